"""The fields of a record, one by one: what is read, and what is refused with the field's name."""

from __future__ import annotations

from typing import Any

import pytest

from tbbn.bench.metrics import ERROR_TYPES
from tbbn.bench.runs.schema import FIELDS, STATUSES, migrate, problem

# A record of two tasks learnt of three.
GOOD: dict[str, Any] = {
    "schema": 2,
    "status": "interrupted",
    "message": "",
    "environment": {"torch": "2.9"},
    "data": {},
    "class_order": [0, 2, 1, 5, 4, 3],
    "task_sizes": [1, 2, 3],
    "accuracy": [[1], [0, 0.5]],
    "task_il": [[1.0], [0.0, 1]],
    "calibrated": [[], [0.0, 1]],
    "errors": [{}, dict.fromkeys(ERROR_TYPES, 0)],
    "exemplars": [0, 7],
    "splits": [1, 2**63 - 1],
    "history": [{}, {"task": 0}],
    "skipped": ["a.png"],
    "weights": ["", "f" * 64],
    "plugins": [
        {"name": "mine", "brings": []},
        {"name": "x", "brings": ["norm y"], "defaults": {"norm": {}, "method": {}}},
    ],
    "resumed": [{"torch": "2.8"}],
    "seconds": 0,
}
NOT_COUNTS: tuple[Any, ...] = (
    None,
    1,
    "12",
    {},
    [1, -1],
    [1, 1.0],
    [1, True],
    [1, False],
    [1, "1"],
    [1, None],
    [1, 2**63],
)
NOT_ACCURACIES: tuple[Any, ...] = (
    None, {}, "", [[0.5], [0.5]], [[0.5, 0.5]], [[]], [0.5], [[1.01]], [[-0.01]], [[True]], [["1"]], [[None]],
    [[0.5], 0.5], [{0: 0.5}], [[float("nan")]],
)  # fmt: skip
NOT_STRINGS: tuple[Any, ...] = (None, "ab", {}, ["a", 1], [None])
NOT_OBJECTS: tuple[Any, ...] = (None, {}, "ab", [{}, 1], ["a"], [[]])
BAD: dict[str, tuple[Any, ...]] = {
    "schema": (0, -1, True, 1.0, "1", None, 2**63, [1]),
    "status": ("", "done", None, 1, ["finished"], {}),
    "message": (None, 1, ["a"], {}),
    "environment": (None, [], "a", 1),
    "data": (None, [], "a", 1),
    "class_order": NOT_COUNTS,
    "task_sizes": (*NOT_COUNTS, [1, 0]),
    "accuracy": NOT_ACCURACIES,
    "task_il": NOT_ACCURACIES,
    "calibrated": tuple(value for value in NOT_ACCURACIES if value != [[]]),
    "errors": (
        None,
        {},
        [1],
        [{"C->X": 1}],
        [{"C->C": -1}],
        [{"C->C": 1.0}],
        [{"C->C": True}],
        [{"C->C": None}],
        [{}, []],
    ),
    "exemplars": NOT_COUNTS,
    "splits": NOT_COUNTS,
    "history": NOT_OBJECTS,
    "skipped": NOT_STRINGS,
    "weights": NOT_STRINGS,
    "plugins": (
        *NOT_OBJECTS,
        [{}],
        [{"name": "a"}],
        [{"brings": []}],
        [{"name": 1, "brings": []}],
        [{"name": "a", "brings": "x"}],
        [{"name": "a", "brings": [1]}],
        [{"name": "a", "brings": [], "defaults": []}],
        [{"name": "a", "brings": [], "defaults": {"data": {}}}],
        [{"name": "a", "brings": [], "defaults": {"norm": 1}}],
    ),
    "resumed": NOT_OBJECTS,
    "seconds": (None, "1", True, -0.5, float("inf"), float("nan"), [1]),
}


def test_every_field_is_covered_here() -> None:
    assert GOOD.keys() == BAD.keys() == FIELDS.keys()


def test_a_good_record_has_no_problem_with_all_of_its_fields_or_with_those_it_needs() -> None:
    assert problem(GOOD) == ""
    assert problem({}) == "" and problem({"task_sizes": [2]}) == ""
    for status in STATUSES:
        assert problem({**GOOD, "status": status}) == ""
    for seconds in (0.0, 1, 1e300):
        assert problem({**GOOD, "seconds": seconds}) == ""


@pytest.mark.parametrize("name", BAD)
def test_a_bad_value_of_any_field_is_named_with_what_is_expected(name: str) -> None:
    expected = FIELDS[name][0]
    for value in BAD[name]:
        assert problem({**GOOD, name: value}) == f"{name} must be {expected}, got {value!r:.60}."
    assert not expected.endswith(".") and len(expected) > 4


def test_fields_of_tasks_have_one_entry_for_each_task_learnt() -> None:
    for name in ("task_il", "calibrated", "errors", "exemplars", "splits", "weights"):
        for value in (GOOD[name][:1], []):
            said = f"{name} must have one entry for each of the 2 tasks learnt, has {len(value)}."
            assert problem({**GOOD, name: value}) == said
        missing = {key: value for key, value in GOOD.items() if key != name}
        assert problem(missing) == f"{name} must have one entry for each of the 2 tasks learnt, has 0."
    for name in ("exemplars", "splits"):
        said = f"{name} must have one entry for each of the 2 tasks learnt, has 3."
        assert problem({**GOOD, name: [1, 1, 1]}) == said
    assert problem({**GOOD, "task_sizes": [1, 2]}) == ""
    assert problem({**GOOD, "task_sizes": [1]}) == "accuracy has 2 rows but task_sizes 1 entries."
    without = {key: value for key, value in GOOD.items() if key != "task_sizes"}
    assert problem(without) == "accuracy has 2 rows but task_sizes 0 entries."


def test_a_record_of_the_first_schema_gets_empty_hashes() -> None:
    old = {"schema": 1, "accuracy": [[1], [1, 1]], "other": "kept"}
    assert migrate(old) == {**old, "schema": 4, "weights": ["", ""], "calibrated": [[], []]} and old["schema"] == 1
    assert migrate({"schema": 1}) == {"schema": 4, "weights": [], "calibrated": []}
    assert migrate({"schema": 2, "a": 1}) == {"schema": 4, "a": 1, "calibrated": []}
    assert migrate({"schema": 0}) == {"schema": 0}


def test_a_record_of_the_second_schema_has_other_names_of_forgetting() -> None:
    old = {"schema": 2, "metrics": {"forgetting_history": 0.25, "forgetting": 0.5, "final_accuracy": 0.75}}
    new = {"forgetting": 0.25, "forgetting_text": 0.5, "final_accuracy": 0.75}
    assert migrate(old) == {"schema": 4, "metrics": new, "calibrated": []} and "forgetting_history" in old["metrics"]
    assert migrate({"schema": 2, "metrics": "none"})["metrics"] == "none"  # of a damaged record
