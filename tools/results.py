"""Make ``src/tbbn/paper/measured.json``, ``docs/results.md`` and the tables of README and docs/speed.md from ``results/``.

python tools/results.py            # write them
python tools/results.py --check    # exit code 1 if they are not current
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from tbbn.bench.analysis.epochs import kept_table
from tbbn.bench.analysis.slots import Slots, slots_table
from tbbn.bench.config import resolve
from tbbn.bench.engine.record import new_record
from tbbn.bench.metrics import ERROR_TYPES, final_accuracy
from tbbn.bench.report.pairs import difference
from tbbn.bench.report.tables import Table
from tbbn.bench.runs.record import load_record
from tbbn.paper import measured
from tbbn.paper.published import compare, find_tables

ROOT = Path(__file__).parents[1]
Experiments = dict[str, measured.Measured]
DATA, PAGE, README = ROOT / "src/tbbn/paper/measured.json", ROOT / "docs/results.md", ROOT / "README.md"
SPEED = ROOT / "docs/speed.md"
BEGIN, END = "<!-- made by make results -->", "<!-- end -->"
EXPERIMENTS = {  # by name: protocol, where the records are
    "best": ("paper", "results/cifar100-ft.json"),
    "table2": ("paper", "results/cifar100-table2"),
    "last": ("paper", "results/cifar100-ft-last"),
    "clean": ("clean", "results/cifar100-ft-clean"),
}
DRIFT = "results/cifar100-ft-last-drift.json"  # tbbn drift --images 200 --json of the same networks, by --view
SLOTS = "results/cifar100-ft-last-slots.json"  # tbbn slots --json of the networks of "last", which are not kept here
OTHER_NORMS = "results/cifar100-table1"  # Table 1 without its pair of batch norm and TBBN, which is above
OWN_LOOP = "results/own_loop-h200.json"  # benchmarks/own_loop.py, by lease: each has another machine of the same kind
# What a loop of one's own may cost. Where it waits for Python alone, a norm written in Python may cost more.
TARGETS = {"eager": 1.10, "autocast": 1.10, "compile": 1.05, "reduce-overhead": 1.02}
HOST_BOUND = {"resnet18@32": 1.25}
NEAREST_MEAN = (
    "results/cifar100-podnet-nme/podnet-bn-0"  # PODNet with its authors' configuration of the other classifier
)


@cache
def records_in(source: Path) -> list[Any]:
    return [load_record(file.parent) for file in sorted(source.glob("*/record.json"))]


def runs_in(source: Path, protocol: str) -> list[dict[str, Any]]:
    """Method, norm, seed, kept epoch and accuracies of every finished run in a file or a folder."""
    runs: list[dict[str, Any]] = []
    if source.suffix == ".json":
        runs = [{**run, "keep": "best"} for run in json.loads(source.read_text())["runs"]]
    else:
        for record in (r for r in records_in(source) if r.status == "finished"):
            config, (method, norm) = record.run_config, record.run_config.names
            assert config.protocol == protocol, f"{source}: a run of {config.protocol}"
            run = {"method": method, "norm": norm, "seed": config.seed, "keep": config.train.keep}
            runs.append({**run, "accuracy": record.accuracy})
    keys = [(run["method"], run["norm"], run["seed"]) for run in runs]
    assert len(set(keys)) == len(keys), f"{source}: two runs of the same method, norm and seed"
    return [{key: run[key] for key in ("method", "norm", "seed", "keep", "accuracy")} for run in runs]


def data() -> str:
    entries = [
        {"name": name, "protocol": protocol, "source": source, "runs": runs_in(ROOT / source, protocol)}
        for name, (protocol, source) in EXPERIMENTS.items()
    ]
    return "[\n" + ",\n".join(json.dumps(entry) for entry in entries) + "\n]\n"


def page() -> str:
    found = measured.measured()
    sections = (_answer, _last_epoch, _clean, _table1, _table2, _kept_epochs)
    return "\n\n".join(section(found).strip() for section in sections) + "\n"


def _answer(found: Experiments) -> str:
    last, best, clean = (found[name].metric("ft", "A_f") for name in ("last", "best", "clean"))
    average = {name: found[name].metric("ft", "A_a") for name in ("last", "best", "clean")}
    paper = measured.gain_in_paper("A_f")
    return f"""# Results

