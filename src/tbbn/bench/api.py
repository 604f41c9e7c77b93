"""The Python API for notebooks: ``tbbn.run``, ``tbbn.sweep`` and ``tbbn.load``.

results = tbbn.run(method="lucir", norm="tbbn", data="digits", seeds=3, **{"train.epochs": 5})
results.to_frame()                   # one row per seed
net = results[0].network()           # the trained network, with plain batch norm
net(images).argmax(1)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from tbbn.bench.config import RunConfig, flatten
from tbbn.bench.data.sources.arrays import remember
from tbbn.bench.data.types import Source
from tbbn.bench.engine import Event, Record, Run, run_lanes
from tbbn.bench.engine import run as run_in_memory
from tbbn.bench.engine.validate import check_used
from tbbn.bench.extras import require_bench
from tbbn.bench.loggers import parse_names
from tbbn.bench.progress import RunProgress, run_progress
from tbbn.bench.report.figures import save_figure
from tbbn.bench.report.plots import figure
from tbbn.bench.report.tables import summary_table
from tbbn.bench.runs.interrupt import stop_on_signal
from tbbn.bench.runs.pending import PendingRun, check_folders, expand, joined
from tbbn.bench.runs.recipe import Axes, check_number, recipe_text
from tbbn.bench.runs.record import RECORD, load_predictions, load_record
from tbbn.bench.runs.sweep import run_all
from tbbn.bench.runs.trained import TrainedNetwork, load_trained, trained
from tbbn.errors import UserError
from tbbn.plugins import origin_of
from tbbn.registry import BACKBONES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Names = str | Sequence[str] | Mapping[str, Any]


def run(
    method: Names | None = None,
    norm: Names | None = None,
    data: Any = None,
    *,
    backbone: str | Callable[..., nn.Module] | None = None,
    seeds: int | Sequence[int] | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    lanes: int | str | None = 1,
    log: str | Sequence[str] = (),
    quiet: bool = False,
    **settings: Any,
) -> Results:
    """Train and evaluate. Returns one :class:`Result` for each method, norm and seed.

    Args:
        method, norm: a name, with options as in ``"cn(groups=8)"`` or ``{"name": "cn", "groups": 8}``; or a list of names.
        data: a name (``tbbn list datasets``), arrays ``(images, labels)`` or ``((images, labels), (images, labels))`` for
            training and test, or a torch Dataset or a pair of them. Without a test part, every fifth image of each class is held
            out for testing. Images are uint8, or floats in [0, 1].
        backbone: a name (``tbbn list backbones``), or a function that returns a module that maps images to features (N, D).
            The function may take ``in_channels``, ``last_relu`` and ``image_size``.
        seeds: a number of seeds, or a list of seeds.
        out: a folder for the runs, as in ``tbbn run``: the same call resumes them. By default nothing is written, and the
            results are only in memory. A single run in the folder of a sweep gets its own folder there.
        overwrite: replace the runs in ``out`` instead of resuming them.
        lanes: the number of runs in parallel on one GPU; "auto" or None finds the fastest number.
        log: loggers, such as ``"tensorboard"`` (``tbbn list loggers``); requires ``out``.
        quiet: show no progress.
        settings: any other settings, dotted (``**{"train.epochs": 5}``) or nested (``train={"epochs": 5}``).
    """
    require_bench("run", "tbbn.")
    lanes = _lanes(lanes)
    folder = Path(".") if out is None else _folder("tbbn.run: out", out)
    given: dict[str, Any] = flatten(settings)
    for kind, value in (("method", method), ("norm", norm), ("data", data)):
        if value is not None and f"{kind}.name" in given:
            raise UserError(f"tbbn.run: {kind} is given twice, as {kind} and as {kind}.name; leave one of them out.")
    axes, source = Axes(seeds=_seeds(seeds, given)), None
    for kind, value in (("method", method), ("norm", norm)):
        if isinstance(value, Mapping):
            given |= flatten({kind: value})
        elif value is not None:
            names = {f"{kind}s": _names(kind, value)}
            axes = Axes(**{**vars(axes), **names})
    if isinstance(data, Mapping):
        given |= flatten({"data": data})
    elif isinstance(data, str):
        given["data.name"] = data
    elif data is not None:
        source = remember(data)
        given["data.name"] = source.name
    if backbone is not None:
        given["backbone"] = backbone if isinstance(backbone, str) else _registered(backbone)
    layers = [("tbbn.run", given)]
    loggers = parse_names(log if isinstance(log, str) else ",".join(log))
    if log and out is None:
        raise UserError("tbbn.run: log needs a folder for the runs; set out, such as out='runs/mine'.")
    runs = expand(layers, axes, folder)
    check_used(given, [run.config for run in runs])
    if out is not None:
        runs = joined(runs)
        check_folders(runs)
    with run_progress(runs, quiet) as progress:
        if out is None:
            return Results(_in_memory(runs, lanes, progress, source))
        return Results(_on_disk(runs, lanes, progress, source, overwrite, recipe_text(layers, axes), loggers))


def sweep(
    methods: Names | None = None,
    norms: Names | None = None,
    data: Any = None,
    *,
    lanes: int | str | None = None,
    **more: Any,
) -> Results:
    """:func:`run` for many methods and norms, with as many runs in parallel on a GPU as raise throughput."""
    for one, several in (("method", "methods"), ("norm", "norms")):
        if one in more:
            raise UserError(f"tbbn.sweep: takes {several}, not {one}: tbbn.sweep({several}={more[one]!r:.60}).")
    return run(methods, norms, data, lanes=lanes, **more)


def load(folder: str | Path, *, backbone: Callable[..., nn.Module] | None = None) -> Results:
    """The results of every run in a folder. For ``network()``, a run with your own backbone needs the ``backbone`` again."""
    if backbone is not None:
        _registered(backbone)
    place = _folder("tbbn.load: the folder", folder)
    found = sorted(file.parent for file in place.rglob(RECORD))
    if not found:
        raise UserError(f"{folder}: no run here; the folder of a run holds a {RECORD}.")
    return Results(Result(load_record(run), run) for run in found)


@dataclass(eq=False)
class Result:
    """One run: its config, its measurements, and its network."""

    record: Record
    directory: Path | None = None  # the run's folder, if it has one
    _network: Any = field(default=None, repr=False)
    _source: Source | None = field(default=None, repr=False)  # keeps data alive that was passed in memory

    def __repr__(self) -> str:
        accuracy = f", final accuracy {100 * self.metrics['final_accuracy']:.1f} %" if self.accuracy else ""
        return (
            f"<Result {self.config.label}, {self.config.data.name}, seed {self.config.seed}: {self.status}{accuracy}>"
        )

    @cached_property
    def config(self) -> RunConfig:
        return self.record.run_config

    @property
    def status(self) -> str:
        """ "finished", "interrupted", "diverged" or "failed"."""
        return self.record.status

    @property
    def accuracy(self) -> list[list[float]]:
        """Row ``t`` holds the accuracy on tasks 0 to ``t`` after learning task ``t``."""
        return self.record.accuracy

    @property
    def calibrated(self) -> list[list[float]]:
        """``accuracy`` if the scores of the newest task's classes are shifted so that it gets as many test images as it has.

        What is left of a difference between two runs is not their bias to the newest task. Empty rows: from an older version.
        """
        return self.record.calibrated

    @property
    def metrics(self) -> dict[str, float]:
        """Final and average accuracy, forgetting and the other metrics of ``tbbn show``."""
        return self.record.metrics

    @property
    def history(self) -> list[dict[str, Any]]:
        """One entry per epoch: task, phase, epoch, learning rate and losses."""
        return self.record.history

    @cached_property
    def predictions(self) -> list[Tensor]:
        """After each task, the predicted class of every test image of the tasks so far; classes are numbered as they arrive."""
        found = self.record.predictions
        if not found and self.directory is not None:
            found = load_predictions(self.directory)
        return [found[f"task{t}"].long() for t in range(len(self.accuracy)) if f"task{t}" in found]

    def network(self) -> TrainedNetwork:
        """The trained network, with plain batch norm: ``net(images)`` returns scores, ``net.predict(images)`` class names."""
        if self._network is not None:
            return trained(self.record, self._network)
        if self.directory is None:
            raise UserError("this run has no network: it stopped before the first task ended.")
        if self.config.backbone not in BACKBONES:
            raise UserError(
                f"{self.directory}: backbone {self.config.backbone!r} is not registered here; register it, name its plugin, or "
                "pass its function: tbbn.load(folder, backbone=...)."
            )
        return load_trained(self.record, self.directory)

    def to_frame(self) -> Any:
        """A pandas DataFrame with the accuracy on each task after each task; tasks count from 1."""
        rows = [(t + 1, i + 1, value) for t, row in enumerate(self.accuracy) for i, value in enumerate(row)]
        return _pandas().DataFrame(rows, columns=["after_task", "task", "accuracy"])

    def plot(self, path: str | Path | None = None, kind: str = "accuracy") -> Figure:
        """A matplotlib figure of this run; see :meth:`Results.plot`."""
        return Results([self]).plot(path, kind)


class Results(list[Result]):
    """A list of results that can be shown in one table and one figure."""

    @property
    def records(self) -> list[Record]:
        return [result.record for result in self]

    def __repr__(self) -> str:
        return summary_table(self.records).render("text") if self else "no results"

    def to_frame(self) -> Any:
        """A pandas DataFrame with one row per run: method, norm, data, seed, status and every metric."""
        rows = []
        for result in self:
            config = result.config
            names = {"method": str(config.method), "norm": str(config.norm), "data": config.data.name}
            rows.append({**names, "seed": config.seed, "status": result.status, **result.metrics})
        return _pandas().DataFrame(rows)

    def plot(self, path: str | Path | None = None, kind: str = "accuracy") -> Figure:
        """A matplotlib figure, also saved to ``path`` if given.

        ``kind`` is "accuracy" or "forgetting" after each task, "gain" of each norm over batch norm on the same seeds, "matrix"
        (heat maps of the accuracy matrices) or "errors" (types of wrong predictions). Colour is the method, line the norm.
        """
        drawn = figure(self.records, kind)
        if path is not None:
            save_figure(drawn, path)
        return drawn


def _in_memory(
    runs: list[PendingRun], lanes: int | None, progress: RunProgress, source: Source | None
) -> Iterator[Result]:
    kept: dict[int, Run] = {}
    started: set[int] = set()

    def drive(number: int, run: Run) -> Iterator[Event]:
        kept[number] = run
        return run.events()

    def on_event(number: int, event: Event) -> None:
        if number not in started:
            progress.start(runs[number])
        started.add(number)
        progress.event(runs[number], event)

    def on_end(number: int, record: Record) -> None:
        progress.end(runs[number], record)

    if lanes == 1:
        records = []
        for i, pending in enumerate(runs):
            records.append(run_in_memory(pending.config, on_event=partial(on_event, i), drive=partial(drive, i)))
            on_end(i, records[-1])
            yield Result(records[-1], None, _network_of(kept.pop(i)), source)
        return
    records = run_lanes([p.config for p in runs], lanes, drive=drive, on_event=on_event, on_end=on_end)
    for i, record in enumerate(records):
        yield Result(record, None, _network_of(kept[i]) if i in kept else None, source)


def _network_of(run: Run) -> Any:
    return run.network.cpu() if run.network.n_classes else None


def _on_disk(
    runs: list[PendingRun],
    lanes: int | None,
    progress: RunProgress,
    source: Source | None,
    overwrite: bool,
    recipe: str,
    log: Sequence[str],
) -> Iterator[Result]:
    with stop_on_signal() as stop:
        records = run_all(
            runs,
            lanes=lanes,
            on_start=progress.start,
            on_event=progress.event,
            on_end=progress.end,
            overwrite=overwrite,
            recipe=recipe,
            stop=stop,
            log=log,
        )
    for pending, record in zip(runs, records, strict=True):
        yield Result(record, pending.directory, None, source)


def _folder(what: str, given: Any) -> Path:
    if isinstance(given, str | os.PathLike) and isinstance(os.fspath(given), str):
        return Path(given)
    raise UserError(f"{what} must be a path, got {given!r:.60}.")


def _whole(value: Any, least: int) -> bool:
    """Whether a value is a whole number of at least ``least``, from Python or NumPy."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def _lanes(lanes: Any) -> int | None:
    if lanes is None or (isinstance(lanes, str) and lanes == "auto"):
        return None
    if not _whole(lanes, 1):
        raise UserError(f"tbbn.run: lanes must be a whole number of at least 1, or 'auto', got {lanes!r}.")
    return int(lanes)


