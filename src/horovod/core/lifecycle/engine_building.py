"""Builds one engine for one group of ranks: the members tell each other what stands against which engine, choose, and build.

Called by :mod:`horovod.core.lifecycle.assembly` for the host memory of a process set, over the control connections of
its members; by engines that are composed of others, through :attr:`Group.subgroup`; and, for the memory of a device,
wherever the members of a set are all there in order, over the communicator that they have already. What the members
say to each other decides, the same on all of them, so nobody has to be told what was decided.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
import numpy as np

from horovod.comm.base import Communicator, DeviceFailure
from horovod.comm.engine import Bootstrap, EngineError, Group
from horovod.comm.select import candidates, cannot, engine, obstacles
from horovod.comm.single import SingleCommunicator
from horovod.comm.spans import HOST
from horovod.control.dial import receive_exactly
from horovod.control.framing import LENGTH_BYTES, frame

_log = logging.getLogger("horovod.core")

LONGEST_MESSAGE = 1 << 24


class Meeting(Protocol):
    """The members of a group exchange small messages, in the same order of calls on all of them."""

    def allgather(self, own: bytes) -> list[bytes]:
        """Everybody's bytes, by index."""

    def broadcast(self, data: bytes, descriptor: int = -1) -> tuple[bytes, int]:
        """What the first member passes, on all members: bytes, and a descriptor of its own for each that can be passed
        one, else -1."""


class MeetingOverConnections:
    """Over the connections of the group's first member with each other one, by index; a member has that to the first only."""

    def __init__(self, size: int, connections: Mapping[int, socket.socket], leads: bool, deadline: float) -> None:
        self._size = size
        self._connections = connections
        self._leads = leads
        self._deadline = deadline

    def allgather(self, own: bytes) -> list[bytes]:
        if not self._leads:
            self._send(0, own)
            return msgspec.msgpack.decode(self._receive(0)[0], type=list[bytes])
        everything = [own if index == 0 else self._receive(index)[0] for index in range(self._size)]
        self.broadcast(msgspec.msgpack.encode(everything))
        return everything

    def broadcast(self, data: bytes, descriptor: int = -1) -> tuple[bytes, int]:
        if not self._leads:
            return self._receive(0)
        for index in self._connections:
            self._send(index, data, descriptor)
        return data, descriptor if descriptor < 0 else os.dup(descriptor)

    def _send(self, index: int, data: bytes, descriptor: int = -1) -> None:
        connection = self._connections[index]
        connection.settimeout(max(0.001, self._deadline - time.monotonic()))
        message = frame(data)
        if descriptor >= 0 and connection.family == socket.AF_UNIX:
            sent = socket.send_fds(connection, [message], [descriptor])
            message = message[sent:]
        connection.sendall(message)

    def _receive(self, index: int) -> tuple[bytes, int]:
        connection = self._connections[index]
        connection.settimeout(max(0.001, self._deadline - time.monotonic()))
        descriptors: list[int] = []
        head = b""
        if connection.family == socket.AF_UNIX:
            head, descriptors, _, _ = socket.recv_fds(connection, LENGTH_BYTES, 1)
            if not head:
                raise ConnectionError("a member closed its connection while an engine was chosen")
        head += receive_exactly(connection, LENGTH_BYTES - len(head), self._deadline)
        length = int.from_bytes(head, "big")
        if length > LONGEST_MESSAGE:
            raise ConnectionError(f"a message of {length} bytes was announced while an engine was chosen")
        return receive_exactly(connection, length, self._deadline), descriptors[0] if descriptors else -1


