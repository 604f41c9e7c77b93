"""The text of ``docs/results.md``: every number in it is computed by ``results_numbers``."""

from __future__ import annotations

from statistics import fmean

import results_numbers as numbers
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
    sections = (_answer, _last_epoch, _clean, _table1, _table2, _kept_epochs, _missing)
    return "\n\n".join(section(found).strip() for section in sections) + "\n"


def _answer(found: Experiments) -> str:
    last, best, clean = ({name: found[e].metric("ft", name) for name in _COLUMNS} for e in ("last", "best", "clean"))
    others, seeds = found["table2"], listed(numbers.shared_seeds(found["best"]))
    return f"""# Results

Made by `make results` from the records in `results/`. Real CIFAR-100, 10 tasks, 2000 exemplars, ResNet-32, bf16, one H200.

**Does TBBN help?** A little, on average over the tasks (A_a); after the last task (A_f) these runs cannot tell, except with the last epoch
kept. TBBN minus batch norm, in points, with the 95 % interval over seeds:

- Fine-tuning as in the paper, {len(best["A_f"].bn)} seeds: A_a {best["A_a"]}, A_f {best["A_f"]}; the paper's three runs have {_printed("ft", "A_a")} and {_printed("ft", "A_f")}.
  The gain is clear of 0 {_clear_after(found["best"])}.
- Five other methods, {_seeds_of_others(others)} each: in their mean A_a {numbers.mean_of_methods(others, "A_a")}, A_f {numbers.mean_of_methods(others, "A_f")}. Alone, A_a is clear
  of 0 with {numbers.clear_of_0({m: others.metric(m, "A_a") for m in others.methods})}, A_f with {numbers.clear_of_0({m: others.metric(m, "A_f") for m in others.methods})}.
- Fine-tuning with the last epoch kept, {len(last["A_f"].bn)} seeds: A_a {last["A_a"]}, A_f {last["A_f"]}. Most of the latter is a weaker bias to the newest
  classes ([below](#fine-tuning-the-last-epoch-kept)): with the task known, A_f gains {last[TASK_KNOWN]}, and with the paper's choice of epoch {best[TASK_KNOWN]}.
- Fine-tuning under `clean` (momentum 0.9, weight decay 5e-4, the usual crop, all training images, last epoch), {len(clean["A_f"].bn)} seeds:
  A_a {clean["A_a"]}, A_f {clean["A_f"]}.
- How: in the paper TBBN forgets less, in all methods. Here it learns new tasks better (A_l is higher in {numbers.higher_with_tbbn(found, "A_l")})
  and forgets more (F is higher in {numbers.higher_with_tbbn(found, "F")}).
- Among the norms of Table 1, fine-tuning, seeds {seeds}, TBBN is number {numbers.place(found["best"], "tbbn", "A_a")} by A_a and {numbers.place(found["best"], "tbbn", "A_f")} by A_f. The order by A_f goes with
  [the epoch that was kept](#which-epoch-is-kept).

{measured.gains(found, _COLUMNS).render("md")}

Intervals are those of Student's t: with three seeds they reach 4.3 standard errors to each side. Of all intervals here about one in twenty misses
the true value by chance. Runs of one seed share its class order, so the methods are not independent; TBBN is ahead in {numbers.won(others, "A_a")} pairs of runs of
the other methods in A_a, in {numbers.won(others, "A_f")} in A_f. The gain of fine-tuning rests on old runs: [Table 1](#the-papers-table-1-fine-tuning) has the details.

To check: `tbbn verify FOLDER` recomputes a record from the labels of the data set (the published archive will do: rows are sorted as they are
read). `tbbn reproduce NAME --from results` prints a table of the paper beside the records; of fine-tuning with batch norm and TBBN it knows one seed,
because nine of ten left their accuracies only (`results/cifar100-ft.json`).
"""


_COLUMNS = (*measured.METRICS, TASK_KNOWN)


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

The paper's protocol but for the epoch that is kept.

![Mean accuracy after each task](../results/cifar100-ft-last.png)

{measured.gains_by_task(last).render("md")}

The gain starts with task 7, where r* becomes 16. Most of it is a weaker bias to the newest classes. After task 10 TBBN takes {numbers.said_new("tbbn"):.0f} % of the test
images for one of the ten newest classes, batch norm {numbers.said_new("bn"):.0f} %; they are 10 %. In task 10 this costs TBBN {-last.new_task("ft", 9).gain:.0f} points on the
new task; why so much more than in tasks 7 to 9 is open. Of 10 000 test images, mean over seeds:

{numbers.errors_after_last_task().render("md")}

After the last task the networks tell new images from old ones by their statistics: in training a current row is normalised by its own
split, a memory row by the average over the splits, and a test image has no such place. With rows in each other's places (`tbbn slots`
on the networks of these runs, {numbers.slot_images()} training images of each run; all seeds, in brackets the lowest and the highest):

