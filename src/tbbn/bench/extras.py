"""The packages that the bench needs besides torch: the extra ``tbbn[bench]``."""

from __future__ import annotations

from importlib.util import find_spec

from tbbn.errors import UserError

PACKAGES = {  # distribution names by import names
    "torchvision": "torchvision",
    "numpy": "numpy",
    "rich": "rich",
    "safetensors": "safetensors",
    "filelock": "filelock",
    "matplotlib": "matplotlib",
    "sklearn": "scikit-learn",
    "jinja2": "jinja2",
    "tomli_w": "tomli-w",
}
WITHOUT = ("list", "show", "report", "doctor", "completion")  # commands that need only torch


def missing() -> list[str]:
    """Packages of the bench that are not installed."""
    return [package for module, package in PACKAGES.items() if not _is_there(module)]


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):
        return False


def require_bench(command: str, caller: str = "tbbn ") -> None:
    """Raise if ``command`` needs a package that is not installed. ``caller`` precedes the command in the message."""
    if command not in WITHOUT and (absent := missing()):
        raise UserError(f"{caller}{command} needs {', '.join(absent)}; pip install 'tbbn[bench]'.")
