"""The text of ``docs/results.md``: every number in it is computed by ``results_numbers``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from statistics import fmean

import results_bias
import results_epochs
import results_last
import results_missing
import results_numbers as numbers
import results_online
import results_others
from results_numbers import listed, mean_row, metrics, of_method, paper_row
from tbbn.bench.metrics import final_accuracy
from tbbn.bench.report.interval import signed
from tbbn.bench.runs.record import load_record
from tbbn.paper import measured
from tbbn.paper.measured import TASK_KNOWN
from tbbn.paper.published import compare, find_tables

Experiments = dict[str, measured.Measured]


def page() -> str:
    found = measured.measured()
    parts = (
        _answer,
        _last_epoch,
        _clean,
        results_bias.section,
        _table1,
        _table2,
        results_epochs.section,
        _online,
        _others,
        _cost,
        _missing,
    )
    return "\n\n".join(part(found).strip() for part in parts) + "\n"


def _answer(found: Experiments) -> str:
    last, best, clean = ({name: found[e].metric("ft", name) for name in _COLUMNS} for e in ("last", "best", "clean"))
    others, seeds = found["table2"], listed(numbers.shared_seeds(found["best"]))
    streams = numbers.records_in(results_online.FOLDER)
    online = {name: results_online.paired(streams, "tbbn", results_online.NUMBERS[name]) for name in ("A_f", "A_a")}
    _guard(found)
    unbiased = results_online.paired(streams, "tbbn", numbers.calibrated)
    assert min(online["A_f"].interval[0], online["A_a"].interval[0]) > 0 > unbiased.interval[0]
    taken = results_online.paired(streams, "tbbn", lambda record: float(record.errors[-1]["P->C"]))
    assert taken.interval[1] < 0
    return f"""# Results

**Does TBBN help?** Under the paper's protocol and online a little, on average over the tasks (A_a). After the last task (A_f) the gain is clear for
fine-tuning in two cases: with the last epoch kept, and online. In both, TBBN takes fewer past images for new ones. Under
`clean`, the bench's default, no gain in A_f or A_a is clear. TBBN minus batch norm, in points, with the 95 % interval over seeds:

