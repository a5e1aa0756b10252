"""``hvd.init(comm=[...])``: some of the launched ranks are a job, others another, on real ranks."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import numpy as np

from ranks import Death, RankPool
from time_limits import SOON

Ranks = Callable[..., RankPool]


def total(name: str, value: float) -> float:
    """The sum of ``value`` over the ranks of the job."""
    from horovod.comm.datatypes import DataType
    from horovod.comm.reduction import ReduceOp
    from horovod.core.requests.tensor import Tensor
    from horovod.core.submission import collectives

    tensor = Tensor(np.array([value]), DataType.FLOAT64, (1,))
    collectives.allreduce("test", name, [tensor], [tensor], ReduceOp.SUM).wait(SOON)
    return float(tensor.array[0])


def life(comm: list[int] | None) -> tuple[list[int], float]:
    """One job, from beginning to end: rank, size, local rank, local size, cross rank; the sum of the launched ranks in it."""
    import os

    from horovod.common import basics

    basics.init(comm)
    numbers = [basics.rank(), basics.size(), basics.local_rank(), basics.local_size(), basics.cross_rank()]
    result = total("x", float(os.environ["HOROVOD_RANK"]))
    basics.shutdown()
    return numbers, result


def test_two_jobs_side_by_side_then_all_then_others(ranks: Ranks) -> None:
    def lives(lists: list[list[int]]) -> list[Any]:
        import os

        own = next(ranks for ranks in lists if int(os.environ["HOROVOD_RANK"]) in ranks)
        return [life(own), life(None), life([3, 1, 0, 2]), life(own)]

    pool = ranks(4)
    pool.run(life, None)
    with pool.leaves_nothing():
        found = pool.run(lives, [[2, 0], [1], [3]]), pool.run(lives, [[2, 0], [1, 3]])
    part, everybody, reordered, again = zip(*found[1], strict=True)
    assert (
        part
        == again
        == (([1, 2, 1, 2, 0], 2.0), ([0, 2, 0, 2, 0], 4.0), ([0, 2, 0, 2, 0], 2.0), ([1, 2, 1, 2, 0], 4.0))
    )
    assert everybody == tuple(([rank, 4, rank, 4, 0], 6.0) for rank in range(4))
    assert reordered == tuple(([rank, 4, rank, 4, 0], 6.0) for rank in (2, 1, 3, 0))
    alone = [each[0] for each in found[0]]
    assert alone[1] == ([0, 1, 0, 1, 0], 1.0) and alone[3] == ([0, 1, 0, 1, 0], 3.0)


def test_hosts_decide_what_is_local(ranks: Ranks) -> None:
    """Ranks 0 and 1 say that they are on one host, 2 and 3 on another; the job has one of the first and both of the others."""

    def job() -> list[int]:
        import os

        from horovod.common import basics

        rank = int(os.environ["HOROVOD_RANK"])
        before = os.environ["HOROVOD_HOSTNAME"]
        os.environ["HOROVOD_HOSTNAME"] = "left" if rank < 2 else "right"
        try:
            if rank == 0:
                return []
            basics.init([3, 1, 2])
            numbers = [basics.local_rank(), basics.local_size(), basics.cross_rank(), basics.cross_size()]
            assert not basics.is_homogeneous()
            assert total("x", rank) == 6.0
            basics.shutdown()
            return numbers
        finally:
            os.environ["HOROVOD_HOSTNAME"] = before

    assert ranks(4).run(job) == [[], [0, 1, 1, 2], [1, 2, 0, 1], [0, 2, 0, 2]]


def test_a_rank_that_is_elsewhere_is_told_when_the_time_is_over(ranks: Ranks) -> None:
    def job(lists: list[list[int]]) -> str:
        import os

        from horovod.common import basics

        rank = int(os.environ["HOROVOD_RANK"])
        os.environ["HOROVOD_START_TIMEOUT"] = str(1 + rank)
        try:
            if lists[rank]:
                basics.init(lists[rank])
        except TimeoutError as error:
            return str(error)
        finally:
            del os.environ["HOROVOD_START_TIMEOUT"]
        return ""

    texts = ranks(4).run(job, [[0, 1], [1, 2], [], []])
    assert texts[0].startswith("rank 1 of 2 did not call hvd.init(comm=[0, 1]) within 1 seconds of the first rank.")
    assert "Instead, rank 1 called hvd.init(comm=[1, 2])." in texts[0]
    assert texts[1].startswith("rank 2 of 2 did not call hvd.init(comm=[1, 2]) within 2 seconds")


def test_a_lost_rank_is_named_by_both_numbers_and_other_jobs_go_on(ranks: Ranks) -> None:
    def job() -> Any:
        import os
        import signal

        from horovod.common import basics
        from horovod.core.errors import HorovodInternalError

        rank = int(os.environ["HOROVOD_RANK"])
        basics.init([0, 1] if rank < 2 else [2, 3])
        try:
            total("together", 1)  # rank 2 may hear of the loss before it has looked at this result
            if rank == 3:
                signal.raise_signal(signal.SIGKILL)
            return [total(f"step {step}", 1) for step in range(100)][-1]
        except HorovodInternalError as error:
            return str(error)
        finally:
            basics.shutdown()

    results = ranks(4).run(job, dies={3})
    assert results[:2] == [2.0, 2.0]
    assert results[2].startswith("Horovod: rank 1 (host localhost, process ")
    assert ", rank 3 of the launched job) failed: its process ended without hvd.shutdown()" in results[2]
    assert results[3] == Death(-signal.SIGKILL)


def test_a_second_init_with_other_ranks_changes_nothing_and_says_so(ranks: Ranks) -> None:
    def job() -> list[int]:
        from horovod.common import basics

        basics.init()
        basics.init([basics.rank()])
        sizes = [basics.size(), int(total("x", 1))]
        basics.shutdown()
        return sizes

    pool = ranks(2)
    assert pool.run(job) == [[2, 2], [2, 2]]
    for rank in range(2):
        assert "Horovod already runs with ranks other than those of comm" in pool.output(rank)


def test_mpi4py_is_not_imported_unless_the_script_does(ranks: Ranks) -> None:
    def job() -> list[str]:
        import sys

        from horovod.common import basics

        basics.init([1, 0])
        total("x", 1)
        basics.shutdown()
        return [name for name in sys.modules if name.startswith("mpi4py")]

    assert ranks(2).run(job) == [[], []]
