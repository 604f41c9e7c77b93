"""Small parts of a run, each beside others that stand in for the rest."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tinyrun import tiny
from torch import nn

from tbbn.bench.engine import EpochEnded, Event, Stepped, forward, lanes, loop, plugins, setup
from tbbn.bench.engine.events import Loading, Position
from tbbn.bench.engine.loop import Run
from tbbn.bench.engine.record import digest, new_record
from tbbn.bench.methods import Phase
from tbbn.errors import UserError
from tbbn.plugins import load_plugin, temporary
from tbbn.registry import BACKBONES, NORMS, Origin


@pytest.mark.parametrize(
    ("device", "steps", "ranks", "captured"),
    [("cuda", 8, 1, True), ("cuda", 7, 1, False), ("cuda", 8, 2, False), ("cpu", 8, 1, False)],
)
def test_a_step_is_made_of_the_run_and_captured_on_a_gpu_where_that_pays(
    device: str, steps: int, ranks: int, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run: Any = Run(tiny(train__clip_norm=0.5, train__clip_value=0.25, precision="bf16", method__name="lucir"))
    context, parameters = run.context(run.scenario.tasks[0]), [nn.Parameter(torch.zeros(1))]
    run.optimizer, run.previous = object(), object()
    run.device, run.ranks = SimpleNamespace(type=device), SimpleNamespace(size=ranks)
    run.restored_totals = {"spec": "totals", "other": "not these"}
    made = SimpleNamespace(restored=None)
    made.restore_totals = lambda totals: setattr(made, "restored", totals)

    def step(**given: Any) -> Any:
        made.given = given
        return made

    monkeypatch.setattr(loop, "Step", step)
    for uses_previous in (True, False):
        block: Any = SimpleNamespace(spec="spec", steps=steps)
        assert run._make_step(context, Phase(uses_previous=uses_previous), block, parameters) is made
        assert made.given.pop("place")(run.method.loss) == "method 'lucir'"
        assert made.given == {
            "maker": run.maker,
            "network": run.network,
            "previous": run.previous if uses_previous else None,
            "loss": run.method.loss,
            "penalty": run.method.penalty,
            "optimizer": run.optimizer,
            "parameters": parameters,
            "spec": "spec",
            "forward": context.training_forward,
            "clip_norm": 0.5,
            "clip_value": 0.25,
            "precision": "bf16",
            "captured": captured,
            "ranks": run.ranks,
            "needs_stages": run.method.needs_stages,
        }
    assert made.restored == "totals" and run.restored_totals == {"other": "not these"}, "once"


def test_loading_is_told_once_it_takes_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now, told = 5.0, []
    monkeypatch.setattr(loop.time, "perf_counter", lambda: now)
    tell, quiet = loop._tell_loading(told.append), loop._tell_loading(None)
    for now, done in ((6.9, 1), (7.0, 2), (8.0, 3)):  # noqa: B007
        tell(done, 9)
        quiet(done, 9)
    assert told == [Loading(2, 9), Loading(3, 9)]


def test_a_record_tells_the_ranks_if_there_are_several() -> None:
    run = Run(tiny())
    for ranks, wanted in ((1, None), (2, 2), (3, 3)):
        record = setup.record_of(run.config, run.source, run.scenario, run.network, run.device, ranks)
        assert record.environment.get("ranks") == wanted


def test_copies_of_a_network_without_convolutions_are_none_and_do_nothing() -> None:
    network: Any = nn.Linear(2, 2)
    copies = forward.WorkingCopies(network)
    copies.refresh()
    copies.copy_gradients_back()
    assert not copies.copies and network.weight.grad is None


def test_of_equal_validation_losses_the_first_epoch_was_kept() -> None:
    record = new_record(tiny())
    record.history = [
        {"task": 0, "phase": "a", "epoch": epoch, "validation": loss} for epoch, loss in enumerate((0.5, 0.25, 0.25, 0.75))
    ]  # fmt: skip
    record.history += [{"task": 0, "phase": "b", "epoch": epoch} for epoch in range(3)]
    record.history += [{"task": 1, "phase": "a", "epoch": epoch, "validation": -epoch} for epoch in range(3)]
    assert record.kept_epochs() == {}, "no task is learnt yet"
    record.accuracy = [[0.5]]
    assert record.kept_epochs() == {(0, "a"): 1, (0, "b"): 2}
    record.accuracy = [[0.5], [0.5, 0.5]]
    assert record.kept_epochs() == {(0, "a"): 1, (0, "b"): 2, (1, "a"): 2}


def test_a_record_with_one_more_task_has_all_of_it_and_the_old_one_nothing() -> None:
    record = new_record(tiny())
    record.seconds, record.splits, record.predictions = 2.5, [1], {"task0": torch.zeros(1)}
    longer = record.with_task(1, {"splits": 4, "weights": "w"}, torch.ones(2), 1.5)
    assert (longer.seconds, longer.splits, longer.weights, list(longer.predictions)) == (
        4.0,
        [1, 4],
        ["w"],
        ["task0", "task1"],
    )
    assert (record.seconds, record.splits, record.weights, list(record.predictions)) == (2.5, [1], [], ["task0"])


def test_a_digest_is_of_names_types_shapes_and_bytes() -> None:
    one = {"a": torch.tensor([1.0, 2.0]), "b": torch.zeros(0), "c": torch.tensor(3)}
    same = {"c": torch.tensor(3), "b": torch.zeros(0), "a": torch.tensor([[1.0, 9.0], [2.0, 9.0]])[:, 0]}
    assert digest(one) == digest(same)
    for name, other in (
        ("a", torch.tensor([1.0, 2.5])),
        ("a", torch.tensor([[1.0, 2.0]])),
        ("a", torch.tensor([1, 2])),
        ("b", torch.zeros(0, 2)),
        ("c", torch.tensor(4)),
        ("d", torch.zeros(0)),
    ):
        assert digest({**one, name: other}) != digest(one)
    row = torch.zeros(3, 4).as_strided((1,), (7,))  # one value is contiguous whatever its stride
    assert digest({"a": row}) == digest({"a": torch.zeros(1)})


@pytest.mark.parametrize(
    ("stored", "current", "memory"),
    [("new old old", "new", "old old"), ("old old", "old old", ""), ("new", "new", ""), ("", "", "")],
)
def test_of_an_online_task_the_rows_in_the_reservoir_are_left_and_all_of_them_if_none_is_new(
    stored: str, current: str, memory: str
) -> None:
    run = Run(tiny(data__online=True))
    context = run.context(run.scenario.tasks[1])
    of = {"old": iter(run.scenario.tasks[0].train.tolist()), "new": iter(run.scenario.tasks[1].train.tolist())}
    rows = [next(of[word]) for word in stored.split()]
    context.reservoir = SimpleNamespace(index=torch.tensor(rows, dtype=torch.int64))  # type: ignore[assignment]
    found = context._seen_rows()
    names = dict(zip(rows, stored.split(), strict=True))
    assert [" ".join(names[row] for row in part.tolist()) for part in found] == [current, memory]
    context.reservoir = None
    assert torch.equal(context._seen_rows()[0], run.scenario.tasks[1].train)


# Lanes. ---------------------------------------------------------------------------------------------------------------


def test_as_many_lanes_are_at_work_as_were_found_to_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tuner:
        n = 1

        def __init__(self, limit: int, has_memory: Any) -> None:
            self.seen: list[tuple[int, Event | None]] = []
            made.append(self)

        def observe(self, lane: int, event: Event | None) -> None:
            self.seen.append((lane, event))
            self.n = 2 if len(self.seen) > 1 else 1

    made: list[Tuner] = []
    order: list[int] = []
    step = Stepped(Position(), "train", 1, 1, 1)

    def drive(number: int, run: Run) -> Any:
        for _ in range(4):
            order.append(number)
            yield step

    monkeypatch.setattr(lanes, "LaneTuner", Tuner)
    lanes.run_lanes([tiny(seed=seed) for seed in range(3)], None, drive=drive)
    assert order == [0, 0, 0, 1, 0, 1, 1, 1, 2, 2, 2, 2], "the second lane after two events, the third after the first"
    assert [lane for lane, event in made[0].seen if event is None] == [0, 1, 2] and len(made[0].seen) == 15
    order.clear()
    lanes.run_lanes([tiny(seed=seed) for seed in range(3)], 3, drive=drive)
    assert order == [0, 1, 2] * 4, "a number that was given stays"


def test_a_lane_counts_its_own_epochs_and_steps() -> None:
    now = 0.0
    found = lanes.LaneTuner(4, clock=lambda: now)
    stepped, ended = Stepped(Position(), "train", 1, 1, 1), EpochEnded(Position(), "train", 1, {}, None)
    found.observe(0, stepped)
    found.observe(0, ended)
    assert found.started == 0.0 and found.epochs == {0: 0} and found.steps == 0, "the first epoch is not measured"
    now = 4.0
    for _ in range(8):
        found.observe(0, stepped)
    found.observe(0, ended)
    assert (found.n, found.best_speed, found.best_speed_before) == (2, 2.0, 2.0)
    assert found.started is None and not found.epochs and not found.enqueued


# Plugins of a record. -------------------------------------------------------------------------------------------------


def used(monkeypatch: pytest.MonkeyPatch, *now: dict[str, Any]) -> None:
    monkeypatch.setattr(plugins, "used_plugins", lambda config: list(now))


@pytest.mark.parametrize(
    ("recorded", "now", "has_changed"),
    [
        ("a" * 64, "b" * 64, True),
        ("a" * 64, "a" * 64, False),
        (None, "b" * 64, False),  # recorded with a version
        ("a" * 64, None, False),
    ],
)
def test_a_plugin_has_changed_if_both_files_are_known_and_differ(
    recorded: str | None, now: str | None, has_changed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def entry(mark: str | None, brings: list[str]) -> dict[str, Any]:
        return {"name": "mine", "brings": brings} | ({} if mark is None else {"file_sha256": mark})

    used(monkeypatch, entry(now, ["norm odd"]))
    for brings, changed in ((["norm odd"], has_changed), (["method other", "norm odd"], has_changed), (["x y"], False)):
        if changed:
            with pytest.raises(UserError, match=r"^here: the plugin mine has changed since this run began; to resume"):
                plugins.check_unchanged(tiny(), [entry(recorded, brings)], "here")
        else:
            plugins.check_unchanged(tiny(), [entry(recorded, brings)], "here")


def test_a_plugin_is_shown_with_its_version_or_the_beginning_of_its_checksum() -> None:
    found = plugins.describe_plugins(
        [
            {"name": "a", "version": "1.2", "file_sha256": "f" * 64, "brings": ["norm x", "method y"]},
            {"name": "b", "file_sha256": "0123456789abcdef", "brings": []},
            {"name": "c", "brings": ["norm z"]},
        ]
    )
    assert found == ["plugin a 1.2: norm x, method y", "plugin b 0123456789ab: ", "plugin c: norm z"]


@pytest.mark.parametrize("text", ["norm elsewhere", "thing bn", "norm"])
def test_what_a_record_needs_and_is_not_here_is_named_with_its_plugin(text: str) -> None:
    kind, _, name = text.partition(" ")
    with pytest.raises(UserError) as caught:
        plugins.require_plugins(tiny(), [{"name": "mine", "version": "3", "brings": ["norm bn", text]}], "here")
    assert str(caught.value) == (
        f"here: {kind} {name!r} comes from the plugin mine 3, which is not loaded; install it, or name its file as a plugin."
    )
    plugins.require_plugins(tiny(), [{"name": "mine", "brings": ["norm bn", "method ft", "backbone small"]}], "here")


@pytest.mark.parametrize(
    ("settings", "data", "network"),
    [
        ({}, "", ""),
        (
            {"data__name": "elsewhere:3"},
            "dataset 'elsewhere' comes from a plugin that is not loaded",
            "dataset 'elsewhere'",
        ),
        ({"data__name": "arrays:gone"}, "the data was passed in memory and is no longer available", ""),
        ({"norm__name": "odd"}, "", "norm 'odd' comes from a plugin that is not loaded"),
        ({"method__name": "odd"}, "", "method 'odd' comes from a plugin that is not loaded"),
        ({"backbone": "odd"}, "", "backbone 'odd' comes from a plugin that is not loaded"),
        ({"batch__augment": "odd"}, "", "augmentation 'odd' comes from a plugin that is not loaded"),
    ],
)
def test_why_data_or_a_network_cannot_be_made_here(settings: dict[str, Any], data: str, network: str) -> None:
    assert plugins.without_data(tiny(**settings)) == data
    found = plugins.without_plugins(tiny(**settings))
    assert found.startswith(network) and bool(found) == bool(network)


def test_the_plugin_of_a_file_is_recorded_with_its_checksum_and_what_it_brings(tmp_path: Path) -> None:
    file = tmp_path / "mine_for_parts.py"
    file.write_text(
        "import tbbn\nfrom torch import nn\n"
        "@tbbn.register_norm('odd', 'a norm')\nclass Odd(nn.BatchNorm2d):\n"
        "    def __init__(self, n, depth: int = 3):\n        super().__init__(n)\n"
    )
    with temporary(fresh=True):
        load_plugin(str(file))
        (found,) = plugins.used_plugins(tiny(norm__name="odd"))
        assert plugins.used_plugins(tiny()) == [] == plugins.used_plugins(tiny(norm__name="elsewhere"))
    assert found["name"] == str(file) and found["brings"] == ["norm odd"]
    assert found["file_sha256"] == hashlib.sha256(file.read_bytes()).hexdigest() and "version" not in found
    assert found["defaults"] == {"norm": {"depth": 3}}


@pytest.mark.parametrize(
    ("origin", "mark"),
    [
        (Origin("here"), {}),
        (Origin("here", version="1.2"), {"version": "1.2"}),
        (Origin("here", sha256="f" * 64), {"file_sha256": "f" * 64}),
        (Origin("here", "1.2", "f" * 64), {"version": "1.2"}),
    ],
)
def test_a_plugin_is_recorded_with_its_version_or_else_its_checksum_or_else_neither(
    origin: Origin, mark: dict[str, str]
) -> None:
    with temporary(fresh=True):
        BACKBONES.register("own", lambda in_channels: nn.Flatten(), origin=origin)
        NORMS.register("odd", nn.BatchNorm2d, origin=origin, options={})
        (found,) = plugins.used_plugins(tiny(backbone="own", norm__name="odd"))
    brings = ["norm odd", "backbone own"]
    assert found == {"name": "here", **mark, "brings": brings, "defaults": {"norm": {}}}


# Norms over ranks. ----------------------------------------------------------------------------------------------------

PER_SAMPLE, SYNCED, ALONE_ONLY = {"in", "gn"}, {"bn", "tbbn", "weighted"}, {"sn", "brn", "cn", "adab2n"}


@pytest.mark.parametrize("norm", list(NORMS))
def test_norms_take_their_statistics_over_ranks_where_they_have_any(norm: str) -> None:
    config = tiny(norm__name=norm)

    def synced(network: nn.Module) -> set[bool]:
        return {bool(layer.sync) for layer in network.modules() if hasattr(layer, "sync")}

    def made(**options: bool) -> set[bool]:
        return synced(setup.build_network(config, setup.method_of(config), (3, 8, 8), **options))

    assert made() == made(sync=False) == ({False} if norm in SYNCED - {"bn"} else set())
    assert {norm} <= PER_SAMPLE | SYNCED | ALONE_ONLY
    run = Run(config)
    assert synced(setup.make_network(config, run.method, run.source, run.device)) == made()
    if norm in ALONE_ONLY:
        for check in (lambda: made(sync=True), lambda: setup.check_ranks(config)):
            with pytest.raises(UserError, match=rf"norm '{norm}' does not take its statistics over ranks"):
                check()
    else:
        setup.check_ranks(config)
        assert made(sync=True) == ({True} if norm in SYNCED else set())
        again = setup.make_network(config, run.method, run.source, run.device, sync=True)
        assert synced(again) == made(sync=True)


def test_a_norm_is_judged_without_a_layer_of_its_own() -> None:
    """64 channels, the width of any layer made to find out, cannot be divided into 5 groups."""
    config = tiny(norm__name="gn", norm__groups=5)
    setup.check_ranks(config)
    assert not setup.has_splits(config)
    for norm in NORMS:
        assert setup.has_splits(tiny(norm__name=norm)) == (norm == "tbbn")


def test_a_rank_has_no_gpu_of_a_number() -> None:
    with pytest.raises(UserError, match=r"^each rank uses its own GPU, got device = 'cuda:1'; use 'cuda' or 'auto'\.$"):
        setup.check_ranks(tiny(device="cuda:1"))
    for device in ("cuda", "auto", "cpu"):
        setup.check_ranks(tiny(device=device))


@pytest.mark.parametrize(
    ("rule", "splits"),
    [("paper", 8), ("current", 12), ("uneven", 15), ("something else", 8), (None, 8)],  # 48 + 16 rows, 5 past tasks
)
def test_the_splits_of_a_batch_follow_the_rule_of_its_norm_if_it_is_one(rule: str | None, splits: int) -> None:
    config = tiny(batch__size=64, **({} if rule is None else {"norm__rule": rule}))
    assert setup.full_batch(config, setup.method_of(config), 5) == (48, 16, splits)


def test_an_outline_of_the_data_is_made_with_the_settings_of_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    real = setup.outline

    def watched(*arguments: Any, **options: Any) -> Any:
        asked.append((arguments, options))
        return real("synthetic:6x12x5x8", "data")

    monkeypatch.setattr(setup, "outline", watched)
    setup.outline_source(tiny(data__root="here", data__size=16, data__unreadable="skip", data__split=0.3))
    assert asked.pop() == (("synthetic:6x12x5x8", "here"), {"size": 16, "unreadable": "skip", "split": 0.3})
    setup.outline_source(tiny())
    assert asked.pop()[1]["size"] is None
    setup.outline_source(tiny(data__crop=8))
    with pytest.raises(UserError, match=r"data\.crop must be at most 8 for images of 8x8, got 9\."):
        setup.outline_source(tiny(data__crop=9))


@pytest.mark.parametrize("norm", ["in", "gn"])
def test_the_quirk_no_affine_takes_the_affine_parameters_of_the_network(norm: str) -> None:
    def parameters(*quirks: str) -> int:
        network = Run(tiny(norm=norm, backbone="resnet20", quirks=list(quirks))).network
        return sum(1 for _ in network.backbone.parameters())

    with_all, without = parameters(), parameters("no-affine")
    convolutions = 1 + 18 + 2  # of the stem, the blocks and two shortcuts; each has a norm after it
    assert with_all == 3 * convolutions and without == convolutions
