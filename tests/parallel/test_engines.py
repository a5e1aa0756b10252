"""Every operation x data type x shape x engine x group size, against plain NumPy statements of what is right.

All comparisons are bit for bit. The statements below are the specification; they share no code with the engines.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import lru_cache, partial, wraps
from itertools import pairwise
from typing import Any, ParamSpec, TypeVar

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines import ENGINES, SEVERAL, SMALL, RankGroup, group_of, make_group, outcomes, run_ranks, sizes_of
from horovod.comm.base import Aborted, Communicator, PeerFailure
from horovod.comm.datatypes import COMPLEX, Array, DataType
from horovod.comm.reduction import ReduceOp, can_fold
from horovod.comm.spans import Layout, Spans, Vectors
from part import draws
from rank_tree import in_tree
from unit.control.concurrent_ranks import wait_until

_P = ParamSpec("_P")
_T = TypeVar("_T")

SHORT = [0, 1, 7, 1000]

FEW = [DataType.BOOL, DataType.INT8, DataType.BFLOAT16, DataType.FLOAT32, DataType.INT64, DataType.COMPLEX128]
"""One of each width and of each way of adding."""


def types(group: RankGroup) -> list[DataType]:
    """All in small groups. What a type takes does not depend on how many ranks there are: few in larger ones."""
    return list(DataType) if group.all_types and len(group) <= SMALL else FEW


def long(group: RankGroup, data_type: DataType, pieces: float = 5.5) -> int:
    """How many elements are some pieces where pieces are small; of other engines, whose pieces have a test of their own
    below, what is too long to travel in one step.
    """
    return int(group.piece * pieces) // data_type.itemsize | 1 if group.piece else 70_001


def lengths(group: RankGroup, data_type: DataType) -> list[int]:
    return [*SHORT, long(group, data_type)]


def once(function: Callable[_P, _T], most: int | None = None) -> Callable[_P, _T]:
    """Computed by the thread that asks first; the other ranks wait for it, instead of computing the same."""
    lock, kept = threading.Lock(), lru_cache(most)(function)

    @wraps(function)
    def asked(*arguments: _P.args, **options: _P.kwargs) -> _T:
        with lock:
            return kept(*arguments, **options)  # type: ignore[arg-type]  # all are hashable

    return asked


FOLD: dict[ReduceOp, Callable[[Array, Array], Array]] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}

# What is right


def scaled(array: Array, factor: float) -> Array:
    """Floats multiply in their own precision; integers in double precision, truncated towards zero, or are divided."""
    if factor == 1.0:
        return array
    if np.issubdtype(array.dtype, np.integer):
        divisor = round(1 / factor)
        if divisor > 1 and factor == 1 / divisor:
            return np.array([abs(each) // divisor * (1 if each > 0 else -1) for each in array.tolist()], array.dtype)
        return np.trunc(array.astype(np.float64) * factor).astype(array.dtype)
    if np.iscomplexobj(array):
        return scaled(array.view(array.real.dtype), factor).view(array.dtype)
    return array * array.dtype.type(factor)


def reduced(
    op: ReduceOp, arrays: Sequence[Array], prescale: float = 1.0, postscale: float = 1.0, hosts: str = ""
) -> Array:
    """In the tree over the ranks; 16-bit floats in float32, rounded once.

    Args:
        hosts: by rank, a host; then in a tree over the ranks of each host, and the hosts' results in one over the hosts.
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
    return scaled(in_tree(FOLD[op], [scaled(array, prescale) for array in arrays]), postscale)


@partial(once, most=4096)
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
    different = found.view(np.uint8) != expected.view(np.uint8)
    if not different.any():
        return
    index = int(np.flatnonzero(different)[0]) // found.itemsize
    raise AssertionError(f"{what}: element {index} of {found.size} is {found[index]!r}, should be {expected[index]!r}")


def untouched(data_type: DataType, length: int) -> Array:
    """An output before the collective: nothing that could pass for a result."""
    return np.full(length * data_type.itemsize, 0xA5, np.uint8).view(data_type.numpy)


