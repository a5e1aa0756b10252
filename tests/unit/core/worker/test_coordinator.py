"""What a coordinator sends to a thousand simulated members, in bytes; and what it records of when they submit."""

from __future__ import annotations

import json
import random
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from horovod._base.config import Config
from horovod.comm.datatypes import DataType
from horovod.control.sealing import Message
from horovod.core.negotiation.messages import (
    Announce,
    Decision,
    Definition,
    Operation,
    Order,
    Request,
    TensorSpec,
    decode_from_coordinator,
    encode,
)
from horovod.core.negotiation.request_dictionary import RequestEncoder
from horovod.core.worker.connections import Connections
from horovod.core.worker.coordinator import Coordinator
from horovod.core.worker.role import Schedule
from horovod.observe.timeline import TensorLabel, Timeline
from unit.core.workers import Watch


class Recorded:
    """In place of the connections to the members: what was sent to each."""

    def __init__(self, size: int) -> None:
        self.sent: dict[int, list[bytes]] = defaultdict(list)
        self._members = list(range(1, size))

    def members(self) -> list[int]:
        return self._members

    def send(self, member: int, body: bytes | Message) -> None:
        self.sent[member].append(body.body if isinstance(body, Message) else body)

    def take(self) -> dict[int, list[bytes]]:
        taken, self.sent = self.sent, defaultdict(list)
        return taken


class Job:
    """A coordinator and its members' side of the messages."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.connections, self.schedule = Recorded(size), Schedule()
        self.coordinator = Coordinator(
            range(size), cast(Connections, self.connections), self.schedule, None, Config(), Watch(), "tcp"
        )
        self._encoders = [RequestEncoder(1024) for _ in range(size)]

    def announce(self, *requests: list[Request]) -> int:
        """Every member announces its request of each list, and the coordinator decides. Returns the bytes announced."""
        total = 0
        self.coordinator.announce([each[0] for each in requests])
        for member in range(1, self.size):
            body = encode(Announce([self._encoders[member].item(each[member]) for each in requests]))
            self.coordinator.receive(member, body)
            total += len(body)
        self.coordinator.decide()
        return total


def alltoall(name: str, splits: list[tuple[int, ...]]) -> list[Request]:
    spec = (TensorSpec(name, DataType.FLOAT32, (max(map(sum, splits)), 3)),)
    return [Request(Operation.ALLTOALL, name, spec, splits=each, caller="train.py:7") for each in splits]


def allreduce(name: str, size: int) -> list[Request]:
    return [Request(Operation.ALLREDUCE, name, (TensorSpec(name, DataType.FLOAT32, (3,)),))] * size


def decisions(body: bytes) -> list[Any]:
    order = decode_from_coordinator(body)
    assert isinstance(order, Order)
    return [item for batch in order.batches for item in batch]


def received(body: bytes) -> list[tuple[int, ...]]:
    order = decode_from_coordinator(body)
    assert isinstance(order, Order) and not order.shares
    return order.received


@pytest.mark.parametrize("size", [1, 2, 5])
def test_each_member_is_told_what_the_others_send_to_it(size: int) -> None:
    job, chances = Job(size), random.Random(size)
    for turn in range(3):
        splits = [tuple(chances.randrange(100) for _ in range(size)) for _ in range(size)]
        job.announce(allreduce("a", size), alltoall("x", splits), allreduce("b", size))
        sent = job.connections.take()
        assert sorted(sent) == list(range(1, size))
        for member, (body,) in sent.items():
            (exchanged,) = (item for item in decisions(body) if isinstance(item, Decision) and item.name == "x")
            others = [item for item in decisions(body) if item is not exchanged and item != exchanged]
            assert len(others) == 2 and all(isinstance(item, int) == (turn > 0) for item in others)
            assert received(body) == [tuple(row[member] for row in splits)] and not exchanged.received
            assert exchanged.longest == max(map(max, splits))
        own = [item for batch in job.schedule.batches for item in batch if item.name == "x"][-1]
        assert own.received == tuple(row[0] for row in splits)
        job.announce(alltoall("x", splits))
        assert all(decisions(body) == [exchanged.identifier] for (body,) in job.connections.take().values())


def test_an_alltoall_of_a_thousand_ranks_grows_with_what_a_rank_needs() -> None:
    """A table of all splits for everybody was 2.9 GB."""
    size = 1024
    job, chances = Job(size), random.Random(1)
    splits = [tuple(chances.randrange(200, 1000) for _ in range(size)) for _ in range(size)]
    announced = job.announce(*[alltoall(f"x{number}", splits) for number in range(2)])
    sent = job.connections.take()
    longest = max(len(body) for (body,) in sent.values())
    assert longest < 2 * 3 * size + 200  # two columns, three bytes a number
    assert sum(len(body) for (body,) in sent.values()) < 7 << 20
    assert announced < 7 << 20
    job.announce(alltoall("x0", splits))
    assert all(len(body) < 20 for (body,) in job.connections.take().values())


class Marks:
    """A timeline that notes when ranks were ready."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, int], float | None] = {}

    def ready(self, operation: str, tensors: Sequence[TensorLabel], rank: int, at: float | None = None) -> None:
        self.found[tensors[0].name, rank] = at


def test_marks_of_ready_ranks_bear_the_time_of_submission(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1's clock shows 100 seconds less. Its second message waits for five seconds, because a collective runs here."""
    now = 1000.0
    monkeypatch.setattr("horovod.core.worker.coordinator.time", SimpleNamespace(monotonic=lambda: now))
    job = Job(2)
    marks = job.coordinator.observer.timeline = cast(Timeline, Marks())

    def announced(name: str, sent: float, ages: list[float]) -> None:
        request = allreduce(name, 2)[1]
        job.coordinator.receive(1, encode(Announce([Definition(-1, request)], 0, sent, ages)))

    announced("a", 899.9, [])  # a tenth of a second on its way
    now = 1010.0
    announced("b", 904.9, [2.0])
    job.coordinator.announce([allreduce("c", 2)[0]], [1009.0])
    found = cast(Marks, marks).found
    assert found == {
        ("a", 1): pytest.approx(1000.0),
        ("b", 1): pytest.approx(1003.0),
        ("c", 0): 1009.0,
    }


def test_a_mark_does_not_stand_before_its_negotiation(tmp_path: Path) -> None:
    timeline = Timeline(str(tmp_path / "t.json"))
    label = TensorLabel("a", "float32", [1])
    start = time.monotonic()
    timeline.ready("ALLREDUCE", [label], 0, start + 1.0)
    timeline.ready("ALLREDUCE", [label], 1, start)
    timeline.ready("ALLREDUCE", [label], 2, start + 2.0)
    timeline.close()
    events = [each for each in json.loads((tmp_path / "t.json").read_text()) if each["ph"] in "BX"]
    assert [each["ph"] for each in events] == ["B", "X", "X", "X"]
    times = [each["ts"] for each in events]
    assert times[0] == times[1] == times[2] < times[3]
