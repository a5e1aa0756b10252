"""Calls that cannot work: an error at once on every rank, that says who did what in which line; then life goes on."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import horovod.torch as hvd
from horovod.core.errors import HorovodInternalError, MismatchError


def line() -> int:
    """The line of the call of this function."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno


def odd(common: Any, different: Any) -> Any:
    """What rank 2 does differently."""
    return different if hvd.rank() == 2 else common


# What each rank calls, and what the error must say. The first view is that of ranks 0 and 1, the second that of rank 2.
MISMATCHES: dict[str, tuple[Callable[[], int], list[str]]] = {
    "shape": (
        lambda: hvd.allreduce_async(torch.ones(odd((2, 3), (3, 2))), name="x"),
        [
            "Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape [2, 3], "
            "but another rank sent a tensor of shape [3, 2].",
            "'allreduce.x'",
            "ranks 0-1: allreduce(Average) float32 [2, 3]",
            "rank 2: allreduce(Average) float32 [3, 2]",
        ],
    ),
    "number of dimensions": (
        lambda: hvd.allreduce_async(torch.ones(odd((), (1,))), name="x"),
        ["One rank sent a tensor of shape [], but another rank sent a tensor of shape [1]."],
    ),
    "data type": (
        lambda: hvd.allreduce_async(torch.ones(2, dtype=odd(torch.float32, torch.bfloat16)), name="x"),
        [
            "Mismatched data types: One rank had type float32, but another rank had type bfloat16.",
            "ranks 0-1: allreduce(Average) float32 [2]",
            "rank 2: allreduce(Average) bfloat16 [2]",
        ],
    ),
    "reduction": (
        lambda: hvd.allreduce_async(torch.ones(2), name="x", op=odd(hvd.Sum, hvd.Max)),
        ["Mismatched reduction operation", "ranks 0-1: allreduce(Sum)", "rank 2: allreduce(Max)"],
    ),
    "factors": (
        lambda: hvd.allreduce_async(torch.ones(2), name="x", prescale_factor=odd(1.0, 0.5)),
        ["Mismatched prescale and/or postscale factors:"],
    ),
    "group size": (
        lambda: hvd.grouped_allreduce_async([torch.ones(2)] * odd(2, 3), name="x"),
        ["Mismatched group sizes: One rank sent 2 tensors, but another rank sent 3 tensors.", "'grouped_allreduce.x'"],
    ),
    "member of a group": (
        lambda: hvd.grouped_allreduce_async([torch.ones(2), torch.ones(odd(4, 5))], name="x"),
        ["shape [4], but another rank sent a tensor of shape [5].", "'grouped_allreduce.x_2of2'"],
    ),
    "root": (
        lambda: hvd.broadcast_async(torch.ones(2), odd(0, 1), name="x"),
        [
            "Mismatched BROADCAST root ranks: One rank specified root rank 0, but another rank specified root rank 1.",
            "ranks 0-1: broadcast float32 [2] from root 0",
            "rank 2: broadcast float32 [2] from root 1",
        ],
    ),
    "shape of a broadcast": (
        lambda: hvd.broadcast_async(torch.ones(odd(2, 3)), 0, name="x"),
        ["Mismatched BROADCAST tensor shapes", "[2]", "[3]"],
    ),
    "columns of an allgather": (
        lambda: hvd.allgather_async(torch.ones(2, odd(3, 4)), name="x"),
        [
            "Mismatched ALLGATHER tensor shapes: One rank sent a tensor with dimension 1 equal to 3, "
            "but another rank sent a tensor with dimension 1 equal to 4."
        ],
    ),
    "dimensions of an allgather": (
        lambda: hvd.allgather_async(torch.ones(odd((2, 3), (2, 3, 1))), name="x"),
        ["One rank sent a tensor of rank 2, but another rank sent a tensor of rank 3."],
    ),
    "columns of an alltoall": (
        lambda: hvd.alltoall_async(torch.ones(3, odd(1, 2)), name="x"),
        ["Mismatched ALLTOALL tensor shapes", "dimension 1 equal to 1", "dimension 1 equal to 2"],
    ),
    "rows of a reducescatter": (
        lambda: hvd.reducescatter_async(torch.ones(odd(3, 4)), name="x"),
        ["Mismatched REDUCESCATTER tensor shapes", "[3]", "[4]"],
    ),
    "type of an allgather": (
        lambda: hvd.allgather_async(torch.ones(1, dtype=odd(torch.int8, torch.uint8)), name="x"),
        ["Mismatched data types: One rank had type int8, but another rank had type uint8."],
    ),
}


