"""The text of ``docs/results.md``: every number in it is computed by ``results_numbers``."""

from __future__ import annotations

from statistics import fmean, stdev

import results_numbers as numbers
from results_numbers import listed, mean_row, metrics, of_method, paper_row, with_interval
from tbbn.bench.metrics import final_accuracy
from tbbn.bench.report.pairs import difference
from tbbn.bench.runs.record import load_record
from tbbn.paper import measured
from tbbn.paper.published import compare, find_tables

Experiments = dict[str, measured.Measured]


def page() -> str:
    found = measured.measured()
    sections = (_answer, _last_epoch, _clean, _table1, _table2, _kept_epochs, _missing)
    return "\n\n".join(section(found).strip() for section in sections) + "\n"


def _answer(found: Experiments) -> str:
    last, best, clean = (found[name].metric("ft", "A_f") for name in ("last", "best", "clean"))
    average = {name: found[name].metric("ft", "A_a") for name in ("last", "best", "clean")}
    others, paper = found["table2"], measured.gain_in_paper("A_f")
    inside = best.interval[0] <= paper <= best.interval[1]
    return f"""# Results

Made by `make results` from the records in `results/`. Real CIFAR-100, 10 tasks, 2000 exemplars, ResNet-32, bf16, one H200.
`tbbn verify FOLDER` recomputes a record from the labels of the data set (the published archive will do: rows are sorted as they are
read), and `tbbn reproduce NAME --from results` prints a table of the paper beside ours.

**Does TBBN help?** Under the paper's protocol yes, a little on average over all tasks (A_a); how much of it is left after the last task (A_f)
depends on the method and on the epoch that is kept. TBBN minus batch norm, in points, standard error and 95 % interval:

- fine-tuning, best epoch on the new task kept, as the authors do, {len(best.bn)} seeds: A_a {with_interval(average["best"])}, A_f {with_interval(best)}.
  The paper has A_f {paper:+.1f}, {"inside" if inside else "outside"} that interval;
- fine-tuning, last epoch kept, {len(last.bn)} seeds: A_a {with_interval(average["last"])}, A_f {with_interval(last)}. Much of the latter is a bias to
  old classes that arises in the last two tasks: with the task known (task-IL) the gain is {numbers.gain_with_task_known("last")}, see below;
- fine-tuning under the `clean` protocol (momentum 0.9, the usual crop, last epoch), {len(clean.bn)} seeds: A_a {with_interval(average["clean"])},
  A_f {with_interval(clean)}: no gain on average, and at most a small one at the end;
- other methods, the paper's protocol, {_seeds_of_others(others)}: A_a {numbers.gains_by_method(others, "A_a")}; A_f {numbers.gains_by_method(others, "A_f")}.
  TBBN is ahead in {numbers.won(others, "A_a")} pairs of runs in A_a, in {numbers.won(others, "A_f")} in A_f. Single seeds of fine-tuning differ with a standard
  deviation of {stdev(average["best"].gains):.1f} in A_a and {stdev(best.gains):.1f} in A_f; beyond two standard errors on that scale: {numbers.standing_out(found)};
- beside other norms, fine-tuning, best epoch, seeds {listed(numbers.shared_seeds(found["best"]))}: A_f {numbers.ranking(found["best"])}. Which epoch was kept
  explains much of this order (below).

{measured.gains(found).render("md")}

Many numbers are compared here, so a few of them may well be off by two standard errors by chance.
"""


def _seeds_of_others(others: measured.Measured) -> str:
    counts = {len(others.seeds(method)) for method in others.methods}
    return f"{' or '.join(map(str, sorted(counts)))} seeds each"


def _last_epoch(found: Experiments) -> str:
    new = found["last"].new_task("ft", 9)
    return f"""## Fine-tuning, the paper's protocol, last epoch kept

![Mean accuracy after each task](../results/cifar100-ft-last.png)

{measured.gains_by_task(found["last"]).render("md")}

Read the last row with care. In task 10 the accuracy of TBBN on the new task is {fmean(new.tbbn):.0f} % (batch norm: {fmean(new.bn):.0f} %)
while old tasks gain. Of 10 000 test images, mean over seeds:

{numbers.errors_after_last_task().render("md")}

The networks tell new images from old ones by their statistics: in training a current row is normalised by its own
split, a memory row by the average over the splits, and a test image has no such place. With rows in each other's places (`tbbn slots`
on the networks of these runs, training images; all seeds, in brackets the lowest and the highest):

{numbers.slots_over_seeds().render("md")}

`tbbn(memory=own)`, `tbbn(case=3)` and `weighted` treat both kinds of row alike. Whether they keep the gain is open, and so is why the effect
grows in tasks 9 and 10 although r* is 16 from task 7 on.

How far the running statistics of these networks are from those of all tasks in equal parts (`tbbn drift`, 200 images of each task; mean over
layers, of each seed):

{numbers.drift().render("md")}

TBBN's statistics are not nearer to the population. Both norms are several times farther from images as they are tested: the augmentation in
training moves the statistics more than the imbalance of tasks does.
"""


