"""A report on many runs as one self-contained HTML page, without network access or scripts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import tbbn
from tbbn.bench.files import write_atomic
from tbbn.bench.report.columns import METRIC, default_metrics
from tbbn.bench.report.cost import cost_table, duration
from tbbn.bench.report.curves import accuracy_panels, forgetting_panels, gain_panels
from tbbn.bench.report.errors import errors_panels, errors_table
from tbbn.bench.report.export import Runs
from tbbn.bench.report.figures import Panel, figure_of, save_as_files
from tbbn.bench.report.groups import groups, stamp
from tbbn.bench.report.matrices import matrix_panels
from tbbn.bench.report.pairs import pairs, pairs_table
from tbbn.bench.report.settings import common_table, differences_table, environment_table
from tbbn.bench.report.svg import inline_svg
from tbbn.bench.report.table import Table
from tbbn.bench.report.tables import blocks_table
from tbbn.errors import UserError, printable

_MEASURED = ("gain", "errors", "drift", "cost")


@dataclass(frozen=True)
class Section:
    """A part of the page: a line of text, tables, and figures of one or more panels."""

    name: str  # of its files and links
    title: str
    line: str = ""
    tables: tuple[Table, ...] = ()
    panels: tuple[Panel, ...] = ()
    folded: tuple[Table, ...] = ()  # tables that are collapsed at first
    asked: bool = False  # shown even if it has only its line

    @property
    def all_tables(self) -> list[Table]:
        return [table for table in (*self.tables, *self.folded) if table.rows]


@dataclass(frozen=True)
class Page:
    title: str
    runs: int
    sections: list[Section]
    stamp: str = ""  # for runs that trained only part of their epochs or tasks


def page(
    runs: Runs, metrics: Sequence[str] = (), after_results: Sequence[Section] = (), before_cost: Sequence[Section] = ()
) -> Page:
    """The page for these runs, without empty sections. The caller's sections go after the results and before the cost."""
    records = list(runs.values())
    metrics = metrics or default_metrics(records)
    found = groups(records)
    paired = pairs(found)
    deviation = "A band shows ± one standard deviation over seeds."
    made = [
        Section("results", "Results", "", (blocks_table(records, metrics),)),
        *after_results,
        Section(
            "accuracy", "Accuracy after each task",
            f"Mean accuracy over the tasks seen so far. Colour shows method and settings, line and marker the norm. {deviation}",
            panels=tuple(accuracy_panels(found)),
        ),
        Section(
            "gain", "Differences on the same seeds",
            "Gain of one norm over another in mean accuracy after each task. A band shows the 95 % interval.",
            (pairs_table(paired, metrics),), tuple(gain_panels(found)),
        ),
        Section(
            "forgetting", "Forgetting", f"F of the tasks learnt so far. {deviation}",
            panels=tuple(forgetting_panels(found)),
        ),
        Section(
            "matrix", "Accuracy matrices", "Accuracy on each task after each task, mean over seeds.",
            panels=tuple(matrix_panels(found)),
        ),
        Section(
            "errors", "Error types", "In the figure a line shows ± one standard deviation of all errors over seeds.",
            (errors_table(found),), tuple(errors_panels(found)),
        ),
        *before_cost,
        Section("cost", "Cost", "", (cost_table(found),)),
        Section("settings", "Settings", "", (differences_table(found),), folded=(common_table(found),)),
        Section("environment", "Environment", "", (environment_table(records),)),
        Section("runs", "Runs", "", (_runs_table(runs),)),
    ]  # fmt: skip
    mark = stamp(group.config for group in found)
    title = mark + ", ".join(dict.fromkeys(g.config.data.name for g in found))
    shown = [_stamped(section, mark) for section in made if section.asked or section.panels or section.all_tables]
    return Page(printable(title), len(runs), shown, mark.strip())


def _stamped(section: Section, mark: str) -> Section:
    """The section with the stamp before the captions of measured tables; the results tables already have it."""
    if section.name not in _MEASURED:
        return section
    return replace(section, tables=tuple(replace(table, caption=mark + table.caption) for table in section.tables))


def _runs_table(runs: Runs) -> Table:
    rows = []
    for folder, record in runs.items():
        config = record.run_config
        ended = f"{record.status}: {record.message}" if record.message else record.status
        ended += f" ({config.data.part})" if config.data.part else ""
        rows.append((str(folder), config.label, str(config.seed), ended, duration(record.seconds)))
    return Table(("folder", "method + norm", "seed", "status", "time"), tuple(rows), align="llrlr", caption="All runs.")


def html(shown: Page) -> str:
    """The page as HTML. Everything from a record is escaped."""
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError:
        raise UserError("tbbn report --html needs jinja2; pip install 'tbbn[bench]'.") from None
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("tbbn.bench.report"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["metric"] = _metric
    pictures = {
        section.name: [Markup(inline_svg(panel, f"{section.name}{i}")) for i, panel in enumerate(section.panels)]
        for section in shown.sections
    }
    return environment.get_template("page.html").render(page=shown, pictures=pictures, version=tbbn.__version__)


def _metric(title: str) -> str:
    """The title of a column; a metric at its beginning gets its index as a subscript."""
    from markupsafe import Markup, escape

    match = METRIC.match(title)
    if match is None:
        return escape(title)
    letter, below, above = match.groups()
    signs = [Markup("<sub>{}</sub>").format(below)] if below else []
    signs += [Markup("<sup>{}</sup>").format(above)] if above else []
    return Markup("").join([letter, *signs, title[match.end() :]])


def write_files(shown: Page, folder: Path) -> list[Path]:
    """Write every figure as SVG and PNG, and every table as LaTeX and CSV."""
    written = []
    for section in shown.sections:
        if section.panels:
            written += save_as_files(figure_of(section.panels, shown.stamp), folder, section.name)
        for i, table in enumerate(section.all_tables):
            name = f"{section.name}-{i + 1}" if i else section.name
            for suffix in ("tex", "csv"):
                folder.mkdir(parents=True, exist_ok=True)
                stamped = suffix == "csv" and shown.stamp and table.caption.startswith(shown.stamp)
                own = table.with_column(shown.stamp.strip()) if stamped else table
                write_atomic(folder / f"{name}.{suffix}", (own.render(suffix) + "\n").encode())
                written.append(folder / f"{name}.{suffix}")
    return written
