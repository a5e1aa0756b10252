"""What only the socket engine must get right: a peer that reads late, the broadcast trees, failures by rank."""

from __future__ import annotations

import socket
import threading
from datetime import timedelta
from itertools import chain

import numpy as np
import pytest

from engines import group_of, outcomes
from horovod.comm.base import Aborted, Communicator, PeerFailure
from horovod.comm.exchange.base import HEADER, MAGIC, CollectiveKind
from horovod.comm.reduction import ReduceOp
from horovod.comm.tcp.communicator import TcpCommunicator
from time_limits import SOON


def frame(payload: bytes) -> bytes:
    return HEADER.pack(MAGIC, CollectiveKind.ALLREDUCE, 1, len(payload)) + payload


class LatePeer:
    """Rank 1 of 2, by hand: sends all it will ever send at once, and reads only when told to."""

    def __init__(self, piece_bytes: int) -> None:
        own, self.socket = socket.socketpair()
        self.socket.settimeout(SOON)
        self.threads: list[threading.Thread] = []
        self.communicator = TcpCommunicator(0, {1: own}, timedelta(seconds=5), piece_bytes=piece_bytes)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)

    def allreduce(self, arrays: list[np.ndarray]) -> threading.Thread:
        """Let rank 0 reduce in place, on a thread of its own."""
        thread = threading.Thread(target=self.communicator.allreduce, args=(arrays, arrays, ReduceOp.SUM, 1.0, 1.0))
        thread.start()
        self.threads.append(thread)
        return thread

    def read(self, length: int) -> bytes:
        data = b""
        while len(data) < HEADER.size + length:
            data += self.socket.recv(HEADER.size + length - len(data))
        assert data[: HEADER.size] == frame(bytes(length))[: HEADER.size]
        return data[HEADER.size :]

    def __enter__(self) -> LatePeer:
        return self

    def __exit__(self, *_: object) -> None:
        self.communicator.abort()
        for thread in self.threads:
            thread.join()
        self.communicator.close()
        self.socket.close()


def test_a_result_never_overwrites_an_input_that_is_still_to_be_sent() -> None:
    array = np.arange(8000, dtype=np.int32)  # as much as is sent whole
    original = array.tobytes()
    with LatePeer(piece_bytes=4096) as peer:
        peer.socket.sendall(frame(np.ones(8000, np.int32).tobytes()))
        thread = peer.allreduce([array])
        thread.join(0.1)
        assert peer.read(len(original)) == original
        thread.join()
    assert (array == np.arange(8000) + 1).all()


def test_staging_is_not_reused_while_it_is_still_to_be_sent() -> None:
    piece, pieces = 4096, 16  # elements
    length = 2 * piece * pieces
    values = np.arange(length, dtype=np.int32)
    batch = [part.copy() for part in np.split(values, 128)]  # four to a piece, so every piece is packed
    with LatePeer(piece_bytes=4 * piece) as peer:
        # Contributions and results look the same here: only their number matters.
        peer.socket.sendall(frame(np.ones(piece, np.int32).tobytes()) * 2 * pieces)
        thread = peer.allreduce(batch)
        thread.join(0.1)
        order = [("contribution", 0)]
        order += chain.from_iterable((("contribution", k + 1), ("result", k)) for k in range(pieces - 1))
        order += [("result", pieces - 1)]
        for kind, k in order:
            found = np.frombuffer(peer.read(4 * piece), np.int32)
            first = k * piece + (length // 2 if kind == "contribution" else 0)
            assert (found == values[first : first + piece] + (kind == "result")).all(), (kind, k)
        thread.join()
    assert (np.concatenate(batch)[: length // 2] == values[: length // 2] + 1).all()
    assert (np.concatenate(batch)[length // 2 :] == 1).all()


@pytest.mark.parametrize("size", range(1, 18))
@pytest.mark.parametrize("chained", [True, False])
def test_broadcast_trees(size: int, chained: bool) -> None:
    """Everyone but the root has one parent, who knows of it, and the root is above all."""
    communicators = [object.__new__(TcpCommunicator) for _ in range(size)]
    for rank, communicator in enumerate(communicators):
        Communicator.__init__(communicator, rank, size)
    for root in {0, size // 2, size - 1}:
        positions = [communicator._position_in_tree(root, chained) for communicator in communicators]
        assert positions[root][0] is None
        depths = {root: 0}
        queue = [root]
        for rank in queue:
            for child in positions[rank][1]:
                assert positions[child][0] == rank and child not in depths
                depths[child] = depths[rank] + 1
                queue.append(child)
        assert sorted(depths) == list(range(size))
        if chained:
            assert max(depths.values()) == size - 1
        else:
            assert max(depths.values()) <= len(positions[root][1]) == (size - 1).bit_length()


def one_allreduce(communicator: Communicator) -> None:
    array = np.ones(1_000_000, np.float32)
    communicator.allreduce([array], [array], ReduceOp.SUM, 1.0, 1.0)


@pytest.mark.parametrize("engine", ["tcp", "tcp-loopback"])
def test_a_peer_that_closes_is_named_by_all(engine: str) -> None:
    with group_of(engine, 3) as group:
        found = outcomes(group, lambda c: c.close() if c.rank == 1 else one_allreduce(c))
        for rank in (0, 2):
            assert isinstance(found[rank], PeerFailure), found
            assert found[rank].rank == 1
            assert not found[rank].suspected


def test_a_peer_out_of_step_is_named() -> None:
    with group_of("tcp", 2) as group:
        found = outcomes(group, lambda c: c.barrier() if c.rank == 1 else one_allreduce(c))
        assert isinstance(found[0], PeerFailure) and isinstance(found[1], PeerFailure)
        assert (found[0].rank, found[1].rank) == (1, 0)
        assert "barrier number 1 (0 bytes) where allreduce number 1" in found[0].reason


def test_abort_of_one_leaves_the_connections_of_the_others() -> None:
    with group_of("tcp", 3) as group:
        group[0].abort()
        with pytest.raises(Aborted):
            one_allreduce(group[0])
        # The others still exchange between themselves what does not need rank 0.
        pair = group[1:]
        found = outcomes(pair, lambda c: c._exchange.begin(CollectiveKind.BARRIER) or swap(c))  # type: ignore[attr-defined]
        assert found == [None, None]


def swap(communicator: Communicator) -> None:
    exchange = communicator._exchange  # type: ignore[attr-defined]
    other = 3 - communicator.rank
    exchange.wait([exchange.send(other), exchange.receive(other)])
