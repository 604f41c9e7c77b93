"""Building the C kernel: with the package, whole or not at all, and never an obstacle where it fails."""

import os
import platform
import shlex
import shutil
import subprocess
import sys
import time

import pytest

from tbbn.accelerators.native import building

COMPILER = shlex.split(os.environ.get("CC", "")) or [name for name in ("cc", "gcc", "clang") if shutil.which(name)][:1]
needs_compiler = pytest.mark.skipif(not COMPILER, reason="no C compiler")


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A copy of the folder without its library; builds are quick, the code they make is not."""
    folder = tmp_path / "native"
    shutil.copytree(building.FOLDER, folder, ignore=shutil.ignore_patterns("*.so", building.NOTE, "__pycache__"))
    monkeypatch.setattr(building, "FOLDER", folder)
    monkeypatch.setattr(building, "FLAGS", ("-O0", *building.FLAGS[1:]))
    return folder


def new_files(folder):
    return sorted(p.name for p in folder.iterdir() if p.suffix not in (".c", ".h", ".py"))


@pytest.mark.parametrize(
    ("environment", "why"),
    [
        ({"PATH": "/nowhere", "CC": ""}, "no C compiler found .cc, gcc or clang."),
        ({"CC": "no-such-compiler -O2"}, "no C compiler found .no-such-compiler."),
        ({"CC": "false"}, "false failed: exit status 1"),
    ],
)
def test_without_a_compiler_the_reason_is_noted(monkeypatch, sources, capsys, environment, why):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(building.CannotBuild, match=why):
        building.build_in_place(sources)
    assert new_files(sources) == [building.NOTE]
    assert (sources / building.NOTE).read_text().startswith(why[:8])
    assert building.main() == 1
    assert "C kernel not built: " in capsys.readouterr().err


@needs_compiler
def test_source_that_does_not_compile_leaves_nothing_behind(sources):
    (sources / "kernel.c").write_text("int oops(void) { return not_declared; }")
    with pytest.raises(building.CannotBuild, match=r"failed: .*kernel.c.*error.*not_declared"):
        building.build(sources, sources)
    assert new_files(sources) == []


def test_other_systems_are_told_so(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(building.CannotBuild, match="the C kernel is for Linux, and this is win32"):
        building.build(building.FOLDER, tmp_path)


@needs_compiler
def test_it_is_built_once_and_again_when_a_source_changes(sources, capsys):
    library, note = sources / building.LIBRARY, sources / building.NOTE
    note.write_text("an earlier failure")
    assert building.main() == 0
    first = library.stat()
    assert new_files(sources) == [building.LIBRARY]
    assert building.main() == 0
    assert library.stat().st_mtime_ns == first.st_mtime_ns
    with (sources / "passes.h").open("a") as file:
        file.write("/* changed */\n")
    assert not building.is_current(library.read_bytes(), sources)
    assert building.build_in_place(sources)
    assert building.is_current(library.read_bytes(), sources)
    said = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert said == ["C kernel built", "C kernel is current"]


@needs_compiler
def test_several_processes_may_build_at_once(sources):
    """Whoever looks meanwhile finds no library, or a whole one."""
    script, library, sizes = sources / "building.py", sources / building.LIBRARY, set()
    script.write_text(script.read_text().replace('"-O3"', '"-O0"'))
    builders = [subprocess.Popen([sys.executable, "-I", script], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    while any(builder.poll() is None for builder in builders):
        sizes |= {library.stat().st_size} if library.exists() else set()
        time.sleep(0.0005)
    said = {builder.communicate()[0].split(":")[0] for builder in builders}
    assert "C kernel built" in said and said <= {"C kernel built", "C kernel is current"}
    assert sizes <= {library.stat().st_size} and building.is_current(library.read_bytes(), sources)
    assert new_files(sources) == [building.LIBRARY]


@needs_compiler
@pytest.mark.parametrize("level", building.LEVELS)
def test_sources_compile_without_a_warning(level):
    if level != "baseline" and platform.machine() != "x86_64":
        pytest.skip("an x86-64 level")
    strict = ["-Wall", "-Wextra", "-Werror", "-fsyntax-only", f"-DLEVEL={level}", '-DTBBN_SOURCES=""']
    for name in ("kernel.c", "dispatch.c"):
        flags = [*building.FLAGS, *building.LEVELS[level], *strict]
        command = [*COMPILER, *flags, str(building.FOLDER / name)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_no_flag_ties_the_library_to_this_machine_or_to_a_second_openmp():
    flags = [*building.FLAGS, *(flag for level in building.LEVELS.values() for flag in level)]
    assert not [flag for flag in flags if "native" in flag or "openmp" in flag]


def test_building_needs_the_standard_library_alone():
    """A build environment has neither torch nor tbbn."""
    code = "import runpy, sys; runpy.run_path(sys.argv[1]); sys.exit('torch' in sys.modules or 'tbbn' in sys.modules)"
    script = str(building.FOLDER / "building.py")
    assert subprocess.run([sys.executable, "-I", "-S", "-c", code, script]).returncode == 0