def _clean(found: Experiments) -> str:
    return f"""## Fine-tuning, `clean`

{measured.gains_by_task(found["clean"]).render("md")}
"""


def _table1(found: Experiments) -> str:
    early, late = numbers.sessions()
    first, second = numbers.first_made(early), numbers.first_made(late)
    return f"""## The paper's Table 1: fine-tuning, best epoch kept

{measured.beside_paper(found["best"]).render("md")}

![Mean accuracy after each task](../results/cifar100-ft.png)

{measured.gains_by_task(found["best"]).render("md")}

The ten seeds were first made in three sessions, between which the GPU kernels were changed: seeds {listed(early)} had A_f {min(first.bn):.1f} to {max(first.bn):.1f} with batch norm
and gained {difference(first.gains)}, seeds {listed(late)} had {min(second.bn):.1f} to {max(second.bn):.1f} and gained {difference(second.gains)}. Their histories were not kept, and they are older than
the float32 head in evaluation (in bf16 about one prediction in a hundred was a tie). One seed was repeated on today's code, and counts as repeated above and below:

{numbers.repetition().render("md")}

The same seed with other last bits can thus end points apart in A_f: the rule may keep another epoch. So the difference between the
sessions may well be chance; the other nine seeds were not repeated.

The other norms of the table, and two that the paper does not have:

{numbers.norms_beside_paper().render("md")}

Differences without `=` are beyond two standard errors. Of `in`, `gn` and `sn` the cause may be that the released program trains something else under
these names (see the notes under the table; the quirks were not run); of the others it is open.

The seed-0 runs of `brn` and `adab2n` were trained before a possible race in their GPU kernels was closed: a thread could have read running
statistics that another had just replaced. A_f by seed, the first from before: `brn` {numbers.each_seed(numbers.of_norm("brn"), "A_f")}; `adab2n` {numbers.each_seed(numbers.of_norm("adab2n"), "A_f")}. No sign of it was seen.

`weighted` gives every task the same weight in one set of statistics, without splits. All norms on the seeds that all have, by A_a, and the difference
from batch norm on each seed:

{numbers.shared_table(found["best"]).render("md")}
"""


