"""Hatch build hook: compiles the C kernel into a wheel, or in place for an editable install.

Without a C compiler the build succeeds all the same: the wheel is pure Python, and notes why for ``tbbn doctor``.
"""

from __future__ import annotations

import importlib.util
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = "accelerators/native"


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        building = _building(Path(self.root, "src/tbbn", FOLDER, "building.py"))
        if version == "editable":
            try:
                building.build_in_place(building.FOLDER)
            except building.CannotBuild as error:
                self.app.display_warning(f"C kernel not built: {error}")
            return
        self._scratch = tempfile.TemporaryDirectory()
        target = Path(self._scratch.name)
        try:
            made = building.build(building.FOLDER, target)
        except building.CannotBuild as error:
            self.app.display_warning(f"C kernel not built: {error}")
            made = target / building.NOTE
            made.write_text(f"{error}\n")
        else:  # no Python extension: one wheel for every Python of this platform
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data.update(pure_python=False, tag=f"py3-none-{platform}")
        build_data["force_include"][str(made)] = f"tbbn/{FOLDER}/{made.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            self._scratch.cleanup()


def _building(path: Path) -> ModuleType:
    """``building.py`` by its path: tbbn itself imports torch, which a build environment does not have."""
    spec = importlib.util.spec_from_file_location("building", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
