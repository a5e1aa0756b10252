"""Allreduces among more ranks than exchange messages with all others: the same bits alone and in a batch, and few messages."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines import TIMEOUT, hierarchical, run_ranks, tcp_sockets
from horovod.comm.base import Communicator
from horovod.comm.datatypes import Array, DataType
from horovod.comm.exchange.base import Mark, PeerExchange
from horovod.comm.exchange.communicator import FEW_RANKS, ExchangeCommunicator, Way, way_of
from horovod.comm.reduction import ReduceOp, can_fold, can_scale
from horovod.comm.tcp.communicator import TcpCommunicator
from parallel.test_engines import FOLD, SCALES, check, reduced, untouched, values
from part import draws


@contextmanager
def closing_all(group: Sequence[Communicator]) -> Iterator[Sequence[Communicator]]:
    try:
        yield group
    finally:
        for communicator in group:
            communicator.close()


def by_tcp(size: int, message_bytes: int) -> list[Communicator]:
    """A group whose messages may be so small that few bytes are halved on every level."""
    meshes = enumerate(tcp_sockets(size, socket.socketpair))
    return [
        TcpCommunicator(rank, peers, TIMEOUT, piece_bytes=4096, message_bytes=message_bytes) for rank, peers in meshes
    ]


def several_hosts(counts: Sequence[int], message_bytes: int) -> tuple[list[Communicator], str]:
    """A group on hosts with so many ranks each, and by rank its host."""
    hosts = "".join(chr(ord("a") + host) * count for host, count in enumerate(counts))
    return hierarchical(hosts, TIMEOUT, lambda size, timeout: by_tcp(size, message_bytes), piece_bytes=4096), hosts


cases = st.fixed_dictionaries(
    {
        "lengths": st.lists(st.one_of(st.integers(0, 9), st.integers(0, 3000)), min_size=1, max_size=6),
        "cuts": st.sets(st.integers(1, 5), max_size=3),
        "data_type": st.sampled_from([DataType.BFLOAT16, DataType.FLOAT32]) | st.sampled_from(list(DataType)),
        "op": st.just(ReduceOp.SUM) | st.sampled_from(list(FOLD)),
        "scales": st.sampled_from([*SCALES, (1.0, 0.1)]),
        "in_place": st.booleans(),
        "seed": st.integers(0, 3),
    }
)


def verify(
    group: Sequence[Communicator],
    hosts: str,
    lengths: Sequence[int],
    cuts: set[int],
    data_type: DataType,
    op: ReduceOp,
    scales: tuple[float, float],
    in_place: bool,
    seed: int,
) -> None:
    """All ranks get the expected bits of every tensor: alone, in groups that ``cuts`` divides, and all together."""
    if not can_scale(data_type):
        scales = (1.0, 1.0)
    if not can_fold(op, data_type):
        op = ReduceOp.SUM
    inputs = [
        [values(data_type, length, rank, 10 * seed + i) for i, length in enumerate(lengths)]
        for rank in range(len(group))
    ]
    with np.errstate(all="ignore"):
        expected = [reduced(op, column, *scales, hosts=hosts) for column in zip(*inputs, strict=True)]
    edges = [0, *sorted(cut for cut in cuts if cut < len(lengths)), len(lengths)]
    groupings = [list(range(len(lengths) + 1)), edges, [0, len(lengths)]]

    def run(communicator: Communicator) -> None:
        for grouping in groupings:
            sources = [array.copy() for array in inputs[communicator.rank]]
            targets = sources if in_place else [untouched(data_type, length) for length in lengths]
            for first, stop in pairwise(grouping):
                with np.errstate(all="ignore"):
                    communicator.allreduce(sources[first:stop], targets[first:stop], op, *scales)
            for index, (found, right) in enumerate(zip(targets, expected, strict=True)):
                check(found, right, f"rank {communicator.rank}, tensor {index}, grouping {grouping}")

    run_ranks(group, run)


@settings(max_examples=draws(40))
@given(
    size=st.integers(FEW_RANKS + 1, 20) | st.integers(2, 20),
    message_bytes=st.sampled_from([1, 64, 1000, 32 << 10]),
    case=cases,
)
def test_one_rank_a_host(size: int, message_bytes: int, case: dict[str, object]) -> None:
    with closing_all(by_tcp(size, message_bytes)) as group:
        verify(group, "", **case)  # type: ignore[arg-type]


@settings(max_examples=draws(8))
@given(
    counts=st.lists(st.integers(1, 3), min_size=FEW_RANKS + 1, max_size=12),
    message_bytes=st.sampled_from([64, 1000]),
    case=cases,
)
def test_several_ranks_a_host(counts: list[int], message_bytes: int, case: dict[str, object]) -> None:
    group, hosts = several_hosts(counts, message_bytes)
    with closing_all(group):
        verify(group, hosts, **case)  # type: ignore[arg-type]


@pytest.mark.parametrize("data_type", [DataType.FLOAT32, DataType.FLOAT64, DataType.BFLOAT16])
def test_special_values_have_the_same_bits_on_all_ranks(data_type: DataType) -> None:
    """NaNs of both signs, infinities and zeros; each rank combines the upper levels of the tree itself."""
    special = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0], np.float32).astype(data_type.numpy)
    size, length = 11, 1500
    inputs = np.random.default_rng(7).choice(special, (size, length))

    def run(communicator: Communicator) -> list[bytes]:
        found = []
        for op in (ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT):
            target = untouched(data_type, length)
            with np.errstate(all="ignore"):
                communicator.allreduce([inputs[communicator.rank]], [target], op, 1.0, 0.5)
            found.append(target.tobytes())
        return found

    for message_bytes in (500, 32 << 10):
        with closing_all(by_tcp(size, message_bytes)) as group:
            first, *others = run_ranks(group, run)
            assert all(other == first for other in others)


class _Counted:
    done = 1


class Counting(PeerExchange[_Counted]):
    """Counts what a rank sends, and moves nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[int] = []

    def send(self, rank: int, *buffers: memoryview) -> Mark[_Counted]:
        self.sent.append(sum(buffer.nbytes for buffer in buffers))
        return _Counted(), 1

    def receive(self, rank: int, *buffers: memoryview) -> Mark[_Counted]:
        return _Counted(), 1

    def wait(self, marks: Iterable[Mark[_Counted]]) -> None: ...

    def abort(self) -> None: ...

    def close(self) -> None: ...


