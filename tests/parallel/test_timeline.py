"""The timeline as a tool reads it: valid JSON at any moment, events named and nested as tools expect."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from horovod.timeline.__main__ import main
from ranks import RankPool


def rows(path: Path) -> dict[str, list[dict[str, Any]]]:
    """By tensor name, the events of its row in the order in which they were written."""
    events = json.loads(path.read_text())
    names = {event["pid"]: event["args"]["name"] for event in events if event["name" if "name" in event else "ph"] ==
             "process_name" and event["pid"]}  # fmt: skip
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] != "M" and event["pid"] in names:
            found[names[event["pid"]]].append(event)
    return found


def train_a_little() -> None:
    import torch

    import horovod.torch as hvd

    hvd.init()
    for _ in range(2):
        hvd.allreduce(torch.ones(2, 3), name="a")
    hvd.broadcast(torch.ones(4, dtype=torch.int32), 1, name="b")
    hvd.grouped_allreduce([torch.ones(1), torch.ones(2)], name="g")
    hvd.barrier()
    hvd.shutdown()


def test_events_and_their_nesting(ranks: Callable[..., RankPool], tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    env = {"HOROVOD_TIMELINE": str(path), "HOROVOD_TIMELINE_MARK_CYCLES": "1"}
    ranks(2, env, "torch").run(train_a_little)
    found = rows(path)
    assert set(found) == {
        "allreduce.a",
        "broadcast.b",
        "grouped_allreduce.g_1of2",
        "grouped_allreduce.g_2of2",
        "barrier.noname",
    }
    once = found["allreduce.a"][: len(found["allreduce.a"]) // 2]
    assert [(event["ph"], event.get("name")) for event in once[:1]] == [("B", "NEGOTIATE_ALLREDUCE")]
    assert sorted(event["name"] for event in once[1:3]) == ["0", "1"]
    assert all(event["ph"] == "X" and event["dur"] == 0 for event in once[1:3])
    assert [(event["ph"], event.get("name")) for event in once[3:]] == [
        ("E", None),
        ("B", "ALLREDUCE"),
        ("B", "GLOO_ALLREDUCE"),
        ("E", None),
        ("E", None),
    ]
    assert once[-1]["args"] == {"dtype": "float32", "shape": "[2, 3]"}
    assert [event["ts"] for event in once] == sorted(event["ts"] for event in once)
    assert found["broadcast.b"][-1]["args"] == {"dtype": "int32", "shape": "[4]"}
    assert [event.get("name") for event in found["barrier.noname"] if event["ph"] == "B"] == ["NEGOTIATE_BARRIER"]
    for events in found.values():
        assert sum(event["ph"] == "B" for event in events) == sum(event["ph"] == "E" for event in events)
    every = json.loads(path.read_text())
    assert every[0]["args"]["start_time_since_epoch_in_micros"] > 0
    assert any(event.get("name") == "CYCLE_START" and event["s"] == "g" for event in every)


def test_it_can_be_started_and_stopped(ranks: Callable[..., RankPool], tmp_path: Path) -> None:
    def job(first: str, second: str) -> None:
        import torch

        import horovod.torch as hvd

        hvd.init()
        hvd.allreduce(torch.ones(1), name="before")
        hvd.start_timeline(first)
        hvd.barrier()
        hvd.allreduce(torch.ones(1), name="in the first")
        hvd.barrier()
        hvd.start_timeline(second, mark_cycles=True)
        hvd.barrier()
        hvd.allreduce(torch.ones(1), name="in the second")
        hvd.barrier()
        hvd.stop_timeline()
        hvd.stop_timeline()
        hvd.barrier()
        hvd.allreduce(torch.ones(1), name="after")
        hvd.start_timeline("/nowhere/at/all.json")
        hvd.shutdown()

    first, second = tmp_path / "first.json", tmp_path / "second.json"
    pool = ranks(2, {"HOROVOD_TIMELINE": "DYNAMIC"}, "torch")
    pool.run(job, str(first), str(second))
    assert "allreduce.in the first" in rows(first)
    assert "allreduce.in the second" in rows(second)
    together = {*rows(first), *rows(second)}
    assert not together & {"allreduce.before", "allreduce.after"}
    assert "/nowhere/at/all.json" in pool.output(0)
    assert not pool.output(1)


def test_it_needs_the_variable_and_a_running_horovod(ranks: Callable[..., RankPool], tmp_path: Path) -> None:
    def job(path: str) -> list[str]:
        import horovod.torch as hvd

        texts = []
        for action in (lambda: hvd.start_timeline(path), hvd.stop_timeline):
            try:
                action()
            except ValueError as error:
                texts.append(str(error))
        hvd.init()
        try:
            hvd.start_timeline(path)
        except ValueError as error:
            texts.append(str(error))
        hvd.stop_timeline()
        hvd.shutdown()
        return texts

    for texts in ranks(2, None, "torch").run(job, str(tmp_path / "t.json")):
        assert texts == ["Horovod has not been initialized; use hvd.init()."] * 2 + [
            "Set HOROVOD_TIMELINE=DYNAMIC to enable dynamic timeline usage."
        ]
    assert not (tmp_path / "t.json").exists()


ACTIVITIES = {
    "allreduce.a": ("ALLREDUCE", "ALLREDUCE", "GLOO_ALLREDUCE"),
    "adasum.d": ("ADASUM", "ADASUM", "MPI_ADASUM_ALLREDUCE"),
    "allgather.g": ("ALLGATHER", "ALLGATHER", "GLOO_ALLGATHER"),
    "broadcast.b": ("BROADCAST", "BROADCAST", "GLOO_BCAST"),
    "alltoall.t": ("ALLTOALL", "ALLTOALL", "MPI_ALLTOALL"),
    "reducescatter.r": ("REDUCESCATTER", "REDUCESCATTER", "GLOO_REDUCESCATTER"),
    "barrier.noname": ("BARRIER",),
    "join.noname": (),
}
"""By tensor: what is negotiated, the operation, the engine's activity in it."""


