"""Make ``src/tbbn/paper/measured.json``, ``docs/results.md`` and the tables of README and docs/speed.md from ``results/``.

python tools/results.py            # write them
python tools/results.py --check    # exit code 1 if they are not current
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from tbbn.bench.analysis.epochs import kept_table
from tbbn.bench.analysis.shares import norm_options, share
from tbbn.bench.analysis.slots import Slots, slots_table
from tbbn.bench.config import resolve
from tbbn.bench.engine.record import new_record
from tbbn.bench.report.tables import Table
from tbbn.bench.runs.record import load_record
from tbbn.paper import measured
from tbbn.paper.published import compare, find_tables

ROOT = Path(__file__).parents[1]
DATA, PAGE, README = ROOT / "src/tbbn/paper/measured.json", ROOT / "docs/results.md", ROOT / "README.md"
SPEED = ROOT / "docs/speed.md"
BEGIN, END = "<!-- made by make results -->", "<!-- end -->"
EXPERIMENTS = {  # by name: title, where the records are
    "best": ("paper, best epoch", "results/cifar100-ft.json"),
    "table2": ("paper, best epoch", "results/cifar100-table2"),
    "last": ("paper, last epoch", "results/cifar100-ft-last"),
    "clean": ("clean, last epoch", "results/cifar100-ft-clean"),
}
DRIFT = "results/cifar100-ft-last-drift.json"  # tbbn drift --images 200 --json of the same networks, by --view
SLOTS = "results/cifar100-ft-last-slots.json"  # tbbn slots --json of the networks of "last", which are not kept here
OTHER_NORMS = "results/cifar100-table1"  # Table 1 without its pair of batch norm and TBBN, which is above
OWN_LOOP = "results/own_loop-h200.json"  # benchmarks/own_loop.py, by lease: each has another machine of the same kind
# What a loop of one's own may cost. Where it waits for Python alone, a norm written in Python may cost more.
TARGETS = {"eager": 1.10, "autocast": 1.10, "compile": 1.05, "reduce-overhead": 1.02}
HOST_BOUND = {"resnet18@32": 1.25}
UNFINISHED = "results/cifar100-table2-unfinished"  # runs of Table 2 that were interrupted, with their checkpoints


SEED = 0  # that every norm of Table 1 has


def records_in(source: Path) -> list[Any]:
    return [load_record(file.parent) for file in sorted(source.glob("*/record.json"))]


def runs_in(source: Path) -> list[dict[str, Any]]:
    """Method, norm, seed and accuracies of every run in a file or a folder."""
    if source.suffix == ".json":
        runs = json.loads(source.read_text())["runs"]
    else:
        runs = [
            {"method": r.run_config.method.name, "norm": r.run_config.norm.name, "seed": r.run_config.seed,
             "accuracy": r.accuracy}
            for r in records_in(source)
        ]  # fmt: skip
    return [{key: run[key] for key in ("method", "norm", "seed", "accuracy")} for run in runs]


def data() -> str:
    entries = [
        {"name": name, "title": title, "source": source, "runs": runs_in(ROOT / source)}
        for name, (title, source) in EXPERIMENTS.items()
    ]
    return "[\n" + ",\n".join(json.dumps(entry) for entry in entries) + "\n]\n"


def page() -> str:
    found = measured.measured()
    last, best, clean = (found[name].metric("ft", "A_f") for name in ("last", "best", "clean"))
    late = [found["last"].after("ft", task) for task in (6, 7, 8)]
    others = [
        (method, found["table2"].metric(method, "A_f").gain, found["table2"].metric(method, "A_a").gain)
        for method in found["table2"].methods
    ]
    new = found["last"].new_task("ft", 9)
    early, late_kept = _final_by_kept_epoch()
    table2 = compare(find_tables("table2", "cifar100")[0], _all_records(), {"precision": "bf16"})
    return f"""# Results

