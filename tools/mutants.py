"""Mutation testing: change one thing in the package, and see whether a test fails.

    python tools/mutants.py --number 30 --seed 1 --minutes 8

Mutants are drawn at random in every area, and tried in a copy of the tree (``build/mutants``), never in the checkout. First
each test file is run once to learn which functions each test calls, also in processes that it starts. A mutant is then given
the tests that call its function: those of its own area, then others, the quick ones first; last those of the command line,
of ranks and of other processes. What was found is kept, so the next call goes on; ``--again`` tries
those that survived once more. Mutants that change nothing a test could see are listed with the reason in
``tools/equivalent.txt``, and not counted.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from mutations import Mutant, function_at, functions, is_valid, mutants_of

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "mutants"
TREE = WORK / "tree"  # the copy that is mutated
PACKAGE = "src/tbbn"
AREAS = {  # where the code is, below the package; its tests are in the folder of the same name
    "nn": ["nn"],
    "config": ["bench/config"],
    "data": ["bench/data"],
    "models": ["bench/models"],
    "methods": ["bench/methods"],
    "engine": ["bench/engine", "bench/seeds.py"],
    "runs": ["bench/runs", "bench/files.py"],
    "report": ["bench/metrics.py", "bench/report"],
    "analysis": ["bench/analysis"],
    "paper": ["paper"],
    "cli": ["bench/cli"],
    "plugins": ["plugins.py", "registry.py", "options.py"],
    "exchange": ["bench/interchange", "bench/loggers"],
}
LEFT_OUT = ("/stateful/", "_examples.", "_dist.")  # slow or random, and others see the same code
LATE = ("accelerators", "/cli/", "/fuzz/", "_compile.", "_docs.", "_export.", "_speed.")  # slow: for those that survive
PRELOADED = (
    "torch._dynamo", "torch.onnx", "numpy", "sklearn.datasets", "safetensors.torch", "matplotlib.pyplot", "pytest",
    "xdist.plugin", "pygments.lexers.python", "hypothesis.strategies", "hypothesis.internal.conjecture.engine",
)  # fmt: skip
MARKS = "not slow and not gpu and not nightly"
FAILED, TIMEOUT = 70, 124  # not exit codes of pytest
# Python runs a file of this name on its path first: so the processes that a test starts note their calls, too.
IN_OTHERS = f"import sys\nsys.path.append({str(ROOT / 'tools')!r})\nimport mutants\nmutants.Watcher().install()\n"


class Watcher:
    """A pytest plugin that notes which functions of the package each test calls, and how long it takes.

    It is also the loader of the package: every function begins with a note of its name. A process that the test has started
    writes its notes to a file.
    """

    FILE = "TBBN_MUTANTS_NOTES"  # where the environment names that file

    def __init__(self) -> None:
        self.calls: dict[str, set[str]] = {}
        self.seconds: Counter[str] = Counter()
        self.failed: set[str] = set()
        self.current: set[str] = set()
        self.process = 0  # that of the tests
        self.files: dict[str, Path] = {}
        self.made: list[Any] = []  # fixtures of several tests that are made for the current one
        self.of_fixture: dict[Any, set[str]] = {}

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        spec = PathFinder.find_spec(name, path) if name.startswith("tbbn.") else None
        if spec is not None and str(spec.origin).endswith(".py"):
            spec.loader = self.Loader(name, str(spec.origin))
            return spec
        return None

    class Loader(SourceFileLoader):
        at_work = 0  # modules that are being imported: what they call counts for no test, since every test may see it

        def exec_module(self, module: ModuleType) -> None:
            Watcher.Loader.at_work += 1
            try:
                super().exec_module(module)
            finally:
                Watcher.Loader.at_work -= 1

        def get_code(self, fullname: str) -> CodeType:
            if fullname.startswith("tbbn.nn."):  # may be compiled, and should be as without notes
                import torch._dynamo

                torch._dynamo.config.ignore_logging_functions.add(builtins.note_call)  # type: ignore[attr-defined]
            tree = ast.parse(self.get_data(self.path))
            for name, function in functions(tree):
                note = f"note_call({f'{Path(self.path).relative_to(TREE)}:{name}'!r})"
                function.body.insert(int(ast.get_docstring(function) is not None), ast.parse(note).body[0])
            return compile(ast.fix_missing_locations(tree), self.path, "exec", dont_inherit=True)

    def install(self) -> None:
        def note(name: str) -> None:
            if name not in self.current and not Watcher.Loader.at_work:
                self.current.add(name)
                if os.getpid() != self.process and self.FILE in os.environ:
                    with open(os.environ[self.FILE], "a") as file:
                        file.write(f"{name}\n")

        builtins.note_call = note  # type: ignore[attr-defined]
        sys.meta_path.insert(0, self)

    def watch_tests(self) -> None:
        """Be the plugin of the tests in this process, and watch the processes that they start."""
        folder = WORK / "notes"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(IN_OTHERS)
        os.environ["PYTHONPATH"] = f"{folder}:{os.environ['PYTHONPATH']}"
        self.process = os.getpid()
        self.install()

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self.current = self.calls.setdefault(nodeid, set())
        self.files[nodeid] = WORK / "notes" / f"{len(self.files)}.txt"
        os.environ[self.FILE] = str(self.files[nodeid])

    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> None:
        if fixturedef.scope != "function" and not fixturedef.func.__module__.startswith("_pytest"):
            self.made.append(fixturedef)

    def pytest_runtest_call(self, item: Any) -> None:
        """What was called to make a fixture counts for every test that has it."""
        self.of_fixture |= {definition: set(self.current) for definition in self.made}
        self.made.clear()
        for definitions in item._fixtureinfo.name2fixturedefs.values():
            self.current.update(*(self.of_fixture.get(definition, ()) for definition in definitions))

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] += report.duration
        if not report.passed:
            self.failed.add(report.nodeid)

    def found(self) -> dict[str, Any]:
        for test, file in self.files.items():
            self.calls[test].update(file.read_text().split("\n")[:-1] if file.exists() else ())
        return {
            test: {"seconds": round(self.seconds[test], 3), "calls": sorted(names)}
            for test, names in self.calls.items()
            if test not in self.failed
        }


def in_child(tests: list[str], limit: float, plugin: Watcher | None = None, result: Path | None = None) -> int:
    """Run tests in a fork, which has torch already. Returns pytest's exit code; TIMEOUT after ``limit`` seconds."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.chdir(TREE)
            log = os.open(WORK / "last.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            import pytest

            if plugin:
                plugin.watch_tests()
            options = ["-q", "-p", "no:cacheprovider", "-m", MARKS, f"--basetemp={WORK}/tmp", "--hypothesis-seed=0"]
            options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # pytest's plugins are loaded already
            code = int(pytest.main([*options, *([] if plugin else ["-x"]), *tests], plugins=[plugin] if plugin else []))
            if plugin is not None and result is not None and code in (0, 1, 5):
                result.write_text(json.dumps(plugin.found()))
        except BaseException:
            traceback.print_exc()
            code = FAILED
        os._exit(code)
    deadline = time.monotonic() + limit
    try:
        while time.monotonic() < deadline:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
    except BaseException:  # stopped by a signal
        os.killpg(pid, signal.SIGKILL)
        raise
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return TIMEOUT


def copy_tree() -> None:
    """Bring the copy up to date with the checkout; files that are equal keep their time stamp."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    names = [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
    names += [str(path.relative_to(ROOT)) for path in (ROOT / PACKAGE).rglob("*.so")]  # the C kernel
    for old in [path for path in TREE.rglob("*.py") if str(path.relative_to(TREE)) not in set(names)]:
        old.unlink()
    for name in names:
        new, old = (ROOT / name).read_bytes(), TREE / name
        if not old.is_file() or old.read_bytes() != new:
            old.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, old)


def learn(deadline: float) -> dict[str, dict[str, Any]]:
    """What every test calls. A test file is run again when it has changed."""
    folder = WORK / "calls"
    folder.mkdir(exist_ok=True)
    known: dict[str, dict[str, Any]] = {}
    for file in sorted((TREE / "tests").rglob("test_*.py")):
        name = str(file.relative_to(TREE))
        if any(word in name for word in LEFT_OUT):
            continue
        stamp = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
        result = folder / f"{name.replace('/', '.')}.{stamp}.json"
        if not result.exists():
            if time.monotonic() > deadline:
                raise SystemExit("not every test file has been run yet; call again to go on.")
            started = time.monotonic()
            code = in_child([name], 400, Watcher(), result)
            print(f"{name}: {time.monotonic() - started:.1f} s, code {code}", flush=True)
        if result.exists():
            known |= json.loads(result.read_text())
    return known


def choose(mutant: Mutant, source: str, tests: dict[str, dict[str, Any]], limit: float) -> list[list[str]]:
    """The tests for a mutant, in groups; at most ``limit`` seconds of its own area, of others, and of late ones."""
    function = f"{mutant.file}:{function_at(source, mutant.line)}"
    named = (f"/test_{Path(mutant.file).stem}.py", "/test_wires.py")
    folders = tuple(f"tests/{place}/" for place in AREAS[mutant.area])
    seen, close = [t for t in tests if function in tests[t]["calls"]], {t for t in tests if any(n in t for n in named)}
    if not seen:  # run on import: any test may see it, first of all those that call something in the file
        seen = list(tests)
        close |= {t for t in tests if any(call.startswith(f"{mutant.file}:") for call in tests[t]["calls"])}
    seen.sort(key=lambda test: (not test.startswith(folders), test not in close, tests[test]["seconds"]))
    late = [test for test in seen if any(word in test for word in LATE)]
    near = [test for test in seen if (test.startswith(folders) or test in close) and test not in late]
    chosen = []
    for group in (near, [test for test in seen if test not in near and test not in late], late):
        ends = itertools.accumulate(tests[test]["seconds"] for test in group)
        chosen.append([test for test, end in zip(group, ends, strict=True) if end < limit])
    return [chosen[0][:15], chosen[0][15:], *chosen[1:]]  # most mutants die in the first group


def try_mutant(mutant: Mutant, tests: dict[str, dict[str, Any]], limit: float) -> tuple[str, int, str]:
    """Whether it was "killed", a "timeout" or "survived", the number of tests it was given, and which of them failed."""
    path = TREE / mutant.file
    original, stamp = path.read_text(), path.stat()
    groups = choose(mutant, original, tests, limit)
    path.write_text(mutant.code(original))
    own_time = 1e9 + int(mutant.key(original)[:7], 16)  # no bytecode of another mutant is used
    os.utime(path, (own_time, own_time))
    code = 0
    try:
        for group in filter(None, groups):
            code = in_child(group, 20 + 4 * sum(tests[test]["seconds"] for test in group))
            if code:
                break
    finally:
        path.write_text(original)
        os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    # No test has failed, but none could start: is it the mutant?
    if code not in (0, 1, TIMEOUT) and in_child(group, 600):
        raise SystemExit(f"the tests fail without a mutant; see {WORK / 'last.log'}.")
    status = "killed" if code else "survived"
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", (WORK / "last.log").read_text(errors="replace"), re.MULTILINE)
    return "timeout" if code == TIMEOUT else status, sum(map(len, groups)), (failed or [""])[0] if code else ""


def draw(areas: list[str], number: int, seed: int) -> list[Mutant]:
    """``number`` mutants of every area, one of each area at a time."""
    drawn = []
    for area in areas:
        paths = [TREE / PACKAGE / place for place in AREAS[area]]
        files = sorted(f for path in paths for f in (path.rglob("*.py") if path.is_dir() else [path]))
        names = [str(file.relative_to(TREE)) for file in files]
        every = [m for name in names for m in mutants_of(area, name, (TREE / name).read_text())]
        random.Random(f"{seed} {area}").shuffle(every)
        valid = (m for m in every if is_valid(m, (TREE / m.file).read_text()))
        drawn.append(list(itertools.islice(valid, number)))
    return [mutants[i] for i in range(number) for mutants in drawn if i < len(mutants)]


def report(results: list[dict[str, Any]]) -> None:
    for result in results:
        if result["status"] == "survived":
            print(f"survived ({result['tests']} tests), line {result['line']}: {result['name']}")
    print(f"{'area':8} {'killed':>7} {'survived':>9} {'equivalent':>11} {'score':>7}")
    for area in [*AREAS, "all"]:
        count = Counter(r["status"] for r in results if area in (r["area"], "all"))
        killed, survived = count["killed"] + count["timeout"], count["survived"]
        if killed + survived:
            score = f"{100 * killed / (killed + survived):.1f} %"
            print(f"{area:8} {killed:7} {survived:9} {count['equivalent']:11} {score:>7}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw mutants of the package and see which of them no test notices.")
    parser.add_argument("--areas", nargs="+", choices=AREAS, default=list(AREAS))
    parser.add_argument("--number", type=int, default=20, help="mutants per area")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=30.0, help="stop after this time; call again to go on")
    parser.add_argument("--seconds", type=float, default=60.0, help="tests per mutant, in its area, in others and late")
    parser.add_argument("--again", action="store_true", help="try those that survived once more")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped; call again to go on."))  # and put the file back
    deadline = time.monotonic() + 60 * arguments.minutes
    TREE.mkdir(parents=True, exist_ok=True)
    copy_tree()
    os.environ.update(PYTHONPATH=str(TREE / "src"), OMP_NUM_THREADS="1")
    sys.path.insert(0, str(TREE / "src"))
    for name in PRELOADED:
        __import__(name)
    tests = learn(deadline)
    equivalent = (ROOT / "tools" / "equivalent.txt").read_text().splitlines()
    file = WORK / "results.json"
    known: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.exists() else {}
    drawn = draw(arguments.areas, arguments.number, arguments.seed)
    keys = {mutant: mutant.key((TREE / mutant.file).read_text()) for mutant in drawn}
    for mutant, key in keys.items():
        if time.monotonic() > deadline:
            break
        old = known.get(key, {}).get("status")
        if mutant.name in equivalent:
            status, seen, by = "equivalent", 0, ""
        elif old in ("killed", "timeout") or (old == "survived" and not arguments.again):
            continue
        else:
            status, seen, by = try_mutant(mutant, tests, arguments.seconds)
        known[key] = {"area": mutant.area, "line": mutant.line, "name": mutant.name, "status": status, "tests": seen}
        known[key]["by"] = by
        file.write_text(json.dumps(known))
        print(f"{status}: {mutant.name}{f'  ({by})' if by else ''}", flush=True)
    done = [known[key] for key in keys.values() if key in known]
    print(f"\n{len(done)} of {len(drawn)} mutants tried")
    report(done)


if __name__ == "__main__":
    main()
