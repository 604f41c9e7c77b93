"""``tbbn report``: many runs as a table, a figure or a page."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tbbn.bench.cli.common import Command, run_folders
from tbbn.errors import UserError, printable, unknown_name

if TYPE_CHECKING:
    from tbbn.bench.report.page import Runs, Section

FORMATS = ("text", "md", "csv", "latex", "json")

_MANY = 10  # more pictures than this take several seconds


def add(command: Command) -> None:
    line = "Summarise runs: a table of mean ± std over seeds, figures, or an HTML page with everything."
    made = command("report", _report, line, "tbbn report runs/demo --html demo.html")
    made.add_argument("runs", nargs="+", metavar="RUN", help="folders of runs or sweeps")
    made.add_argument("--metrics", metavar="NAMES", help="metrics to show, in this order, such as A_f,A_a,FM")
    made.add_argument(
        "--format",
        default="text",
        help="text, md or latex: a row for each group of seeds; csv or json: every run in full",
    )
    made.add_argument("--json", action="store_true", help="the same as --format json")
    made.add_argument("--plot", metavar="FILE.png", help="also draw a figure; .svg, .pdf and others work too")
    made.add_argument("--kind", default="accuracy", help="figure to draw: accuracy, forgetting, gain, matrix or errors")
    made.add_argument("--html", metavar="FILE.html", help="also write a page with all tables and figures")
    made.add_argument(
        "--drift",
        type=int,
        metavar="N",
        help="with --html or --files: measure the drift of statistics on N images per task; needs the data",
    )
    made.add_argument(
        "--files", metavar="FOLDER", help="also write every figure as SVG and PNG, every table as LaTeX and CSV"
    )


def _report(args: argparse.Namespace) -> int:
    from tbbn.bench.report.columns import parse_metrics
    from tbbn.bench.report.export import runs_csv, runs_json
    from tbbn.bench.report.tables import blocks_table, summary_table
    from tbbn.bench.runs.record import load_record

    if args.json and args.format not in ("text", "json"):
        raise UserError(f"--json and --format {args.format} are two formats; leave one of them out.")
    form = "json" if args.json else "latex" if args.format == "tex" else args.format
    if form not in FORMATS:
        raise unknown_name("format", form, FORMATS)
    metrics = parse_metrics(args.metrics) if args.metrics is not None else ()
    _check_files(args)
    runs = {folder: load_record(folder) for folder in run_folders(args.runs)}
    records = list(runs.values())
    if form in ("csv", "json"):
        text = (runs_csv if form == "csv" else runs_json)(runs, metrics)
    else:
        text = (blocks_table if form == "latex" else summary_table)(records, metrics).render(form)
    # Write files before printing, so that a command that fails to write a file prints no results.
    written = _write(args, runs, metrics)
    print(text)
    for line in written:
        print(printable(line), file=sys.stderr)
    return 0


def _check_files(args: argparse.Namespace) -> None:
    """Raise for files that cannot be made, before the work for others."""
    if args.drift is not None and not (args.html or args.files):
        raise UserError("--drift adds a section to a page; name the page: --html FILE, or --files FOLDER.")
    if args.drift is not None and args.drift < 1:
        raise UserError(f"--drift takes a number of images, at least 1, got {args.drift}.")
    if args.html and Path(args.html).suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--html takes a file that ends in .html, got {args.html!r:.200}.")


def _write(args: argparse.Namespace, runs: Runs, metrics: Sequence[str]) -> list[str]:
    """Write the requested figure, page and files; return a line about each."""
    lines = []
    if args.plot:
        from tbbn.bench.report.figures import save_figure
        from tbbn.bench.report.plots import figure

        lines.append(f"figure: {save_figure(figure(list(runs.values()), args.kind), args.plot)}")
    if args.html or args.files:
        from tbbn.bench.analysis.sections import drift_section, shares_section
        from tbbn.bench.report.page import html, page, write_files

        analyses = [shares_section(list(runs.values()))]
        if args.drift is not None:
            analyses.append(drift_section(runs, args.drift))
        shown = page(runs, metrics, [_paper(runs)], analyses)
        if (pictures := sum(len(section.panels) for section in shown.sections)) > _MANY:
            print(f"drawing {pictures} figures (takes a few seconds)", file=sys.stderr)
        if args.html:
            from tbbn.bench.files import write_atomic

            path = Path(args.html)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, html(shown).encode())
            lines.append(f"page: {path}")
        if args.files:
            lines.append(f"{len(write_files(shown, Path(args.files)))} figures and tables: {args.files}")
    return lines


def _paper(runs: Runs) -> Section:
    """The paper's tables with at least one row that these runs reproduce."""
    from tbbn.bench.report.page import Section
    from tbbn.paper.published import beside

    line = "Rows of the paper that these runs reproduce: the paper's numbers, ours, and the difference."
    return Section("paper", "Comparison with the paper", line, tuple(beside(list(runs.values()))))