@pytest.mark.parametrize("kind", MISMATCHES)
def test_ranks_that_disagree_get_an_error_that_names_them(job: Any, kind: str) -> None:
    call, wanted = MISMATCHES[kind]

    def check() -> str:
        for _ in range(2):  # and it fails the second time too
            with pytest.raises(MismatchError) as error:
                hvd.synchronize(call())
        assert error.value.ranks == (0, 1, 2) and error.value.tensor in str(error.value)
        assert all(__file__ in error.value.call_sites[rank] for rank in range(3)), error.value.call_sites
        assert hvd.allreduce(torch.ones(2), name="x", op=hvd.Sum).tolist() == [3.0, 3.0]
        return str(error.value)

    texts = job(3, check)
    assert len(set(texts)) == 1
    for part in wanted:
        assert part in texts[0], texts[0]
    source, start = inspect.getsourcelines(call)
    lines = {f"{__file__}:{number}" for number in range(start, start + len(source))}
    assert any(text in texts[0] for text in lines), texts[0]


def test_a_disagreement_shows_the_line_of_each_rank(job: Any) -> None:
    def check() -> tuple[str, int]:
        if hvd.rank() == 0:
            handle, where = hvd.allreduce_async(torch.ones(2), name="x"), line()
        else:
            handle, where = hvd.allreduce_async(torch.ones(3), name="x"), line()
        with pytest.raises(HorovodInternalError) as error:
            hvd.synchronize(handle)
        return str(error.value), where

    (text, first), (same, second) = job(2, check)
    assert text == same and first != second
    assert f"rank 0: allreduce(Average) float32 [2] at {__file__}:{first}" in text
    assert f"rank 1: allreduce(Average) float32 [3] at {__file__}:{second}" in text


def test_one_name_for_two_operations_is_an_error(job: Any) -> None:
    """Names carry their operation, so two operations of one name are two collectives; a group of one is a group."""

    def check() -> None:
        x = torch.ones(2)
        handles = [hvd.allreduce_async(x, name="x", op=hvd.Sum), hvd.allgather_async(x, name="x")]
        for handle in handles if hvd.rank() else reversed(handles):
            assert hvd.synchronize(handle).sum().item() == 4.0

    job(2, check)


def test_of_many_operations_only_the_one_that_ranks_disagree_on_fails(job: Any) -> None:
    """The one that is wrong fails; those beside it do not."""

    def check() -> None:
        handles = [
            hvd.allreduce_async(torch.ones(1 + (n == 7 and hvd.rank())), name=f"n{n}", op=hvd.Sum) for n in range(20)
        ]
        for n, handle in enumerate(handles):
            if n == 7:
                with pytest.raises(HorovodInternalError, match=r"allreduce\.n7"):
                    hvd.synchronize(handle)
            else:
                assert hvd.synchronize(handle).tolist() == [2.0]

    job(2, check)


def test_rows_of_a_scalar_are_refused_in_a_job_of_one_too(job: Any) -> None:
    def check() -> None:
        for call in (hvd.allgather, hvd.alltoall, lambda t: hvd.grouped_allgather([torch.ones(1), t])):
            with pytest.raises((HorovodInternalError, ValueError), match=r"rank-zero tensor|scalar"):
                call(torch.tensor(1.0))
        assert hvd.allreduce(torch.ones(1)).item() == 1.0

    job(1, check)


def test_rows_of_a_scalar_are_refused_in_a_set_of_one_too(job: Any) -> None:
    def check(sets: Any) -> None:
        if hvd.rank() == 1:
            with pytest.raises((HorovodInternalError, ValueError), match=r"rank-zero tensor|scalar"):
                hvd.allgather(torch.tensor(1.0), process_set=sets[0])
        assert hvd.allreduce(torch.ones(1)).item() == 1.0

    job(2, check, sets=[[1]])