Made by `make results` from the records in `results/`. Real CIFAR-100, 10 tasks, 2000 exemplars, ResNet-32, bf16, one H200.
`tbbn verify FOLDER` recomputes a record from the labels of the data set (the published archive will do: rows are sorted as they are
read), and `tbbn reproduce NAME --from results` prints a table of the paper beside ours.

**Does TBBN help?** With fine-tuning under the paper's protocol yes, a little on average over all tasks; how much of it is left after the
last task depends on the epoch that is kept. TBBN minus batch norm, in points, standard error and 95 % interval:

- best epoch on the new task kept, as the authors do, {len(best.bn)} seeds: A_a {_with_interval(average["best"])}, A_f {_with_interval(best)}. The paper has A_f
  {paper:+.1f}, at the edge of that interval;
- last epoch kept, {len(last.bn)} seeds: A_a {_with_interval(average["last"])}, A_f {_with_interval(last)}. Much of the latter is a bias to old
  classes that arises in the last two tasks: with the task known (task-IL) the gain is {_task_il("last")}, see below;
- under the `clean` protocol (momentum 0.9, the usual crop, last epoch), {len(clean.bn)} seeds: A_a {_with_interval(average["clean"])}, A_f
  {_with_interval(clean)}: no gain on average, and at most a small one at the end;
- with other methods, one seed each: A_a {_one_seed_gains(found["table2"], "A_a")}; A_f {_one_seed_gains(found["table2"], "A_f")}. The differences of single
  seeds of fine-tuning have a standard deviation of {stdev(average["best"].gains):.1f} in A_a and {stdev(best.gains):.1f} in A_f, twice of which only {_standing_out(found)} exceeds;
- beside other norms, fine-tuning, best epoch, seeds {_listed(_shared_seeds(found["best"]))}: A_f {_ranking(found["best"])}. Which epoch was kept explains much of this order (below).

{measured.gains(found).render("md")}

Twelve numbers of fine-tuning are compared here, so one of them may well be off by two standard errors by chance.
"""


def _last_epoch(found: Experiments) -> str:
    new = found["last"].new_task("ft", 9)
    return f"""## Fine-tuning, the paper's protocol, last epoch kept

![Mean accuracy after each task](../results/cifar100-ft-last.png)

{measured.gains_by_task(found["last"]).render("md")}

Read the last row with care. In task 10 the accuracy of TBBN on the new task is {fmean(new.tbbn):.0f} % (batch norm: {fmean(new.bn):.0f} %)
while old tasks gain. Of 10 000 test images, mean over seeds:

{_errors_after_last_task().render("md")}

The networks tell new images from old ones by their statistics: in training a current row is normalised by its own
split, a memory row by the average over the splits, and a test image has no such place. With rows in each other's places (`tbbn slots`
on the networks of these runs, training images; all seeds, in brackets the lowest and the highest):

{_slots_over_seeds().render("md")}

`tbbn(memory=own)`, `tbbn(case=3)` and `weighted` treat both kinds of row alike. Whether they keep the gain is open, and so is why the effect
grows in tasks 9 and 10 although r* is 16 from task 7 on.

How far the running statistics of these networks are from those of all tasks in equal parts (`tbbn drift`, 200 images of each task; mean over
layers, of each seed):

{_drift().render("md")}

TBBN's statistics are not nearer to the population. Both norms are several times farther from images as they are tested: the augmentation in
training moves the statistics more than the imbalance of tasks does.
"""


def _clean(found: Experiments) -> str:
    return f"""## Fine-tuning, `clean`

{measured.gains_by_task(found["clean"]).render("md")}
"""


def _table1(found: Experiments) -> str:
    best = found["best"].metric("ft", "A_f")
    early, late = (
        [gain for seed, gain in zip(found["best"].seeds("ft"), best.gains, strict=True) if seed in some]
        for some in _sessions()
    )
    first, second = (
        [value for seed, value in zip(found["best"].seeds("ft"), best.bn, strict=True) if seed in some]
        for some in _sessions()
    )
    return f"""## The paper's Table 1: fine-tuning, best epoch kept

