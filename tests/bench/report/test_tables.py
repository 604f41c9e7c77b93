"""Tables of records: numbers worked out by hand, groups of seeds, and the escaping rules of each format."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path

import pytest
from records import labels, record

from tbbn.bench.engine.forecast import TaskForecast
from tbbn.bench.report.groups import blocks, groups
from tbbn.bench.report.page import page
from tbbn.bench.report.pairs import pairs
from tbbn.bench.report.table import Table
from tbbn.bench.report.tables import (
    accuracy_table,
    blocks_table,
    forecast_table,
    metrics_table,
    percent,
    summary_table,
)
from tbbn.errors import UserError

A, B, C = [[1.0], [0.5, 0.9]], [[0.8], [0.7, 0.6]], [[0.9], [0.1, 0.2]]


def test_mean_and_sample_deviation_of_three_seeds() -> None:
    table = summary_table([record(A, seed=0), record(B, seed=1), record(C, seed=2)])
    final = [0.7, 0.65, 0.15]
    mean = sum(final) / 3
    deviation = (sum((x - mean) ** 2 for x in final) / 2) ** 0.5  # n - 1: sample standard deviation
    (row,) = table.rows
    assert row[:3] == ("ft + bn", "3", f"{100 * mean:.1f} ± {100 * deviation:.1f}")
    assert table.header == ("method + norm", "seeds", "A_f %", "A_a %", "F %", "F_text %", "A_l %")


def test_the_headline_metrics_of_one_run_by_hand() -> None:
    (row,) = summary_table([record(A)]).rows
    # A_f = (.5 + .9) / 2, A_a = (1 + .7) / 2, F = F_text = (1 - .5) / 2, A_l = (1 + .9) / 2; one seed has no deviation.
    assert row == ("ft + bn", "1", "70.0", "85.0", "25.0", "25.0", "95.0")


def test_f_is_the_best_past_accuracy_minus_the_final_one_and_f_text_the_largest_drop() -> None:
    # Task 1 has .6 when learnt, .8 after task 2, .7 at the end: .8 - .7 in F, .6 - .7 in F_text. Task 2: .9 - .5 in both.
    rows = [[0.6], [0.8, 0.9], [0.7, 0.5, 1.0]]
    made = record(rows)
    (row,) = summary_table([made]).rows
    assert row[4:6] == ("16.7", "10.0")


def test_the_best_mean_is_bold_only_where_all_have_the_same_seeds() -> None:
    even = [record(A), record(B, norm__name="tbbn"), record(C, norm__name="gn", status="interrupted")]
    table = blocks_table(even, ("final_accuracy",))
    assert table.bold == {(0, 3)} and table.caption.endswith("is bold.")
    table = blocks_table([*even, record(A, seed=1)], ("final_accuracy",))
    assert table.bold == set() and table.caption.endswith("is bold, if all its rows have the same seeds.")


def test_of_equal_runs_the_one_that_got_furthest_counts() -> None:
    short, long, whole = (record(A[:n], status="interrupted", data__tasks=2) for n in (1, 2, 2))
    for runs in ([short, long], [long, short]):
        (group,) = groups(runs)
        assert group.records == [long]
    whole.status = "finished"
    assert groups([long, whole])[0].records == [whole] == groups([whole, long])[0].records


def test_norms_are_compared_with_batch_norm_or_the_first_that_has_a_finished_run() -> None:
    cut, gn, tbbn = (
        record(A[:1], "interrupted", data__tasks=2),
        record(B, norm__name="gn"),
        record(C, norm__name="tbbn"),
    )
    assert [(pair.base.norm, pair.other.norm) for pair in pairs(groups([cut, gn, tbbn]))] == [("gn", "tbbn")]
    assert [(pair.base.norm, pair.other.norm) for pair in pairs(groups([gn, tbbn, record(A)]))] == [
        ("bn", "gn"),
        ("bn", "tbbn"),
    ]
    assert pairs(groups([cut])) == []


def test_percent_of_one_and_of_two() -> None:
    assert percent([0.123]) == "12.3"
    assert percent([0.2, 0.4]) == "30.0 ± 14.1"


def test_the_report_prints_every_formula_it_uses() -> None:
    notes = "\n".join(summary_table([record(A)]).notes)
    for part in (
        "A_f = (1/T) sum_i a[T,i]",
        "A_a = ",
        "F = (1/T) sum_{i<T} (max_{t<T} a[t,i] - a[T,i])",
        "F_text = ",
        "A_l = ",
        "a[t,i]: accuracy on task i",
    ):
        assert part in notes


def test_seeds_are_one_group_and_norms_are_not() -> None:
    records = [record(A, seed=0), record(A, seed=1, norm__name="tbbn"), record(B, seed=1)]
    found = groups(records)
    assert [group.label for group in found] == ["ft + bn", "ft + tbbn"]
    assert [[seed for seed, _ in group.runs] for group in found] == [[0, 1], [1]]


def test_runs_on_other_machines_are_one_group() -> None:
    records = [record(A, device="cpu", threads=2), record(B, seed=1, data__root="/data"), record(C, seed=2)]
    assert labels(records) == ["ft + bn"]


def test_a_repeated_run_counts_once() -> None:
    broken = record(C[:1], status="interrupted", seed=1)
    table = summary_table([record(A), broken, record(A, threads=2), record(B, seed=1)])
    (row,) = table.rows
    assert row[:3] == ("ft + bn", "2", percent([0.7, 0.65]))
    assert table.notes[-1] == "2 of the 4 runs repeat the config and seed of another and are not counted again."
    assert "repeat" not in summary_table([record(A), record(B, seed=1)]).notes[-1]


def test_groups_with_one_label_show_the_settings_that_differ() -> None:
    records = [record(A, train__epochs=3), record(B, train__epochs=4), record(C, train__epochs=4, train__lr=0.5)]
    assert labels(records) == [
        "ft + bn [train.epochs=3, train.lr=0.05]",
        "ft + bn [train.epochs=4, train.lr=0.05]",
        "ft + bn [train.epochs=4, train.lr=0.5]",
    ]
    other = record(A, data__name="synthetic")
    assert labels([record(A), other, record(A, norm__name="gn")]) == [
        "ft + bn [digits]",
        "ft + bn [synthetic]",
        "ft + gn [digits]",
    ]


def test_another_optimizer_is_said_rather_than_its_learning_rate() -> None:
    made = [record([[0.9]]), record([[0.8]], train__optimizer="adamw")]
    assert [group.label for group in groups(made)] == [
        "ft + bn [train.optimizer=sgd]",
        "ft + bn [train.optimizer=adamw]",
    ]


def test_norms_with_other_settings_show_them_and_stand_in_blocks_of_their_own() -> None:
    runs = [
        record(A, train__epochs=3),
        record(A, train__epochs=3, norm__name="gn"),
        record(A, train__epochs=4, norm__name="in"),
    ]
    assert labels(runs) == ["ft + bn [train.epochs=3]", "ft + gn [train.epochs=3]", "ft + in [train.epochs=4]"]
    assert [[g.setup for g in block] for block in blocks(groups(runs))] == [
        ["ft [train.epochs=3]"] * 2,
        ["ft [train.epochs=4]"],
    ]


def test_an_unfinished_run_is_not_in_the_mean_but_in_the_status() -> None:
    broken = record(C[:1], status="diverged", seed=2)
    table = summary_table([record(A, seed=0), record(B, seed=1), broken])
    (row,) = table.rows
    assert row[1] == "2" and row[2] == percent([0.7, 0.65])
    assert table.header[-1] == "status" and row[-1] == "2 finished, 1 diverged after 1 of 2 tasks"
    (row,) = summary_table([replace(broken)]).rows
    assert row == ("ft + bn", "0", "-", "-", "-", "-", "-", "1 diverged after 1 of 2 tasks")


def test_the_accuracy_table_is_the_matrix_in_percent() -> None:
    table = accuracy_table(record(A))
    assert table.header == ("accuracy %", "task 1", "task 2", "mean", "memory")
    assert table.rows == (("after task 1", "100.0", "", "100.0", "8"), ("after task 2", "50.0", "90.0", "70.0", "8"))


def test_the_metrics_table_has_every_metric_with_its_formula_and_the_errors() -> None:
    made = record(A)
    made.errors[0] = dict.fromkeys(made.errors[0], 9)  # only those after the last task are shown
    rows = {row[0]: row[1:] for row in metrics_table(made).rows}
    assert rows["A_f"] == ("70.00 %", "(1/T) sum_i a[T,i]")
    assert rows["F"][0] == "25.00 %"
    assert rows["BWT"][0] == "-50.00 %"
    assert {"A_f", "A_a", "F", "F_text", "A_l", "BWT", "A_f^w", "A_a^w", "A_f task-IL", "A_a task-IL"} <= set(rows)
    assert [rows[kind][0] for kind in ("C->C", "C->P", "P->C", "P->P")] == ["1", "2", "3", "4"]
    assert all(cells[-1] for cells in rows.values())


TABLE = Table(("name", "A_f %"), (("a&b_c", "1.0 ± 0.5"), ("d|e", "2.0")), ("a note",))


def test_text_columns_line_up() -> None:
    lines = TABLE.render("text").splitlines()
    assert lines == ["name       A_f %", "----------------", "a&b_c  1.0 ± 0.5", "d|e          2.0", "", "a note"]


def test_markdown_escapes_its_bars() -> None:
    lines = TABLE.render("md").splitlines()
    assert lines[:4] == ["| name | A_f % |", "|---|---:|", "| a&b_c | 1.0 ± 0.5 |", r"| d\|e | 2.0 |"]
    assert "a note" in lines[-1]


def test_csv_has_numbers_in_columns_of_their_own() -> None:
    rows = list(csv.reader(io.StringIO(TABLE.render("csv"))))
    assert rows == [["name", "A_f %", "A_f % std"], ["a&b_c", "1.0", "0.5"], ["d|e", "2.0", ""]]
    assert [float(row[1]) for row in rows[1:]] == [1.0, 2.0]


def test_csv_quotes_cells_with_commas() -> None:
    table = Table(("name", "x"), (('cn(groups=8, eps="1")', "1"),))
    assert list(csv.reader(io.StringIO(table.render("csv"))))[1] == ['cn(groups=8, eps="1")', "1"]


def test_latex_escapes_every_special_sign() -> None:
    table = Table(("h%", "v"), ((r"a&b_c#d$e{f}g~h^i\j", "1.0 ± 0.5"),))
    lines = table.render("latex").splitlines()
    assert lines[0] == r"\begin{tabular}{lr}" and lines[-1] == r"\end{tabular}"
    assert lines[2] == r"h\% & v \\"
    escaped = r"a\&b\_c\#d\$e\{f\}g\textasciitilde{}h\textasciicircum{}i\textbackslash{}j"
    assert lines[4] == escaped + r" & 1.0 $\pm$ 0.5 \\"


def test_an_unknown_format_names_the_nearest() -> None:
    with pytest.raises(
        UserError, match=r"unknown format 'latx'; choose one of: csv, latex, md, text\. Did you mean 'latex'"
    ):
        TABLE.render("latx")


NASTY = Table(
    ("name", "A_f %"), (("=cmd()|x", "-1.0"), ("[a](b)*`<i>\\", "@sum"), ("\x1b[31m\nz", "-")), ("a `b`\x07",)
)


def test_markdown_in_a_record_is_escaped() -> None:
    assert NASTY.render("md").splitlines()[2:] == [
        r"| =cmd()\|x | -1.0 |",
        r"| \[a](b)\*\`\<i>\\ | @sum |",
        r"| \\x1b\[31m\\nz | - |",
        "",
        r"- `a 'b'\x07`",
    ]


def test_spreadsheet_formulas_in_a_record_are_quoted() -> None:
    rows = list(csv.reader(io.StringIO(NASTY.render("csv"))))
    assert rows[1:] == [["'=cmd()|x", "-1.0"], ["[a](b)*`<i>\\", "'@sum"], [r"\x1b[31m\nz", "-"]]


def test_latex_in_a_record_is_escaped() -> None:
    lines = NASTY.render("latex").splitlines()
    assert lines[4] == r"=cmd()\textbar{}x & -1.0 \\"
    assert lines[5] == r"{}[a](b)*`\textless{}i\textgreater{}\textbackslash{} & @sum \\"


def test_line_breaks_in_a_record_are_escaped() -> None:
    assert NASTY.render("text").splitlines()[4].startswith(r"\x1b[31m\nz")


def test_skipped_images_are_counted_and_named() -> None:
    one, other = record(A), record(B, seed=1)
    one.skipped, other.skipped = ["a.png", "b.png", "c.png"], ["c.png", "d\n.png"]
    note = "skipped 4 unreadable image files (a.png, b.png, c.png, ...)."
    assert summary_table([one, other]).notes[-1] == note
    assert "skipped" not in "".join(summary_table([record(A)]).notes)


def test_rows_of_several_data_sets_or_scenarios_name_them() -> None:
    mixed = [
        record(A),
        record(A, norm__name="tbbn", data__name="synthetic"),
        record(A, norm__name="gn", data__online=True),
    ]
    assert labels(mixed) == [
        "ft + bn [digits, data.online=False]",
        "ft + tbbn [synthetic, data.online=False]",
        "ft + gn [digits, data.online=True]",
    ]


def test_options_implied_by_online_learning_are_not_in_the_label() -> None:
    online = [record(A, data__online=True, method__name=name) for name in ("ft", "eeil", "podnet")]
    assert labels(online) == ["ft + bn", "eeil + bn", "podnet + bn"]
    given = record(A, data__online=True, method__name="eeil", method__balanced_epochs=2)
    assert labels([*online[:2], given]) == ["ft + bn", "eeil + bn", "eeil(balanced_epochs=2) + bn"]
    both = [online[1], record(A, method__name="eeil")]
    assert labels(both) == ["eeil + bn [data.online=True]", "eeil + bn [data.online=False]"]


def test_streaming_and_saving_settings_make_no_group() -> None:
    assert labels([record(A), record(B, seed=1, data__stream="yes", save__tasks="none")]) == ["ft + bn"]


def test_the_forecast_has_a_row_per_task() -> None:
    entries = [
        TaskForecast(0, 4, 200, 0, 64, 0, 1, 4, 10),
        TaskForecast(1, 2, 100, 20, 48, 16, 2, 3, 10),
    ]
    table = forecast_table(entries)
    assert table.header == ("task", "classes", "images", "exemplars", "batch", "r*", "steps/epoch", "steps")
    assert table.rows == (
        ("1", "4", "200", "0", "64+0", "1", "4", "40"),
        ("2", "2", "100", "20", "48+16", "2", "3", "30"),
    )


def test_metrics_stand_in_the_order_asked_for() -> None:
    table = summary_table([record(A)], ("learning_accuracy", "forgetting_past", "final_accuracy"))
    assert table.header == ("method + norm", "seeds", "A_l %", "FM %", "A_f %")
    # FM is over the past tasks alone: (1 - .5) / 1, twice the F of two tasks.
    assert table.rows == (("ft + bn", "1", "95.0", "50.0", "70.0"),)
    assert table.notes[1] == "FM = (1/(T-1)) sum_{i<T} (max_{t<T} a[t,i] - a[T,i])"


def test_class_weighted_accuracy_is_shown_where_tasks_differ_in_size() -> None:
    table = summary_table([record(A, sizes=[3, 1])])
    assert table.header[-2:] == ("A_f^w %", "A_a^w %")
    assert table.rows[0][-2:] == ("60.0", "80.0")  # (3 * .5 + .9) / 4, and (1 + .6) / 2


def test_a_block_is_a_method_and_its_best_norm_is_bold() -> None:
    records = [
        record(A),
        record(B, norm__name="tbbn"),
        record(B, method__name="lucir"),
        record(B, method__name="lucir", norm__name="tbbn"),
        record(C, method__name="lucir", norm__name="gn"),
        record(A, method__name="er"),
    ]
    table = blocks_table(records, ("final_accuracy", "forgetting"))
    assert table.header == ("method", "norm", "seeds", "A_f %", "F %")
    assert table.rows == (
        ("ft", "bn", "1", "70.0", "25.0"),
        ("", "tbbn", "1", "65.0", "5.0"),
        ("lucir", "bn", "1", "65.0", "5.0"),
        ("", "tbbn", "1", "65.0", "5.0"),
        ("", "gn", "1", "15.0", "40.0"),
        ("er", "bn", "1", "70.0", "25.0"),
    )
    assert table.blocks == (0, 2, 5)
    # The lowest F is the best, equal means are best together, and a block of one row has no best.
    assert table.bold == {(0, 3), (1, 4), (2, 3), (2, 4), (3, 3), (3, 4)}


def test_blocks_with_other_settings_have_a_column_for_them() -> None:
    records = [record(A, train__epochs=3), record(B, train__epochs=4), record(C, train__epochs=4, norm__name="gn")]
    table = blocks_table(records, ("final_accuracy",))
    assert table.header == ("method", "settings", "norm", "seeds", "A_f %")
    assert [row[:3] for row in table.rows] == [
        ("ft", "train.epochs=3", "bn"),
        ("ft", "train.epochs=4", "bn"),
        ("", "", "gn"),
    ]
    assert table.bold == {(1, 4)}


def test_the_network_is_in_every_label_where_it_differs() -> None:
    # Also where another setting tells the runs apart.
    runs = [record(A), record(B, data__tasks=3, backbone="resnet20"), record(A, method__name="er")]
    assert labels(runs) == [
        "ft + bn [data.tasks=2, backbone=small]",
        "ft + bn [data.tasks=3, backbone=resnet20]",
        "er + bn [data.tasks=2, backbone=small]",
    ]
    assert labels([runs[0], runs[2]]) == ["ft + bn", "er + bn"]
    assert labels([record(A), record(A, data__name="cifar10")]) == ["ft + bn [digits]", "ft + bn [cifar10]"]


def test_protocol_and_kept_epoch_are_in_every_label_where_they_differ() -> None:
    paper = record(A, protocol="paper", method__name="er", train__keep="best", data__validation=0.1)
    runs = [record(A, protocol="clean"), paper, record(A, protocol="clean", seed=1)]
    assert labels(runs) == ["ft + bn [clean, train.keep=last]", "er + bn [paper, train.keep=best]"]
    assert [len(block) for block in blocks(groups(runs))] == [1, 1]


def test_tex_is_understood() -> None:
    assert TABLE.render("tex") == TABLE.render("latex")


def test_only_finished_repeats_can_contradict() -> None:
    assert "other results" not in summary_table([record(A, "interrupted"), record(B, "interrupted")]).notes[-1]
    assert summary_table([record(A, data__class_order_seed=5)] * 2).notes[-1].endswith("are not counted again.")


def test_seeds_are_compared_within_a_block_and_among_finished_runs() -> None:
    both = [record(A), record(B, norm__name="tbbn")]
    other = [record(A, seed=1, method__name="er"), record(B, seed=1, method__name="er", norm__name="tbbn")]
    table = blocks_table([*both, *other, record(A[:1], "interrupted", seed=7, data__tasks=2)], ("final_accuracy",))
    assert {(0, 3), (2, 3)} == table.bold and table.caption.endswith("is bold.")
    assert blocks_table([record(A), record(B, norm__name="tbbn", seed=1)], ("final_accuracy",)).bold == set()


def test_tables_of_scaled_runs_say_so() -> None:
    runs = [record(A, train__scale=0.1), record(A, seed=1, train__scale=0.25), record(A, norm__name="gn")]
    line = "SCALE 0.1 and 0.25: a fraction of the epochs."
    assert summary_table(runs).notes[0] == line and blocks_table(runs).caption.startswith(f"{line} ")
    assert page({Path("a"): runs[0]}).title == "SCALE 0.1: a fraction of the epochs. digits"
    assert "SCALE" not in summary_table(runs[2:]).render("text") + blocks_table(runs[2:]).caption


def test_runs_that_stop_early_are_marked_and_not_pooled_with_whole_ones() -> None:
    whole, again = record(A, data__tasks=10), record(B, seed=1, data__tasks=10, data__stop_after=10)
    stopped = [record(C, seed=seed, data__tasks=10, data__stop_after=3) for seed in (0, 1)]
    assert labels([whole, again]) == ["ft + bn"], "it stops where the run ends"
    alone = summary_table(stopped)
    assert [row[:2] for row in alone.rows] == [("ft + bn", "2")] and alone.notes[0] == "STOPPED: after 3 of 10 tasks."
    both = summary_table([whole, again, *stopped])
    assert [row[:2] for row in both.rows] == [("ft + bn [all tasks]", "2"), ("ft + bn [3 of 10 tasks]", "2")]
    assert both.notes[0] == "STOPPED: some runs after 3 of 10 tasks."
    assert blocks_table(stopped).caption.startswith("STOPPED: after 3 of 10 tasks. digits: mean")
    shown = page({Path("a"): stopped[0], Path("b"): whole})
    assert shown.title == "STOPPED: some runs after 3 of 10 tasks. digits"
    assert ["(3 of 10 tasks)" in row[3] for row in shown.sections[-1].all_tables[0].rows] == [True, False]
