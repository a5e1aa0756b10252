"""Ranks that wait for one that does not come: they are told which and where it is, and wait on as long as it lives."""

from __future__ import annotations

import ctypes
import functools
import os
import select
import signal
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import repeat, starmap
from pathlib import Path
from typing import Any

import pytest
import torch

import horovod.torch as hvd
from ranks import Pools, RankPool
from time_limits import SOON

Ranks = Callable[..., RankPool]


def settings(**seconds: int) -> dict[str, str]:
    names = {
        "timeout": "HOROVOD_GLOO_TIMEOUT_SECONDS",
        "warning": "HOROVOD_STALL_CHECK_TIME_SECONDS",
        "end": "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    }
    return {names[name]: str(value) for name, value in seconds.items()}


def generation(env: dict[str, str], function: Callable[[], Any]) -> Any:
    os.environ.update(env)
    try:
        hvd.init()
        return function()
    finally:
        hvd.shutdown()
        for name in env:
            del os.environ[name]


def wait_for(path: Path) -> None:
    """Until another rank has made this file."""
    deadline = time.monotonic() + SOON
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def keep_the_interpreter_until_written_to(fifo: str) -> None:
    """For 40 seconds at most. No thread of this process does anything meanwhile."""
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    wanted = struct.pack("ihh", reader, select.POLLIN, 0)
    once = (wanted, ctypes.c_ulong(1), 100)
    deque(
        starmap(ctypes.PyDLL(None).poll, repeat(once, 400)), maxlen=0
    )  # a signal ends one call; no bytecode in between
    os.close(reader)


def test_the_warning_names_the_missing_rank_and_its_line(ranks: Ranks) -> None:
    def check() -> None:
        if hvd.rank() == 1:
            time.sleep(3.5)  # where it is
        handles = [hvd.allreduce_async(torch.ones(2, 3), name=name, op=hvd.Sum) for name in ("late", "later")]
        for handle in handles:
            assert hvd.synchronize(handle)[0][0].item() == 3.0

    pool = ranks(3, framework="torch")
    pool.run(generation, settings(timeout=3, warning=2), check)
    text = pool.output(0)
    start = check.__code__.co_firstlineno
    assert "waiting for remainder of ranks for more than 2 seconds" in text
    assert f"1: [allreduce.late, allreduce.later] (it is at {__file__}:{start + 2} in check)" in text
    assert f"allreduce.late was submitted as: allreduce(Sum) float32 [2, 3] at {__file__}:{start + 3}" in text
    assert "0: [" not in text.replace("10: [", "") and "2: [" not in text
    assert pool.output(1) == pool.output(2) == ""


def test_no_warning_when_it_is_turned_off(ranks: Ranks) -> None:
    def check() -> None:
        if hvd.rank() == 1:
            time.sleep(2.5)
        hvd.barrier()

    pool = ranks(2, framework="torch")
    pool.run(generation, {**settings(timeout=3, warning=1), "HOROVOD_STALL_CHECK_DISABLE": "1"}, check)
    assert pool.output(0) == pool.output(1) == ""


def test_a_stall_that_is_to_end_the_job(ranks: Ranks) -> None:
    def check() -> str:
        if hvd.rank() == 1:
            deadline = time.monotonic() + SOON
            while time.monotonic() < deadline:  # it computes, and hears of the end at its next collective
                try:
                    hvd.synchronize(hvd.allreduce_async(torch.ones(1), name="something.else"))
                except hvd.HorovodInternalError as error:
                    return str(error)
        with pytest.raises(hvd.HorovodInternalError) as error:
            hvd.allreduce(torch.ones(1), name="stalled")
        return str(error.value)

    pool = ranks(3, framework="torch")
    texts = pool.run(generation, settings(timeout=3, warning=1, end=2), check)
    assert len(set(texts)) == 1
    assert "stalled for longer than 2 seconds. Will shutdown." in texts[0]
    assert "allreduce.stalled" in texts[0] and "allreduce.something.else" in texts[0]
    assert "1!: [allreduce.stalled]" in texts[0]


def test_a_slow_rank_is_waited_for(ranks: Ranks) -> None:
    """Asleep or busy, for longer than the timeout: it answers, so it lives."""

    def check() -> None:
        if hvd.rank() == 1:
            time.sleep(2.2)
            deadline = time.monotonic() + 2.2
            while time.monotonic() < deadline:
                sum(range(1000))
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2.0

    ranks(2, framework="torch").run(generation, settings(timeout=2), check)


@pytest.mark.parametrize("held", [0, 1])
def test_a_rank_that_cannot_even_answer_is_waited_for_while_its_process_runs(ranks: Ranks, held: int) -> None:
    """Whatever keeps the interpreter's lock for longer than the timeout: a large pickle, native code."""

    def check(held: int) -> None:
        hvd.allreduce(torch.ones(1), name="before")
        if hvd.rank() == held:
            ctypes.PyDLL(None).sleep(5)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="after").item() == 3.0

    pool = ranks(3, framework="torch")
    pool.run(generation, settings(timeout=2), functools.partial(check, held))
    text = pool.output(1 if held == 0 else 0)
    assert f"rank {held} (host localhost, process " in text and "Its process runs, so the job waits for it" in text
    assert pool.output(2) == "", "one voice is enough"


