"""The paper's numbers as data, and our runs beside them."""

from __future__ import annotations

import re
from dataclasses import replace
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

from tbbn.bench.config import resolve
from tbbn.bench.engine.record import Record, new_record
from tbbn.bench.report.tables import summary_table
from tbbn.bench.runs.recipe import parse_choice
from tbbn.errors import UserError
from tbbn.paper import recipes
from tbbn.paper.published import METRICS, beside, compare, find_tables, header, members, paper_tables

PAPER = Path(__file__).parents[3] / "shared" / "paper" / "paper.tex"
TABLE1 = find_tables("table1", "cifar100")[0]


def run_of(norm: str, seed: int, value: float, **settings: Any) -> Record:
    """A finished run of Table 1 with this accuracy."""
    layers, _ = TABLE1.layers()
    choice = parse_choice("method", "ft") | parse_choice("norm", norm) | {"seed": seed, **settings}
    record = new_record(resolve(*layers, ("test", choice)))
    record.status = "finished"
    record.accuracy, record.task_il, record.task_sizes = [[value]], [[value]], [100]
    return record


def notes(records: list[Record], **options: Any) -> list[str]:
    return [note for note in compare(TABLE1, records, **options).notes if "other settings" in note]


def test_finished_runs_with_other_settings_are_named_beside_rows_without_runs() -> None:
    part = [run_of(norm, seed, 0.5, **{"train.scale": 0.1}) for norm in ("bn", "tbbn") for seed in (0, 1)]
    said = compare(TABLE1, part).notes
    assert "No finished run of this table was found." in said
    assert said[-1] == "Finished runs with other settings, not shown: 4 with train.scale = 0.1."
    assert notes(part, settings={"train.scale": 0.1}) == [], "asked for"
    assert notes(part, missing=False) == [], "on a page of many runs"
    whole, last = run_of("bn", 0, 0.5), run_of("bn", 0, 0.5, **{"train.keep": "last", "train.scale": 0.1})
    assert notes([whole, *part, last]) == ["Finished runs with other settings, not shown: 2 with train.scale = 0.1."], (
        "batch norm has a run"
    )
    assert notes([whole, *part], rows=[("ft", "bn")]) == []
    small = {"data.name": "digits", "data.tasks": 2, "backbone": "small"}
    far = {"train.keep": "last", "train.scale": 0.1, "backbone": "resnet20", "train.epochs": 7}
    assert notes([*part, run_of("gn", 0, 0.5, **small), run_of("tbbn", 3, 0.5, **far)]) == [
        "Finished runs with other settings, not shown: 4 with train.scale = 0.1; 1 with data.name = digits; "
        "1 with backbone = resnet20, train.epochs = 7, train.keep = last and more."
    ]
    assert notes([replace(record, status="failed") for record in part]) == []


def cells(records: list[Record], label: str, **settings: Any) -> tuple[str, ...]:
    return next(row[1:5] for row in compare(TABLE1, records, settings).rows if row[0] == label)


def printed() -> list[list[tuple[str, list[float]]]]:
    """Of every table in the paper's source: its rows, each with the norm or case that it is about and its numbers."""
    tables = re.findall(r"\\begin\{table\}.*?\\end\{table\}", PAPER.read_text(), re.DOTALL)
    found = []
    for table in tables:
        rows = []
        for line in table.split("\\\\"):
            line = re.sub(r"\{([\d.]+)\}", r"\1", re.sub(r"\\textbf\{\s*([^}]*)\}", r"\1", line).replace(r"\csm", ""))
            names = r"\+?(TBBN|BN|IN|GN|SN|BRN|CN\$\^\{\*\}\$|CN ?\(\$G=\d+\$\)|CN|Case \d|FT \+ BalAug)\s*&(.*)"
            if match := re.search(names, line, re.DOTALL):
                numbers = [float(number) for number in re.findall(r"(?<![\w=.])\d+\.\d+(?!\w)", match[2])]
                rows.append((match[1], numbers))
        found.append(rows)
    return found