{measured.beside_paper(found["best"]).render("md")}

![Mean accuracy after each task](../results/cifar100-ft.png)

{measured.gains_by_task(found["best"]).render("md")}

The ten seeds were made in three sessions, between which the GPU kernels were changed: seeds {_listed(_sessions()[0])} have A_f {min(first):.1f} to {max(first):.1f} with batch norm
and gain {difference(early)}, seeds {_listed(_sessions()[1])} have {min(second):.1f} to {max(second):.1f} and gain {difference(late)}. Chance or the code: their histories were not
kept, so this is open until they are repeated. They are also older than the float32 head in evaluation (in bf16 about one prediction in a
hundred was a tie), and `tbbn reproduce --from results` does not show them.

The other norms of the table, and two that the paper does not have:

{_other_norms().render("md")}

The seed-0 runs of `brn` and `adab2n` were trained before a possible race in their GPU kernels was closed: a thread could have read running
statistics that another had just replaced. Their seed-1 runs, made after it, are {_apart("brn"):.1f} and {_apart("adab2n"):.1f} points of A_f away, so no sign of it was seen.

`weighted` gives every task the same weight in one set of statistics, without splits. All norms on the seeds that all have, by A_a, and the difference
from batch norm on each seed:

{_shared_table(found["best"]).render("md")}
"""


def _table2(found: Experiments) -> str:
    table = compare(find_tables("table2", "cifar100")[0], _all_records())
    nearest = load_record(ROOT / NEAREST_MEAN)
    ours, paper = _row("podnet", "bn"), dict(zip(measured.METRICS, _paper_row("podnet", "bn"), strict=True))
    other = {name: 100 * metric(nearest.accuracy) for name, metric in measured.METRICS.items()}
    return f"""## The paper's Table 2

{table.render("md")}

What departs most from the paper, and what is known of it:

- **PODNet.** The official program has a configuration for each of its two classifiers, and the paper does not say which one its row used. By
  the nearest mean of exemplars (`podnet(classifier=nme,scale=3,pod_spatial=5)`, seed 0, {_values(other)}) PODNet with batch norm is far nearer
  to the paper's row ({_values(paper)}) than by its proxies ({_values(ours)}): the row is most likely of the nearest mean. A_f and F still differ by {other["A_f"] - paper["A_f"]:+.1f} and {other["F"] - paper["F"]:+.1f}: open.
- **LUCIR with TBBN** has A_f {_row("lucir", "tbbn")["A_f"]:.1f} where the paper has {_paper_row("lucir", "tbbn")[0]:.1f}, below batch norm and CN. It kept epoch {_last_kept("lucir", "tbbn")} of 160 in the last task, one
  before the learning rate drops. Up to task 7 TBBN was ahead, by {_ahead("lucir", 0, 6):.1f} points after it; so it was with seed 1 ({_ahead("lucir", 1, 6):.1f} points), a run that was cut in task 8. Open.
- **SS-IL** learns new tasks less well (A_l {_row("ssil", "bn")["A_l"]:.1f} and {_row("ssil", "tbbn")["A_l"]:.1f}, paper {_paper_row("ssil", "bn")[3]:.1f} and {_paper_row("ssil", "tbbn")[3]:.1f}) and forgets less. The released program distils the last old task alone
  (the quirk `kd-last-task-only`), which would do that; not run yet.
- **AFC** has a lower A_l and F than the paper ({_row("afc", "bn")["A_l"]:.1f} and {_row("afc", "bn")["F"]:.1f} with batch norm, paper {_paper_row("afc", "bn")[3]:.1f} and {_paper_row("afc", "bn")[2]:.1f}): open.
- **CN** costs PODNet and AFC {_lost("podnet"):.1f} and {_lost("afc"):.1f} points of A_f against batch norm (paper {_lost_in_paper("podnet"):.1f} and {_lost_in_paper("afc"):.1f}); with the other methods it is within {max(abs(_lost(m)) for m in ("eeil", "lucir", "ssil")):.1f} points of it.
- **Fine-tuning**: A_f and A_a of both norms are within two standard errors of the paper's. New tasks are learnt better here (A_l {_above_paper(found, "bn", "A_l"):+.1f} and {_above_paper(found, "tbbn", "A_l"):+.1f}), and
  F of TBBN is {_above_paper(found, "tbbn", "F"):.1f} points above the paper's: both open.