Made by `make results` from the records in `results/`; `tbbn verify FOLDER` checks a record, `tbbn reproduce NAME --from results` prints
a table of the paper beside ours. Real CIFAR-100, 10 tasks, 2000 exemplars, ResNet-32, bf16, one H200.

**Does TBBN help?** With fine-tuning under the paper's protocol yes, by how much depends on the epoch that is kept:

- last epoch kept, {len(last.bn)} seeds: A_f {last.gain:+.1f} points (standard error {last.error:.1f}), in part a bias to old classes, see below; after tasks
  7 to 9, where r* = 16, {late[0].gain:+.1f}, {late[1].gain:+.1f} and {late[2].gain:+.1f}; before task 7 less than 1 point;
- best epoch on the new task kept, as the authors do, {len(best.bn)} seeds: A_f {best.gain:+.1f} ({best.error:.1f}); the paper has +3.1;
- under the `clean` protocol (momentum 0.9, the usual crop, last epoch), {len(clean.bn)} seeds: A_f {clean.gain:+.1f} ({clean.error:.1f}), A_a
  {found["clean"].metric("ft", "A_a").gain:+.1f} ({found["clean"].metric("ft", "A_a").error:.1f}): all but gone;
- with other methods, seed 0: A_f {", ".join(f"{m} {f:+.1f}" for m, f, _ in others)}; A_a {", ".join(f"{m} {a:+.1f}" for m, _, a in others)}.
  One seed says little: seeds of fine-tuning differ by about 2 points;
- beside other norms, fine-tuning, best epoch, seed {SEED}: A_f {_ranking(found["best"])}. One seed, and which epoch was
  kept may explain much of it (below).

{measured.gains(found).render("md")}

## Fine-tuning, the paper's protocol, last epoch kept

![Mean accuracy after each task](../results/cifar100-ft-last.png)

{measured.gains_by_task(found["last"]).render("md")}

Read the last row with care. In task 10 the accuracy of TBBN on the new task is {sum(new.tbbn) / len(new.tbbn):.0f} % (batch norm: {sum(new.bn) / len(new.bn):.0f} %)
while old tasks gain. The networks tell new images from old ones by their statistics: in training a current row is normalised by its own
split, a memory row by the average over the splits, and a test image has no such place. With rows in each other's places (`tbbn slots`
on the networks of these runs, training images):

{slots_table(["tbbn", "bn"], [_slots(norm) for norm in ("tbbn", "bn")]).render("md")}

`tbbn(memory=own)`, `tbbn(case=3)` and `weighted` treat both kinds of row alike. Whether they keep the gain is open, and so is why the effect
grows in tasks 9 and 10 although r* is 16 from task 7 on.

How far the running statistics of these networks are from those of all tasks in equal parts (`tbbn drift`, 200 images of each task, mean over
layers and seeds; the weight of the newest task: median):

{_drift().render("md")}

TBBN's statistics hold less of the newest task, but they are not nearer to the population; what the rest of the distance is made of is open. Both
norms are several times farther from images as they are tested: the augmentation in training moves the statistics more than the imbalance of
tasks does.

## Fine-tuning, `clean`

{measured.gains_by_task(found["clean"]).render("md")}

## The paper's Table 1, fine-tuning, as the authors trained

{measured.beside_paper(found["best"]).render("md")}

The other norms of the table, and two that the paper does not have:

{_other_norms().render("md")}

`brn` and `adab2n` were trained before a possible race in their GPU kernels was closed: a thread could have read running statistics that another
had just replaced. No sign of it was seen, but these two rows should be repeated.

`weighted` gives every task the same weight in one set of statistics, without splits. All norms with seed {SEED}, by A_a; seeds of batch norm
differ by about {stdev(best.bn):.0f} points of A_f (standard deviation), so most of this order is chance:

{_one_seed(found["best"]).render("md")}

## The paper's Table 2

{table2.render("md")}

