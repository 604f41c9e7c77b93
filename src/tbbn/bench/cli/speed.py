"""``tbbn speed``: measure how fast this machine trains."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from tbbn.bench.cli.common import Command
from tbbn.errors import UserError, unknown_name
from tbbn.registry import BACKBONES, NORMS, Registry

FIRST, THEN = 2.0, 10.0  # seconds until progress within a row is first shown, and between later updates
PRECISIONS = ("fp32", "tf32", "bf16")


def add(command: Command) -> None:
    line = "Time norm layers, training steps and parallel runs on this machine, relative to batch norm."
    speed = command("speed", _speed, line, "tbbn speed --precision bf16 --lanes 1,4,8 --json > h200.json")
    speed.add_argument("--backbone", default="resnet32", help="backbones, comma-separated (default: resnet32)")
    speed.add_argument("--norm", default="bn,tbbn", help="norms, comma-separated (default: bn,tbbn)")
    speed.add_argument("--precision", help="fp32, tf32, bf16, comma-separated (default: fp32; on a GPU tf32,bf16)")
    speed.add_argument(
        "--lanes", help="numbers of parallel runs, comma-separated; 0 skips them (default: 1; on a GPU 1,4,8)"
    )
    speed.add_argument("--epochs", type=int, default=4, help="epochs per task in the parallel runs (default: 4)")
    speed.add_argument("--device", default="auto", help="cpu, cuda or auto (default: auto)")
    speed.add_argument("--json", action="store_true", help="print JSON")
    speed.add_argument("--quiet", action="store_true", help="hide progress")


def _speed(args: argparse.Namespace) -> int:
    import torch

    from tbbn.bench.report.cost import duration
    from tbbn.bench.speed import estimate_seconds, measure_speed

    if args.device not in ("auto", "cpu", "cuda"):
        raise UserError(f"unknown device {args.device!r}; use 'cuda' for a GPU, 'cpu' or 'auto'.")
    on_gpu = torch.cuda.is_available() if args.device == "auto" else args.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise UserError("--device cuda: torch finds no CUDA device.")
    if args.epochs < 2:
        raise UserError(f"--epochs must be at least 2 (the first epoch is not timed), got {args.epochs}.")
    precisions = _names("precision", args.precision or ("tf32,bf16" if on_gpu else "fp32"), PRECISIONS)
    if not on_gpu and precisions != ["fp32"]:
        raise UserError(f"--precision must be fp32 on a CPU, got {','.join(precisions)}.")
    device = torch.device("cuda" if on_gpu else "cpu")
    given: dict[str, Any] = {
        "backbones": _names("backbone", args.backbone, BACKBONES),
        "norms": _names("norm", args.norm, NORMS),
        "precisions": precisions,
        "n_lanes": _numbers(args.lanes or ("1,4,8" if on_gpu else "1")),
        "epochs": args.epochs,
    }
    if args.quiet:
        found = measure_speed(device, **given)
    else:
        _say(f"this takes about {duration(estimate_seconds(device, **given))}")
        progress = _Progress()
        found = measure_speed(device, **given, on_row=progress.row, on_share=progress.share)
    print(json.dumps(found, indent=1) if args.json else speed_tables(found))
    return 0


class _Progress:
    """Prints the current row, and the progress within a long one: after two seconds, then every ten."""

    def row(self, text: str) -> None:
        _say(text)
        self.due = time.monotonic() + FIRST

    def share(self, done: float) -> None:
        if time.monotonic() >= self.due:
            _say(f"  {100 * done:.0f} %")
            self.due = time.monotonic() + THEN


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _names(kind: str, text: str, known: Sequence[str] | Registry[Any]) -> list[str]:
    names = [part.strip() for part in text.split(",") if part.strip()]
    for name in names:
        if name not in known:
            raise unknown_name(kind, name, known)
    if not names:
        raise UserError(f"--{kind} needs at least one name.")
    return list(dict.fromkeys(names))


def _numbers(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() for part in parts):
        raise UserError(f"--lanes must be comma-separated numbers, such as 1,4,8; got {text!r}.")
    return [int(part) for part in parts if int(part)]


def speed_tables(found: dict[str, Any]) -> str:
    """The tables as text."""
    from tbbn.bench.report.table import Table

    parts = ["\n".join(f"{key.ljust(20)}{value}" for key, value in found["machine"].items())]
    titles = {
        "layers": "one layer, forward + backward; floor: time for its memory traffic at copy bandwidth",
        "steps": "one training step, batch size 64",
        "lanes": "whole runs in parallel, timed in their second task",
    }
    for name, title in titles.items():
        rows = [_row(entry) for entry in found[name]]
        if rows:
            header = list(dict.fromkeys(key for row in rows for key in row))
            cells = tuple(tuple(row.get(key, "") for key in header) for row in rows)
            parts.append(f"{title}\n{Table(tuple(header), cells).render('text')}")
    return "\n\n".join(parts)


def _row(entry: dict[str, Any]) -> dict[str, str]:
    """A table row, with a separate column for each number measured for a norm."""
    row: dict[str, str] = {}
    for key, value in entry.items():
        if isinstance(value, dict):
            row |= {f"{key} {inner}".replace("_", " "): _cell(v, inner) for inner, v in value.items()}
        else:
            row[key.replace("_", " ")] = _cell(value, key)
    return row


def _cell(value: Any, key: str) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3f}" if "ratio" in key or "ms" in key else f"{value:.1f}"
