"""NCCL's C functions on host memory: executes late, records what was called, and tells of every breach of the protocol.

:class:`RecordedNccl` has the functions of ``libnccl.so`` that :mod:`horovod.comm.nccl.library` names. What is called is put
on the stream that it is called for, as one piece of work a group, and carried out there when that stream comes to it: between
processes or threads, over sockets of the unique id's name. As in NCCL with ``blocking=0``, calls answer "in progress", and
what was called reaches the stream only when somebody has asked long enough; so whoever records an event too early, forgets to
wait, or frees memory that is in use, gets wrong numbers or a breach. A stream is any object with ``push(work)``.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import numpy as np

from horovod.comm.base import Aborted, PeerFailure, Stall
from horovod.comm.datatypes import Array
from horovod.comm.device import DeviceRuntime, OwnedSpans
from horovod.comm.nccl import library
from horovod.comm.reduction import ReduceOp
from horovod.comm.spans import Spans, address_of, layout_of
from horovod.comm.tcp.communicator import TcpCommunicator

SUCCESS, INVALID_USAGE, REMOTE_ERROR, IN_PROGRESS = 0, 5, 6, 7
VERSION = 23203
SECONDS = 30

_WORDS = {INVALID_USAGE: b"invalid usage", REMOTE_ERROR: b"remote process exited or there was a network error"}
_TYPES = {number: dtype for dtype, number in library.DATA_TYPES.items()}
_OPS = {number: op for op, number in library.OPERATIONS.items()}
_CUSTOM = itertools.count(1000)
_BETWEEN_TWO = ("send", "recv")


def array_at(address: int, length: int, dtype: Any) -> Array:
    """Memory of the host as an array."""
    dtype = np.dtype(dtype)
    if not length:
        return np.empty(0, dtype)
    memory = (ctypes.c_char * (length * dtype.itemsize)).from_address(address)
    return np.frombuffer(memory, dtype)


class _Comm:
    """One rank's communicator."""

    def __init__(
        self, number: int, rank: int, size: int, token: str, write: Callable[[int], None] = lambda number: None
    ) -> None:
        self.write = write
        self.number = number
        self.rank = rank
        self.size = size
        self.state = SUCCESS
        self.asks = random.randrange(3)
        self.made = threading.Event()
        self.aborted = threading.Event()
        self.pending: list[Callable[[], None]] = []
        self.factors: dict[int, float] = {}
        self.callers = 0
        self.queued = 0
        self.ended = ""
        self.token = token
        self.splits = 0
        self.splitting = False
        self.tcp: TcpCommunicator | None = None
        self.pairs: dict[int, socket.socket] = {}
        threading.Thread(target=self._meet, args=(token,), name="recorded-nccl", daemon=True).start()

    def _meet(self, token: str) -> None:
        peers: dict[int, socket.socket] = {}
        two = [peers, self.pairs]
        deadline = time.monotonic() + SECONDS
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(f"\0{token}-{self.rank}")
                listener.listen(self.size)
                listener.settimeout(0.05)
                for peer in range(self.rank):
                    for which in range(2):
                        two[which][peer] = self._dial(f"\0{token}-{peer}", which, deadline)
                while (
                    sum(map(len, two)) < 2 * (self.size - 1)
                    and time.monotonic() < deadline
                    and not self.aborted.is_set()
                ):
                    try:
                        made, _ = listener.accept()
                    except TimeoutError:
                        continue
                    made.settimeout(SECONDS)
                    which, peer = made.recv(2)
                    two[which][peer] = made
            if sum(map(len, two)) < 2 * (self.size - 1):
                raise OSError("not all came")
            self.tcp = TcpCommunicator(self.rank, peers, timedelta(seconds=SECONDS), self._stalled)
        except OSError:
            self.state = REMOTE_ERROR
            for each in (*peers.values(), *self.pairs.values()):
                each.close()
        if self.aborted.is_set() and self.tcp is not None:
            self.tcp.abort()
        self.write(self.number)  # once more, as NCCL does
        self.made.set()

    def _stalled(self, stall: Stall) -> None:
        raise PeerFailure(stall.rank, stall.reason)

    def _dial(self, address: str, which: int, deadline: float) -> socket.socket:
        while True:
            made = socket.socket(socket.AF_UNIX)
            try:
                made.connect(address)
                made.sendall(bytes([which, self.rank]))
                return made
            except OSError:
                made.close()
                if time.monotonic() > deadline or self.aborted.is_set():
                    raise
                time.sleep(0.005)


