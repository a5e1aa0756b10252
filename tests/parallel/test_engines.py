"""Every operation x data type x shape x engine x group size, against plain NumPy statements of what is right.

All comparisons are bit for bit. The statements below are the specification; they share no code with the engines.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import cache, lru_cache, reduce
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines import ENGINES, SEVERAL, RankGroup, group_of, make_group, outcomes, run_ranks
from horovod.comm.base import Aborted, Communicator, PeerFailure
from horovod.comm.datatypes import COMPLEX, Array, DataType
from horovod.comm.reduction import ReduceOp, can_fold
from horovod.comm.spans import Layout, Spans

LENGTHS = [0, 1, 7, 1000, 70_001]
"""The last is many of tcp-small-pieces' pieces for each rank; an engine's usual pieces have tests of their own below."""

FOLD: dict[ReduceOp, Callable[[Array, Array], Array]] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
}

# What is right


def scaled(array: Array, factor: float) -> Array:
    """Floats multiply in their own precision; integers in double precision, truncated towards zero."""
    if factor == 1.0:
        return array
    if np.issubdtype(array.dtype, np.integer):
        return np.trunc(array.astype(np.float64) * factor).astype(array.dtype)
    if np.iscomplexobj(array):
        return scaled(array.view(array.real.dtype), factor).view(array.dtype)
    return array * array.dtype.type(factor)


def reduced(
    op: ReduceOp, arrays: Sequence[Array], prescale: float = 1.0, postscale: float = 1.0, hosts: str = ""
) -> Array:
    """The fold in rank order; 16-bit floats in float32, rounded once.

    Args:
        hosts: by rank, a host; then in rank order on each host, and the hosts' results in the order of hosts.
    """
    if hosts:
        by_host = [
            reduced(op, [array for array, at in zip(arrays, hosts, strict=True) if at == host], prescale)
            for host in dict.fromkeys(hosts)
        ]
        return reduced(op, by_host, 1.0, postscale)
    dtype = arrays[0].dtype
    if dtype in (np.float16, ml_dtypes.bfloat16):
        return reduced(op, [array.astype(np.float32) for array in arrays], prescale, postscale).astype(dtype)
    return scaled(reduce(FOLD[op], [scaled(array, prescale) for array in arrays]), postscale)


@lru_cache(maxsize=4096)
def values(data_type: DataType, length: int, rank: int, seed: int = 0) -> Array:
    """What a rank contributes: the whole range of integers, and floats whose sum depends on the order of addition."""
    random = np.random.default_rng([data_type, length, rank, seed])
    dtype = data_type.numpy
    if data_type is DataType.BOOL:
        array = random.integers(0, 2, length).astype(dtype)
    elif np.issubdtype(dtype, np.integer):
        limits = np.iinfo(dtype)
        array = random.integers(limits.min, limits.max, length, dtype=dtype, endpoint=True)
    elif data_type in COMPLEX:
        array = (random.standard_normal(2 * length) * 10.0).view(np.complex128).astype(dtype)
        array[: 3 * (length > 100)] = [np.inf, -0.0, -1j * np.inf][: 3 * (length > 100)]
    else:
        array = (random.standard_normal(length) * 10.0 ** random.integers(-3, 4, length)).astype(dtype)
        array[: 3 * (length > 100)] = [np.inf, -0.0, 0.0][: 3 * (length > 100)]
    array.flags.writeable = False
    return array


def check(found: Array, expected: Array, what: object) -> None:
    """Fail, saying where, unless the two have the same bits."""
    assert found.dtype == expected.dtype and found.shape == expected.shape, what
    if found.tobytes() == expected.tobytes():
        return
    different = np.flatnonzero(
        found.view(np.uint8).reshape(-1, found.itemsize) != expected.view(np.uint8).reshape(-1, found.itemsize)
    )
    index = int(different[0]) // found.itemsize
    raise AssertionError(f"{what}: element {index} of {found.size} is {found[index]!r}, should be {expected[index]!r}")


def untouched(data_type: DataType, length: int) -> Array:
    """An output before the collective: nothing that could pass for a result."""
    return np.full(length * data_type.itemsize, 0xA5, np.uint8).view(data_type.numpy)


def shares(length: int, size: int) -> list[int]:
    """Uneven counts that add up to ``length``, some of them 0 where there is little to share."""
    cuts = [0, *sorted(length * (r * r + 1) // (size * size + 1) for r in range(1, size)), length]
    return [stop - start for start, stop in pairwise(cuts)]


GROUPS = [(name, size) for name, engine in ENGINES.items() for size in engine.sizes]


@pytest.fixture(scope="module", params=GROUPS, ids=lambda group: f"{group[0]}-{group[1]}")
def group(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    with group_of(*request.param) as communicators:
        yield communicators


def everywhere(group: RankGroup, cases: Sequence[Any], function: Callable[[Communicator, Any], None]) -> None:
    """Run all cases, in order, on all ranks; a failure names its case and rank."""

    def run(communicator: Communicator) -> None:
        for case in cases:
            try:
                function(communicator, case)
            except Exception as error:
                raise AssertionError(
                    f"rank {communicator.rank} of {communicator.size}, case {case}: {error}"
                ) from error

    run_ranks(group, run)


SCALES = [(1.0, 1.0), (0.5, 1.0), (1.0, 1 / 3), (0.3, 0.7)]


def test_allreduce(group: RankGroup) -> None:
    size = len(group)
    cases = [
        (data_type, length, op, in_place)
        for data_type in DataType
        for length in LENGTHS
        for op in FOLD
        if can_fold(op, data_type)
        for in_place in (False, True)
        if length < 10_000 or in_place
    ]

    @cache
    def expected(data_type: DataType, length: int, op: ReduceOp) -> Array:
        with np.errstate(all="ignore"):
            return reduced(op, [values(data_type, length, rank) for rank in range(size)], hosts=group.hosts)

    def one(communicator: Communicator, case: Any) -> None:
        data_type, length, op, in_place = case
        source = values(data_type, length, communicator.rank).copy()
        target = source if in_place else untouched(data_type, length)
        with np.errstate(all="ignore"):
            communicator.allreduce([source], [target], op, 1.0, 1.0)
        check(target, expected(data_type, length, op), "result")
        if not in_place:
            check(source, values(data_type, length, communicator.rank), "input afterwards")

    everywhere(group, cases, one)


def test_allreduce_scaled(group: RankGroup) -> None:
    """Average is a sum with a postscale of 1/size; integers are truncated towards zero."""
    size = len(group)
    cases = [
        (data_type, length, op, prescale, postscale)
        for data_type in DataType
        if data_type is not DataType.BOOL
        for length in (1, 1000, 30_001)
        for op in (ReduceOp.SUM, ReduceOp.MAX)
        if can_fold(op, data_type)
        for prescale, postscale in [(1.0, 1 / size), *SCALES]
        if length < 10_000 or (prescale, postscale) == (0.3, 0.7)
    ]

    @cache
    def expected(data_type: DataType, length: int, op: ReduceOp, prescale: float, postscale: float) -> Array:
        with np.errstate(all="ignore"):
            inputs = [values(data_type, length, rank) for rank in range(size)]
            return reduced(op, inputs, prescale, postscale, group.hosts)

    def one(communicator: Communicator, case: Any) -> None:
        data_type, length, op, prescale, postscale = case
        source, target = values(data_type, length, communicator.rank), untouched(data_type, length)
        with np.errstate(all="ignore"):
            communicator.allreduce([source], [target], op, prescale, postscale)
        check(target, expected(*case), "result")

    everywhere(group, cases, one)


def test_integer_average_truncates_towards_zero(group: RankGroup) -> None:
    def one(communicator: Communicator, case: Any) -> None:
        source = np.array([7, -7, 1, -1] if communicator.rank == 0 else [0, 0, 0, 0], np.int32)
        communicator.allreduce([source], [source], ReduceOp.SUM, 1.0, 0.5)
        assert source.tolist() == [3, -3, 0, 0]

    everywhere(group, [None], one)


BATCHES = [[], [0], [1], [0, 0], [3, 0, 5], [1] * 40, [1000, 1, 0, 70_001, 2], [4096] * 10, [0, 50_000, 50_000, 1]]


def test_allreduce_of_a_batch_equals_its_members_alone(group: RankGroup) -> None:
    size = len(group)
    cases = [
        (data_type, lengths, in_place, as_spans)
        for data_type in (DataType.FLOAT32, DataType.BFLOAT16, DataType.INT8)
        for lengths in BATCHES
        for in_place in (False, True)
        for as_spans in (False, True, "every other rank")
        if in_place or data_type is DataType.FLOAT32
    ]

    def one(communicator: Communicator, case: Any) -> None:
        data_type, lengths, in_place, as_spans = case
        rank = communicator.rank
        sources = [values(data_type, length, rank, index).copy() for index, length in enumerate(lengths)]
        targets = sources if in_place else [untouched(data_type, length) for length in lengths]
        alone = [source.copy() for source in sources]
        with np.errstate(all="ignore"):
            if as_spans is True or (as_spans and rank % 2):
                layout = Layout.of(data_type.numpy, lengths)
                inputs = outputs = Spans(layout, [source.ctypes.data for source in sources])
                if not in_place:
                    outputs = Spans(layout, [target.ctypes.data for target in targets])
                communicator.allreduce(inputs, outputs, ReduceOp.SUM, 1.0, 1 / size)
            else:
                communicator.allreduce(sources, targets, ReduceOp.SUM, 1.0, 1 / size)
            for index, array in enumerate(alone):
                communicator.allreduce([array], [array], ReduceOp.SUM, 1.0, 1 / size)
                check(targets[index], array, f"tensor {index}")

    everywhere(group, cases, one)


def test_allreduce_far_larger_than_a_piece(group: RankGroup) -> None:
    """Many pieces of every engine's usual size: as one tensor, a batch of odd ones, and hundreds to a piece."""
    size, length = len(group), 2_500_009
    sources = [np.arange(length, dtype=np.float32) * (rank + 1) for rank in range(size)]
    expected = reduced(ReduceOp.SUM, sources, hosts=group.hosts)

    def one(communicator: Communicator, lengths: list[int]) -> None:
        source = sources[communicator.rank]
        pieces = np.split(source.copy(), np.cumsum(lengths)[:-1])
        communicator.allreduce(pieces, pieces, ReduceOp.SUM, 1.0, 1.0)
        check(np.concatenate(pieces), expected, "result")

    odd = [1, 0, 850_003, 7, 649_999, length - 1_500_010]
    everywhere(group, [[length], odd, [1000] * (length // 1000) + [length % 1000]], one)


def test_allgather(group: RankGroup) -> None:
    size = len(group)
    cases = [(data_type, length) for data_type in DataType for length in LENGTHS]

    def one(communicator: Communicator, case: Any) -> None:
        data_type, length = case
        # Two tensors: counts that differ by rank (rank 1 brings nothing), and one that all bring alike.
        counts = [[0 if r == 1 else length + r for r in range(size)], [5] * size]
        inputs = [values(data_type, count[communicator.rank], communicator.rank, i) for i, count in enumerate(counts)]
        outputs = [untouched(data_type, sum(count)) for count in counts]
        communicator.allgather(inputs, outputs, counts)
        for i, count in enumerate(counts):
            check(outputs[i], np.concatenate([values(data_type, count[r], r, i) for r in range(size)]), f"tensor {i}")

    everywhere(group, cases, one)


def test_allgather_of_nothing(group: RankGroup) -> None:
    size = len(group)

    def one(communicator: Communicator, case: Any) -> None:
        communicator.allgather([], [], [])
        empty = np.empty(0, np.float32)
        communicator.allgather([empty], [empty.copy()], [[0] * size])

    everywhere(group, [None], one)


def test_broadcast(group: RankGroup) -> None:
    size = len(group)
    cases = [
        (data_type, length, root)
        for data_type in DataType
        for length in LENGTHS
        for root in range(size)
        if length < 10_000 or root in (0, size - 1)
    ] + [(DataType.FLOAT32, 1_000_003, root) for root in {0, size // 2}]

    def one(communicator: Communicator, case: Any) -> None:
        data_type, length, root = case
        array = values(data_type, length, root).copy() if communicator.rank == root else untouched(data_type, length)
        communicator.broadcast([array], root)
        check(array, values(data_type, length, root), "result")

    everywhere(group, cases, one)


def test_alltoall(group: RankGroup) -> None:
    size = len(group)
    cases = [(data_type, length) for data_type in DataType for length in LENGTHS]

    def one(communicator: Communicator, case: Any) -> None:
        data_type, length = case
        rank = communicator.rank

        def counts_of(sender: int) -> list[int]:
            uneven = shares(length, size)
            return uneven[sender:] + uneven[:sender]

        def sent(sender: int) -> list[Array]:
            source, counts = values(data_type, length + 3, sender), counts_of(sender)
            return np.split(source[:length], np.cumsum(counts)[:-1])

        expected = np.concatenate([sent(sender)[rank] for sender in range(size)])
        target = untouched(data_type, expected.size)
        received = [counts_of(sender)[rank] for sender in range(size)]
        # The source is longer than the sum of its counts: the rest stays.
        communicator.alltoall([values(data_type, length + 3, rank)], [target], counts_of(rank), received)
        check(target, expected, "result")

    everywhere(group, cases, one)


def test_reducescatter(group: RankGroup) -> None:
    size = len(group)
    cases = [
        (data_type, length, op, in_place)
        for data_type in DataType
        for length in LENGTHS
        for op in (FOLD if length < 10_000 else [ReduceOp.SUM])
        if can_fold(op, data_type)
        for in_place in (False, True)
    ]

    @cache
    def whole(data_type: DataType, length: int, op: ReduceOp, index: int) -> Array:
        with np.errstate(all="ignore"):
            return reduced(op, [values(data_type, length, rank, index) for rank in range(size)])

    def one(communicator: Communicator, case: Any) -> None:
        data_type, length, op, in_place = case
        rank = communicator.rank
        lengths = [length, 2 * size]
        counts = [shares(length, size), [2] * size]
        inputs = [values(data_type, length, rank, i).copy() for i, length in enumerate(lengths)]
        starts = [sum(count[:rank]) for count in counts]
        stops = [sum(count[: rank + 1]) for count in counts]
        outputs = [
            inputs[i][starts[i] : stops[i]] if in_place else untouched(data_type, counts[i][rank]) for i in range(2)
        ]
        with np.errstate(all="ignore"):
            communicator.reducescatter(inputs, outputs, counts, op, 1.0, 1.0)
        for i in range(2):
            check(outputs[i], whole(data_type, lengths[i], op, i)[starts[i] : stops[i]], f"tensor {i}")

    everywhere(group, cases, one)


def test_reducescatter_scaled(group: RankGroup) -> None:
    size = len(group)
    cases = [
        (data_type, prescale, postscale)
        for data_type in DataType
        if data_type is not DataType.BOOL
        for prescale, postscale in [(1.0, 1 / size), *SCALES]
    ]

    def one(communicator: Communicator, case: Any) -> None:
        data_type, prescale, postscale = case
        rank, counts = communicator.rank, shares(1000, size)
        target = untouched(data_type, counts[rank])
        source = values(data_type, 1000, rank)
        start = sum(counts[:rank])
        with np.errstate(all="ignore"):
            communicator.reducescatter([source], [target], [counts], ReduceOp.SUM, prescale, postscale)
            inputs = [values(data_type, 1000, r) for r in range(size)]
            expected = reduced(ReduceOp.SUM, inputs, prescale, postscale)
        check(target, expected[start : start + target.size], "result")

    everywhere(group, cases, one)


def test_barrier(group: RankGroup) -> None:
    """Nobody leaves before everybody has come."""
    came = [0] * len(group)

    def one(communicator: Communicator, turn: int) -> None:
        if communicator.rank == turn % len(group):
            time.sleep(0.002)
        came[communicator.rank] = turn
        communicator.barrier()
        assert min(came) >= turn

    everywhere(group, range(1, 30), one)


def test_ranks_may_run_ahead(group: RankGroup) -> None:
    """Collectives of all kinds in a row, each rank at its own pace."""
    size = len(group)

    def one(communicator: Communicator, turn: int) -> None:
        rank = communicator.rank
        if (turn + rank) % 3 == 0:
            time.sleep(0.001)
        array = np.full(300 * turn, rank, np.int64)
        gathered = np.empty(size * array.size, np.int64)
        communicator.allgather([array], [gathered], [[array.size] * size])
        check(gathered, np.repeat(np.arange(size), array.size), "allgather")
        communicator.broadcast([array], turn % size)
        assert (array == turn % size).all()
        communicator.allreduce([array], [array], ReduceOp.SUM, 1.0, 1.0)
        assert (array == turn % size * size).all()

    everywhere(group, range(20), one)


@pytest.fixture(scope="module", params=SEVERAL)
def trio(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    with group_of(request.param, 3) as communicators:
        yield communicators


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.one_of(st.integers(0, 5), st.integers(0, 6000)), max_size=12),
    data_type=st.sampled_from(list(DataType)),
    op=st.sampled_from(list(FOLD)),
    scales=st.sampled_from(SCALES),
    aliased=st.lists(st.booleans(), min_size=12, max_size=12),
    seed=st.integers(0, 3),
)
def test_random_batches(
    trio: RankGroup,
    lengths: list[int],
    data_type: DataType,
    op: ReduceOp,
    scales: tuple[float, float],
    aliased: list[bool],
    seed: int,
) -> None:
    if data_type is DataType.BOOL:
        scales = (1.0, 1.0)
    if not can_fold(op, data_type):
        op = ReduceOp.SUM

    def one(communicator: Communicator, case: Any) -> None:
        rank = communicator.rank
        sources = [values(data_type, length, rank, seed).copy() for length in lengths]
        targets = [
            source if same else untouched(data_type, source.size)
            for source, same in zip(sources, aliased, strict=False)
        ]
        with np.errstate(all="ignore"):
            communicator.allreduce(sources, targets, op, *scales)
            for index, length in enumerate(lengths):
                expected = reduced(
                    op, [values(data_type, length, r, seed) for r in range(3)], *scales, hosts=trio.hosts
                )
                check(targets[index], expected, f"tensor {index}")

    everywhere(trio, [None], one)


# Failures. What the engine can see of a peer that dies is its own matter; these hold for all.


def every_collective(size: int) -> dict[str, Callable[[Communicator], None]]:
    """One large call of each, in which every rank depends on every other."""
    length = 3_000_000

    def reduce_all(communicator: Communicator) -> None:
        array = np.ones(length, np.float32)
        communicator.allreduce([array], [array], ReduceOp.SUM, 1.0, 1.0)

    def scatter(communicator: Communicator) -> None:
        counts = [length // size] * size
        source, target = np.ones(sum(counts), np.float32), np.empty(counts[0], np.float32)
        communicator.reducescatter([source], [target], [counts], ReduceOp.SUM, 1.0, 1.0)

    def gather(communicator: Communicator) -> None:
        source, target = np.ones(length, np.float32), np.empty(length * size, np.float32)
        communicator.allgather([source], [target], [[length] * size])

    def transpose(communicator: Communicator) -> None:
        source, counts = np.ones(length * size, np.float32), [length] * size
        communicator.alltoall([source], [np.empty_like(source)], counts, counts)

    return {
        "allreduce": reduce_all,
        "reducescatter": scatter,
        "allgather": gather,
        "alltoall": transpose,
        "broadcast": lambda communicator: communicator.broadcast([np.ones(length, np.float32)], 1),
        "barrier": lambda communicator: communicator.barrier(),
    }


@pytest.mark.parametrize("collective", every_collective(2))
@pytest.mark.parametrize("engine", SEVERAL)
def test_a_silent_peer_is_named(engine: str, collective: str) -> None:
    with group_of(engine, 2, timedelta(seconds=0.2)) as group:
        call = every_collective(2)[collective]
        found = outcomes(group, lambda communicator: call(communicator) if communicator.rank == 0 else None)
        assert isinstance(found[0], PeerFailure), found
        assert found[0].rank == 1
        assert found[0].suspected


@pytest.mark.parametrize("collective", every_collective(3))
@pytest.mark.parametrize("engine", SEVERAL)
def test_abort_wakes_every_wait(engine: str, collective: str) -> None:
    """Rank 1 never comes; the others wait for it until another thread aborts them."""
    with group_of(engine, 3) as group:
        call = every_collective(3)[collective]

        def abort() -> None:
            for communicator in group:
                communicator.abort()
                communicator.abort()

        timer = threading.Timer(0.1, abort)
        timer.start()
        found = outcomes(group, lambda communicator: call(communicator) if communicator.rank != 1 else None)
        timer.join()
        assert isinstance(found[0], Aborted), found
        assert isinstance(found[2], Aborted), found


@pytest.mark.parametrize("engine", [name for name in SEVERAL if not name.startswith("mpi")])
def test_after_a_failure_nobody_writes_into_what_was_to_be_received(engine: str) -> None:
    """Rank 0 gives up waiting for a broadcast, and uses the memory for something else; then the root comes."""
    with group_of(engine, 2) as group:
        received, sent = np.zeros(1 << 20, np.float32), np.ones(1 << 20, np.float32)

        def give_up(rank: int, array: Array) -> None:
            timer = threading.Timer(0.2, group[rank].abort)
            timer.start()
            (found,) = outcomes([group[rank]], lambda communicator: communicator.broadcast([array], 1))
            timer.join()
            assert rank == 1 or isinstance(found, Aborted), found

        give_up(0, received)
        received.fill(7)
        give_up(1, sent)
        assert (received == 7).all()


@pytest.mark.parametrize("engine", SEVERAL)
def test_abort_is_sticky(engine: str) -> None:
    with group_of(engine, 2) as group:
        group[0].abort()
        for _ in range(2):
            with pytest.raises(Aborted):
                group[0].barrier()


@pytest.mark.parametrize("engine", SEVERAL)
def test_abort_after_close_does_nothing(engine: str) -> None:
    group = make_group(engine, 2)
    for communicator in group:
        communicator.close()
        communicator.abort()