With ten seeds the paper's A_f and A_a of `ft` with batch norm and with TBBN are within two standard errors of ours. New tasks are learnt 1 to 2
points better here (A_l), and TBBN forgets more (F): both open. The difference of PODNet is open, too: the official program has two classifiers, and the
paper does not say which one its row used. With CN, PODNet and AFC lose {_lost("podnet"):.1f} and {_lost("afc"):.1f} points of A_f to batch norm (one seed); in
the paper {_lost_in_paper("podnet"):.1f} and {_lost_in_paper("afc"):.1f}. The second phase of `eeil` is balanced over classes here, as its authors describe it; the released program draws it
otherwise (the quirk `unbalanced-phase`). The rows of `eeil`, `lucir`, `podnet` and `ssil` with batch norm and TBBN, seed 0, are older than the
float32 head in evaluation (in bf16 about one prediction in a hundred was a tie) and than stored predictions: `tbbn verify` cannot recompute them,
nor the ten seeds of `ft`. It does recompute all others.

Three runs with CN are not finished ([what they left](../results/cifar100-table2-unfinished), `tbbn resume` goes on). Seed 0, mean accuracy
over the tasks so far:

{_unfinished(found["table2"]).render("md")}

## Which epoch is kept

{_kept().render("md")}

The authors keep the epoch with the lowest loss on validation rows of the new task. In later tasks that is often one before the learning rate
first drops, after epoch {_first_drop()}; SS-IL is the exception. With this rule fine-tuning with batch norm has A_f {fmean(best.bn):.1f}, with the last epoch
{fmean(last.bn):.1f}. PODNet and AFC always keep the last epoch; the ten seeds of `ft` have no history here.

**The rule alone may order the norms.** Of the {len(early) + len(late_kept)} other norms in Table 1, {len(late_kept)} kept an epoch after the first drop in the last task ({", ".join(late_kept)}): A_f
{fmean(late_kept.values()):.1f} on average. {len(early)} kept an earlier one ({", ".join(early)}): {fmean(early.values()):.1f}. One seed each: a hint, not a proof; runs with the last epoch kept would tell.

## Missing