- Paper, fine-tuning, last epoch kept, {len(last["A_f"].bn)} seeds: A_f {last["A_f"]}, A_a {last["A_a"]}.
- Paper, fine-tuning, best epoch kept as the authors do, {len(best["A_f"].bn)} seeds: A_f {best["A_f"]}, A_a {best["A_a"]}; the paper has {_printed("ft", "A_f")} and {_printed("ft", "A_a")}.
- Paper, mean of five other methods, {_seeds_of_others(others)} each: A_f {numbers.mean_of_methods(others, "A_f")}, A_a {numbers.mean_of_methods(others, "A_a")}.
- `clean` (momentum 0.9, weight decay 5e-4, the usual crop, all training images, last epoch), fine-tuning, {len(clean["A_f"].bn)} seeds: A_f {clean["A_f"]}, A_a {clean["A_a"]}.
- [Online](#online), a single pass over 20 tasks, fine-tuning, {len(online["A_f"].bn)} seeds: A_f {online["A_f"]}, A_a {online["A_a"]}; without the bias to the newest task A_f {unbiased}.

This page is made by `make results` from the records in `results/`: real CIFAR-100, 10 tasks, 2000 exemplars, ResNet-32, bf16, one H200; the online scenario has its own [setup](#online). More on
each line:

- With the last epoch kept, most of the gain in A_f is a weaker bias towards the newest classes. There is no sign that TBBN tells new from past
  classes better ([where the gain comes from](#where-the-gain-comes-from)).
- With the best epoch kept, fine-tuning gains in mean accuracy {_clear_after(found["best"])}.
- For a single one of the other methods the interval of A_a excludes 0 for {numbers.clear_of_0({m: others.metric(m, "A_a") for m in others.methods})}, that of A_f for {numbers.clear_of_0({m: others.metric(m, "A_f") for m in others.methods})}.
- Over continual norm (CN), with the five other methods, the gain is larger: A_a {_over_cn("A_a")}; without
  PODNet and AFC, [which CN harms](#the-papers-table-2), A_a {_over_cn("A_a", _WITHOUT_STAGES)}.
- In the paper TBBN forgets less with every method (F is lower). In the rows "paper" below it learns new tasks better and forgets more: A_l is higher in
  {numbers.higher_with_tbbn(found, "A_l")}, and F in {numbers.higher_with_tbbn(found, "F")}.
  One follows from the other: F is at least A_l - A_f, and A_f hardly changes. In the row "paper, last epoch" F is lower.
- Among the norms of Table 1 (fine-tuning, best epoch, seeds {seeds}) TBBN ranks {numbers.place(found["best"], "tbbn", "A_a")} by A_a (by seed: {numbers.places_by_seed(found["best"], "tbbn", "A_a")}) and {numbers.place(found["best"], "tbbn", "A_f")}
  by A_f (by seed: {numbers.places_by_seed(found["best"], "tbbn", "A_f")}). A_f is associated with [the epoch that was kept](#which-epoch-is-kept).

{measured.gains(found, _COLUMNS).render("md")}

Intervals are Student's t intervals; with three seeds they extend 4.3 standard errors to each side. About one interval in twenty misses the
true value by chance, and this page has hundreds: one that barely excludes 0 means little. Runs with the same seed share a class order, so the methods are not independent. Over all pairs of runs of the other
methods, TBBN is ahead in {numbers.won(others, "A_a")} in A_a and in {numbers.won(others, "A_f")} in A_f. The gain of fine-tuning rests on old runs: see
[Table 1](#the-papers-table-1-fine-tuning).

To check these numbers: `tbbn verify FOLDER` recomputes a record from the labels of the data set. The published archive works, because rows are
sorted when they are read. `tbbn reproduce NAME --from results` prints a table of the paper beside the records. For fine-tuning with batch norm
and TBBN it has one seed, because only the accuracies of the other nine were kept (`results/cifar100-ft.json`).
"""


_COLUMNS = tuple(measured.METRICS)


def _guard(found: Experiments) -> None:
    """What the text says in words. New records that contradict it stop ``make results`` here."""
    clear = [(e.name, m) for e in found.values() for m in e.methods if e.metric(m, "A_f").interval[0] > 0]
    assert clear == [("last", "ft")], f"A_f is clear of 0 for {clear}"
    assert all(found["clean"].metric("ft", name).interval[0] <= 0 for name in ("A_f", "A_a"))
    assert (
        numbers.mean_of_methods(found["table2"], "A_a").interval[0] > 0 < found["best"].metric("ft", "A_a").interval[0]
    )
    last = found["last"]
    assert last.metric("ft", "F").interval[1] < 0
    assert last.metric("ft", TASK_KNOWN).gain < last.metric("ft", "A_f").gain / 2  # most of it is bias
    after = [last.after("ft", task).interval[0] > 0 for task in range(10)]
    assert after == 6 * [False] + 4 * [True]  # it starts with task 7
    assert 4 * max(-last.new_task("ft", task).gain for task in range(9)) < -last.new_task("ft", 9).gain
    assert results_last.newest_in_statistics("tbbn") < results_last.newest_in_statistics("bn")
    assert results_last.off_population("tbbn", "train") >= results_last.off_population("bn", "train")
    assert all(
        results_last.off_population(n, "test") > 4 * results_last.off_population(n, "train") for n in ("bn", "tbbn")
    )
    finals = {
        (norm, seed): [
            100 * final_accuracy(r["accuracy"])
            for r in numbers.first_runs()
            if r["norm"] == norm and r["seed"] in seeds
        ]
        for norm in ("bn",)
        for seed, seeds in enumerate((range(6), range(6, 10)))
    }
    assert max(finals["bn", 0]) < min(
        finals["bn", 1]
    )  # batch norm's runs of the last session are above all earlier ones
    late = ("adab2n", "sn", "in")
    assert all(numbers.last_kept(r) > numbers.first_drop() for norm in late for r in numbers.of_norm(norm).values())
    for norm in ("bn", "tbbn"):  # the signs of the candidate cause
        own, theirs = mean_row("afc", norm), paper_row("afc", norm)
        assert own["A_l"] < theirs["A_l"] and own["F"] < theirs["F"] and own["A_a"] > theirs["A_a"]
    assert mean_row("afc", "cn")["A_a"] < paper_row("afc", "cn")["A_a"]
    for metric in ("A_l", "F"):
        assert mean_row("podnet", "bn")[metric] > paper_row("podnet", "bn")[metric]
    nearest, proxies, paper = _podnet()
    worse = [name for name in paper if abs(nearest[name] - paper[name]) > abs(proxies[name] - paper[name])]
    assert worse == ["A_f"], f"the nearest mean is farther from the paper in {worse}"


def _clear_after(experiment: measured.Measured) -> str:
    """The tasks after which the gain in mean accuracy is clear of 0, and whether the last one is among them."""
    tasks = [task + 1 for task in range(10) if experiment.after("ft", task).interval[0] > 0]
    if not tasks:
        return "after no task"
    in_a_row = tasks == list(range(tasks[0], tasks[-1] + 1))
    named = listed(tasks) if in_a_row else ", ".join(map(str, tasks))
    return f"after {'task' if len(tasks) == 1 else 'tasks'} {named}{'' if 10 in tasks else ', not at the end'}"


def _printed(method: str, metric: str) -> str:
    return signed(measured.printed_gain(method, metric))


def _seeds_of_others(others: measured.Measured) -> str:
    counts = {len(others.seeds(method)) for method in others.methods}
    return f"{' or '.join(map(str, sorted(counts)))} seeds"


def _last_epoch(found: Experiments) -> str:
    last = found["last"]
    return f"""## Fine-tuning, the last epoch kept

The paper's protocol, except that the last epoch is kept.

![Mean accuracy after each task](../results/cifar100-ft-last.png)

{measured.gains_by_task(last).render("md")}

The gain is clear from task 7 on. Most of it is a [weaker bias](#where-the-gain-comes-from) towards the newest classes. After task 10, TBBN assigns {results_last.said_new("tbbn"):.0f} % of the test
images to the ten newest classes and batch norm {results_last.said_new("bn"):.0f} %; the true share is 10 %.
Tasks 1 to 9 gain {results_bias.gains_of_past()} points each, and task 10 loses {-last.new_task("ft", 9).gain:.0f}. Wrong predictions among 10 000 test images, mean over seeds:

{numbers.errors_table(results_last.runs()).render("md")}

After the last task, the networks with TBBN recognise new images by how they are normalised. In training a current row is normalised by its
own split and a memory row by the average over the splits; a test image is in neither position. `tbbn slots` swaps the rows' positions, here on the
networks of these runs with {results_last.slot_images()} training images each (all seeds; lowest and highest seed in brackets):

{results_last.slots_over_seeds().render("md")}

`tbbn(memory=own)`, `tbbn(case=3)` and `weighted` normalise both kinds of row in the same way. Whether they keep the gain is open.

The distance of these networks' running statistics from the statistics of all tasks in equal parts (`tbbn drift`, 200 images per task; mean over
layers; lowest and highest seed in brackets):

{results_last.drift().render("md")}

TBBN's statistics give the newest task less weight (equal parts would be 0.10), but they are not closer to the population. Both norms are
several times farther from the statistics of test images: the training augmentation shifts the statistics more than the imbalance of tasks does.
"""


def _clean(found: Experiments) -> str:
    return f"""## Fine-tuning, `clean`

{measured.gains_by_task(found["clean"]).render("md")}
"""


def _table1(found: Experiments) -> str:
    first = numbers.sessions()["all"]
    return f"""## The paper's Table 1: fine-tuning

{numbers.table1().render("md")}

The differences of `in`, `gn` and `sn` may come from the released program, which trains something else under these names (see the notes above;
the quirks were not run). The causes of the other differences are open.

**Batch norm and TBBN**, mean accuracy over the tasks seen so far:

![Mean accuracy after each task](../results/cifar100-ft.png)

{measured.gains_by_task(found["best"]).render("md")}

Wrong predictions among 10 000 test images after the last task, mean over the ten seeds. In the paper's figure of errors TBBN takes fewer past
images for new ones (P->C). Here the difference is {numbers.biased()} images:

{numbers.errors_table(numbers.fine_tuned()).render("md")}

How certain is this? The ten seeds were run in three sessions, between which the GPU kernels changed:

{numbers.sessions_table().render("md")}

A shift of batch norm between the sessions cannot be excluded: in the last session all its runs are above all earlier ones. Histories were not
kept. These runs also predate the float32 head in evaluation and validation. (With random logits, 1.3 % of the bf16 predictions were ties, and a
tie went to the older class.) One seed was repeated on newer code:

{numbers.repetition().render("md")}

All tables use the repeated run, except the table of sessions. This one run moves the gain in A_f from {first} to {found["best"].metric("ft", "A_f")}, so the last digit of
the gain means nothing until the other nine seeds are repeated.

**The other norms.** The seed-0 runs of `brn` and `adab2n` predate the fix of a possible race in their GPU kernels: a thread could have read running
statistics that another thread had just replaced. A_f by seed, the first from before the fix: `brn` {numbers.each_seed(numbers.of_norm("brn"), "A_f")}; `adab2n` {numbers.each_seed(numbers.of_norm("adab2n"), "A_f")}.
They show no sign of it.

`weighted` gives every task the same weight in one set of statistics, without splits. The next table has all norms on the seeds that they share,
sorted by A_a. The last column is the difference from batch norm on each seed (seeds 0 and 1 of `bn` and `tbbn` are old runs):

{numbers.shared_table(found["best"]).render("md")}
"""


def _table2(found: Experiments) -> str:
    table = compare(find_tables("table2", "cifar100")[0], numbers.all_records())
    nearest, proxies, podnet = _podnet()
    quirk, plain = metrics(load_record(numbers.ROOT / numbers.LAST_TASK_DISTILLED)), metrics(of_method("ssil", "bn")[0])
    assert all(0.4 < _explained(name, plain, quirk) < 0.6 for name in ("A_l", "F"))  # about half
    lucir = found["table2"].metric("lucir", "A_f")
    afc, ssil = {n: mean_row("afc", n) for n in ("bn", "tbbn")}, {n: mean_row("ssil", n) for n in ("bn", "tbbn")}
    return f"""## The paper's Table 2

{table.render("md")}

The gain of TBBN over batch norm:

{measured.gains_beside_paper([found["best"], found["table2"]]).render("md")}

The marks `=` and `*` treat the paper's numbers as exact, although they are means of three runs with unknown spread. If those runs spread as
ours do, {numbers.beyond_chance([found["best"], found["table2"]])}. With our three seeds, a
difference exceeds two standard errors (the bound of `=`) by chance in one case of five. What is known about the larger differences:

- **PODNet.** The official program has one configuration for each of its two classifiers, and the paper does not say which one its row used. With
  the nearest mean of exemplars (`podnet(classifier=nme,scale=3,pod_spatial=5)`, batch norm, seed 0: {_values(nearest)}) PODNet is closer
  to the paper's row ({_values(podnet)}) than with its proxies ({_values(proxies)}) in all metrics but A_f. The row probably used the
  nearest mean. The rest of the difference is open.
- **LUCIR.** Our mean shows no gain in A_f ({lucir}; paper {_printed("lucir", "A_f")}). By seed, TBBN leads by {_ahead(found["table2"], "lucir", 6)} points after task 7,
  by {_ahead(found["table2"], "lucir", 7)} after task 8 and by {_ahead(found["table2"], "lucir", 9)} at the end. Three seeds do not show whether anything is lost: open.
- **SS-IL** learns new tasks less well than in the paper (A_l {ssil["bn"]["A_l"]:.1f} and {ssil["tbbn"]["A_l"]:.1f}, paper {paper_row("ssil", "bn")["A_l"]:.1f} and {paper_row("ssil", "tbbn")["A_l"]:.1f}) and forgets less. The released program distils only the
  last old task. With that quirk (`kd-last-task-only`, batch norm, seed 0) A_l changes from {plain["A_l"]:.1f} to {quirk["A_l"]:.1f}, F from {plain["F"]:.1f} to {quirk["F"]:.1f} (paper {paper_row("ssil", "bn")["F"]:.1f}) and A_f from {plain["A_f"]:.1f} to {quirk["A_f"]:.1f}.
  On this one seed the quirk covers about half of the difference in A_l and in F, but the run without it is an older one. The rest is open.
- **AFC** has a lower A_l and F than the paper ({afc["bn"]["A_l"]:.1f} and {afc["bn"]["F"]:.1f} with batch norm, {afc["tbbn"]["A_l"]:.1f} and {afc["tbbn"]["F"]:.1f} with TBBN; paper {paper_row("afc", "bn")["A_l"]:.1f} and {paper_row("afc", "bn")["F"]:.1f}, {paper_row("afc", "tbbn")["A_l"]:.1f} and {paper_row("afc", "tbbn")["F"]:.1f}): open.
  A candidate that was not run: all commands in the README of AFC's program (first task of 50 or 500 classes) keep 20 exemplars per class, while
  here, as in the paper's text, all classes so far share 2000 (200 per class in task 2, 22 in task 10). Fewer exemplars in early tasks may raise A_l,
  and with it F, and lower A_a. Batch norm and TBBN differ from the paper in this way, CN not in A_a. PODNet's commands do the same, and its row
  differs the other way.
- **CN** minus batch norm in A_f, on the same seeds (paper): {_with_cn()}.
  CN costs {_first_lost()} already after task 1, before there is a memory. AFC loses more than in the paper; for PODNet this is
  not certain, as the paper's row probably has the other classifier. The released scripts run CN with 8 groups where the text says 16; with
  fine-tuning, 8 groups have A_f {_mean_final("cn(groups=8)")} and 16 have {_mean_final("cn")}. Whether this is the cause is open.
- **TBBN** minus CN in A_f, mean of the five methods: {_over_cn("A_f")}; without PODNet and AFC {_over_cn("A_f", _WITHOUT_STAGES)}.
- **All other differences** are open.

These runs train as the paper describes, without the errors of the released program (`quirks` is empty). That program validates on 448 of 500
images, draws current rows of `eeil` and `lucir` from the memory as well (`current-from-union`), draws an unbalanced second phase of `eeil`
(`unbalanced-phase`), and uses other constants in BRN and SN. The seed-0 rows of `eeil`, `lucir`, `podnet` and `ssil` with batch norm and TBBN predate
the float32 head and stored predictions: `tbbn verify` cannot recompute them, and a single one of them should not be compared with a newer run to
the last point. `tbbn verify` recomputes all other run folders in `results/`.
"""


def _podnet() -> tuple[dict[str, float], ...]:
    """PODNet with the nearest mean, with its proxies, and the paper's row, all with batch norm."""
    nearest = metrics(load_record(numbers.ROOT / numbers.NEAREST_MEAN))
    return nearest, metrics(of_method("podnet", "bn")[0]), paper_row("podnet", "bn")


def _explained(metric: str, plain: dict[str, float], quirk: dict[str, float]) -> float:
    """The part of SS-IL's difference from the paper that the quirk removes."""
    return (quirk[metric] - plain[metric]) / (paper_row("ssil", "bn")[metric] - plain[metric])


_WITH_STAGES, _WITHOUT_STAGES = ("podnet", "afc"), ("eeil", "lucir", "ssil")  # the first two distil maps of stages


def _with_cn() -> str:
    """The change of A_f with continual norm, for each method, and the paper's."""
    words = []
    for method in (*_WITH_STAGES, *_WITHOUT_STAGES):
        printed = paper_row(method, "cn")["A_f"] - paper_row(method, "bn")["A_f"]
        words.append(f"{method} {numbers.beside(method, 'bn', 'cn', 'A_f')} ({signed(printed)})")
    return ", ".join(words)


def _first_lost() -> str:
    """What continual norm changes after the first task with PODNet and AFC."""
    after = {
        m: numbers.beside(m, "bn", "cn", lambda r: 100 * r.accuracy[0][0]) for m in (*_WITH_STAGES, *_WITHOUT_STAGES)
    }
    assert all(after[method].interval[1] < 0 for method in _WITH_STAGES)
    assert all(after[method].interval[0] < 0 < after[method].interval[1] for method in _WITHOUT_STAGES)
    return " and ".join(f"{method} {-after[method].gain:.1f} points" for method in _WITH_STAGES)


def _over_cn(metric: str, methods: Sequence[str] = (*_WITH_STAGES, *_WITHOUT_STAGES)) -> str:
    """The mean over methods of TBBN's gain over continual norm, and in how many pairs of runs it is ahead."""
    pairs = [numbers.beside(method, "cn", "tbbn", metric) for method in methods]
    ahead = [gain > 0 for pair in pairs for gain in pair.gains]
    return f"{numbers.mean_of(pairs)} (ahead in {sum(ahead)} of {len(ahead)} pairs)"


def _mean_final(norm: str) -> str:
    return f"{fmean(metrics(record)['A_f'] for record in numbers.of_norm(norm).values()):.1f}"


def _cost(_: Experiments) -> str:
    (ablation,) = find_tables("ablation", "cifar100")
    theirs, base = ablation.cost["tbbn"], ablation.cost["bn"]
    machine = json.loads((numbers.ROOT / numbers.H200).read_text())
    bf16, tf32 = (step["tbbn"] for step in machine["steps"])
    return f"""## Cost

In the paper ({ablation.cost["device"]}) TBBN takes {theirs["memory_mib"] / base["memory_mib"]:.1f} times the memory and {theirs["hours"] / base["hours"]:.1f} times the training time of batch norm. Here
({machine["machine"]["device"]}, the same network, a captured training step) it takes {max(bf16["peak_ratio"], tf32["peak_ratio"]):.2f} times the peak memory, and {bf16["ratio"]:.2f} times the time of `nn.BatchNorm2d` in bf16 or {tf32["ratio"]:.2f} times
in tf32. For the layer alone, and for your own loop, see [speed](speed.md). In the test both are the same layer.
"""


def _online(_: Experiments) -> str:
    return results_online.section(numbers.records_in(results_online.FOLDER))


def _others(_: Experiments) -> str:
    return results_others.section()


def _missing(_: Experiments) -> str:
    return results_missing.section(numbers.all_records() + numbers.records_in(results_online.FOLDER))


def _values(row: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.1f}" for name, value in row.items())


def _ahead(experiment: measured.Measured, method: str, task: int) -> str:
    """How many points of mean accuracy TBBN is above batch norm after a task (from 0), on each seed."""
    return ", ".join(f"{gain:+.1f}" for gain in experiment.after(method, task).gains)