@pytest.mark.skipif(not PAPER.exists(), reason="the paper's source is not here")
def test_every_row_has_the_papers_numbers_in_the_papers_order() -> None:
    tables = printed()
    # Which table of the source, and which of its numbers, a table of ours is.
    places = {("table1", "cifar100"): (0, slice(0, 4)), ("table1", "imagenet100"): (0, slice(4, 8))}
    places |= {("table2", "cifar100"): (1, slice(0, 4)), ("table2", "imagenet100"): (1, slice(4, 8))}
    places |= {("table4", "dissimilar"): (3, slice(0, 4)), ("ablation", "cifar100"): (4, slice(0, 2))}
    places |= {("base-task", "cifar100"): (6, slice(0, 4)), ("online", "cifar100"): (len(tables) - 1, slice(0, 2))}
    places |= {("twenty-tasks", "cifar100"): (7, slice(0, 1)), ("twenty-tasks", "imagenet100"): (7, slice(1, 2))}
    (balaug,) = (numbers for rows in tables for name, numbers in rows if name == "FT + BalAug")
    seen = 0
    for table in paper_tables():
        ours = [list(row) for row in table.rows.values()]
        if table.name == "balaug":
            wanted = [balaug]
        elif table.name == "table3":
            wanted = [numbers[2 * seen : 2 * seen + 2] for _, numbers in tables[2]]
            seen += 1
        else:
            number, part = places[table.name, table.data]
            wanted = [numbers[part] for _, numbers in tables[number]]
        assert ours == wanted, table.title
    names = [name for name, _ in tables[0]]
    assert names[0] == "BN" and names[-1] == "TBBN", "so rows are what they are called"


def test_what_the_notes_say_of_single_runs_holds_for_the_printed_numbers() -> None:
    """On ImageNet-100 the accuracy of one run is a multiple of 1/5000, 0.02 points; a mean of three rarely is."""
    whole: dict[str, dict[str, list[bool]]] = {}
    for table in paper_tables():
        if any("multiple" in note for note in table.notes):
            for (method, norm), values in table.rows.items():
                row = f"{table.name}-{method}" if table.name != "table1" else norm.partition("(")[0]
                for column, value in zip(table.columns, values, strict=True):
                    step = 5 if method in ("podnet", "afc") else 2  # hundredths
                    is_whole = round(100 * value) % step == 0
                    whole.setdefault(row, {}).setdefault(column, []).append(is_whole)
    for row in ("bn", "cn", "tbbn", "table2-ft", "table2-eeil", "table2-lucir", "table2-ssil"):
        assert all(all(whole[row][column]) for column in ("A_f", "F", "A_l")), row
    for row in ("in", "gn", "sn", "brn"):
        assert not all(all(whole[row][column]) for column in ("A_f", "F", "A_l")), row
    for row in ("table3-ft", "table3-ssil", "table2-podnet", "table2-afc"):
        assert all(whole[row]["A_f"]), row


def test_the_papers_cost_stands_under_its_ablation_with_ratios() -> None:
    notes = [note for note in compare(find_tables("ablation")[0], []).notes if note.startswith("Cost")]
    assert notes == [
        "Cost in the paper (TITAN XP), tbbn: 2525 MiB (1.6x), training 6.0 h (1.3x), 0.6 s per test batch.",
        "Cost in the paper (TITAN XP), bn: 1545 MiB, training 4.6 h, 0.6 s per test batch.",
    ]
    assert not any(note.startswith("Cost") for note in compare(TABLE1, []).notes)


def test_every_table_has_a_recipe_and_as_many_numbers_as_columns() -> None:
    for table in paper_tables():
        assert table.recipe in recipes() and set(table.columns) <= set(METRICS)
        assert all(len(row) == len(table.columns) for row in table.rows.values())
        _, axes = table.layers()
        unknown = [norm for _, norm in table.rows if norm not in axes.norms]
        assert not unknown and {method for method, _ in table.rows} <= set(axes.methods or ("ft",))


def test_numbers_that_contradict_each_other_are_found() -> None:
    found = [note.partition(":")[0] for table in find_tables("table2", "cifar100") for note in table.impossible()]
    assert found == ["ft + cn", "eeil + tbbn", "ssil + tbbn"]  # protocol.md, section 7


def test_ours_stand_beside_the_papers_with_their_spread_and_difference() -> None:
    values = (0.35, 0.36, 0.37)
    records = [run_of("bn", seed, value) for seed, value in enumerate(values)]
    n, paper, ours, difference = cells(records, "ft + bn")
    assert (n, paper, ours) == ("3", "35.41", "36.0 ± 1.0")
    error = 100 * stdev(values) / sqrt(3)
    assert abs(100 * fmean(values) - 35.41) < 2 * error and difference == "+0.6 ="
    assert cells([run_of("bn", s, v + 0.03) for s, v in enumerate(values)], "ft + bn")[3] == "+3.6"
    assert cells(records[:1], "ft + bn")[2:] == ("35.0", "-0.4")  # one seed has no standard error
    assert cells(records[:2], "ft + bn")[2:] == ("35.5 ± 0.7", "+0.1")  # and that of two says next to nothing
    assert cells(records, "ft + tbbn") == ("0", "38.46", "-", "-")
    assert cells([run_of("weighted", 0, 0.4)], "ft + weighted (ours)") == ("1", "-", "40.0", "-")