class MeetingOverCommunicator:
    """Over a communicator for host memory that the same members have already; no descriptors."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def allgather(self, own: bytes) -> list[bytes]:
        size = self._communicator.size
        lengths = np.empty(size, np.int64)
        self._communicator.allgather([np.array([len(own)], np.int64)], [lengths], [[1] * size])
        everything = np.empty(int(lengths.sum()), np.uint8)
        self._communicator.allgather([np.frombuffer(own, np.uint8)], [everything], [lengths.tolist()])
        ends = lengths.cumsum().tolist()
        return [everything[end - length : end].tobytes() for end, length in zip(ends, lengths.tolist(), strict=True)]

    def broadcast(self, data: bytes, descriptor: int = -1) -> tuple[bytes, int]:
        length = np.array([len(data)], np.int64)
        self._communicator.broadcast([length], 0)
        array = np.empty(int(length[0]), np.uint8)
        if self._communicator.rank == 0:
            array[:] = np.frombuffer(data, np.uint8)
        self._communicator.broadcast([array], 0)
        return array.tobytes(), -1


class _Opinion(msgspec.Struct, array_like=True):
    """What a member says before an engine is chosen."""

    forced: str
    obstacles: dict[str, str]


_decode_opinion = msgspec.msgpack.Decoder(_Opinion).decode


class _Offer(msgspec.Struct, array_like=True):
    """What the first member says of one engine; ``obstacle`` where it could not make the bootstrap."""

    data: bytes
    obstacle: str = ""


_decode_offer = msgspec.msgpack.Decoder(_Offer).decode


def build_engine(
    group: Group,
    meeting: Meeting,
    forced: str,
    variable: str,
    deadline: float,
    names: Sequence[str] = (),
    device: str = HOST,
) -> Communicator:
    """This rank's communicator of the best engine that can serve the group. Every member must call it.

    Args:
        forced: what this rank's environment asks for, "" for no wish; ``variable`` is where.
        deadline: ``time.monotonic`` by which all members must have answered.
        names: the engines to choose from, best first; none: those of the device that are chosen without being forced.

    Raises:
        EngineError: no engine can serve this group, or the one that was forced cannot. On all members.
        OSError, msgspec.DecodeError: a member did not answer, or not as it should.
    """
    if group.size == 1 and device == HOST:
        if forced:
            candidates([forced], [{}], variable, names, device)  # a wrong name is an error in a group of one, too
        return SingleCommunicator()
    opinion = _Opinion(forced, obstacles(group, forced, names, device))
    opinions = [_decode_opinion(each) for each in meeting.allgather(msgspec.msgpack.encode(opinion))]
    wishes = [each.forced for each in opinions]
    found = [each.obstacles for each in opinions]
    rest = candidates(wishes, found, variable, names, device)
    wish = next((wish for wish in wishes if wish), "")
    reasons: dict[str, tuple[int, str]] = {}
    for name in rest:
        communicator, failed = _try(name, group, meeting, deadline, device)
        if communicator is not None:
            if group.rank == 0:
                why = _why(rest[: rest.index(name)], reasons, found, name)
                _log.info(
                    "a process set of %d ranks exchanges %s memory by %s%s",
                    group.size,
                    "host" if device == HOST else device,
                    name,
                    f" ({why})" if why else "",
                )
            return communicator
        reasons[name] = failed
    member, obstacle = reasons[rest[-1]]
    if wish:
        raise cannot(variable, wish, member, obstacle)
    raise EngineError(f"no engine can serve this group; {rest[-1]}: member {member}: {obstacle}")


def build_for_members(
    name: str,
    group: Group | None,
    members: Sequence[int],
    meeting: Meeting,
    deadline: float,
    device: str,
    whole: Communicator | None = None,
) -> Communicator | None:
    """This rank's communicator of one engine for some of those who meet; None where it is not among them.

    Everybody who meets must call it.

    Args:
        group: as this rank sees the members, None where it is not one.
        members: their indices in the meeting.
        whole: the engine's communicator of all who meet, if there is one. It is split where that can be done now.

    Raises:
        EngineError: it could not be built on a member; everywhere.
    """
    communicator, obstacle = None, ""
    if whole is not None and all(meeting.allgather(b"splits" if whole.can_split() else b"")):
        try:
            communicator = whole.split(members, deadline)
        except DeviceFailure as error:
            obstacle = str(error)
    else:
        communicator, obstacle = _build_anew(name, group, members, meeting, deadline, device)
    try:
        outcomes = [each.decode() for each in meeting.allgather(obstacle.encode())]
    except BaseException:
        if communicator is not None:
            communicator.abort()
            communicator.close()
        raise
    failed = [f"rank {rank}: {outcome}" for rank, outcome in enumerate(outcomes) if outcome]
    if failed:
        if communicator is not None:
            communicator.abort()
            communicator.close()
        raise EngineError(
            f"{name} could not be set up for the memory of GPUs: {failed[0]}. With HOROVOD_GPU_OPERATIONS=HOST copies in "
            "host memory travel instead."
        )
    return communicator


def _build_anew(
    name: str, group: Group | None, members: Sequence[int], meeting: Meeting, deadline: float, device: str
) -> tuple[Communicator | None, str]:
    """This rank's communicator, None where it is not a member or that failed; and why it failed."""
    kind, offer = engine(name, device), _Offer(b"")
    if group is not None and group.rank == 0:
        try:
            offer = _Offer(kind.bootstrap(group).data)
        except (EngineError, OSError, ValueError) as error:
            offer = _Offer(b"", str(error) or repr(error))
    offer = _decode_offer(meeting.allgather(msgspec.msgpack.encode(offer))[members[0]])
    if group is None or offer.obstacle:
        return None, offer.obstacle
    try:
        return kind.build(group, Bootstrap(offer.data), deadline), ""
    except (EngineError, OSError, ValueError, RuntimeError) as error:
        return None, str(error) or repr(error)


def _why(
    tried: Sequence[str], reasons: Mapping[str, tuple[int, str]], found: Sequence[Mapping[str, str]], chosen: str
) -> str:
    """Why it is not a better engine, for the log."""
    failures = [f"member {reasons[name][0]}: {reasons[name][1]}" for name in tried]
    for name, obstacle in found[0].items():
        if name == chosen:
            break
        if obstacle and name not in tried:
            failures.append(f"{name}: {obstacle}")
    return "; ".join(failures)


def _try(
    name: str, group: Group, meeting: Meeting, deadline: float, device: str
) -> tuple[Communicator | None, tuple[int, str]]:
    """Build one engine; None, and the first member that could not with its reason, where that failed on any."""
    kind = engine(name, device)
    offer, own_descriptor = _Offer(b""), -1
    if group.rank == 0:
        try:
            made = kind.bootstrap(group)
            offer, own_descriptor = _Offer(made.data), made.descriptor
        except (EngineError, OSError, ValueError) as error:
            offer = _Offer(b"", str(error) or repr(error))
    try:
        body, descriptor = meeting.broadcast(msgspec.msgpack.encode(offer), own_descriptor)
    finally:
        if own_descriptor >= 0:
            os.close(own_descriptor)
    communicator, obstacle = None, ""
    try:
        offer = _decode_offer(body)
        if offer.obstacle:
            return None, (0, offer.obstacle)
        try:
            communicator = kind.build(group, Bootstrap(offer.data, descriptor), deadline)
        except (EngineError, OSError, ValueError, RuntimeError) as error:
            obstacle = str(error) or repr(error)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    try:
        outcomes = [each.decode() for each in meeting.allgather(obstacle.encode())]
    except BaseException:
        if communicator is not None:
            communicator.close()
        raise
    failed = [(member, outcome) for member, outcome in enumerate(outcomes) if outcome]
    if failed:
        if communicator is not None:
            communicator.close()
        return None, failed[0]
    return communicator, (0, "")
