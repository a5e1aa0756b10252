"""Process sets that come and go while the job runs, on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from horovod.core import config
from ranks import RankPool

DYNAMIC = {config.DYNAMIC_PROCESS_SETS: "1"}


def test_a_set_is_added_used_removed_and_its_number_used_again(ranks: Callable[..., RankPool]) -> None:
    def job() -> list[Any]:
        import torch

        import horovod.torch as hvd

        hvd.init()
        seen = []
        for _ in range(3):
            pair = hvd.add_process_set([2, 1])
            alone = hvd.add_process_set(hvd.ProcessSet([0]))
            seen.append((pair.process_set_id, alone.process_set_id, pair.size(), pair.included()))
            if pair.included():
                total = hvd.allreduce(torch.tensor([float(hvd.rank())]), op=hvd.Sum, process_set=pair)
                seen.append((pair.rank(), total.item()))
                seen.append(hvd.broadcast_object(hvd.rank(), root_rank=2, process_set=pair))
            assert hvd.remove_process_set(pair)
            assert not hvd.remove_process_set(pair)
            assert hvd.remove_process_set(alone)
            assert pair.process_set_id is None
        assert not hvd.remove_process_set(hvd.global_process_set)
        hvd.shutdown()
        return seen

    pool = ranks(3, DYNAMIC, "torch")
    pool.run(job)
    with pool.leaves_nothing():
        outsider, first, second = pool.run(job)
    assert outsider == [(1, 2, 2, False)] * 3
    assert first == [(1, 2, 2, True), (0, 3.0), 2] * 3
    assert second == [(1, 2, 2, True), (1, 3.0), 2] * 3


def test_sets_run_side_by_side(ranks: Callable[..., RankPool]) -> None:
    """A set whose members wait for one another does not hold up another set of the same rank."""

    def job() -> list[float]:
        import torch

        import horovod.torch as hvd

        hvd.init()
        left, right = hvd.add_process_set([0, 1]), hvd.add_process_set([1, 2])
        results = []
        if hvd.rank() == 1:
            waiting = hvd.allreduce_async(torch.ones(1), name="late", op=hvd.Sum, process_set=left)
            results.append(hvd.allreduce(torch.ones(1), name="now", op=hvd.Sum, process_set=right).item())
            assert not hvd.poll(waiting)
            hvd.barrier()
            results.append(hvd.synchronize(waiting).item())
        else:
            if hvd.rank() == 2:
                results.append(hvd.allreduce(torch.ones(1), name="now", op=hvd.Sum, process_set=right).item())
            hvd.barrier()
            if hvd.rank() == 0:
                results.append(hvd.allreduce(torch.ones(1), name="late", op=hvd.Sum, process_set=left).item())
        hvd.barrier()
        hvd.shutdown()
        return results

    assert ranks(3, DYNAMIC, "torch").run(job) == [[2.0], [2.0, 2.0], [2.0]]


def test_mistakes_are_errors_on_every_rank_and_the_job_goes_on(ranks: Callable[..., RankPool]) -> None:
    def job() -> list[str]:
        import torch

        import horovod.torch as hvd

        hvd.init()
        pair = hvd.add_process_set([0, 1])
        texts = []
        for wanted in ([0, hvd.rank()], [0, 0], [0, 7], [1, 0], [0, 1, 2], []):
            try:
                hvd.add_process_set(wanted)
            except ValueError as error:
                texts.append(str(error))
        try:
            hvd.allreduce(torch.ones(1), process_set=hvd.ProcessSet([0, 1]))
        except ValueError as error:
            texts.append(str(error))
        if hvd.rank() == 2:
            try:
                hvd.allreduce(torch.ones(1), process_set=pair)
            except ValueError as error:
                texts.append(str(error))
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 3.0
        hvd.shutdown()
        return texts

    for rank, texts in enumerate(ranks(3, DYNAMIC, "torch").run(job)):
        assert "do not add the same process set" in texts[0]
        assert "just once" in texts[1]
        assert "rank 7 is not one of the job's 3" in texts[2]
        assert "Attempted to add a duplicate process set" in texts[3]
        assert "Attempted to add a duplicate process set" in texts[4]
        assert "invalid process set []" in texts[5]
        assert texts[6] == "Allreduce: Process set provided does not exist, or has not been registered."
        if rank == 2:
            assert texts[7] == "Allreduce: Rank 2 is not a member of the provided process set."


def test_what_is_pending_on_a_removed_set_fails(ranks: Callable[..., RankPool]) -> None:
    def job() -> str:
        import torch

        import horovod.torch as hvd

        hvd.init()
        pair = hvd.add_process_set([0, 1])
        handle = hvd.allreduce_async(torch.ones(1), name="lonely", process_set=pair) if hvd.rank() == 0 else None
        hvd.remove_process_set(pair)
        text = ""
        if handle is not None:
            try:
                hvd.synchronize(handle)
            except hvd.HorovodInternalError as error:
                text = str(error)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 3.0
        hvd.shutdown()
        return text

    text, _, _ = ranks(3, DYNAMIC, "torch").run(job)
    assert "the process set was removed" in text


def test_it_must_be_allowed(ranks: Callable[..., RankPool]) -> None:
    def job() -> list[str]:
        import os

        import horovod.torch as hvd

        texts = []
        for action in (lambda: hvd.add_process_set([0]), lambda: hvd.remove_process_set(hvd.ProcessSet([0]))):
            try:
                action()
            except ValueError as error:
                texts.append(str(error))
        hvd.init()
        for action in (lambda: hvd.add_process_set([0]), lambda: hvd.remove_process_set(hvd.ProcessSet([0]))):
            try:
                action()
            except ValueError as error:
                texts.append(str(error))
        hvd.shutdown()
        hvd.init(process_sets="dynamic")
        texts.append(str(hvd.add_process_set([0]).process_set_id))
        hvd.shutdown()
        del os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"]
        return texts

    for texts in ranks(2, None, "torch").run(job):
        assert texts[0] == texts[1] == "Horovod has not been initialized; use hvd.init()."
        assert texts[2].startswith("Set HOROVOD_DYNAMIC_PROCESS_SETS=1 to allow adding process sets")
        assert texts[3].startswith("Set HOROVOD_DYNAMIC_PROCESS_SETS=1 to allow removing process sets")
        assert texts[4] == "1"
