"""Make ``src/tbbn/paper/measured.json``, ``docs/results.md`` and the tables of README and docs/speed.md from ``results/``.

python tools/results.py            # write them
python tools/results.py --check    # exit code 1 if they are not current
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

from results_numbers import EXPERIMENTS, ROOT, TABLE1, fine_tuned, records_in
from results_page import page
from tbbn.bench.report.figures import save_figure
from tbbn.bench.report.plots import figure
from tbbn.bench.report.tables import Table
from tbbn.paper import measured

DATA, PAGE, README = ROOT / "src/tbbn/paper/measured.json", ROOT / "docs/results.md", ROOT / "README.md"
SPEED = ROOT / "docs/speed.md"
BEGIN, END = "<!-- made by make results -->", "<!-- end -->"
OWN_LOOP = "results/own_loop-h200.json"  # benchmarks/own_loop.py, by lease: each has another machine of the same kind
PICTURES: dict[str, tuple[Callable[[], list[Any]], str]] = {
    "results/cifar100-ft.png": (fine_tuned, "accuracy"),
    "results/cifar100-ft-gain.png": (fine_tuned, "gain"),
    "results/cifar100-ft-last.png": (lambda: records_in(EXPERIMENTS["last"][1]), "accuracy"),
}
# What a loop of one's own may cost. Where it waits for Python alone, a norm written in Python may cost more.
TARGETS = {"eager": 1.10, "autocast": 1.10, "compile": 1.05, "reduce-overhead": 1.02}
HOST_BOUND = {"resnet18@32": 1.25}


def runs_in(source: str, protocol: str) -> list[dict[str, Any]]:
    """Method, norm, seed, kept epoch and accuracies of every finished run in a file or a folder.

    A run of a file that was repeated, with a record of its own, counts as repeated.
    """
    runs: list[dict[str, Any]] = []
    if source.endswith(".json"):
        repeated = {(*r.run_config.names, r.run_config.seed): r for r in records_in(TABLE1)}
        for run in json.loads((ROOT / source).read_text())["runs"]:
            record = repeated.get((run["method"], run["norm"], run["seed"]))
            own = record.tree() if record else run
            runs.append({**run, "keep": "best", "accuracy": own["accuracy"], "task_known": fmean(own["task_il"][-1])})
    else:
        for record in (r for r in records_in(source) if r.status == "finished"):
            config, (method, norm) = record.run_config, record.run_config.names
            assert config.protocol == protocol, f"{source}: a run of {config.protocol}"
            run = {"method": method, "norm": norm, "seed": config.seed, "keep": config.train.keep}
            runs.append({**run, "accuracy": record.accuracy, "task_known": fmean(record.task_il[-1])})
    keys = [(run["method"], run["norm"], run["seed"]) for run in runs]
    assert len(set(keys)) == len(keys), f"{source}: two runs of the same method, norm and seed"
    return [{key: run[key] for key in ("method", "norm", "seed", "keep", "task_known", "accuracy")} for run in runs]


def data() -> str:
    entries = [
        {"name": name, "protocol": protocol, "source": source, "runs": runs_in(source, protocol)}
        for name, (protocol, source) in EXPERIMENTS.items()
    ]
    return "[\n" + ",\n".join(json.dumps(entry) for entry in entries) + "\n]\n"


def readme() -> str:
    """The README with its table of results made anew."""
    return _with_table(README, measured.gains(measured.measured(), list(measured.METRICS)))


def speed() -> str:
    """The page on speed with its table of loops made anew."""
    return _with_table(SPEED, own_loop())


def _with_table(page: Path, table: Table) -> str:
    before, _, rest = page.read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n{table.render('md')}\n{END}{rest.partition(END)[2]}"


def own_loop() -> Table:
    """Times of the first lease that has a network and a mode, ratios of all of them."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for lease in json.loads((ROOT / OWN_LOOP).read_text())["leases"]:
        for row in lease["rows"]:
            found.setdefault((row["network"], row["mode"]), []).append(row)
    rows = []
    for (network, mode), times in sorted(found.items(), key=lambda item: (item[0][0], list(TARGETS).index(item[0][1]))):
        first, (name, _, side) = times[0], network.partition("@")
        target = HOST_BOUND.get(network, 0) if mode in ("eager", "autocast") else 0
        rows.append(
            (
                f"{name}, {side}x{side}",
                {"autocast": "autocast, channels last", "compile": "torch.compile"}.get(mode, mode),
                f"{first['bn ms']:.1f}",
                f"{first['tbbn ms']:.1f}",
                ", ".join(f"{row['ratio']:.2f}" for row in times),
                f"{target or TARGETS[mode]:.2f}",
                f"{first['bn launches']} : {first['tbbn launches']}",
                ", ".join(f"{row['peak ratio']:.3f}" for row in times if "peak ratio" in row) or "-",
            )
        )
    header = ("network, input", "mode", "batch norm ms", "TBBN ms", "ratio", "target", "launches", "peak memory")
    return Table(header, tuple(rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    code = 0
    for path, make in ((DATA, data), (PAGE, page), (README, readme), (SPEED, speed)):
        text = make()
        if check:
            if not path.exists() or path.read_text() != text:
                sys.stderr.write(f"{path} is not current: run make results\n")
                code = 1
        else:
            path.write_text(text)
            measured.measured.cache_clear()
    if not check:  # the bytes of a picture are those of one version of matplotlib
        for path, (records, kind) in PICTURES.items():
            save_figure(figure(records(), kind), ROOT / path)
    return code


if __name__ == "__main__":
    sys.exit(main())