def _table2(found: Experiments) -> str:
    table = compare(find_tables("table2", "cifar100")[0], numbers.all_records())
    nearest, proxies = metrics(load_record(numbers.ROOT / numbers.NEAREST_MEAN)), metrics(of_method("podnet", "bn")[0])
    quirk, plain = metrics(load_record(numbers.ROOT / numbers.LAST_TASK_DISTILLED)), metrics(of_method("ssil", "bn")[0])
    lucir, lucir_bn = of_method("lucir", "tbbn"), of_method("lucir", "bn")
    afc, ssil = {n: mean_row("afc", n) for n in ("bn", "tbbn")}, {n: mean_row("ssil", n) for n in ("bn", "tbbn")}
    lost = {method: numbers.lost_with_cn(method) for method in ("podnet", "afc", "eeil", "lucir", "ssil")}
    printed = {method: paper_row(method, "bn")["A_f"] - paper_row(method, "cn")["A_f"] for method in lost}
    return f"""## The paper's Table 2

{table.render("md")}

Differences without `=` are beyond two standard errors in rows of three seeds or more. What is known of them:

- **PODNet.** The official program has a configuration for each of its two classifiers, and the paper does not say which one its row used. By
  the nearest mean of exemplars (`podnet(classifier=nme,scale=3,pod_spatial=5)`, batch norm, seed 0: {_values(nearest)}) PODNet is far nearer
  to the paper's row ({_values(paper_row("podnet", "bn"))}) than by its proxies ({_values(proxies)}): the row is most likely of the nearest mean.
  A_f and F still differ by {nearest["A_f"] - paper_row("podnet", "bn")["A_f"]:+.1f} and {nearest["F"] - paper_row("podnet", "bn")["F"]:+.1f}: open.
- **LUCIR with TBBN** has A_f {numbers.each_seed(lucir, "A_f")} by seed where the paper has {paper_row("lucir", "tbbn")["A_f"]:.1f}; batch norm has {numbers.each_seed(lucir_bn, "A_f")} (paper {paper_row("lucir", "bn")["A_f"]:.1f}).
  In the last task TBBN kept epochs {numbers.each_kept(lucir)} of 160, batch norm {numbers.each_kept(lucir_bn)}; the learning rate drops after epoch {numbers.first_drop()}. After task 7 TBBN was
  ahead by {_ahead(found["table2"], "lucir", 6)} points, at the end by {_ahead(found["table2"], "lucir", 9)}: the epochs kept are the likely cause of what is lost in between. Open.
- **SS-IL** learns new tasks less well (A_l {ssil["bn"]["A_l"]:.1f} and {ssil["tbbn"]["A_l"]:.1f}, paper {paper_row("ssil", "bn")["A_l"]:.1f} and {paper_row("ssil", "tbbn")["A_l"]:.1f}) and forgets less. The released program distils the last
  old task alone. With that quirk (`kd-last-task-only`, batch norm, seed 0) A_l goes from {plain["A_l"]:.1f} to {quirk["A_l"]:.1f} and F from {plain["F"]:.1f} to {quirk["F"]:.1f} (paper {paper_row("ssil", "bn")["F"]:.1f}), A_f from {plain["A_f"]:.1f} to {quirk["A_f"]:.1f}:
  {_share(plain, quirk, "A_l"):.0%} of the difference in A_l and {_share(plain, quirk, "F"):.0%} of that in F. The rest is open.
- **AFC** has a lower A_l and F than the paper ({afc["bn"]["A_l"]:.1f} and {afc["bn"]["F"]:.1f} with batch norm, {afc["tbbn"]["A_l"]:.1f} and {afc["tbbn"]["F"]:.1f} with TBBN; paper {paper_row("afc", "bn")["A_l"]:.1f} and {paper_row("afc", "bn")["F"]:.1f}, {paper_row("afc", "tbbn")["A_l"]:.1f} and {paper_row("afc", "tbbn")["F"]:.1f}): open.
- **CN** costs A_f against batch norm (paper in brackets): {", ".join(f"{m} {fmean(values):+.1f} ({printed[m]:+.1f})" for m, values in lost.items())}. That it costs PODNet and AFC more than in the paper is open.
- **The rest** is open.

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
    seeds = numbers.shared_seeds(best)
    sides, gains = numbers.changed_sides()
    return f"""## Which epoch is kept

{numbers.kept().render("md")}

The authors keep the epoch with the lowest loss on validation rows of the new task. In later tasks that is often one before the learning rate
first drops, after epoch {numbers.first_drop()}: in {numbers.early_tasks("ft", "brn")} of ten tasks of a run with `brn`, in {numbers.early_tasks("ft", "in")} with `in`. On seeds {listed(same)} this rule gives
fine-tuning with batch norm A_f {by_rule["bn"][0]:.1f}, the last epoch {by_rule["bn"][1]:.1f}; with TBBN {by_rule["tbbn"][0]:.1f} and {by_rule["tbbn"][1]:.1f}. PODNet and AFC always keep the last epoch; of
`ft` with batch norm and TBBN only the repeated seed has a history.

**This rule orders Table 1.** The norms, by whether they kept an epoch of the last task before or after the first drop:

{numbers.split_table(seeds).render("md")}

The split was chosen on seed {seeds[0]}, where late epochs are ahead by {numbers.late_gain(seeds[0]):.1f} points; on seeds {listed(seeds[1:])} they are ahead by {" and ".join(f"{numbers.late_gain(s):.1f}" for s in seeds[1:])}. It is not the norm that decides: some norms
are on one side with one seed and on the other with another, and lose with the early epoch, {fmean(gains):.1f} points on average:

{sides.render("md")}

Runs with the last epoch kept would show how the norms compare without this rule.
"""


def _missing(_: Experiments) -> str:
    gaps = numbers.missing()
    of_table2 = f"Of Table 2: {gaps}; then " if gaps else ""
    return f"""## Missing

{of_table2}Tables 1 and 2 with the last epoch kept, ImageNet-100, dissimilar tasks, 20 tasks, the base-task scenario, the ablation.
Each is one command (`tbbn reproduce table2`, ...) and hours of a GPU.
"""


def _values(row: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.1f}" for name, value in row.items())


def _share(plain: dict[str, float], quirk: dict[str, float], metric: str) -> float:
    """How much of the difference between SS-IL with batch norm and the paper's row a quirk explains."""
    return (quirk[metric] - plain[metric]) / (paper_row("ssil", "bn")[metric] - plain[metric])


def _ahead(experiment: measured.Measured, method: str, task: int) -> str:
    """How many points of mean accuracy TBBN is above batch norm after a task (from 0), on each seed."""
    return ", ".join(f"{gain:+.1f}" for gain in experiment.after(method, task).gains)