These runs train as the paper describes. Errors of the released program are left out (`quirks` is empty): it validates on 448 of 500 images, draws
current rows of `eeil` and `lucir` from the memory, too (`current-from-union`), draws the second phase of `eeil` unbalanced (`unbalanced-phase`),
and has other constants in BRN and SN. The rows of `eeil`, `lucir`, `podnet` and `ssil` with batch norm and TBBN, seed 0, are older than the float32 head and than stored
predictions: `tbbn verify` cannot recompute them. It recomputes all others that are folders in `results/`.
"""


def _kept_epochs(found: Experiments) -> str:
    best, last = found["best"], found["last"]
    same = [s for s in best.seeds("ft") if s in last.seeds("ft")]
    by_rule = {
        norm: [fmean(100 * final_accuracy(e.runs["ft", norm, s]) for s in same) for e in (best, last)]
        for norm in ("bn", "tbbn")
    }
    seeds = _shared_seeds(best)
    split = {seed: _final_by_kept_epoch(seed) for seed in seeds}
    return f"""## Which epoch is kept

{_kept().render("md")}

The authors keep the epoch with the lowest loss on validation rows of the new task. In later tasks that is often one before the learning rate
first drops, after epoch {_first_drop()}: in {_early_tasks("ft", "brn")} of ten tasks of a run with `brn`, in {_early_tasks("ft", "in")} with `in`. On seeds {_listed(same)} this rule gives
fine-tuning with batch norm A_f {by_rule["bn"][0]:.1f}, the last epoch {by_rule["bn"][1]:.1f}; with TBBN {by_rule["tbbn"][0]:.1f} and {by_rule["tbbn"][1]:.1f}. PODNet and AFC always keep the last epoch; the ten seeds of `ft` with batch norm and
TBBN have no history here.

**This rule orders Table 1.** The other norms, by whether they kept an epoch of the last task before or after the first drop:

{_split_table(split).render("md")}

The split was chosen on seed 0 and holds on seed 1, where two norms have changed sides: `cn(groups=8)` kept epoch {_last_kept_of("cn(groups=8)", 0)} with seed 0 and {_last_kept_of("cn(groups=8)", 1)} with
seed 1, and A_f changed by {_seed_gain("cn(groups=8)"):+.1f} points; `weighted` went from {_last_kept_of("weighted", 0)} to {_last_kept_of("weighted", 1)}, {_seed_gain("weighted"):+.1f} points. Runs with the last epoch kept would show how the norms compare without it.

## Missing