def test_a_mean_at_a_tie_is_rounded_as_in_every_other_table() -> None:
    """The mean is 35.65 %: 100 times the mean rounds up, the mean of 100 times each value rounds down."""
    values = (0.3137, 0.3582, 0.3976)
    assert f"{100 * fmean(values):.1f}" != f"{fmean(100 * value for value in values):.1f}"
    records = [run_of("bn", seed, value) for seed, value in enumerate(values)]
    (row,) = summary_table(records, ("final_accuracy",)).rows
    assert cells(records, "ft + bn")[2] == row[2]


def test_f_by_the_formula_of_the_text_stands_beside_f() -> None:
    records = [run_of("bn", seed, 0.3) for seed in (0, 1)]
    for record, first in zip(records, (0.9, 0.7), strict=True):
        record.task_sizes = [50, 25, 25]
        record.accuracy = record.task_il = [[first], [0.95, 0.8], [0.3, 0.5, 0.6]]
    table = compare(TABLE1, records, rows=[("ft", "bn"), ("ft", "gn")])
    at = table.header.index("F_text ours")
    assert table.header[at - 3 : at + 2] == ("F paper", "ours", "diff.", "F_text ours", "A_l paper")
    # F: ((.95 - .3) + (.8 - .5)) / 3 for both. F_text: (max(.9 - .95, .9 - .3) + .3) / 3 = .3, and (.4 + .3) / 3.
    assert table.rows[0][at - 2 : at + 1 : 2] == ("31.7 ± 0.0", "26.7 ± 4.7") and table.rows[1][at] == "-"
    formulas = [note for note in table.notes if note.startswith("F")]
    assert formulas == [
        "F = (1/T) sum_{i<T} (max_{t<T} a[t,i] - a[T,i])",
        "F_text = (1/T) sum_{i<T} max_{t>i} (a[i,i] - a[t,i])",
        "F is by the formula of the released code, F_text by that of the text; the paper prints one F.",
    ]
    assert len(set(header(TABLE1.columns, unique=True))) == len(table.header) == 15
    online = find_tables("online")[0]
    assert "F" not in online.columns and "F_text ours" not in header(online.columns)


def test_methods_are_blocks_and_the_best_of_ours_in_each_is_bold() -> None:
    table2 = find_tables("table2", "cifar100")[0]

    def of(method: str, norm: str, value: float, seed: int = 0) -> Record:
        layers, _ = table2.layers()
        choice = parse_choice("method", method) | parse_choice("norm", norm) | {"seed": seed}
        record = new_record(resolve(*layers, ("test", choice)))
        record.status, record.task_sizes = "finished", [50, 50]
        record.accuracy = record.task_il = [[0.9], [value, value]]
        return record

    records = [of("eeil", "bn", 0.3), of("eeil", "tbbn", 0.4), of("lucir", "bn", 0.5), of("lucir", "tbbn", 0.2, seed=1)]
    table = compare(table2, records)
    assert [table.rows[i][0] for i in table.blocks] == [
        f"{m} + bn" for m in ("ft", "eeil", "lucir", "podnet", "ssil", "afc")
    ]
    bold = {(table.rows[i][0], table.header[j - 1]) for i, j in table.bold}
    # Forgetting is 0.6 / 2 and 0.5 / 2. Lucir's two runs have other seeds: none of them is the best.
    assert bold == {("eeil + tbbn", title) for title in ("A_f paper", "A_a paper", "F paper", "diff.", "A_l paper")}
    assert {table.header[j] for _, j in table.bold} == {"ours", "F_text ours"}


def test_a_note_about_a_row_stands_under_a_table_that_shows_it() -> None:
    table2 = find_tables("table2", "cifar100")[0]
    for rows, shown in (([("eeil", "cn")], True), ([("eeil", "bn")], False)):
        assert any(note.startswith("eeil + cn: ") for note in compare(table2, [], rows=rows).notes) == shown


