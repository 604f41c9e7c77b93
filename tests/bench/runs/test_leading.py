"""What rank 0 sends to the others, and what these do with it; in one process, with a launch that is written down."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import pytest
from tinyrun import finish, results, tiny

from tbbn.bench.engine import loop
from tbbn.bench.engine.loop import Run
from tbbn.bench.engine.ranks import Ranks
from tbbn.bench.engine.record import Record
from tbbn.bench.runs import checkpoint, state
from tbbn.bench.runs.leading import follow, leading


class Launch(Ranks):
    """Ranks whose calls are noted; rank 0 announces what it is given."""

    def __init__(self, size: int = 1, *contents: bytes) -> None:
        self.size, self.contents = size, [*contents, b""]
        self.calls: list[str] = []

    def announce(self, state: bytes) -> None:
        self.calls.append("announce")
        self.contents.append(state)

    def ended(self) -> None:
        self.calls.append("ended")

    def receive(self) -> bytes:
        self.calls.append("receive")
        return self.contents.pop(0)


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> list[Record]:
    """The records of all runs that a rank takes part in."""
    found: list[Record] = []
    real = loop.run

    def watched(*arguments: Any, **options: Any) -> Record:
        found.append(real(*arguments, **options))
        return found[-1]

    monkeypatch.setattr(loop, "run", watched)
    return found


def part_of(run: Run, events: int) -> bytes:
    """The state of a run after so many events."""
    steps: Iterator[Any] = run.events()
    assert len(list(islice(steps, events))) == events
    return state.encoded(run)


def test_a_rank_goes_on_from_the_state_of_rank_0_until_there_is_nothing_more(followed: list[Record]) -> None:
    first, second = tiny(norm__name="tbbn"), tiny(seed=1, method__name="lucir", data__stop_after=2)
    launch: Any = Launch(1, part_of(Run(first), 17), part_of(Run(second), 0))
    follow(launch, lambda: False)
    assert [results(record) for record in followed] == [results(finish(config).record) for config in (first, second)]
    assert launch.calls == ["receive", "ended", "receive", "ended", "receive"]


def test_a_rank_stops_when_it_is_asked_to(followed: list[Record]) -> None:
    asked = iter(range(100))
    launch: Any = Launch(1, part_of(Run(tiny()), 0))
    follow(launch, lambda: next(asked) == 5)
    (record,) = followed
    assert record.status == "interrupted" and next(asked) == 6
    assert launch.calls == ["receive", "ended", "receive"]


def test_nothing_announced_is_nothing_to_do(followed: list[Record]) -> None:
    launch: Any = Launch(1)
    follow(launch, lambda: False)
    assert not followed and launch.calls == ["receive"]


def test_rank_0_sends_its_state_and_says_when_the_run_is_over() -> None:
    run = Run(tiny())
    run.ranks = launch = Launch(2)
    with leading(run):
        assert launch.calls == ["announce"]
    assert launch.calls == ["announce", "ended"]
    values, tensors = checkpoint.decode(launch.contents[-1], "here")
    assert values["position"] == {"task": 0, "phase": 0, "epoch": 0, "step": 0}
    assert state.is_of(values, run.config) and any(name.startswith("network.") for name in tensors)


def test_a_process_alone_sends_nothing_and_after_an_error_the_run_is_not_over() -> None:
    run = Run(tiny())
    for size, wanted in ((1, []), (2, ["announce"])):
        run.ranks = launch = Launch(size)
        with suppress(KeyError), leading(run):
            raise KeyError
        assert launch.calls == wanted
