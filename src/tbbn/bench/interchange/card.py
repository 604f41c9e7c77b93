"""The model card of an export, with everything that a user of the network needs to know."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tbbn.bench.engine.record import Record
from tbbn.bench.report.columns import SHORT, SYMBOLS, formulas

_METRICS = ("final_accuracy", "average_accuracy", "forgetting")
_LISTED = 200  # classes in the table; model.json has all


def model_card(
    record: Record,
    about: Mapping[str, Any],
    checked: Sequence[str],
    not_checked: Sequence[str],
    sums: Mapping[str, str],
) -> str:
    """The text of README.md, with the header that model hubs read."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("tbbn.bench.interchange"), autoescape=False, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters |= {"cell": _cell, "digits": _digits}
    is_whole = about["tasks"] == len(record.accuracy)  # the record's metrics are for its last task only
    shown = [key for key in _METRICS if is_whole and key in record.metrics]
    task_of = [task for task, size in enumerate(about["task_sizes"], 1) for _ in range(size)]
    return environment.get_template("card.md").render(
        record=record,
        config=record.run_config,
        about=about,
        n_classes=len(about["classes"]),
        accuracy=record.accuracy[about["tasks"] - 1],
        metrics={SHORT[key]: record.metrics[key] for key in shown},
        formulas=formulas(shown),
        symbols=SYMBOLS,
        classes=list(zip(about["classes"], task_of, strict=True))[:_LISTED],
        checked=checked,
        not_checked=not_checked,
        sums=sums,
    )


def _cell(value: object) -> str:
    """Text for a table cell, without bars and line breaks."""
    return "".join(sign if sign.isprintable() and sign != "|" else "_" for sign in str(value))


def _digits(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)