class RecordedNccl:
    """Plays the loaded library.

    Args:
        stream_of: the stream with an address.
        touched: ``touched(stream, address)`` is called with each address that work on a stream uses; what it returns is called
            when that is over. For who watches memory.

    Attributes:
        calls: names and arguments of all calls, in order.
        breaches: of the protocol.
        hold: while it is not set, nothing that was called is carried out.
        writes: while it is not set, no address of a part is written.
    """

    def __init__(
        self,
        stream_of: Callable[[int], Any],
        touched: Callable[[Any, int], Callable[[], None]] = lambda stream, address: lambda: None,
    ) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.breaches: list[str] = []
        self.hold = threading.Event()
        self.hold.set()
        self.writes = threading.Event()
        self.writes.set()
        self.abort_takes = 0.0
        self.comms: dict[int, _Comm] = {}
        self._stream_of = stream_of
        self._touched = touched
        self._numbers = itertools.count(1)
        self._thread = threading.local()
        self._lock = threading.Condition()

    # Of the library as a whole

    def ncclGetVersion(self, version: Any) -> int:
        version._obj.value = VERSION
        return SUCCESS

    def ncclGetUniqueId(self, made: Any) -> int:
        ctypes.memmove(ctypes.addressof(made._obj), os.urandom(128), 128)
        return SUCCESS

    def ncclGetErrorString(self, result: int) -> bytes:
        return _WORDS.get(result, b"error")

    def ncclGetLastError(self, comm: int | None) -> bytes:
        return b"recorded"

    # Communicators

    def ncclCommInitRankConfig(self, made: Any, size: int, identity: Any, rank: int, config: Any) -> int:
        if config._obj.blocking != 0 or config._obj.size != ctypes.sizeof(config._obj):
            self._breach("the communicator is not non-blocking")
        number = next(self._numbers)
        token = ctypes.string_at(ctypes.addressof(identity), 16).hex()
        self._record("init", size, rank)
        self.comms[number] = _Comm(number, rank, size, token, self._writer(made))
        made._obj.value = number
        return IN_PROGRESS

    def ncclCommSplit(self, comm: int, color: int, key: int, made: Any, config: Any) -> int:
        known = self._known(comm, "ncclCommSplit")
        if known is None:
            return INVALID_USAGE
        if config._obj.blocking != 0 or config._obj.size != ctypes.sizeof(config._obj):
            self._breach("the part is not non-blocking")
        if known.pending or known.queued or known.splitting or not known.made.is_set():
            self._breach("ncclCommSplit while something that was called is under way")
        self._record("split", comm, color, key)
        known.splitting, known.splits = True, known.splits + 1
        number, turn = next(self._numbers), known.splits
        write = self._writer(made)

        def divide() -> None:
            assert known.tcp is not None
            everybody = np.empty(2 * known.size, np.int64)
            try:
                known.tcp.allgather([np.array([color, key])], [everybody], [[2] * known.size])
                members = sorted(
                    (each[1], rank) for rank, each in enumerate(everybody.reshape(-1, 2).tolist()) if each[0] == color
                )
                if color != library.NO_COLOR:
                    rank = members.index((key, known.rank))
                    token = f"{known.token}-{turn}-{color}"
                    self.comms[number] = _Comm(number, rank, len(members), token)
                time.sleep(random.random() * 0.01)
                self.writes.wait(SECONDS)
                write(number if number in self.comms else None)
            except (Aborted, PeerFailure, OSError):
                known.state = REMOTE_ERROR
            with self._lock:
                known.splitting = False
                self._lock.notify_all()

        threading.Thread(target=divide, name="recorded-nccl", daemon=True).start()
        return SUCCESS  # as NCCL does: the state says that the split is in progress

    def _writer(self, made: Any) -> Callable[[int | None], None]:
        """Writes the address of a communicator. The caller keeps the memory until the state says that the call is over."""
        written = weakref.ref(made._obj)

        def write(address: int | None) -> None:
            place = written()
            if place is None:
                self._breach("the memory for the address of a communicator was freed before NCCL wrote it")
            else:
                place.value = address

        return write

    def ncclCommGetAsyncError(self, comm: int, state: Any) -> int:
        known = self.comms.get(comm)
        if known is None or known.ended not in ("", "finalized"):
            known = self._known(comm, "ncclCommGetAsyncError")
        if known is None:
            return INVALID_USAGE
        at_work = known.ended and known.queued  # the end waits for what the device is at
        if at_work or known.splitting or (known.state == SUCCESS and not known.made.is_set()):
            state._obj.value = IN_PROGRESS
        elif known.state == SUCCESS and known.pending:
            known.asks -= 1
            if known.asks < 0:
                self._flush(known)
            state._obj.value = SUCCESS if known.asks < 0 else IN_PROGRESS
        else:
            state._obj.value = known.state
        return SUCCESS

    def ncclCommFinalize(self, comm: int) -> int:
        known = self._known(comm, "ncclCommFinalize")
        if known is None:
            return INVALID_USAGE
        if known.pending or known.splitting:
            self._breach("ncclCommFinalize while a call is in progress")
        self._record("finalize", comm)
        known.ended = "finalized"
        return IN_PROGRESS

    def ncclCommDestroy(self, comm: int) -> int:
        known = self.comms.get(comm)
        if known is None or known.ended != "finalized" or known.queued:
            self._breach("ncclCommDestroy without ncclCommFinalize, before that is done, or twice")
            return INVALID_USAGE
        known.ended = "destroyed"
        self._record("destroy", comm)
        self._end(known)
        return SUCCESS

    def ncclCommAbort(self, comm: int) -> int:
        known = self._known(comm, "ncclCommAbort")
        if known is None:
            return INVALID_USAGE
        if known.callers:
            self._breach("ncclCommAbort while a thread is inside a call")
        self._record("abort", comm)
        known.ended = "aborted"
        time.sleep(self.abort_takes)
        known.aborted.set()
        if known.tcp is not None:
            known.tcp.abort()
        for each in known.pairs.values():
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        known.made.wait(SECONDS)
        with self._lock:  # what makes communicators ends before the abort does
            self._lock.wait_for(lambda: not known.splitting, SECONDS)
        self._end(known)
        return SUCCESS

    def _end(self, known: _Comm) -> None:
        """Close the sockets, when the work that uses them has left: who still waits at one would not be woken by that."""

        def close() -> None:
            known.made.wait(SECONDS)
            with self._lock:
                self._lock.wait_for(lambda: not known.queued and not known.splitting, SECONDS)
            if known.tcp is not None:
                known.tcp.close()
            for each in known.pairs.values():
                each.close()

        threading.Thread(target=close, name="recorded-nccl", daemon=True).start()

    # Groups

    def ncclGroupStart(self) -> int:
        if getattr(self._thread, "group", None) is not None:
            self._breach("ncclGroupStart inside a group")
        self._thread.group = []
        return SUCCESS

    def ncclGroupEnd(self) -> int:
        group = getattr(self._thread, "group", None)
        self._thread.group = None
        if group is None:
            self._breach("ncclGroupEnd without ncclGroupStart")
            return INVALID_USAGE
        if not group:
            return SUCCESS
        comms = {call[1].number: call[1] for call in group}
        streams = {call[2] for call in group}
        if len(comms) != 1 or len(streams) != 1:
            self._breach("a group of several communicators or streams")
        (comm,) = comms.values()
        if comm.pending or comm.splitting:
            self._breach("a call while the one before is in progress")
        address = streams.pop()
        if not address:
            self._breach("a call on the default stream")
            return INVALID_USAGE
        stream = self._stream_of(address)
        comm.pending.append(lambda: self._queue(comm, stream, group))
        comm.asks = random.randrange(4)
        if comm.asks == 0:
            self._flush(comm)
            return SUCCESS
        return IN_PROGRESS

    def _flush(self, comm: _Comm) -> None:
        pending, comm.pending = comm.pending, []
        for each in pending:
            each()

    def _queue(self, comm: _Comm, stream: Any, group: list[Any]) -> None:
        over = [self._touched(stream, address) for call in group for address in call[3]]

        with self._lock:
            comm.queued += 1

        def work() -> None:
            try:
                self._carry_out(comm, group)
            finally:
                for each in over:
                    each()
                with self._lock:
                    comm.queued -= 1
                    self._lock.notify_all()

        stream.push(work)

    # Collectives

    def _call(self, name: str, comm: int, stream: int, addresses: tuple[int, ...], *arguments: Any) -> int:
        known = self._known(comm, name)
        if known is None:
            return INVALID_USAGE
        group = getattr(self._thread, "group", None)
        self._record(name, comm, *arguments)
        if group is None:
            self._breach(f"{name} outside of a group")
            return INVALID_USAGE
        with self._lock:
            known.callers += 1
        time.sleep(0)
        # What is made of a factor may be destroyed when the call has returned.
        arguments = tuple(known.factors.get(each, each) for each in arguments)
        group.append((name, known, stream, addresses, arguments))
        with self._lock:
            known.callers -= 1
        return SUCCESS

    def ncclRedOpCreatePreMulSum(self, op: Any, scalar: Any, dtype: int, residence: int, comm: int) -> int:
        known = self._known(comm, "ncclRedOpCreatePreMulSum")
        if known is None:
            return INVALID_USAGE
        op._obj.value = next(_CUSTOM)
        known.factors[op._obj.value] = float(array_at(scalar.value, 1, _TYPES[dtype])[0])
        return SUCCESS

    def ncclRedOpDestroy(self, op: int, comm: int) -> int:
        known = self._known(comm, "ncclRedOpDestroy")
        if known is None or known.factors.pop(op, None) is None:
            self._breach("ncclRedOpDestroy of what there is not")
        return SUCCESS

    def ncclAllReduce(self, source: int, target: int, count: int, dtype: int, op: int, comm: int, stream: int) -> int:
        return self._call("allreduce", comm, stream, (source, target), count, dtype, op)

    def ncclReduce(
        self, source: int, target: int, count: int, dtype: int, op: int, root: int, comm: int, stream: int
    ) -> int:
        return self._call("reduce", comm, stream, (source, target), count, dtype, op, root)

    def ncclReduceScatter(
        self, source: int, target: int, count: int, dtype: int, op: int, comm: int, stream: int
    ) -> int:
        return self._call("reducescatter", comm, stream, (source, target), count, dtype, op)

    def ncclBroadcast(self, source: int, target: int, count: int, dtype: int, root: int, comm: int, stream: int) -> int:
        return self._call("broadcast", comm, stream, (source, target), count, dtype, root)

    def ncclAllGather(self, source: int, target: int, count: int, dtype: int, comm: int, stream: int) -> int:
        return self._call("allgather", comm, stream, (source, target), count, dtype)

    def ncclSend(self, source: int, count: int, dtype: int, peer: int, comm: int, stream: int) -> int:
        return self._call("send", comm, stream, (source,), count, dtype, peer)

    def ncclRecv(self, target: int, count: int, dtype: int, peer: int, comm: int, stream: int) -> int:
        return self._call("recv", comm, stream, (target,), count, dtype, peer)

    def _carry_out(self, comm: _Comm, group: list[Any]) -> None:
        while not self.hold.wait(0.01):
            if comm.aborted.is_set():
                return
        try:
            assert comm.made.wait(SECONDS) and comm.tcp is not None
            collective = [(name, *arguments) for name, _, _, _, arguments in group if name not in _BETWEEN_TWO]
            if collective:
                self._compare(comm, collective)
            between_two = [call for call in group if call[0] in _BETWEEN_TWO]
            for name, _, _, addresses, arguments in group:
                if name not in _BETWEEN_TWO:
                    self._collective(comm, name, addresses, arguments)
            if between_two:
                self._exchange(comm, between_two)
        except (Aborted, PeerFailure, OSError):
            if not comm.aborted.is_set():
                comm.state = REMOTE_ERROR
                comm.aborted.wait(SECONDS)  # a kernel whose peer is gone ends with the abort

    def _compare(self, comm: _Comm, calls: list[tuple[Any, ...]]) -> None:
        """Whether all ranks came here with the same calls."""
        assert comm.tcp is not None
        digest = np.frombuffer(repr(calls).encode().ljust(1 << 16, b" ")[: 1 << 16], np.uint8)
        everybody = np.empty(comm.size << 16, np.uint8)
        comm.tcp.allgather([digest.copy()], [everybody], [[1 << 16] * comm.size])
        for rank, other in enumerate(everybody.reshape(comm.size, -1)):
            if other.tobytes() != digest.tobytes():
                theirs = other.tobytes().decode().strip()
                self._breach(f"rank {comm.rank} calls {calls}, and rank {rank} {theirs}")

    def _collective(self, comm: _Comm, name: str, addresses: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        tcp, size, rank = comm.tcp, comm.size, comm.rank
        assert tcp is not None
        count, dtype = arguments[0], _TYPES[arguments[1]]
        source = array_at(addresses[0], count, dtype)
        if name == "broadcast":
            target = array_at(addresses[1], count, dtype)
            if rank == arguments[2]:
                target[:] = source
            tcp.broadcast([target], arguments[2])
        elif name == "allgather":
            tcp.allgather([source.copy()], [array_at(addresses[1], count * size, dtype)], [[count] * size])
        else:
            number = arguments[2]
            op = _OPS.get(number, ReduceOp.SUM) if isinstance(number, int) else ReduceOp.SUM
            factor = number if isinstance(number, float) else 1.0 / size if number == library.AVERAGE else 1.0
            if name == "allreduce":
                tcp.allreduce([source], [array_at(addresses[1], count, dtype)], op, factor, 1.0)
            elif name == "reducescatter":
                whole = array_at(addresses[0], count * size, dtype).copy()
                tcp.reducescatter([whole], [array_at(addresses[1], count, dtype)], [[count] * size], op, factor, 1.0)
            else:
                counts = [count if other == arguments[3] else 0 for other in range(size)]
                target = array_at(addresses[1], counts[rank], dtype)
                tcp.reducescatter([source.copy()], [target], [counts], op, factor, 1.0)

    def _exchange(self, comm: _Comm, calls: list[Any]) -> None:
        """Sends and receives: who has none for a peer need not be there."""

        def send() -> None:
            for name, _, _, addresses, (count, _, peer) in calls:
                if name == "send" and peer != comm.rank:
                    comm.pairs[peer].sendall(array_at(addresses[0], count, np.uint8).tobytes())

        sender = threading.Thread(target=send, name="recorded-nccl", daemon=True)
        sender.start()
        own = [array_at(call[3][0], call[4][0], np.uint8) for call in calls if call[4][2] == comm.rank]
        if own:
            source, target = own
            target[:] = source
        for name, _, _, addresses, (count, _, peer) in calls:
            if name == "recv" and peer != comm.rank:
                room = memoryview(bytearray(count))
                done = 0
                while done < count:
                    got = comm.pairs[peer].recv_into(room[done:])
                    if not got:
                        raise OSError("the peer has closed")
                    done += got
                array_at(addresses[0], count, np.uint8)[:] = np.frombuffer(room, np.uint8)
        sender.join()

    # Notes

    def _known(self, comm: int, name: str) -> _Comm | None:
        known = self.comms.get(comm)
        if known is None or known.ended:
            self._breach(f"{name} on a communicator that is {known.ended if known else 'none'}")
            return None
        return known

    def _record(self, *call: Any) -> None:
        self.calls.append(call)

    def _breach(self, text: str) -> None:
        self.breaches.append(text)

    def names(self) -> list[str]:
        """Of the calls, in order."""
        return [call[0] for call in self.calls]


@contextmanager
def loaded(functions: RecordedNccl) -> Iterator[None]:
    """A block in which the engine finds this library and no other."""
    before = library.find, library.loaded
    found = library.Nccl(functions, "recorded")
    library.find = lambda: "recorded"
    library.loaded = lambda: found
    try:
        yield
    finally:
        library.find, library.loaded = before


# A runtime on host memory, for tests without a framework


class Stream:
    """Does its work in order, on a thread of its own, late."""

    def __init__(self, registry: dict[int, Stream], seed: int) -> None:
        self._work: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._random = random.Random(seed)
        self._thread: threading.Thread | None = None
        self.address = id(self)
        registry[self.address] = self

    def push(self, work: Callable[[], None]) -> None:
        with self._changed:
            self._work.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="recorded-stream", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._work:
                    self._thread = None
                    return
                work = self._work.popleft()
            time.sleep(self._random.random() * 2e-3)
            work()


class Marker:
    """An event: set when the stream has come there."""

    def __init__(self) -> None:
        self.reached = threading.Event()


class RecordingRuntime(DeviceRuntime):
    """A device whose memory is the host's: each rank has its own, with streams that are late.

    Attributes:
        current: the stream of the caller.
        freed: addresses whose memory was let go of.
    """

    scales = True

    def __init__(self, name: str, registry: dict[int, Stream]) -> None:
        self.device = name
        self._registry = registry
        self.current = Stream(registry, 1)

    @contextmanager
    def chosen(self) -> Iterator[None]:
        yield

    def new_stream(self) -> Stream:
        return Stream(self._registry, 2)

    def current_stream(self) -> Stream:
        return self.current

    def stream_address(self, stream: Stream) -> int:
        return stream.address

    def record(self, stream: Stream) -> Marker:
        marker = Marker()
        stream.push(marker.reached.set)
        return marker

    def wait(self, stream: Stream, marker: Marker) -> None:
        stream.push(lambda: _await(marker))

    def query(self, marker: Marker) -> bool:
        return marker.reached.is_set()

    def allocate(self, dtype: np.dtype[Any], length: int, stream: Stream, value: Any = None) -> OwnedSpans:
        made = np.full(length, 77 if dtype.kind != "V" else 0).astype(dtype)
        if value is not None:
            stream.push(lambda: made.fill(value))
        return OwnedSpans(layout_of(dtype, (length,), self.device), [address_of(made)], owner=made)

    def copy(self, stream: Stream, sources: Spans, targets: Spans) -> None:
        layout = sources.layout
        pairs = [
            (array_at(target, length, np.uint8), array_at(source, length, np.uint8))
            for source, target, length in zip(
                sources.addresses, targets.addresses, layout.lengths.tolist(), strict=True
            )
        ]

        def work() -> None:
            for target, source in pairs:
                target[:] = source

        stream.push(work)

    def scale(self, stream: Stream, sources: Spans, targets: Spans, factor: float) -> None:
        layout = sources.layout
        wide = np.float64 if layout.dtype.itemsize == 8 else np.float32
        pairs = [
            (array_at(target, size, layout.dtype), array_at(source, size, layout.dtype))
            for source, target, size in zip(sources.addresses, targets.addresses, layout.sizes, strict=True)
        ]

        def work() -> None:
            for target, source in pairs:
                target[:] = (source.astype(wide) * wide(factor)).astype(layout.dtype)

        stream.push(work)


def _await(marker: Marker) -> None:
    assert marker.reached.wait(SECONDS), "the stream is stuck"