def test_only_runs_of_the_table_count_and_each_once() -> None:
    one = run_of("bn", 0, 0.3)
    other = [run_of("bn", 1, 0.9, **{"train.keep": "last"}), run_of("bn", 2, 0.9, **{"data.tasks": 20})]
    unfinished = run_of("bn", 3, 0.9)
    unfinished.status = "interrupted"
    assert cells([one, one, *other, unfinished], "ft + bn")[:3] == ("1", "35.41", "30.0")
    assert compare(TABLE1, [one, unfinished]).notes[-1] == "Unfinished runs of this table, not counted: 1."
    shorter = replace(run_of("bn", 3, 0.9, **{"train.scale": 0.1}), status="interrupted")
    assert "not counted" not in compare(TABLE1, [one, shorter]).notes[-1]
    assert "not counted: 1." in compare(TABLE1, [shorter], {"train.scale": 0.1}).notes[-1]
    assert unfinished.status == "interrupted" and "finished" not in compare(TABLE1, [one]).notes[-1]
    assert cells([one, *other], "ft + bn", **{"train.keep": "last"})[:3] == ("1", "35.41", "90.0")


def test_runs_with_other_settings_have_rows_of_their_own() -> None:
    one, slow = run_of("in", 0, 0.3), run_of("in", 1, 0.9, **{"train.lr": 0.01})
    short = run_of("in", 0, 0.8, **{"data.stop_after": 2, "memory.budget": 500})
    found = compare(TABLE1, [slow, short, one])
    rows = {row[0]: row[1:4] for row in found.rows if row[0].startswith("ft + in")}
    assert rows == {
        "ft + in": ("1", "31.72", "30.0"),
        "ft + in [train.lr=0.01]": ("1", "31.72", "90.0"),
        "ft + in [data.stop_after=2, memory.budget=500]": ("1", "31.72", "80.0"),
    }
    assert next(iter(rows)) == "ft + in", "the recipe's own settings come first"
    assert not any(note.startswith("Not as in the recipe") for note in found.notes)
    assert [row[1] for row in compare(TABLE1, [one, slow], {"train.lr": 0.01}).rows if "ft + in" in row[0]] == ["1"]


def test_a_setting_that_was_asked_for_excludes_other_runs() -> None:
    one = run_of("in", 0, 0.3)
    assert cells([one], "ft + in", **{"memory.budget": 500})[0] == "0"
    assert cells([one], "ft + in", **{"memory.budget": 2000})[0] == "1"


def test_of_equal_runs_the_first_counts_and_a_contradiction_is_named() -> None:
    one, other = run_of("in", 0, 0.3, device="cpu"), run_of("in", 0, 0.4, threads=2)
    assert cells([one, other], "ft + in")[2] == "30.0"
    assert compare(TABLE1, [one, other]).notes[-1] == (
        "1 of the 2 runs repeat the config and seed of another and are not counted again. "
        "1 of them have different results: the first of each is shown."
    )
    assert compare(TABLE1, [one, one]).notes[-1].endswith("not counted again.")


def test_only_the_rows_that_were_asked_for_are_shown() -> None:
    table = compare(TABLE1, [run_of("in", 0, 0.3)], rows=[("ft", "gn"), ("ft", "in")])
    assert [row[:2] for row in table.rows] == [("ft + gn", "0"), ("ft + in", "1")]


def test_only_tables_and_rows_of_which_there_are_runs_stand_beside_them() -> None:
    assert beside([]) == [] and beside([run_of("bn", 0, 0.3, **{"data.tasks": 25})]) == []
    assert beside([run_of("weighted", 0, 0.3)]) == [], "the paper has no such row"
    tables = beside([run_of("cn", 0, 0.3), run_of("bn", 0, 0.3)])
    assert [table.caption[:8] for table in tables] == ["Table 1:", "Table 2:", "Ablation"]
    assert [[row[0] for row in table.rows] for table in tables] == [["ft + bn", "ft + cn"]] * 2 + [["ft + bn"]]
    (impossible,) = (note for note in tables[1].notes if "is impossible" in note)  # eeil and ssil are not shown
    assert impossible.startswith("ft + cn: ")


