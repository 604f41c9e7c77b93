"""The kinds of figures for ``tbbn report --plot`` and ``Results.plot``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tbbn.bench.engine.record import Record
from tbbn.bench.report.curves import accuracy_panels, forgetting_panels, gain_panels
from tbbn.bench.report.errors import errors_panels
from tbbn.bench.report.figures import Panel, figure_of
from tbbn.bench.report.groups import Group, groups, stamp
from tbbn.bench.report.matrices import matrix_panels
from tbbn.errors import unknown_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS: dict[str, Callable[[Sequence[Group]], list[Panel]]] = {
    "accuracy": accuracy_panels,
    "forgetting": forgetting_panels,
    "gain": gain_panels,
    "matrix": matrix_panels,
    "errors": errors_panels,
}


def figure(records: Sequence[Record], kind: str = "accuracy") -> Figure:
    """A figure of these runs: accuracy or forgetting after each task, gain over batch norm, accuracy matrices, error types."""
    if kind not in KINDS:
        raise unknown_name("kind of figure", kind, KINDS)
    found = groups(records)
    return figure_of(KINDS[kind](found), stamp(group.config for group in found).strip())