Of Table 1 seed 2; of Table 2 seeds 1 and 2 (of `lucir` there is one run with batch norm, and the cut one with TBBN); ImageNet-100, dissimilar tasks, 20 tasks, the base-task scenario, the ablation.
Each is one command (`tbbn reproduce table1`, ...) and hours of a GPU.
"""


def readme() -> str:
    """The README with its table of results made anew."""
    found = measured.measured()
    shown = {name: found[name] for name in ("best", "last", "clean")}
    return _with_table(README, measured.gains(shown))


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


def _all_records() -> list[Any]:
    folders = [*(source for _, source in EXPERIMENTS.values() if (ROOT / source).is_dir()), OTHER_NORMS]
    return [record for source in folders for record in records_in(ROOT / source)] + _fine_tuned()


def _fine_tuned() -> list[Any]:
    """The runs of "best", of which only accuracies were kept, as records."""
    layers, _ = find_tables("table1", "cifar100")[0].layers()
    records = []
    for run in json.loads((ROOT / EXPERIMENTS["best"][1]).read_text())["runs"]:
        own = {"precision": "bf16", "method.name": run["method"], "norm.name": run["norm"], "seed": run["seed"]}
        record = new_record(resolve(*layers, ("run", own)))
        record.status, record.accuracy, record.task_il = "finished", run["accuracy"], run["task_il"]
        record.task_sizes = 10 * [10]
        records.append(record)
    return records


def _slots_over_seeds() -> Table:
    """The slots of both norms, counted over all seeds, with the range over single seeds."""
    runs = json.loads((ROOT / SLOTS).read_text())
    tables = {
        norm: [slots_table([norm], [_slots([run])]) for run in runs if _norm_of(run) == norm] for norm in ("tbbn", "bn")
    }
    total = slots_table(list(tables), [_slots([run for run in runs if _norm_of(run) == norm]) for norm in tables])
    rows = []
    for number, row in enumerate(total.rows):
        cells = [row[0]]
        for at, cell in enumerate(row[1:]):
            seeds = [float(table.rows[number][1 + at % 2]) for table in list(tables.values())[at // 2]]
            cells.append(f"{cell} ({min(seeds):.0f} to {max(seeds):.0f})")
        rows.append(tuple(cells))
    return replace(total, rows=tuple(rows))


def _slots(runs: list[dict[str, Any]]) -> Slots:
    """The counts of these runs together."""
    total = Slots()
    for run in runs:
        for kind, counts in ((kind, counts) for kind, counts in run.items() if kind != "run"):
            seen = getattr(total, kind)
            for key, count in counts.items():
                setattr(seen, key, getattr(seen, key) + count)
    return total


def _norm_of(run: dict[str, Any]) -> str:
    """Of an entry in the files of `tbbn slots` and `tbbn drift`, whose folders are METHOD-NORM-SEED."""
    return str(run["run"]).split("-")[1]


def _drift() -> Table:
    """Running statistics against the population, batch norm and TBBN."""
    found = json.loads((ROOT / DRIFT).read_text())
    rows = []
    for norm in ("bn", "tbbn"):
        cells = []
        for view in ("train", "test"):
            seeds = [fmean(layer["mean"] for layer in run["layers"]) for run in found[view] if _norm_of(run) == norm]
            cells.append(f"{fmean(seeds):.3f} ({min(seeds):.3f} to {max(seeds):.3f})")
        rows.append((norm, *cells))
    return Table(("norm", "mean off, sd: images as in training", "as in the test"), tuple(rows))


def _errors_after_last_task() -> Table:
    """Error types, and accuracy with the task known, of the runs that kept the last epoch."""
    rows = []
    for norm in ("bn", "tbbn"):
        records = [r for r in records_in(ROOT / EXPERIMENTS["last"][1]) if r.run_config.norm.name == norm]
        errors = [f"{fmean(r.errors[-1][kind] for r in records):.0f}" for kind in ERROR_TYPES]
        known = fmean(100 * r.metrics["task_il_final_accuracy"] for r in records)
        rows.append((norm, *errors, f"{known:.1f}"))
    return Table(
        ("norm", *ERROR_TYPES, "accuracy with the task known, %"),
        tuple(rows),
        ("C: a class of the newest task, P: of a past one; P->C is a past class taken for a new one.",),
    )


def _task_il(name: str) -> str:
    """What TBBN gains in A_f where the task is known."""
    found = {
        (r.run_config.norm.name, r.run_config.seed): 100 * r.metrics["task_il_final_accuracy"]
        for r in records_in(ROOT / EXPERIMENTS[name][1])
    }
    return difference([found["tbbn", seed] - value for (norm, seed), value in found.items() if norm == "bn"])


def _other_norms() -> Table:
    """Table 1 without the two norms that have a table of their own."""
    table = compare(find_tables("table1", "cifar100")[0], records_in(ROOT / OTHER_NORMS))
    return replace(table, rows=tuple(row for row in table.rows if row[0] not in ("ft + bn", "ft + tbbn")))


def _table1_runs(pair: measured.Measured) -> dict[str, dict[int, measured.Matrix]]:
    """The accuracies of every norm of Table 1, by seed."""
    runs: dict[str, dict[int, measured.Matrix]] = {}
    for (_, norm, seed), accuracy in pair.runs.items():
        runs.setdefault(norm, {})[seed] = accuracy
    for record in records_in(ROOT / OTHER_NORMS):
        runs.setdefault(record.run_config.names[1], {})[record.run_config.seed] = record.accuracy
    return runs


def _shared_seeds(pair: measured.Measured) -> list[int]:
    """Seeds that every norm of Table 1 has."""
    return sorted(set.intersection(*(set(seeds) for seeds in _table1_runs(pair).values())))


def _over_shared_seeds(pair: measured.Measured) -> dict[str, dict[str, list[float]]]:
    """The metrics of every norm of Table 1 on the seeds that all have, in percent."""
    seeds = _shared_seeds(pair)
    return {
        norm: {name: [100 * metric(runs[seed]) for seed in seeds] for name, metric in measured.METRICS.items()}
        for norm, runs in _table1_runs(pair).items()
    }


def _shared_table(pair: measured.Measured) -> Table:
    """The means of every norm over the seeds that all have, best average accuracy first, and A_f beside batch norm's."""
    found = _over_shared_seeds(pair)
    rows = []
    for norm, values in sorted(found.items(), key=lambda item: -fmean(item[1]["A_a"])):
        gains = [a - b for a, b in zip(values["A_f"], found["bn"]["A_f"], strict=True)]
        rows.append(
            (
                norm,
                *(f"{fmean(v):.1f}" for v in values.values()),
                ", ".join(f"{g + 0.0:+.1f}" for g in gains) if norm != "bn" else "",
            )
        )
    return Table(("norm", *measured.METRICS, "A_f - bn's"), tuple(rows), (f"Seeds {_listed(_shared_seeds(pair))}.",))