@pytest.mark.parametrize("engine", ["shm", "tcp"])
def test_every_operation_by_its_name(ranks: Callable[..., RankPool], tmp_path: Path, engine: str) -> None:
    def job(path: str, engine: str) -> None:
        import os

        import torch

        import horovod.torch as hvd

        os.environ["HOROVOD_CPU_OPERATIONS"] = engine
        try:
            hvd.init()
        finally:
            del os.environ["HOROVOD_CPU_OPERATIONS"]
        hvd.start_timeline(path)
        hvd.barrier()
        ones = torch.ones(2)
        hvd.allreduce(ones, name="a")
        hvd.allreduce(ones, name="d", op=hvd.Adasum)
        hvd.allgather(ones, name="g")
        hvd.broadcast(ones, 1, name="b")
        hvd.alltoall(ones, name="t")
        hvd.reducescatter(ones, name="r")
        hvd.barrier()
        hvd.join()
        hvd.shutdown()

    path = tmp_path / "timeline.json"
    ranks(2, {"HOROVOD_TIMELINE": "DYNAMIC"}, "torch").run(job, str(path), engine)
    found = {name.replace("allreduce.d", "adasum.d"): events for name, events in rows(path).items()}
    assert set(found) == {name for name, names in ACTIVITIES.items() if names}
    for name, events in found.items():
        begun = [event for event in events if event["ph"] == "B"]
        negotiated, *work = ACTIVITIES[name]
        assert [event["name"] for event in begun[: 1 + len(work)]] == [f"NEGOTIATE_{negotiated}", *work]
        assert [event["args"] for event in begun if "args" in event] == [{"engine": engine}] * bool(work)
        shape = "".join(event["ph"] for event in events if event["ph"] != "X")
        assert shape in ("BEBBEE" if work else "BE", "BE" * 2)


@pytest.mark.parametrize("bytes_written", [3_000, 60_000])
def test_a_killed_job_leaves_a_file_that_can_be_read(
    ranks: Callable[..., RankPool], tmp_path: Path, bytes_written: int
) -> None:
    def job() -> None:
        import torch

        import horovod.torch as hvd

        hvd.init()
        tensors = [torch.ones(1) for _ in range(50)]
        for _ in range(1_000_000):
            handles = [hvd.allreduce_async(tensor, name=f"step {number}") for number, tensor in enumerate(tensors)]
            for handle in handles:
                hvd.synchronize(handle)

    path = tmp_path / "timeline.json"
    pool = ranks(2, {"HOROVOD_TIMELINE": str(path), "HOROVOD_GLOO_TIMEOUT_SECONDS": "6"}, "torch")
    call = pool.start(job)
    while not path.exists() or path.stat().st_size < bytes_written:  # bounded by the test's own time limit
        assert pool.alive(0)
    pool.kill(0, signal.SIGKILL)
    pool.kill(1, signal.SIGKILL)
    call.results(dies={0, 1})
    assert 0 < len(rows(path)) <= 50


def train_with_a_slow_rank() -> None:
    import time

    import torch

    import horovod.torch as hvd

    hvd.init()
    for _ in range(30):
        if hvd.rank() == 1:
            time.sleep(0.05)  # what makes this rank slow
        hvd.allreduce(torch.ones(1000), name="a")
    hvd.shutdown()


def test_the_summary_names_the_slow_rank(
    ranks: Callable[..., RankPool], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "timeline.json"
    ranks(2, {"HOROVOD_TIMELINE": str(path)}, "torch").run(train_with_a_slow_rank)
    assert main([str(path)]) == 0
    printed = capsys.readouterr().out
    assert "with 2 ranks: 30 tensors in 30 batches." in printed
    assert "Rank 1 holds up the others" in printed
    assert "most of it before 'allreduce.a'" in printed