{numbers.slots_over_seeds().render("md")}

`tbbn(memory=own)`, `tbbn(case=3)` and `weighted` treat both kinds of row alike. Whether they keep the gain is open.

How far the running statistics of these networks are from those of all tasks in equal parts (`tbbn drift`, 200 images of each task; mean over
layers; in brackets the lowest and the highest seed):

{numbers.drift().render("md")}

TBBN's statistics hold less of the newest task (in equal parts 0.10), but are not nearer to the population. Both norms are several times
farther from images as they are tested: the augmentation in training moves the statistics more than the imbalance of tasks does.
"""


def _clean(found: Experiments) -> str:
    return f"""## Fine-tuning, `clean`

{measured.gains_by_task(found["clean"]).render("md")}
"""


def _table1(found: Experiments) -> str:
    first = numbers.sessions()["all"]
    return f"""## The paper's Table 1: fine-tuning

{numbers.table1().render("md")}

Of `in`, `gn` and `sn` the cause of differences may be that the released program trains something else under these names (see the notes under
the table; the quirks were not run). Of the others it is open.

**Batch norm and TBBN**, mean accuracy over the tasks seen so far:

![Mean accuracy after each task](../results/cifar100-ft.png)

{measured.gains_by_task(found["best"]).render("md")}

How sure is this? The ten seeds were made in three sessions, between which the GPU kernels were changed:

{numbers.sessions_table().render("md")}

A shift of batch norm between the sessions cannot be excluded: all its runs of the last one are above all earlier ones. Histories were not kept,
and these runs are older than the float32 head in evaluation and validation (with random logits 1.3 % of the predictions in bf16 are ties, and
a tie went to the older class). One seed was repeated on newer code:

{numbers.repetition().render("md")}

The repeated seed counts in all tables but the one of sessions. It alone moves the gain in A_f from {first} to {found["best"].metric("ft", "A_f")}. The other nine seeds have
to be repeated before the last digit of this gain means anything.

**The other norms.** The seed-0 runs of `brn` and `adab2n` were trained before a possible race in their GPU kernels was closed: a thread could have
read running statistics that another had just replaced. A_f by seed, the first from before: `brn` {numbers.each_seed(numbers.of_norm("brn"), "A_f")}; `adab2n` {numbers.each_seed(numbers.of_norm("adab2n"), "A_f")}. No sign of it was seen.

`weighted` gives every task the same weight in one set of statistics, without splits. All norms on the seeds that all have, by A_a, and the difference
from batch norm on each seed (of `bn` and `tbbn`, seeds 0 and 1 are old runs):

{numbers.shared_table(found["best"]).render("md")}
"""


def _table2(found: Experiments) -> str:
    table = compare(find_tables("table2", "cifar100")[0], numbers.all_records())
    nearest, proxies = metrics(load_record(numbers.ROOT / numbers.NEAREST_MEAN)), metrics(of_method("podnet", "bn")[0])
    quirk, plain = metrics(load_record(numbers.ROOT / numbers.LAST_TASK_DISTILLED)), metrics(of_method("ssil", "bn")[0])
    lucir = found["table2"].metric("lucir", "A_f")
    afc, ssil = {n: mean_row("afc", n) for n in ("bn", "tbbn")}, {n: mean_row("ssil", n) for n in ("bn", "tbbn")}
    return f"""## The paper's Table 2

{table.render("md")}

What TBBN gains over batch norm:

{measured.gains_beside_paper([found["best"], found["table2"]]).render("md")}

The marks `=` and `*` take the paper's numbers as exact; they are means of three runs with unknown spread. With three seeds of ours two standard
errors, the bound of `=`, are exceeded by chance in one case of five. What is known of the larger differences:

- **PODNet.** The official program has a configuration for each of its two classifiers, and the paper does not say which one its row used. By
  the nearest mean of exemplars (`podnet(classifier=nme,scale=3,pod_spatial=5)`, batch norm, seed 0: {_values(nearest)}) PODNet is nearer
  to the paper's row ({_values(paper_row("podnet", "bn"))}) than by its proxies ({_values(proxies)}), but for A_f: the row is probably of the nearest mean.
  What is left of the differences is open.
- **LUCIR.** Our mean shows no gain in A_f ({lucir}; paper {_printed("lucir", "A_f")}). TBBN is ahead by {_ahead(found["table2"], "lucir", 6)} points after task 7 (by seed),
  {_ahead(found["table2"], "lucir", 7)} after task 8, {_ahead(found["table2"], "lucir", 9)} at the end. Three seeds do not show that anything is lost, nor why: open.