def test_runs_that_keep_another_epoch_stand_beside_the_paper_if_no_others_are_there() -> None:
    own, last = run_of("bn", 0, 0.3), [run_of(norm, 0, 0.4, **{"train.keep": "last"}) for norm in ("bn", "tbbn")]
    table = beside(last)[0]
    assert [row[:4] for row in table.rows] == [("ft + bn", "1", "35.41", "40.0"), ("ft + tbbn", "1", "38.46", "40.0")]
    assert table.notes[-1].endswith("the recipe: train.keep = last.")
    table = beside([*last, own])[0]
    assert [row[:4] for row in table.rows] == [("ft + bn", "1", "35.41", "30.0")], "as before"
    assert not any("train.keep" in note for note in table.notes)


def test_settings_that_are_not_the_recipes_are_named() -> None:
    notes = compare(TABLE1, [run_of("bn", 0, 0.3, precision="bf16", device="cpu")]).notes
    assert notes[-1] == "Different from the recipe: precision = bf16."
    assert compare(TABLE1, []).notes[-1] == "No finished run of this table was found."


def test_a_table_is_found_by_name_and_data() -> None:
    assert [table.data for table in find_tables("table2")] == ["cifar100"]
    assert len(find_tables("table3")) == 4
    with pytest.raises(UserError, match="unknown table 'table5'"):
        find_tables("table5")
    with pytest.raises(UserError, match="table4: the paper reports it for dissimilar, not for 'cifar100'"):
        find_tables("table4", "cifar100")
    assert replace(TABLE1, name="x").recipe == "x-cifar100"


def test_rows_of_ours_alone_are_no_table() -> None:
    assert beside([run_of("weighted", 0, 0.3), run_of("weighted", 0, 0.3, **{"train.lr": 0.01})]) == []


def test_impossible_numbers_of_rows_without_a_run_are_named() -> None:
    assert [n[:9] for n in compare(find_tables("table2", "cifar100")[0], []).notes if "is impossible" in n][
        1
    ] == "eeil + tb"


def test_departures_are_sorted() -> None:
    given = {"train.lr": 0.01, "precision": "bf16", "memory.budget": 500, "data.stop_after": 2, "autotune": True}
    assert compare(TABLE1, [run_of("bn", 0, 0.3, **given)]).notes[-1] == (
        "Different from the recipe: autotune = True; data.stop_after = 2; memory.budget = 500; precision = bf16; train.lr = 0.01."
    )


def test_an_unfinished_run_alone_is_no_row() -> None:
    unfinished = run_of("bn", 0, 0.3)
    unfinished.status = "interrupted"
    assert "No finished run of this table was found." in compare(TABLE1, [unfinished]).notes


def test_the_papers_rows_come_first() -> None:
    table = find_tables("ablation")[0]
    assert [row[0] for row in compare(table, []).rows][:2] == ["ft + tbbn", "ft + tbbn(case=1)"]


def test_two_standard_errors_are_not_two_deviations() -> None:
    values = (0.36, 0.37, 0.38)  # 1.6 above the paper's: less than two deviations, more than two errors
    assert cells([run_of("bn", seed, value) for seed, value in enumerate(values)], "ft + bn")[3] == "+1.6"


@pytest.mark.parametrize(
    "settings",
    [
        {"train.epochs": 2},
        {"data.base_classes": 50},
        {"protocol": "clean", "train.keep": "best"},
        {"backbone": "small"},
    ],
)
def test_another_experiment_is_no_row_of_the_table(settings: dict[str, Any]) -> None:
    rows = compare(TABLE1, [run_of("in", 0, 0.3, **settings)]).rows
    assert [row[1] for row in rows if row[0].startswith("ft + in")] == ["0"]


def test_no_rows_are_no_rows() -> None:
    assert compare(TABLE1, [run_of("bn", 0, 0.3)], rows=[]).rows == ()


def test_a_plugin_makes_a_row_of_its_own() -> None:
    rows = compare(TABLE1, [run_of("in", 0, 0.3), run_of("in", 1, 0.3, plugins=["json"])]).rows
    assert [row[:2] for row in rows if "ft + in" in row[0]] == [("ft + in", "1"), ("ft + in [plugins=['json']]", "1")]


def test_a_seed_that_was_asked_for_excludes_others() -> None:
    runs = [run_of("in", 0, 0.3), run_of("in", 1, 0.3), run_of("in", 0, 0.3, **{"data.class_order_seed": 5})]
    assert cells(runs, "ft + in")[0] == "3"
    assert [list(group.runs) for group in members(TABLE1, runs, {"seed": 1})["ft", "in"]] == [[(1, -1)]]
    assert cells(runs, "ft + in", seed=1)[0] == "1" == cells(runs, "ft + in", **{"data.class_order_seed": 5})[0]
