"""Process sets that come and go while the job runs, on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from horovod._base import config
from ranks import Death, RankPool
from time_limits import SOON

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


def test_collectives_without_names_on_a_set_that_has_a_removed_ones_number(ranks: Callable[..., RankPool]) -> None:
    """One member has made some on the removed set, another has not."""

    def job() -> list[float]:
        import torch

        import horovod.torch as hvd

        hvd.init()
        totals = []
        for members in ([0, 1], [1, 2], [0, 2]):
            some = hvd.add_process_set(members)
            assert some.process_set_id == 1
            if some.included():
                tensors = [torch.ones(1) + turn for turn in range(3)]
                totals += [hvd.allreduce(tensor, op=hvd.Sum, process_set=some).item() for tensor in tensors]
            hvd.remove_process_set(some)
        hvd.shutdown()
        return totals

    assert ranks(3, DYNAMIC, "torch").run(job) == [[2.0, 4.0, 6.0] * 2] * 3


def test_a_set_that_one_rank_cannot_make_is_an_error_on_all_and_leaves_nothing(ranks: Callable[..., RankPool]) -> None:
    def job(broken: int) -> list[Any]:
        import torch

        import horovod.torch as hvd
        from horovod.core.submission import dynamic_process_sets

        hvd.init()
        assemble = dynamic_process_sets.assemble

        def fail(*arguments: Any) -> Any:
            made = assemble(*arguments)  # the others have no reason to fail
            made.close()
            raise OSError("too many open files")

        seen: list[Any] = []
        if hvd.rank() == broken:
            dynamic_process_sets.assemble = fail
        try:
            hvd.add_process_set([1, 2])
        except RuntimeError as error:
            seen.append(str(error))
        finally:
            dynamic_process_sets.assemble = assemble
        for members in ([1, 2], [0, 2]):
            some = hvd.add_process_set(members)
            seen.append(some.process_set_id)
            if some.included():
                assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=some).item() == 2.0
        hvd.shutdown()
        return seen

    pool = ranks(3, DYNAMIC, "torch")
    pool.run(job, 2)
    for broken in (1, 2):
        with pool.leaves_nothing():
            text = f"The process set [1, 2] could not be added, and nothing has changed: rank {broken}: OSError: "
            assert pool.run(job, broken) == [[text + "too many open files", 1, 2]] * 3


def test_a_rank_that_dies_while_a_set_is_removed_is_named_by_the_others(
    ranks: Callable[..., RankPool], tmp_path: Path
) -> None:
    def job(outsider_is_done: Path) -> str:
        import os
        import time
        from unittest import mock

        import horovod.torch as hvd
        from horovod.core.worker.coordinator import Coordinator

        def die(*_: object) -> None:
            """Rank 0 is about to tell the other members that the set has ended."""
            deadline = time.monotonic() + SOON
            while not outsider_is_done.exists() and time.monotonic() < deadline:
                time.sleep(0.01)  # another process makes the file
            os._exit(3)

        hvd.init()
        some = hvd.add_process_set([0, 1])
        if hvd.rank() == 0:
            mock.patch.object(Coordinator, "stop", die).start()  # this process ends there
        try:
            hvd.remove_process_set(some)
            if hvd.rank() == 2:
                outsider_is_done.touch()
        except hvd.HorovodInternalError as error:
            return str(error)
        finally:
            hvd.shutdown()
        return "removed"

    pool = ranks(3, {**DYNAMIC, "HOROVOD_GLOO_TIMEOUT_SECONDS": "5"}, "torch")
    dead, other, outsider = pool.run(job, tmp_path / "done", dies={0})
    assert dead == Death(3)
    assert outsider == "removed"
    assert other.startswith("Horovod: rank 0 ") and "its process ended without hvd.shutdown()" in other


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
        assert "listed once" in texts[1]
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


def test_adding_a_process_set_must_be_enabled(ranks: Callable[..., RankPool]) -> None:
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


def test_collectives_of_all_members_finish_before_a_set_is_removed(ranks: Callable[..., RankPool]) -> None:
    def job() -> list[float]:
        import torch

        import horovod.torch as hvd

        hvd.init()
        found = []
        for turn in range(5):
            pair = hvd.add_process_set([0, 1])
            handles = []
            if pair.included():
                handles = [
                    hvd.allreduce_async(
                        torch.full((1000,), float(number)), name=f"n{number}", op=hvd.Sum, process_set=pair
                    )
                    for number in range(20)
                ]
            assert hvd.remove_process_set(pair)
            found += [hvd.synchronize(handle)[-1].item() for handle in handles]
            assert hvd.allreduce(torch.ones(1), name=f"turn {turn}", op=hvd.Sum).item() == 3.0
        hvd.shutdown()
        return found

    first, second, outsider = ranks(3, DYNAMIC, "torch").run(job)
    assert first == second == [2.0 * number for number in range(20)] * 5
    assert outsider == []


def test_a_set_whose_members_wait_does_not_hold_up_a_set_of_others(ranks: Callable[..., RankPool]) -> None:
    """Sets without a common rank: one waits for a member that comes only after the other set has done its work."""

    def job() -> list[float]:
        import torch

        import horovod.torch as hvd

        hvd.init()
        blocked, busy = hvd.add_process_set(range(2)), hvd.add_process_set(range(2, 4))
        results = []
        if hvd.rank() == 0:
            handle = hvd.allreduce_async(torch.ones(1), name="x", op=hvd.Sum, process_set=blocked)
        if busy.included():
            results = [hvd.allreduce(torch.ones(1), name="x", op=hvd.Sum, process_set=busy).item() for _ in range(50)]
        if hvd.rank() == 0:
            assert not hvd.poll(handle)
        hvd.barrier()
        if hvd.rank() == 1:
            results = [hvd.allreduce(torch.ones(1), name="x", op=hvd.Sum, process_set=blocked).item()]
        if hvd.rank() == 0:
            results = [hvd.synchronize(handle).item()]
        hvd.shutdown()
        return results

    assert ranks(4, DYNAMIC, "torch").run(job) == [[2.0], [2.0], [2.0] * 50, [2.0] * 50]


def test_what_adding_and_removing_return(ranks: Callable[..., RankPool]) -> None:
    def job() -> None:
        import horovod.torch as hvd

        hvd.init()
        mine = hvd.ProcessSet(range(1, 3))
        assert mine.included() == (hvd.rank() > 0)  # known before it is registered
        assert mine.size() is None and mine.rank() is None
        assert hvd.add_process_set(mine) is mine
        other = hvd.add_process_set(iter([0]))
        assert (mine.ranks, mine.process_set_id, mine.size()) == ([1, 2], 1, 2)
        assert (other.ranks, other.process_set_id, other.size()) == ([0], 2, 1)
        again = hvd.ProcessSet([2, 1])
        again.process_set_id = mine.process_set_id  # another object of the same set
        assert hvd.remove_process_set(mine) is True
        assert hvd.remove_process_set(again) is False and again.process_set_id is None
        assert hvd.remove_process_set(hvd.ProcessSet([1])) is False
        assert hvd.remove_process_set(hvd.global_process_set) is False and hvd.global_process_set.process_set_id == 0
        assert hvd.remove_process_set(other) is True
        numbers = [hvd.add_process_set(ranks).process_set_id for ranks in ([0, 1], [0, 2], [1, 2])]
        assert numbers == [1, 2, 3]  # the longest freed first, then new ones
        hvd.shutdown()
        try:
            mine.included()
        except ValueError as error:
            assert str(error) == "Horovod has not been initialized; use hvd.init()."

    ranks(3, DYNAMIC, "torch").run(job)


def test_ranks_that_add_while_others_remove(ranks: Callable[..., RankPool]) -> None:
    def job() -> str:
        import torch

        import horovod.torch as hvd

        hvd.init()
        pair = hvd.add_process_set([0, 1])
        try:
            if hvd.rank() == 1:
                hvd.add_process_set([1, 2])
            else:
                hvd.remove_process_set(pair)
        except ValueError as error:
            text = str(error)
        if pair.included():
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=pair).item() == 2.0
        assert hvd.remove_process_set(pair)
        hvd.shutdown()
        return text

    adds, removes = "rank 1 adds [1, 2]", "removes set 1"
    for text in ranks(3, DYNAMIC, "torch").run(job):
        assert adds in text and removes in text


def test_a_rank_may_leave_while_others_make_a_set_without_it(ranks: Callable[..., RankPool]) -> None:
    def job() -> float | None:
        import time
        from unittest import mock

        import torch

        import horovod.torch as hvd
        from horovod.core.lifecycle.context import current
        from horovod.core.submission import dynamic_process_sets

        def late(*arguments: Any) -> None:
            deadline = time.monotonic() + SOON
            while current().stopped is None:  # until rank 1 has left
                assert time.monotonic() < deadline
                time.sleep(0.01)
            start_set(*arguments)

        start_set = dynamic_process_sets.start_set
        hvd.init()
        with mock.patch.object(dynamic_process_sets, "start_set", late):
            pair = hvd.add_process_set([0, 2])
        try:
            if pair.included():
                return hvd.allreduce(torch.tensor([1.0 + hvd.rank()]), op=hvd.Sum, process_set=pair).item()
            return None
        finally:
            hvd.shutdown()

    assert ranks(3, DYNAMIC, "torch").run(job) == [4.0, None, 4.0]


def test_sets_in_one_life_after_another(ranks: Callable[..., RankPool]) -> None:
    """The same objects are registered anew; those of the life before are not known any more."""

    def job() -> None:
        import torch

        import horovod.torch as hvd

        first, second = hvd.ProcessSet([0, 1]), hvd.ProcessSet([1, 2])
        for order in ([first, second], [second, first], [second]):
            hvd.init(process_sets=order)
            assert [each.process_set_id for each in order] == [1, 2][: len(order)]
            for each in order:
                if each.included():
                    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=each).item() == 2.0
            later = hvd.add_process_set([0, 2])
            assert later.process_set_id == len(order) + 1
            hvd.shutdown()
            try:
                first.size()
            except ValueError as error:
                assert str(error) == "Horovod has not been initialized; use hvd.init()."
        hvd.init()
        try:
            first.size()
        except ValueError as error:
            assert "does not exist, or has not been registered" in str(error)
        hvd.shutdown()

    pool = ranks(3, DYNAMIC, "torch")
    pool.run(job)
    with pool.leaves_nothing():
        pool.run(job)


def test_a_duplicate_is_left_out_and_the_others_are_there(ranks: Callable[..., RankPool]) -> None:
    def job() -> str:
        import torch

        import horovod.torch as hvd

        sets = [hvd.ProcessSet([0, 1]), hvd.ProcessSet([1]), hvd.ProcessSet([1, 0]), hvd.ProcessSet(range(3))]
        try:
            hvd.init(process_sets=sets)
        except ValueError as error:
            text = str(error)
        assert hvd.is_initialized()
        assert [each.process_set_id for each in sets] == [1, 2, None, None]
        hvd.init(process_sets=sets[:2])  # a valid list, looked up
        if sets[0].included():
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=sets[0]).item() == 2.0
        hvd.shutdown()
        return text

    for text in ranks(3, DYNAMIC, "torch").run(job):
        assert text.startswith(
            "Horovod could not be initialized because process_sets entry number 2 is a duplicate: ProcessSet("
        )