- **SS-IL** learns new tasks less well (A_l {ssil["bn"]["A_l"]:.1f} and {ssil["tbbn"]["A_l"]:.1f}, paper {paper_row("ssil", "bn")["A_l"]:.1f} and {paper_row("ssil", "tbbn")["A_l"]:.1f}) and forgets less. The released program distils the last
  old task alone. With that quirk (`kd-last-task-only`, batch norm, seed 0) A_l goes from {plain["A_l"]:.1f} to {quirk["A_l"]:.1f} and F from {plain["F"]:.1f} to {quirk["F"]:.1f} (paper {paper_row("ssil", "bn")["F"]:.1f}), A_f from {plain["A_f"]:.1f} to {quirk["A_f"]:.1f}:
  about half of both differences, as far as one seed can say. The rest is open.
- **AFC** has a lower A_l and F than the paper ({afc["bn"]["A_l"]:.1f} and {afc["bn"]["F"]:.1f} with batch norm, {afc["tbbn"]["A_l"]:.1f} and {afc["tbbn"]["F"]:.1f} with TBBN; paper {paper_row("afc", "bn")["A_l"]:.1f} and {paper_row("afc", "bn")["F"]:.1f}, {paper_row("afc", "tbbn")["A_l"]:.1f} and {paper_row("afc", "tbbn")["F"]:.1f}): open.
- **CN** against batch norm in A_f, on the seeds that both have (paper in brackets): {_with_cn()}. Why it costs PODNet and AFC more than
  in the paper is open.
- **The rest** is open.

These runs train as the paper describes. Errors of the released program are left out (`quirks` is empty): it validates on 448 of 500 images, draws
current rows of `eeil` and `lucir` from the memory, too (`current-from-union`), draws the second phase of `eeil` unbalanced (`unbalanced-phase`),
and has other constants in BRN and SN. The rows of `eeil`, `lucir`, `podnet` and `ssil` with batch norm and TBBN, seed 0, are older than the float32 head and than stored
predictions: `tbbn verify` cannot recompute them, and single runs should not be compared with newer ones to the last point. It recomputes all
others that are folders in `results/`.
"""


def _with_cn() -> str:
    """What each method loses or gains in A_f with continual norm, and with how many seeds."""
    words = []
    for method in ("podnet", "afc", "eeil", "lucir", "ssil"):
        lost = numbers.lost_with_cn(method)
        printed = paper_row(method, "cn")["A_f"] - paper_row(method, "bn")["A_f"]
        n = f", {len(lost)} {'seed' if len(lost) == 1 else 'seeds'}"
        words.append(f"{method} {signed(-fmean(lost))} ({signed(printed)}{n})")
    return ", ".join(words)


def _kept_epochs(found: Experiments) -> str:
    best, last = found["best"], found["last"]
    same = [s for s in best.seeds("ft") if s in last.seeds("ft")]
    by_rule = {
        norm: [fmean(100 * final_accuracy(e.runs["ft", norm, s]) for s in same) for e in (best, last)]
        for norm in ("bn", "tbbn")
    }
    seeds = numbers.shared_seeds(best)
    return f"""## Which epoch is kept

The authors keep the epoch with the lowest loss on validation rows of the new task. In fine-tuning that is one from before the first drop of the
learning rate in {100 * numbers.early_share([r for r in numbers.best_kept() if r.run_config.names[0] == "ft"]):.0f} % of tasks 2 to 10. On seeds {listed(same)} this rule gives batch norm A_f {by_rule["bn"][0]:.1f}, the last epoch {by_rule["bn"][1]:.1f}; TBBN {by_rule["tbbn"][0]:.1f} and {by_rule["tbbn"][1]:.1f}.
PODNet and AFC always keep the last epoch.

{numbers.kept().render("md")}

**The order of Table 1 by A_f goes with the kept epoch.** The norms, by whether they kept an epoch of the last task from before or after the first drop:

{numbers.split_table(seeds).render("md")}

The split was chosen on seed {seeds[0]}, where late epochs are ahead by {numbers.late_gain(seeds[0]):.1f} points; on seeds {listed(seeds[1:])} they are ahead by {" and ".join(f"{numbers.late_gain(s):.1f}" for s in seeds[1:])}. It is no more than an
association: which epoch is kept is itself a result of training, and the norm matters as well (`adab2n`, `sn` and `in` kept late epochs with
every seed, and differ). Of batch norm and TBBN only seed {max(seeds)} has a history. Runs with the last epoch kept would show how the norms compare without this rule.
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


def _ahead(experiment: measured.Measured, method: str, task: int) -> str:
    """How many points of mean accuracy TBBN is above batch norm after a task (from 0), on each seed."""
    return ", ".join(f"{gain:+.1f}" for gain in experiment.after(method, task).gains)