def _ranking(pair: measured.Measured) -> str:
    """Every norm of Table 1 with its mean A_f over the seeds that all have, best first."""
    found = sorted(_over_shared_seeds(pair).items(), key=lambda item: -fmean(item[1]["A_f"]))
    return ", ".join(f"{norm} {fmean(values['A_f']):.1f}" for norm, values in found)


def _one_seed_gains(experiment: measured.Measured, metric: str) -> str:
    """What TBBN gains with each method that has one pair of runs."""
    assert all(len(experiment.seeds(method)) == 1 for method in experiment.methods), "write about several seeds"
    return ", ".join(f"{method} {experiment.metric(method, metric).gain:+.1f}" for method in experiment.methods)


def _with_interval(pair: measured.Paired) -> str:
    low, high = pair.interval
    return f"{pair.gain:+.1f} ({pair.error:.1f}; {low:+.1f} to {high:+.1f})"


def _listed(seeds: list[int]) -> str:
    return f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 2 else " and ".join(map(str, seeds))


def _sessions() -> tuple[list[int], list[int]]:
    """The seeds of "best" that were made before and in the last session."""
    *first, last = (session["seeds"] for session in json.loads((ROOT / EXPERIMENTS["best"][1]).read_text())["sessions"])
    return [seed for seeds in first for seed in seeds], last


def _seed_gain(norm: str) -> float:
    """A_f of the other seed of a norm in Table 1 minus that of seed 0."""
    finals = [
        100 * r.metrics["final_accuracy"] for r in records_in(ROOT / OTHER_NORMS) if r.run_config.names[1] == norm
    ]
    return float(finals[1] - finals[0])


def _apart(norm: str) -> float:
    return abs(_seed_gain(norm))


def _record(method: str, norm: str) -> Any:
    """The run of Table 2 with seed 0."""
    return load_record(ROOT / EXPERIMENTS["table2"][1] / f"{method}-{norm}-0")


def _row(method: str, norm: str) -> dict[str, float]:
    return {name: 100 * metric(_record(method, norm).accuracy) for name, metric in measured.METRICS.items()}


def _paper_row(method: str, norm: str) -> tuple[float, ...]:
    table = find_tables("table2", "cifar100")[0]
    assert table.columns == tuple(measured.METRICS)
    return table.rows[method, norm]


def _values(row: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.1f}" for name, value in row.items())


def _last_kept(method: str, norm: str) -> int:
    *_, last = _record(method, norm).kept_epochs().values()
    return int(last) + 1