def _names(kind: str, value: Any) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else ()
    if not names or not all(isinstance(name, str) for name in names):
        raise UserError(f"tbbn.run: {kind} must be a name, a list of names or a dict with a name, got {value!r:.60}.")
    return names


def _seeds(seeds: Any, given: Mapping[str, Any]) -> tuple[int, ...]:
    if seeds is None:
        return ()
    if "seed" in given:
        raise UserError("tbbn.run: use either seed or seeds: seed=5 is the seed 5, seeds=5 the seeds 0 to 4.")
    if _whole(seeds, 1):
        check_number(int(seeds))
        return tuple(range(int(seeds)))
    if isinstance(seeds, Iterable) and not isinstance(seeds, str | Mapping):
        several = list(seeds)
        if several and all(_whole(seed, 0) for seed in several) and len(set(several)) == len(several):
            return tuple(map(int, several))
    raise UserError(f"tbbn.run: seeds must be a number of seeds, or distinct seeds of at least 0, got {seeds!r:.60}.")


def _registered(factory: Any) -> str:
    """Register a backbone's factory, and return the name by which a config refers to it."""
    if isinstance(factory, nn.Module) or not callable(factory):
        raise UserError(
            f"tbbn.run: backbone must be a name, or a function that returns a new module, got {type(factory).__name__}."
        )
    name = f"{getattr(factory, '__module__', '')}.{getattr(factory, '__qualname__', type(factory).__name__)}"
    home = sys.modules.get(getattr(factory, "__module__", ""), None)
    BACKBONES.register(name, factory, "given to tbbn.run", origin=origin_of(vars(home) if home else {}), replace=True)
    return name


def _pandas() -> Any:
    try:
        import pandas
    except ImportError:
        raise UserError("to_frame needs pandas; pip install pandas.") from None
    return pandas
