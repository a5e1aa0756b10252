"""The timeline's file: valid at every moment, whatever is recorded by however many threads."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from horovod.observe import timeline as module
from horovod.observe import trace_file
from horovod.observe.activities import activity
from horovod.observe.timeline import TensorLabel, Timeline
from horovod.observe.trace_file import PAGE_BYTES
from time_limits import SOON


def test_the_file_is_valid_after_every_write_and_writes_are_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "timeline.json"
    spans: list[tuple[int, int]] = []

    def pwrite(descriptor: int, data: bytes, offset: int) -> int:
        written = os.pwrite(descriptor, data, offset)
        json.loads(path.read_text())
        spans.append((offset, offset + len(data)))
        return written

    monkeypatch.setattr(trace_file, "os", _Os(pwrite))
    timeline = Timeline(str(path))
    labels = [TensorLabel(f"tensor {number}", "float32", [number]) for number in range(100)]
    for label in labels:
        timeline.ready("ALLREDUCE", [label], 0)
    timeline.decided(labels)
    timeline.begin("ALLREDUCE", "GLOO_ALLREDUCE", "shm", labels)
    timeline.end(labels)
    timeline.close()
    events = json.loads(path.read_text())
    assert Counter(event["ph"] for event in events) == {"M": 203, "B": 300, "E": 300, "X": 100}
    assert len(spans) > 10
    longest = max(len(json.dumps(event)) for event in events)
    for start, stop in spans:
        assert stop - start <= PAGE_BYTES + longest + len(",\n\n]\n")


class _Os:
    """The ``os`` of the module under test, with another ``pwrite``."""

    def __init__(self, pwrite: Any) -> None:
        self.pwrite = pwrite

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def test_many_threads(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    timeline = Timeline(str(path), mark_cycles=True)

    def record(thread: int) -> None:
        for number in range(100):
            label = [TensorLabel(f"{thread}/{number % 10}", "int8", ())]
            timeline.ready("ALLGATHER", label, 1)
            timeline.decided(label)
            timeline.begin("ALLGATHER", "GLOO_ALLGATHER", "tcp", label)
            timeline.end(label)
            timeline.cycle()

    threads = [threading.Thread(target=record, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    timeline.close()
    events = json.loads(path.read_text())
    assert Counter(event["ph"] for event in events) == {"M": 3 + 80, "B": 1200, "E": 1200, "X": 400, "i": 400}


def test_a_name_longer_than_a_page_and_one_of_other_letters(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    timeline = Timeline(str(path))
    names = ["x" * 10_000, 'größe "ß" 长', "plain"]
    for name in names:
        timeline.ready("BROADCAST", [TensorLabel(name, "int8", ())], 0)
    timeline.close()
    events = json.loads(path.read_text())
    assert [event["args"]["name"] for event in events if event["name"] == "process_name" and event["pid"]] == names


@pytest.mark.parametrize(
    ("engine", "operation", "name"),
    [
        ("shm", "ALLREDUCE", "GLOO_ALLREDUCE"),
        ("tcp", "BROADCAST", "GLOO_BCAST"),
        ("single", "ALLGATHER", "GLOO_ALLGATHER"),
        ("gloo", "ALLTOALL", "MPI_ALLTOALL"),
        ("shm", "REDUCESCATTER", "GLOO_REDUCESCATTER"),
        ("tcp", "ADASUM", "MPI_ADASUM_ALLREDUCE"),
        ("mpi", "BROADCAST", "MPI_BCAST"),
        ("mpi", "ALLTOALL", "MPI_ALLTOALL"),
        ("nccl", "REDUCESCATTER", "NCCL_REDUCESCATTER"),
        ("ccl", "ALLGATHER", "CCL_ALLGATHER"),
    ],
)
def test_activities_have_the_names_that_tools_know(engine: str, operation: str, name: str) -> None:
    assert activity(engine, operation) == name


def test_a_full_disk_ends_the_file_and_fills_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    timeline = Timeline(str(tmp_path / "t.json"), mark_cycles=True)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(trace_file, "os", _Os(full))
        for _ in range(1000):
            timeline.cycle()
        deadline = time.monotonic() + SOON
        while not timeline._events.empty() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert timeline._events.empty()
        timeline.close()
    assert caplog.text.count("No space left on device") == 1
    assert len(json.loads((tmp_path / "t.json").read_text())) == 3


def test_names_that_never_come_again_fill_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is under way keeps its row, however many others come meanwhile."""
    monkeypatch.setattr(module, "MOST_ROWS", 8)
    path = tmp_path / "timeline.json"
    timeline = Timeline(str(path))
    slow, negotiated = TensorLabel("slow", "float32", [1]), TensorLabel("negotiated", "float32", [1])
    timeline.begin("ALLREDUCE", "GLOO_ALLREDUCE", "shm", [slow])
    timeline.ready("ALLREDUCE", [negotiated], 0)
    for number in range(100):
        label = TensorLabel(f"tensor {number}", "float32", [number])
        timeline.ready("ALLREDUCE", [label], 0)
        timeline.decided([label])
        timeline.begin("ALLREDUCE", "GLOO_ALLREDUCE", "shm", [label])
        timeline.end([label])
    timeline.end([slow])
    timeline.decided([negotiated])
    assert len(timeline._rows) == 8
    timeline.close()
    events = json.loads(path.read_text())
    names = {event["pid"]: event["args"].get("name") for event in events if event.get("name") == "process_name"}
    assert len(set(names.values())) == len(names) == 103  # the file, and a row of its own each
    open_events = Counter(event["pid"] for event in events if event["ph"] == "B")
    open_events.subtract(event["pid"] for event in events if event["ph"] == "E")
    assert set(open_events.values()) == {0}
