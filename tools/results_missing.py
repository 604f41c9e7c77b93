"""The section of ``docs/results.md`` on what is missing: which rows of the paper have runs, and which runs are to be repeated."""

from __future__ import annotations

from typing import Any

import results_numbers as numbers
from tbbn.bench.report.tables import Table
from tbbn.paper.published import members, paper_tables

SEEDS = 3  # as in the paper


def section(records: list[Any]) -> str:
    """``records``: all runs."""
    gaps = numbers.missing()
    return f"""## Missing

The rows of each table of the paper, by the number of our runs. A row counts under its recipe's settings; in the online table, with the reduced
network.

{coverage(records).render("md")}

- **Table 2 on CIFAR-100** {f"lacks {gaps}" if gaps else "is complete"}.
- **To be repeated**, because they are not whole records: {to_repeat()}.
- **Not in the paper, and not run**: Tables 1 and 2 with the last epoch kept (of these only `ft` with batch norm and TBBN is here); other forms
  of the layer (`rule`, `memory=own`, `total_variance`, `weighted`) with the last epoch kept; methods that correct the bias (`bic`, `wa`, `il2m`) with the last epoch kept; Tiny-ImageNet; TBBN and more seeds of PODNet with the
  nearest mean, and of SS-IL with the quirk; AFC with 20 exemplars per class; CN with 8 groups in PODNet and AFC.
- **Recorded in {calibrated(records)} only**: the [calibrated accuracy](report.md), which would show what is left of a gain without the bias to the
  newest task.

Each row takes one command (`tbbn reproduce table2`, ...) and a GPU: [how long](scale.md#the-whole-paper). The runs that are not in the paper have
[their commands](start-paper.md), too.
"""


def calibrated(records: list[Any]) -> str:
    """The runs that have the calibrated accuracy, by their norms."""
    norms = [record.run_config.names[1] for record in records if numbers.all_calibrated([record])]
    return f"{len(norms)} newer runs ({', '.join(f'{norms.count(norm)} of {norm}' for norm in dict.fromkeys(norms))})"


def coverage(records: list[Any]) -> Table:
    """Of each table of the paper: its rows with three seeds or more, with fewer, and without a run."""
    rows = []
    for table in paper_tables():
        online = {"backbone": "resnet18-reduced"} if table.name == "online" else None
        found = members(table, records, online, rows=list(table.rows))
        seeds = [max((len(group.finished) for group in found.get(key, [])), default=0) for key in table.rows]
        counts = (sum(n >= SEEDS for n in seeds), sum(0 < n < SEEDS for n in seeds), seeds.count(0))
        rows.append((table.title.partition(":")[0], table.name, table.data, table.backbone or "", *map(str, counts)))
    header = ("in the paper", "tbbn reproduce", "data", "network", "rows with 3 seeds or more", "with fewer", "without")
    return Table(header, tuple(rows), align="llllrrr")


def to_repeat() -> str:
    """Runs of which only accuracies were kept, and runs without predictions."""
    table2 = numbers.ROOT / numbers.EXPERIMENTS["table2"][1]
    silent = [
        run.parent for run in table2.glob("*/record.json") if not (run.parent / "predictions.safetensors").exists()
    ]
    names = ", ".join(f"`{folder.name}`" for folder in sorted(silent))
    return (
        f"{len(numbers.without_record())} runs of `ft` with batch norm and TBBN, of which only accuracies were kept, and\n"
        f"  {len(silent)} runs of Table 2 without predictions ({names})"
    )