@pytest.mark.parametrize("held", [0, 1])
def test_a_rank_that_cannot_answer_for_longer_than_the_user_allows(ranks: Ranks, held: int, tmp_path: Path) -> None:
    """Rank 0 could not even end the job itself."""

    def check(held: int, let_go: str) -> str:
        hvd.allreduce(torch.ones(1), name="before")
        if hvd.rank() == held:
            keep_the_interpreter_until_written_to(let_go)
        with pytest.raises(hvd.HorovodInternalError) as error:
            hvd.allreduce(torch.ones(1), name="after")  # on the held rank it may succeed: the others have contributed
            hvd.allreduce(torch.ones(1), name="and after that")
        told = Path(f"{let_go}.told")  # both of the others, or one of them would find the held rank back
        if hvd.rank() == 2:
            wait_for(told)
            Path(let_go).write_text("now")
        elif hvd.rank() != held:
            told.touch()
        return str(error.value)

    let_go = tmp_path / "let_go"
    os.mkfifo(let_go)
    limits = settings(timeout=2, warning=1, end=3)
    texts = ranks(3, framework="torch").run(generation, limits, functools.partial(check, held, str(let_go)))
    others = {text for rank, text in enumerate(texts) if rank != held}
    assert len(others) == 1
    (text,) = others
    assert f"rank {held} (host localhost, process " in text
    assert "longer than 3 seconds" in text


@pytest.fixture(scope="module")
def stopped(pools: Pools) -> Iterator[dict[int, list[str]]]:
    """By stopped rank: the errors of those that wait for it outside of any collective. Both jobs run side by side."""

    def wait(victim: int) -> str:
        from horovod.common import basics
        from horovod.core.errors import HorovodInternalError
        from horovod.core.lifecycle import context
        from horovod.core.submission import collectives

        basics.init()
        collectives.barrier().wait()
        if os.environ["HOROVOD_RANK"] == str(victim):
            signal.raise_signal(signal.SIGSTOP)
        try:
            collectives.barrier().wait(SOON)
        except HorovodInternalError as error:
            return str(error)
        finally:
            context.shutdown()
        return "nothing happened"

    jobs = {}
    try:
        calls = {}
        for victim in (0, 1):
            jobs[victim] = RankPool(3, settings(timeout=6), templates=pools.templates)
            jobs[victim].start(wait, victim, ranks=[victim])
            calls[victim] = jobs[victim].start(wait, victim, ranks=[rank for rank in range(3) if rank != victim])
        found = {victim: call.results(SOON) for victim, call in calls.items()}
    finally:
        for pool in jobs.values():
            pool.close()
    yield found


@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank_outside_of_collectives(stopped: dict[int, list[str]], victim: int) -> None:
    for text in stopped[victim]:
        assert f"rank {victim} (host localhost" in text and "it no longer answers" in text


def test_an_idle_rank_uses_no_processor_time(ranks: Ranks) -> None:
    """Seconds of processor time, of all threads together, while five seconds pass."""

    def idle() -> float:
        hvd.allreduce(torch.ones(1000))
        before = time.process_time()
        time.sleep(5)
        return time.process_time() - before

    used = ranks(3, framework="torch").run(generation, {}, idle)
    assert max(used) < 0.02, used


def test_a_rank_that_waits_uses_no_processor_time(ranks: Ranks) -> None:
    def wait() -> float:
        hvd.allreduce(torch.ones(1000))
        before = time.process_time()
        if hvd.rank() == 1:
            time.sleep(3)
        hvd.allreduce(torch.ones(1000))
        return time.process_time() - before

    used = ranks(2, framework="torch").run(generation, {}, wait)
    assert max(used) < 0.02, used