def shares(length: int, size: int) -> list[int]:
    """Uneven counts that add up to ``length``, some of them 0 where there is little to share."""
    cuts = [0, *sorted(length * (r * r + 1) // (size * size + 1) for r in range(1, size)), length]
    return [stop - start for start, stop in pairwise(cuts)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "group" in metafunc.fixturenames:
        groups = [(name, size) for name in ENGINES for size in sizes_of(name, metafunc.function.__name__)]
        ids = [f"{name}-{size}" for name, size in groups]
        metafunc.parametrize("group", groups, indirect=True, scope="module", ids=ids)


@pytest.fixture(scope="module")
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
        for data_type in types(group)
        for length in lengths(group, data_type)
        for op in FOLD
        if can_fold(op, data_type)
        for in_place in (False, True)
        if length in SHORT or in_place
    ]

    @once
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
        for data_type in types(group)
        if data_type is not DataType.BOOL
        for length in (1, 1000, long(group, data_type))
        for op in (ReduceOp.SUM, ReduceOp.MAX)
        if can_fold(op, data_type)
        for prescale, postscale in [(1.0, 1 / size), *SCALES]
        if length in SHORT or (prescale, postscale) == (0.3, 0.7)
    ]

    @once
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


def batches(group: RankGroup) -> list[list[int]]:
    many = long(group, DataType.FLOAT32)
    several = many // 17 + 1
    return [
        [],
        [0],
        [1],
        [0, 0],
        [3, 0, 5],
        [1] * 40,
        [1000, 1, 0, many, 2],
        [several] * 10,
        [0, *[several * 12] * 2, 1],
    ]


def test_allreduce_of_a_batch_equals_its_members_alone(group: RankGroup) -> None:
    size = len(group)
    cases = [
        (data_type, lengths)
        for data_type in (DataType.FLOAT32, DataType.BFLOAT16, DataType.INT8)
        for lengths in batches(group)
    ]

    def one(communicator: Communicator, case: Any) -> None:
        data_type, lengths = case
        rank = communicator.rank
        alone = [values(data_type, length, rank, index).copy() for index, length in enumerate(lengths)]
        with np.errstate(all="ignore"):
            for array in alone:
                communicator.allreduce([array], [array], ReduceOp.SUM, 1.0, 1 / size)
        for in_place in (False, True) if data_type is DataType.FLOAT32 else (True,):
            for as_spans in (False, True, bool(rank % 2)):  # the last on every other rank
                sources = [values(data_type, length, rank, index).copy() for index, length in enumerate(lengths)]
                targets = sources if in_place else [untouched(data_type, length) for length in lengths]
                inputs: Vectors = sources
                outputs: Vectors = targets
                if as_spans:
                    layout = Layout.of(data_type.numpy, lengths)
                    inputs = outputs = Spans(layout, [source.ctypes.data for source in sources])
                    if not in_place:
                        outputs = Spans(layout, [target.ctypes.data for target in targets])
                with np.errstate(all="ignore"):
                    communicator.allreduce(inputs, outputs, ReduceOp.SUM, 1.0, 1 / size)
                for index, array in enumerate(alone):
                    check(targets[index], array, f"tensor {index}, in place: {in_place}, as spans: {as_spans}")

    everywhere(group, cases, one)


def test_allreduce_far_larger_than_a_piece(group: RankGroup) -> None:
    """Many pieces: as one tensor, a batch of odd ones, and several to a piece (hundreds, of the usual ones)."""
    size = len(group)
    length = long(group, DataType.FLOAT32, pieces=20.5) if group.piece else 2_500_009
    sources = [np.arange(length, dtype=np.float32) * (rank + 1) for rank in range(size)]
    expected = reduced(ReduceOp.SUM, sources, hosts=group.hosts)

    def one(communicator: Communicator, lengths: list[int]) -> None:
        whole = sources[communicator.rank].copy()
        pieces = np.split(whole, np.cumsum(lengths)[:-1])
        communicator.allreduce(pieces, pieces, ReduceOp.SUM, 1.0, 1.0)
        check(whole, expected, "result")

    third, fourth, few = length // 3, length // 4, 1000 if length > 1_000_000 else 100
    odd = [1, 0, third, 7, fourth, length - third - fourth - 8]
    everywhere(group, [[length], odd, [few] * (length // few) + [length % few]], one)


def test_allgather(group: RankGroup) -> None:
    size = len(group)
    cases = [(data_type, length) for data_type in types(group) for length in lengths(group, data_type)]

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
        for data_type in types(group)
        for length in lengths(group, data_type)
        for root in range(size)
        if length in SHORT or root in (0, size - 1)
    ]
    # Ranks that pass a broadcast on do so in pieces that are never made small.
    cases += [(DataType.FLOAT32, 300_003 if group.piece else 1_000_003, root) for root in {0, size // 2}]

    def one(communicator: Communicator, case: Any) -> None:
        data_type, length, root = case
        array = values(data_type, length, root).copy() if communicator.rank == root else untouched(data_type, length)
        communicator.broadcast([array], root)
        check(array, values(data_type, length, root), "result")

    everywhere(group, cases, one)


def test_alltoall(group: RankGroup) -> None:
    size = len(group)
    cases = [(data_type, length) for data_type in types(group) for length in lengths(group, data_type)]

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
        source = values(data_type, length + 3, rank)
        communicator.alltoall([source], [target], counts_of(rank), received, max(shares(length, size)))
        check(target, expected, "result")

    everywhere(group, cases, one)


@given(data=st.data())
@settings(max_examples=draws(10), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_alltoall_of_a_vector_for_each_rank(group: RankGroup, data: st.DataObject) -> None:
    """Each rank passes one vector for each rank, or one for all, as it likes: the results are the same."""
    size, data_type = len(group), data.draw(st.sampled_from(FEW))
    few = st.integers(0, 9)
    sizes = few if data.draw(st.booleans()) else few | st.just(long(group, data_type) // size)
    rows = st.lists(sizes, min_size=size, max_size=size)
    counts = data.draw(st.lists(rows, min_size=size, max_size=size))  # [sender][receiver]
    yes_or_no = st.lists(st.booleans(), min_size=size, max_size=size)
    inputs_apart, outputs_apart, longer = (data.draw(yes_or_no) for _ in range(3))

    def sent(sender: int, receiver: int) -> Array:
        return values(data_type, counts[sender][receiver], sender, receiver)

    def one(communicator: Communicator, case: Any) -> None:
        rank = communicator.rank
        received = [row[rank] for row in counts]
        rest = values(data_type, 3 * longer[rank], rank)
        parts = [sent(rank, receiver) for receiver in range(size)]
        source = [np.append(part, rest) for part in parts] if inputs_apart[rank] else [np.concatenate([*parts, rest])]
        target = [untouched(data_type, each) for each in (received if outputs_apart[rank] else [sum(received)])]
        communicator.alltoall(source, target, counts[rank], received, max(map(max, counts)))
        check(np.concatenate(target), np.concatenate([sent(sender, rank) for sender in range(size)]), "result")

    everywhere(group, [None], one)


def test_a_rank_that_receives_nothing_may_run_ahead_and_overwrites_nothing(group: RankGroup) -> None:
    """Rank 0 sends to all; the others are late, and must get what was sent in each call."""
    size = len(group)
    length = long(group, DataType.FLOAT32, 1.5)

    def one(communicator: Communicator, turn: int) -> None:
        rank = communicator.rank
        if rank:
            time.sleep(0.002 * (turn % 2))
        source = np.full(length * size if rank == 0 else 0, turn, np.float32)
        target = untouched(DataType.FLOAT32, length)
        sent, received = [length if rank == 0 else 0] * size, [length, *[0] * (size - 1)]
        communicator.alltoall([source], [target], sent, received, length)
        check(target, np.full(length, turn, np.float32), "result")

    everywhere(group, range(12), one)


def test_reducescatter(group: RankGroup) -> None:
    size = len(group)
    cases = [
        (data_type, length, op, in_place)
        for data_type in types(group)
        for length in lengths(group, data_type)
        for op in (FOLD if length in SHORT else [ReduceOp.SUM])
        if can_fold(op, data_type)
        for in_place in (False, True)
    ]

    @once
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
        for data_type in types(group)
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


@settings(max_examples=draws(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
        source = np.ones(length * size, np.float32)
        communicator.alltoall([source], [np.empty_like(source)], *([[length] * size] * 2), length)

    return {
        "allreduce": reduce_all,
        "reducescatter": scatter,
        "allgather": gather,
        "alltoall": transpose,
        "broadcast": lambda communicator: communicator.broadcast([np.ones(length, np.float32)], 1),
        "barrier": lambda communicator: communicator.barrier(),
    }


CALLS = [
    (engine, collective)
    for engine in SEVERAL
    if not engine.endswith("small-pieces")  # those calls are several pieces of the usual size
    for collective in every_collective(2)
    if engine != "mpi-openmpi"
    or collective in ("allreduce", "broadcast")  # all wait in one call; the others do in MPICH
]


@pytest.mark.parametrize(("engine", "collective"), CALLS)
def test_a_silent_peer_is_named(engine: str, collective: str) -> None:
    with group_of(engine, 2, timedelta(seconds=0.2)) as group:
        call = every_collective(2)[collective]
        found = outcomes(group, lambda communicator: call(communicator) if communicator.rank == 0 else None)
        assert isinstance(found[0], PeerFailure), found
        assert found[0].rank == 1
        assert found[0].suspected


@pytest.mark.parametrize(("engine", "collective"), CALLS)
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
        assert isinstance(found[2], Aborted | PeerFailure), found  # it may see first that the others have been aborted


@pytest.mark.parametrize("engine", [name for name in SEVERAL if not name.startswith("mpi")])
def test_after_a_failure_nothing_writes_into_receive_buffers(engine: str) -> None:
    """Rank 0 gives up waiting for a broadcast, and uses the memory for something else; then the root comes."""
    with group_of(engine, 2) as group:
        received, sent = np.zeros(1 << 20, np.float32), np.ones(1 << 20, np.float32)

        def give_up(rank: int, array: Array) -> None:
            timer = threading.Timer(0.2, group[rank].abort)
            timer.start()
            (found,) = outcomes([group[rank]], lambda communicator: communicator.broadcast([array], 1))
            timer.join()
            assert rank == 1 or isinstance(found, Aborted), found

        connected = group[1].descriptors()
        give_up(0, received)
        received.fill(7)
        if engine == "gloo":  # an operation that begins while its connection ends may never end, and keeps its group
            wait_until(lambda: group[1].descriptors() != connected, "the end of Gloo's connection")
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
