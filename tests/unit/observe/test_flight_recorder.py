"""The ring of the last collectives."""

from __future__ import annotations

import pytest

from horovod.core.negotiation.messages import Operation, Request
from horovod.core.requests.batch import Entry
from horovod.core.requests.handle import Handle
from horovod.observe import flight_recorder
from horovod.observe.flight_recorder import FlightRecorder, Record
from references import kept


def request(name: str, transient: bool = False) -> Request:
    return Request(Operation.ALLREDUCE, name, transient=transient)


def batch_of(*records: Record | None) -> list[tuple[None, Entry | None]]:
    return [
        (None, None if record is None else Entry(record.request, [], [], None, Handle(record=record), 0.0))
        for record in records
    ]


def test_the_life_of_a_collective() -> None:
    recorder = FlightRecorder(10)
    record = recorder.submitted(request("a"), 5.0)
    assert (record.number, record.occurrence, record.order, record.submitted, record.ended) == (1, 1, 0, 5.0, 0.0)
    recorder.begins(batch_of(record), "shm", 6.0)
    assert (record.order, record.engine, record.agreed) == (1, "shm", 6.0)
    assert record.started > 0.0
    assert not record.error
    record.fail(ValueError())
    assert record.error == "ValueError"


def test_it_keeps_the_last_and_counts_all() -> None:
    recorder = FlightRecorder(3)
    for _ in range(5):
        recorder.submitted(request("a"), 0.0)
    assert [(each.number, each.occurrence) for each in recorder.ring] == [(3, 3), (4, 4), (5, 5)]
    assert recorder.count == 5


def test_collectives_of_joined_ranks_count_for_the_order() -> None:
    recorder = FlightRecorder(3)
    record = recorder.submitted(request("b"), 0.0)
    recorder.begins(batch_of(None, record), "shm", 0.0)
    assert record.order == 2
    last = recorder.submitted(request("c"), 0.0)
    recorder.ran(last, "fast path", 1.0)
    assert (last.order, last.started, recorder.carried_out) == (3, 1.0, 3)


def test_names_that_do_not_come_again_fill_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder, "MOST_NAMES", 10)
    for transient, most in ((True, 0), (False, 10)):
        recorder = FlightRecorder(3)
        names = [f"name {number}" for number in range(100)]
        for name in names:
            assert recorder.submitted(request(name, transient=transient), 0.0).occurrence == 1
        assert kept(names) <= 3 + most