class _Alone(ExchangeCommunicator):
    name = "alone"


def sent_by(rank: int, size: int, array: Array) -> list[int]:
    """The bytes of each message that a rank sends in an allreduce of this array."""
    exchange = Counting()
    with np.errstate(all="ignore"):
        _Alone(rank, size, exchange).allreduce([array], [array], ReduceOp.SUM, 1.0, 1.0)
    return exchange.sent


@pytest.mark.parametrize("size", [9, 64, 100, 256, 1000, 1024, 1250])
def test_the_messages_of_a_small_tensor_grow_with_the_logarithm_of_the_ranks(size: int) -> None:
    for nbytes in (4, 4096, 20_000):
        array = np.zeros(nbytes // 4, np.float32)
        for rank in (0, 1, size // 2, size - 2, size - 1):
            assert len(sent_by(rank, size, array)) <= size.bit_length()
    for rank in (0, size - 1):  # a message for each half, and one for each half of the result
        assert len(sent_by(rank, size, np.zeros(size * 1000, np.float32))) <= 2 * size.bit_length()


@pytest.mark.parametrize("size", [9, 16, 40])
@pytest.mark.parametrize("data_type", [DataType.FLOAT32, DataType.BFLOAT16])
def test_a_large_tensor_costs_no_more_bytes_than_its_shards(size: int, data_type: DataType) -> None:
    length = size * (32 << 10) // data_type.itemsize
    array = np.zeros(length, data_type.numpy)
    assert way_of(size, array.nbytes) is Way.SHARDS
    for rank in (0, size - 1):
        assert sum(sent_by(rank, size, array)) == 2 * array.nbytes * (size - 1) // size


MODEL = Path(__file__).resolve().parents[2] / "benchmarks" / "scale_model.py"


@pytest.fixture(scope="module")
def model() -> ModuleType:
    spec = importlib.util.spec_from_file_location("scale_model_of_tests", MODEL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@settings(max_examples=60)
@given(hosts=st.integers(2, 70), each=st.integers(1, 12_000))
def test_the_model_of_scaling_counts_what_is_sent(model: ModuleType, hosts: int, each: int) -> None:
    array = np.zeros(hosts * each, np.float32)
    sent, cost = sent_by(0, hosts, array), model.between_hosts(hosts, array.nbytes)
    assert cost.way is way_of(hosts, array.nbytes)
    assert cost.messages == len(sent)
    assert cost.nbytes == pytest.approx(sum(sent), rel=1e-3)
