"""Handles of asynchronous calls, names, barrier and join: when things are done, and what cannot be asked for."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import horovod.torch as hvd
from horovod.core.errors import HorovodInternalError
from time_limits import SOON


def test_poll_tells_when_a_result_is_there_and_synchronize_clears_the_handle(job: Any) -> None:
    def check() -> None:
        if hvd.rank() == 1:
            time.sleep(0.2)
        handle = hvd.allreduce_async(torch.ones(2), op=hvd.Sum)
        assert isinstance(handle, int) and not isinstance(handle, bool)
        if hvd.rank() == 0:
            assert hvd.poll(handle) is False  # the other has not submitted it
        deadline = time.monotonic() + SOON
        while not hvd.poll(handle) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert hvd.poll(handle) is True
        assert hvd.synchronize(handle).tolist() == [2.0, 2.0]
        assert hvd.synchronize(handle) is None
        with pytest.raises(ValueError, match="not created or has been cleared"):
            hvd.poll(handle)

    job(2, check)


def test_a_wait_that_a_signal_interrupts_can_be_repeated(job: Any) -> None:
    """Small collectives run on the very thread in which a handler raises; wherever it strikes, nothing is lost or half done."""

    def check() -> int:
        import random
        import signal

        class Rang(Exception):
            pass

        armed = False

        def ring(*_: Any) -> None:
            nonlocal armed
            if armed:
                armed = False
                raise Rang

        before = signal.signal(signal.SIGALRM, ring)
        interrupted = 0
        for turn in range(400):
            tensor = torch.full((50,), float(turn + hvd.rank()))
            handle = hvd.allreduce_async_(tensor, name="x", op=hvd.Sum)
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 5e-4))
                hvd.synchronize(handle)
                armed = False
            except Rang:
                interrupted += 1
                hvd.synchronize(handle)
            armed = False
            assert (tensor == sum(range(turn, turn + hvd.size()))).all(), turn
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        return interrupted

    assert all(job(2, check))


def test_unknown_handles_are_refused(job: Any) -> None:
    def check() -> None:
        known = hvd.allreduce_async(torch.ones(1))
        for wrong in (known + 1000, 0, -1):
            with pytest.raises(ValueError, match="not created"):
                hvd.poll(wrong)
            with pytest.raises(ValueError, match="not created"):
                hvd.synchronize(wrong)
        for wrong in (None, "1", 1.5):
            with pytest.raises(ValueError):
                hvd.synchronize(wrong)
        hvd.synchronize(known)

    job(2, check)


def test_handles_are_forgotten_at_shutdown(job: Any) -> None:
    def check() -> int:
        handle = hvd.allreduce_async(torch.ones(1))
        hvd.barrier()  # nobody leaves before all have submitted it
        return handle

    def later(before: list[int]) -> None:
        old = before[hvd.rank()]  # ranks have counted what they did, which earlier tests made different
        with pytest.raises(ValueError):
            hvd.poll(old)
        assert hvd.synchronize(old) is None
        assert hvd.synchronize(hvd.allreduce_async(torch.ones(1))).item() == 1.0

    job(2, later, job(2, check))


def test_results_can_be_fetched_in_any_order_and_from_any_thread(job: Any) -> None:
    def check() -> None:
        from concurrent.futures import ThreadPoolExecutor

        handles = [hvd.allreduce_async(torch.full((3,), float(i)), op=hvd.Sum) for i in range(20)]
        with ThreadPoolExecutor(4) as threads:
            found = list(threads.map(hvd.synchronize, reversed(handles)))
        assert [result[0].item() for result in reversed(found)] == [2.0 * i for i in range(20)]

    job(2, check)


def test_threads_take_turns_at_a_barrier(job: Any) -> None:
    def check() -> None:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(3) as threads:
            assert list(threads.map(lambda _: hvd.barrier(), range(60))) == [None] * 60

    job(2, check)


def test_a_failed_handle_is_done(job: Any) -> None:
    def check() -> None:
        handle = hvd.allreduce_async(torch.ones(1 + hvd.rank()), name="unequal")
        with pytest.raises(HorovodInternalError, match="Mismatched"):
            hvd.synchronize(handle)
        assert hvd.synchronize(handle) is None
        assert hvd.allreduce(torch.ones(1), name="unequal").item() == 1.0

    job(2, check)


def test_a_name_belongs_to_one_operation_at_a_time(job: Any) -> None:
    def check() -> None:
        source = torch.ones(2)
        if hvd.rank() == 0:
            first = hvd.allreduce_async(source, name="x", op=hvd.Sum)
            with pytest.raises(ValueError, match="same name as another tensor"):
                hvd.allreduce_async(source, name="x")
            with pytest.raises(ValueError, match="same name as another tensor"):
                hvd.allreduce_async(source, name="x", op=hvd.Max)
            # other operations have names of their own
            others = [hvd.allgather_async(source, name="x"), hvd.broadcast_async(source, 0, name="x")]
            group = hvd.grouped_allreduce_async([source], name="x", op=hvd.Sum)
        else:
            time.sleep(0.3)
            others = [hvd.allgather_async(source, name="x"), hvd.broadcast_async(source, 0, name="x")]
            first = hvd.allreduce_async(source, name="x", op=hvd.Sum)
            group = hvd.grouped_allreduce_async([source], name="x", op=hvd.Sum)
        assert hvd.synchronize(first).tolist() == [2.0, 2.0]
        assert [hvd.synchronize(other).numel() for other in others] == [4, 2]
        assert hvd.synchronize(group)[0].tolist() == [2.0, 2.0]
        assert hvd.allreduce(source, name="x").tolist() == [1.0, 1.0]  # free again
        assert hvd.allreduce(source, name="").tolist() == [1.0, 1.0]  # no name at all

    job(2, check)


def test_more_names_than_are_remembered_give_right_results(job: Any) -> None:
    def check() -> None:
        for turn in range(3):
            handles = [hvd.allreduce_async(torch.full((2,), float(n)), name=f"n{n}", op=hvd.Sum) for n in range(40)]
            assert [hvd.synchronize(h)[0].item() for h in handles] == [2.0 * n for n in range(40)], turn

    job(2, check, env={"HOROVOD_CACHE_CAPACITY": "8"})
    job(2, check, env={"HOROVOD_CACHE_CAPACITY": "0"})


def test_a_name_whose_tensor_changes_type_and_shape_gives_right_results(job: Any) -> None:
    def check() -> None:
        for shape, dtype in [
            ((3,), torch.float32),
            ((3,), torch.float64),
            ((2, 2), torch.float64),
            ((3,), torch.float32),
        ]:
            for _ in range(3):
                found = hvd.allreduce(torch.ones(shape, dtype=dtype), name="changes", op=hvd.Sum)
                assert found.dtype == dtype and found.shape == shape and bool((found == 2).all())

    job(2, check)


def test_collectives_complete_with_a_gathering_window(job: Any) -> None:
    def check() -> None:
        handles = [hvd.allreduce_async(torch.ones(4), op=hvd.Sum) for _ in range(10)]
        assert all(hvd.synchronize(handle).tolist() == [2.0] * 4 for handle in handles)
        assert hvd.allreduce(torch.ones(1)).item() == 1.0

    job(2, check, env={"HOROVOD_CYCLE_TIME": "5"})


def test_a_barrier_returns_when_the_last_rank_has_come(job: Any) -> None:
    def check() -> tuple[float, float]:
        if hvd.rank() == 1:
            time.sleep(0.3)
        before = time.monotonic()
        assert hvd.barrier() is None
        return before, time.monotonic()

    times = job(3, check)
    assert max(before for before, _ in times) <= min(after for _, after in times)


def test_ranks_that_have_joined_add_zeros_and_all_learn_who_joined_last(job: Any) -> None:
    def check() -> int:
        rank = hvd.rank()
        for step in range(rank + 1):  # rank 0 has one batch, rank 2 has three
            found = hvd.allreduce(torch.tensor([3.0]), name=f"step{step}")
            assert found.item() == 3.0 * (3 - step) / 3  # who has joined adds zeros, and counts
            pair = hvd.grouped_allreduce([torch.ones(2), torch.ones(1).int()], name=f"pair{step}", op=hvd.Sum)
            assert [each[0].item() for each in pair] == [3 - step, 3 - step]
        last = hvd.join()
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 3.0  # and life goes on
        return last

    assert job(3, check) == [2, 2, 2]


def test_collectives_that_need_all_ranks_fail_after_a_join(job: Any) -> None:
    def check() -> int:
        if hvd.rank() == 0:
            calls = [
                lambda: hvd.broadcast(torch.ones(1), 1),
                lambda: hvd.alltoall(torch.ones(2)),
                lambda: hvd.reducescatter(torch.ones(2)),
            ]
            for call in calls:
                with pytest.raises(HorovodInternalError, match="not supported with Join"):
                    call()
        return hvd.join()

    job(2, check)


def test_join_in_a_job_of_one_returns_rank_0(job: Any) -> None:
    assert job(1, lambda: hvd.join()) == [0]


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_may_submit_at_different_times_and_in_different_orders(job: Any, size: int) -> None:
    """The same collectives everywhere; who waits at once, asks, comes late or waits for several together differs by rank."""

    def check() -> None:
        import random

        program, rhythm = random.Random(7), random.Random(hvd.rank())
        size, total = hvd.size(), sum(range(hvd.size()))
        open_handles: list[tuple[int, float]] = []

        def collect() -> None:
            while open_handles:
                number, value = open_handles.pop()
                assert hvd.synchronize(number)[0] == value

        for turn in range(600):
            kind = program.choice(["named", "unnamed", "named", "broadcast", "barrier", "gather", "large"])
            if rhythm.random() < 0.02:
                time.sleep(rhythm.random() * 0.015)  # shorter or longer than a rank waits for a late one by itself
            tensor = torch.full((program.choice([1, 7, 300]),), float(turn + hvd.rank()))
            if kind == "barrier":
                hvd.barrier()
                continue
            if kind == "broadcast":
                root = program.randrange(size)
                handle, expected = hvd.broadcast_async(tensor, root, name=f"b{turn % 5}.{turn}"), float(turn + root)
            elif kind == "gather":
                handle, expected = hvd.allgather_async(tensor, name=f"g{turn}"), float(turn)
            elif kind == "large":
                handle = hvd.allreduce_async(tensor.repeat(9000), name=f"l{turn}", op=hvd.Sum)
                expected = turn * size + total
            else:
                name = f"n{turn % 3}" if kind == "named" else None
                if name is not None:
                    collect()  # of the same name there is one at a time
                handle = hvd.allreduce_async(tensor, name=name, op=hvd.Sum)
                expected = turn * size + total
            open_handles.append((handle, expected))
            patience = rhythm.random()
            if patience < 0.1:
                hvd.poll(handle)
            elif patience < 0.8:
                collect()
        collect()

    job(size, check)
