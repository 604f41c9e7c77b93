"""``--engine``: do runs in this process, on a Ray cluster, or as SLURM jobs."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from tbbn.errors import UserError

if TYPE_CHECKING:
    from tbbn.bench.engine.record import Record
    from tbbn.bench.runs.pending import PendingRun

_PACKAGES = {"ray": "ray", "slurm": "submitit"}  # the package that an engine imports
LOCAL: dict[str, Any] = {"engine": "local", "address": None, "workers": None, "job": []}  # default option values
_FOR = {"address": ("ray",), "workers": ("ray", "slurm"), "job": ("slurm",)}  # the engines that an option applies to


def add_engine_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--engine",
        choices=("local", *_PACKAGES),
        default="local",
        help="where to train: this machine, or a Ray or SLURM cluster",
    )
    command.add_argument("--address", help="Ray cluster: auto, or HOST:PORT (default: start Ray on this machine)")
    command.add_argument(
        "--workers",
        type=int,
        help="processes to run at a time on the cluster; each trains a bundle of runs (default: as many as fit)",
    )
    command.add_argument(
        "--job", action="append", default=[], metavar="KEY=VALUE", help="SLURM option, such as partition=gpu"
    )


@contextmanager
def engine(
    args: argparse.Namespace, runs: Sequence[PendingRun], overwrite: bool
) -> Iterator[Callable[..., list[Record]]]:
    """The function that does runs: :func:`tbbn.bench.runs.sweep.run_all`, or one that submits them to a cluster.

    The connection to the cluster is closed at the end of the block.
    """
    for option, engines in _FOR.items():
        if getattr(args, option) not in (None, []) and args.engine not in engines:
            raise UserError(f"--{option} needs --engine {' or '.join(engines)}, got --engine {args.engine}.")
    if args.engine == "local":
        from tbbn.bench.runs.sweep import run_all

        yield partial(run_all, overwrite=overwrite, ranks=args.ranks)
        return
    _check(args, overwrite)
    from tbbn.integrations.cluster import run_on

    if args.engine == "ray":
        from tbbn.integrations.ray import ray_cluster

        with ray_cluster(args.address) as cluster:
            yield partial(run_on, cluster, workers=args.workers)
    else:
        from tbbn.integrations.slurm import slurm_cluster

        with slurm_cluster(runs[0].directory.parent.resolve(), _options(args.job)) as jobs:
            yield partial(run_on, jobs, workers=args.workers)


def _check(args: argparse.Namespace, overwrite: bool) -> None:
    package = _PACKAGES[args.engine]
    if find_spec(package) is None:
        raise UserError(f"--engine {args.engine} needs {package}; pip install 'tbbn[{args.engine}]'.")
    if overwrite:
        raise UserError(f"--overwrite works only on this machine; with --engine {args.engine} use another --name.")
    if args.ranks.size > 1:
        raise UserError(f"--engine {args.engine} starts its own processes; run it without torchrun.")
    if args.workers is not None and args.workers < 1:
        raise UserError(f"--workers must be at least 1, got {args.workers}.")


def _options(words: Sequence[str]) -> dict[str, Any]:
    """
    >>> _options(["partition=gpu", "timeout_min=240"])
    {'partition': 'gpu', 'timeout_min': 240}
    """
    found: dict[str, Any] = {}
    for word in words:
        key, separator, value = word.partition("=")
        if not separator or not key.isidentifier():
            raise UserError(f"--job takes KEY=VALUE, such as partition=gpu, got {word!r:.60}.")
        found[key] = int(value) if value.isdecimal() else value
    return found