def _ahead(method: str, seed: int, task: int) -> float:
    """How many points of mean accuracy TBBN is above batch norm after a task (from 0); the runs need not be finished."""
    folder = ROOT / EXPERIMENTS["table2"][1]
    bn, tbbn = (100 * fmean(load_record(folder / f"{method}-{norm}-{seed}").accuracy[task]) for norm in ("bn", "tbbn"))
    return tbbn - bn


def _early_tasks(method: str, norm: str) -> int:
    """The most tasks in which a run kept an epoch before the first drop of the learning rate."""
    runs = [r for r in _best_kept() if r.run_config.names == (method, norm)]
    return max(sum(epoch + 1 <= _first_drop() for epoch in r.kept_epochs().values()) for r in runs)


def _above_paper(found: Experiments, norm: str, metric: str) -> float:
    """Fine-tuning's mean of a metric minus the paper's."""
    ours = fmean(getattr(found["best"].metric("ft", metric), norm))
    return ours - dict(zip(measured.METRICS, _paper_row("ft", norm), strict=True))[metric]


def _standing_out(found: Experiments) -> str:
    """Methods whose one difference exceeds two standard deviations of those of fine-tuning, by metric."""
    large = []
    for metric in ("A_a", "A_f"):
        reach = 2 * stdev(found["best"].metric("ft", metric).gains)
        table2 = found["table2"]
        large += [f"`{m}` in {metric}" for m in table2.methods if abs(table2.metric(m, metric).gain) > reach]
    return " and ".join(large)


def _last_kept_of(norm: str, seed: int) -> int:
    """The epoch, from 1, that a run of Table 1 kept in the last task."""
    (record,) = (
        r for r in records_in(ROOT / OTHER_NORMS) if (r.run_config.names[1], r.run_config.seed) == (norm, seed)
    )
    *_, last = record.kept_epochs().values()
    return int(last) + 1


def _lost(method: str) -> float:
    """Points of A_f that a method loses with continual norm instead of batch norm."""
    return _row(method, "bn")["A_f"] - _row(method, "cn")["A_f"]


def _lost_in_paper(method: str) -> float:
    return _paper_row(method, "bn")[0] - _paper_row(method, "cn")[0]


def _best_kept() -> list[Any]:
    """The records of runs that kept the best epoch."""
    folders = (OTHER_NORMS, EXPERIMENTS["table2"][1])
    return [r for folder in folders for r in records_in(ROOT / folder) if r.run_config.train.keep == "best"]


def _kept() -> Table:
    return kept_table({f"{r.run_config.label}, seed {r.run_config.seed}": r for r in _best_kept()})


def _final_by_kept_epoch(seed: int) -> dict[str, dict[str, float]]:
    """A_f of the other norms in Table 1 by the epoch kept in the last task: "before" the first drop, or "after" it."""
    drop = _first_drop()
    found: dict[str, dict[str, float]] = {"before": {}, "after": {}}
    for record in (r for r in records_in(ROOT / OTHER_NORMS) if r.run_config.seed == seed):
        *_, last_kept = record.kept_epochs().values()
        found["after" if last_kept + 1 > drop else "before"][record.run_config.names[1]] = (
            100 * record.metrics["final_accuracy"]
        )
    return found


def _split_table(split: dict[int, dict[str, dict[str, float]]]) -> Table:
    rows = [
        (
            str(seed),
            when,
            f"{fmean(finals.values()):.1f}",
            ", ".join(f"{norm} {value:.1f}" for norm, value in finals.items()),
        )
        for seed, by_epoch in split.items()
        for when, finals in by_epoch.items()
    ]
    return Table(("seed", "epoch kept", "mean A_f", "A_f of each"), tuple(rows), align="llrl")


def _first_drop() -> int:
    """The epoch after which the learning rate of these runs first drops."""
    train = {(r.run_config.train.epochs, r.run_config.train.milestones) for r in _best_kept()}
    ((epochs, milestones),) = train
    return round(milestones[0] * epochs)


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
    return code


if __name__ == "__main__":
    sys.exit(main())