Seeds 1 and 2 of the other norms in Table 1 and of the methods in Table 2, three methods with CN, ImageNet-100, dissimilar tasks, 20 tasks,
the base-task scenario, the ablation. Each is one command (`tbbn reproduce table1`, ...) and hours of a GPU.
"""


def readme() -> str:
    """The README with its table of results made anew."""
    found = measured.measured()
    shown = {name: found[name] for name in ("last", "best", "clean")}
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
    folders = [*(source for _, source in EXPERIMENTS.values() if "." not in source), OTHER_NORMS]
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


def _slots(norm: str) -> Slots:
    """The counts of all seeds of a norm together."""
    total = Slots()
    for run in json.loads((ROOT / SLOTS).read_text()):
        if run["run"].split("-")[1] == norm:
            for kind, counts in ((kind, counts) for kind, counts in run.items() if kind != "run"):
                seen = getattr(total, kind)
                for key, count in counts.items():
                    setattr(seen, key, getattr(seen, key) + count)
    return total


def _drift() -> Table:
    """Running statistics against the population, batch norm and TBBN."""
    found = json.loads((ROOT / DRIFT).read_text())
    rows = []
    for norm in ("bn", "tbbn"):
        layers = {
            view: [layer for run in runs if run["run"].split("-")[1] == norm for layer in run["layers"]]
            for view, runs in found.items()
        }
        off = {view: fmean(layer["mean"] for layer in layers[view]) for view in layers}
        weight = median(layer["newest"] for layer in layers["train"])
        batch = share(48, 16, 9, norm_options(norm, {}))
        cells = (f"{off['train']:.3f}", f"{off['test']:.3f}", f"{100 * weight:.0f}", f"{100 * batch.current:.1f}")
        rows.append((norm, *cells))
    header = (
        "norm",
        "mean off, sd: images as in training",
        "as in the test",
        "newest task, %",
        "its share in a batch, %",
    )
    return Table(header, tuple(rows))


def _other_norms() -> Table:
    """Table 1 without the two norms that have a table of their own."""
    table = compare(find_tables("table1", "cifar100")[0], records_in(ROOT / OTHER_NORMS), {"precision": "bf16"})
    return replace(table, rows=tuple(row for row in table.rows if row[0] not in ("ft + bn", "ft + tbbn")))


def _unfinished(finished: measured.Measured) -> Table:
    """Mean accuracy after each task of the interrupted runs, each below batch norm and TBBN with the same method and seed."""
    rows = []
    for record in records_in(ROOT / UNFINISHED):
        method, seed = record.run_config.method.name, record.run_config.seed
        runs = {norm: finished.runs[method, norm, seed] for norm in ("bn", "tbbn")}
        runs[record.run_config.norm.name] = record.accuracy
        for norm, accuracy in runs.items():
            missing = ["-"] * (record.run_config.data.tasks - len(accuracy))
            rows.append((f"{method} + {norm}", *(f"{100 * fmean(row):.1f}" for row in accuracy), *missing))
    return Table(("run", *(f"task {t + 1}" for t in range(len(rows[0]) - 1))), tuple(rows))


def _of_one_seed(pair: measured.Measured) -> dict[str, dict[str, float]]:
    """The metrics of every norm of Table 1 with the same seed, in percent."""
    runs = {norm: accuracy for (_, norm, seed), accuracy in pair.runs.items() if seed == SEED}
    runs |= {
        r.run_config.label.removeprefix("ft + "): r.accuracy
        for r in records_in(ROOT / OTHER_NORMS)
        if r.run_config.seed == SEED
    }
    return {norm: {name: 100 * metric(run) for name, metric in measured.METRICS.items()} for norm, run in runs.items()}


def _one_seed(pair: measured.Measured) -> Table:
    """The metrics of every norm of Table 1 with the same seed, best average accuracy first."""
    found = sorted(_of_one_seed(pair).items(), key=lambda item: -item[1]["A_a"])
    rows = tuple((norm, *(f"{value:.1f}" for value in values.values())) for norm, values in found)
    return Table(("norm", *measured.METRICS), rows)


def _ranking(pair: measured.Measured) -> str:
    """Every norm of Table 1 with its A_f for one seed, best first."""
    found = sorted(_of_one_seed(pair).items(), key=lambda item: -item[1]["A_f"])
    return ", ".join(f"{norm} {values['A_f']:.1f}" for norm, values in found)


def _lost(method: str) -> float:
    """Points of A_f that a method loses with continual norm instead of batch norm."""
    records = [r for r in records_in(ROOT / EXPERIMENTS["table2"][1]) if r.run_config.method.name == method]
    final = {r.run_config.norm.name: 100 * r.metrics["final_accuracy"] for r in records if r.run_config.seed == SEED}
    return final["bn"] - final["cn"]


def _lost_in_paper(method: str) -> float:
    table = find_tables("table2", "cifar100")[0]
    at = table.columns.index("A_f")
    return table.rows[method, "bn"][at] - table.rows[method, "cn"][at]


def _best_kept() -> list[Any]:
    """The records of runs that kept the best epoch."""
    folders = (OTHER_NORMS, EXPERIMENTS["table2"][1])
    return [r for folder in folders for r in records_in(ROOT / folder) if r.run_config.train.keep == "best"]


def _kept() -> Table:
    return kept_table({f"{r.run_config.label}, seed {r.run_config.seed}": r for r in _best_kept()})


def _final_by_kept_epoch() -> tuple[dict[str, float], dict[str, float]]:
    """A_f of the other norms in Table 1: of those that kept an epoch of the last task before the first drop, and after it."""
    early: dict[str, float] = {}
    late: dict[str, float] = {}
    for record in records_in(ROOT / OTHER_NORMS):
        *_, last_kept = record.kept_epochs().values()
        chosen = late if last_kept + 1 > _first_drop() else early
        chosen[record.run_config.label.removeprefix("ft + ")] = 100 * record.metrics["final_accuracy"]
    return early, late


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