def test_roots_that_are_not_ranks_are_refused(job: Any) -> None:
    def check() -> None:
        for root in (-1, 2, 100):
            for call in (hvd.broadcast, hvd.broadcast_, hvd.broadcast_async, hvd.broadcast_async_):
                with pytest.raises(ValueError, match=f"invalid root rank {root}"):
                    call(torch.ones(1), root)
            with pytest.raises(ValueError, match=f"invalid root rank {root}"):
                hvd.broadcast_object("x", root)
        assert hvd.broadcast(torch.full((1,), float(hvd.rank())), 1).item() == 1.0

    job(2, check)


def test_splits_that_do_not_fit_are_refused(job: Any) -> None:
    def check() -> None:
        x = torch.arange(5.0)
        wrong: list[tuple[str, Any]] = [
            ("not an even multiple of the number of workers", None),
            ("not an even multiple of the number of workers", []),
            ("Number of entries in splits does not equal number of workers", [5]),
            ("Number of entries in splits does not equal number of workers", [1, 1, 1]),
            ("Sum of splits entries is greater than the first dimension", [3, 3]),
            ("negative", [6, -1]),
            ("1D splits tensor", torch.ones(2, 1, dtype=torch.int32)),
            ("32-bit integer", torch.tensor([2, 3])),
            ("32-bit integer", torch.tensor([2.0, 3.0])),
            ("greater than the first dimension", torch.tensor([2, 4], dtype=torch.int32)),
        ]
        for text, splits in wrong:
            for call in (hvd.alltoall, hvd.alltoall_async):
                with pytest.raises(ValueError, match=text):
                    call(x, splits)
        assert hvd.alltoall(x, [2, 3])[1].tolist() == [2 + hvd.rank()] * 2

    job(2, check)


def test_after_shutdown_every_call_says_to_use_init(job: Any) -> None:
    def check() -> None:
        x = torch.ones(2)
        pending = hvd.allreduce_async(x, name="never.answered") if hvd.rank() == 0 else None
        hvd.barrier()
        hvd.shutdown()
        if pending is not None:
            assert hvd.synchronize(pending) is None  # forgotten, with everything else
        assert not hvd.is_initialized()
        calls: list[Callable[[], Any]] = [
            lambda: hvd.allreduce(x),
            lambda: hvd.allreduce_async(x, name="given"),
            lambda: hvd.grouped_allreduce([x]),
            lambda: hvd.allgather(x),
            lambda: hvd.broadcast(x, 0),
            lambda: hvd.alltoall(x),
            lambda: hvd.reducescatter(x),
            lambda: hvd.barrier(),
            lambda: hvd.join(),
            lambda: hvd.sparse_allreduce_async(x.to_sparse(), "s", hvd.Sum),
        ]
        for call in calls:
            with pytest.raises(HorovodInternalError, match=r"not been initialized; use hvd\.init\(\)"):
                call()
        for question in (hvd.rank, hvd.size, hvd.local_rank, lambda: hvd.broadcast_object(1)):
            with pytest.raises((ValueError, HorovodInternalError), match="not been initialized"):
                question()
        hvd.shutdown()  # once more is harmless

    job(2, check)


def test_a_rank_that_has_left_is_named_to_those_who_wait(job: Any) -> None:
    """One rank shuts down in good order; another waits for it, and is told which and why."""

    def check() -> list[str]:
        if hvd.rank() == 1:
            import time

            time.sleep(0.3)
            return []
        texts = []
        for name in ("waited.for", "too.late"):
            with pytest.raises(HorovodInternalError) as error:
                hvd.allreduce(torch.ones(1), name=name)
            texts.append(str(error.value))
        return texts

    results = job(3, check)
    for rank in (0, 2):
        assert "Horovod has been shut down. This was caused by rank 1: it left the job" in results[rank][0]
        assert f"while rank {rank} waited for 'allreduce.waited.for'" in results[rank][0]
        assert "shut down" in results[rank][1] and "rank 1" in results[rank][1]


def test_what_was_decided_still_runs_when_a_rank_leaves(job: Any) -> None:
    def check() -> None:
        handles = [hvd.allreduce_async(torch.full((100_000,), float(n)), op=hvd.Sum) for n in range(10)]
        if hvd.rank() == 1:
            for handle in handles:
                hvd.synchronize(handle)
            return  # and shuts down
        assert [hvd.synchronize(handle)[-1].item() for handle in handles] == [2.0 * n for n in range(10)]

    for _ in range(5):
        job(2, check)
