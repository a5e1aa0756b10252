"""Builds one engine for one group of ranks: the members exchange which engines each can use, choose the best, and build it.

Called by :mod:`horovod.core.lifecycle.assembly` for the host memory of a process set, over the control connections of its
members; by engines that are composed of others, through :attr:`EngineGroup.subgroup`; and by
:mod:`horovod.core.engines.device_engines` for the memory of GPUs, over the communicator that the ranks already have. All
members choose from the same data by the same rule, so the choice itself is not sent.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

import msgspec

from horovod._base.config import GPU_OPERATIONS
from horovod.comm.base import Communicator, DeviceFailure
from horovod.comm.engine import Bootstrap, EngineError, EngineGroup
from horovod.comm.select import Support, candidates, engine, forced_engine_error, obstacles
from horovod.comm.shm.engine import SharedProposals
from horovod.comm.shm.proposals import Proposals
from horovod.comm.single import SingleCommunicator
from horovod.comm.spans import HOST
from horovod.core.engines.member_exchange import MemberExchange

_log = logging.getLogger("horovod.core")

_MEETING_SECONDS = 0.5
_BUILDS, _DONE, _FAILED = b"builds", b"done", b"failed: "
"""A rank's message in one status exchange."""


class Closable(Protocol):
    """Something that is built on all members, and released if another member could not build it."""

    def close(self) -> None: ...


BuiltT = TypeVar("BuiltT", bound=Closable)
BuiltT_co = TypeVar("BuiltT_co", bound=Closable, covariant=True)


class Kind(Protocol[BuiltT_co]):
    """Something that is built in the steps of an :class:`~horovod.comm.engine.Engine`."""

    def bootstrap(self, group: EngineGroup) -> Bootstrap: ...
    def build(self, group: EngineGroup, bootstrap: Bootstrap, deadline: float) -> BuiltT_co: ...


_decode_support = msgspec.msgpack.Decoder(Support).decode


class _BootstrapMessage(msgspec.Struct, array_like=True):
    """The first member's bootstrap data of one engine; or ``obstacle``, the reason why it could not make it."""

    data: bytes
    obstacle: str = ""


_decode_bootstrap = msgspec.msgpack.Decoder(_BootstrapMessage).decode


def build_engine(
    group: EngineGroup,
    exchange: MemberExchange,
    forced: str,
    variable: str,
    deadline: float,
    names: Sequence[str] = (),
    device: str = HOST,
) -> Communicator:
    """This rank's communicator of the best engine that can serve the group. Every member must call it.

    Args:
        forced: the engine that this rank's environment forces, "" for none; ``variable`` is the environment variable.
        deadline: ``time.monotonic`` by which all members must have answered.
        names: the engines to choose from, best first; none: those of the device that are chosen without being forced.

    Raises:
        EngineError: no engine can serve this group, or the one that was forced cannot. On all members.
        OSError, msgspec.DecodeError: a member did not answer, or not as it should.
    """
    if group.size == 1 and device == HOST:
        if forced:  # a wrong name is an error in a group of one, too
            candidates({exchange.ranks[0]: Support(forced, {})}, variable, names, device)
        return SingleCommunicator()
    own = Support(forced, obstacles(group, forced, names, device))
    gathered = exchange.allgather(msgspec.msgpack.encode(own))
    support = {rank: _decode_support(each) for rank, each in zip(exchange.ranks, gathered, strict=True)}
    rest = candidates(support, variable, names, device)
    failures: dict[str, tuple[int, str]] = {}
    for name in rest:
        communicator, failure = _try(engine(name, device), group, exchange, deadline)
        if communicator is not None:
            if group.rank == 0:
                why = communicator.chosen_because = _why(failures, support[exchange.ranks[0]].obstacles, name)
                _log.debug(
                    "a process set of %d ranks exchanges %s memory by %s%s",
                    group.size,
                    "host" if device == HOST else device,
                    name,
                    f" ({why})" if why else "",
                )
            return communicator
        failures[name] = failure
    last = rest[-1]
    forced_somewhere = next((each.forced for each in support.values() if each.forced), "")
    if forced_somewhere:
        raise forced_engine_error(variable, forced_somewhere, *failures[last])
    rank, obstacle = failures[last]
    raise EngineError(f"no engine can serve this group; {last}: rank {rank}: {obstacle}")


def build_proposals(
    group: EngineGroup, contributions: bool, exchange: MemberExchange, deadline: float
) -> Proposals | None:
    """The shared memory in which the members agree on collectives without messages; None where they share none.

    Every member must call it.

    Args:
        contributions: as of :class:`~horovod.comm.shm.proposals.Proposals`.
        deadline: ``time.monotonic`` by which all members must have answered.

    Raises:
        OSError, msgspec.DecodeError: a member did not answer, or not as it should.
    """
    if group.size == 1 or len(set(group.hosts)) > 1:
        return None
    proposals, (rank, obstacle) = _try(SharedProposals(contributions), group, exchange, deadline)
    if proposals is None and group.rank == 0:
        _log.info("a process set of %d ranks agrees by messages alone: rank %d: %s", group.size, rank, obstacle)
    return proposals


def build_for_members(
    name: str,
    group: EngineGroup | None,
    members: Sequence[int],
    exchange: MemberExchange,
    deadline: float,
    device: str,
    whole: Communicator | None = None,
) -> Communicator | None:
    """This rank's communicator of one engine for some members of an exchange; None where this rank is not among them.

    All ranks of the exchange must call it.

    Args:
        group: the members as this rank sees them; None if this rank is not a member.
        members: their indices in the exchange.
        whole: the engine's communicator of all ranks of the exchange, if there is one. It is split if possible.

    Raises:
        EngineError: it could not be built on a member; on all ranks of the exchange. A :class:`SplitError` where ``whole`` was
            to be split.
    """
    communicator, obstacle = None, ""
    meetings = _Meetings(exchange)
    splits = whole is not None and all(exchange.allgather(b"splits" if whole.can_split() else b""))
    try:
        if whole is not None and splits:
            communicator = whole.split(members, deadline, meetings.meet)
        else:
            if group is not None:
                group = dataclasses.replace(group, meanwhile=meetings.meet)
            communicator, obstacle = _build_anew(name, group, members, exchange, deadline, device)
    except DeviceFailure as error:
        obstacle = str(error)
    except _OtherFailed:
        obstacle = _GAVE_UP
    failure = meetings.end(communicator, obstacle)
    if failure is not None:
        raise (SplitError if splits else EngineError)(
            f"{name} could not be set up for the memory of GPUs: rank {failure[0]}: {failure[1]}. With "
            f"{GPU_OPERATIONS}=HOST tensors are staged in host memory instead."
        )
    return communicator


def _build_anew(
    name: str, group: EngineGroup | None, members: Sequence[int], exchange: MemberExchange, deadline: float, device: str
) -> tuple[Communicator | None, str]:
    """This rank's communicator, or None if it is not a member or the build failed; and the reason of a failure."""
    kind = engine(name, device)
    message, _ = _own_bootstrap(kind, group)
    message = _decode_bootstrap(exchange.allgather(msgspec.msgpack.encode(message))[members[0]])
    if group is None or message.obstacle:
        return None, message.obstacle
    return _build(kind, group, Bootstrap(message.data), deadline)


class SplitError(EngineError):
    """A communicator could not be split. It may be half split on some ranks, so it cannot be used any more."""


_GAVE_UP = "another rank failed"


class _OtherFailed(Exception):
    """Another rank could not build its part, so this rank stops building."""


class _Meetings:
    """Exchanges the ranks' status in small collectives while some of them build an engine, which may take minutes.

    In one long collective, a rank that waits would report the builders as stuck, and could not learn that one has failed.
    """

    def __init__(self, exchange: MemberExchange) -> None:
        self._exchange = exchange
        self._next = time.monotonic() + _MEETING_SECONDS

    def meet(self) -> None:
        """Exchange the status. A rank that builds calls it often.

        Raises:
            _OtherFailed: another rank has failed.
        """
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _MEETING_SECONDS
            if any(each.startswith(_FAILED) for each in self._exchange.allgather(_BUILDS)):
                raise _OtherFailed

    def end(self, built: Communicator | None, obstacle: str) -> tuple[int, str] | None:
        """Exchange the status until all ranks are done. Returns the first rank that failed, with its reason, or None; after a
        failure it releases what this rank has built.

        Args:
            obstacle: why this rank failed; "" if it did not.
        """
        own = _DONE if obstacle in ("", _GAVE_UP) else _FAILED + obstacle.encode()
        failed: list[tuple[int, str]] | None = None
        try:
            statuses = [_BUILDS]
            while _BUILDS in statuses:
                statuses = self._exchange.allgather(own)
            failed = [
                (rank, each.removeprefix(_FAILED).decode())
                for rank, each in zip(self._exchange.ranks, statuses, strict=True)
                if each.startswith(_FAILED)
            ]
        finally:
            if built is not None and failed != []:
                built.abort()
                built.close()
        return failed[0] if failed else None


def _try(
    kind: Kind[BuiltT], group: EngineGroup, exchange: MemberExchange, deadline: float
) -> tuple[BuiltT | None, tuple[int, str]]:
    """Build one engine. If a rank fails, returns None and the first rank that failed, with its reason."""
    message, own_descriptor = _own_bootstrap(kind, group)
    try:
        body, descriptor = exchange.broadcast(msgspec.msgpack.encode(message), own_descriptor)
    finally:
        if own_descriptor >= 0:
            os.close(own_descriptor)
    try:
        message = _decode_bootstrap(body)
        if message.obstacle:
            return None, (exchange.ranks[0], message.obstacle)
        built, obstacle = _build(kind, group, Bootstrap(message.data, descriptor), deadline)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    failure = _first_failure(built, obstacle, exchange)
    return (built, (0, "")) if failure is None else (None, failure)


def _own_bootstrap(kind: Kind[Closable], group: EngineGroup | None) -> tuple[_BootstrapMessage, int]:
    """The first member's bootstrap data, and an open descriptor or -1. Other members send nothing."""
    if group is None or group.rank != 0:
        return _BootstrapMessage(b""), -1
    try:
        made = kind.bootstrap(group)
    except (EngineError, OSError, ValueError) as error:
        return _BootstrapMessage(b"", str(error) or repr(error)), -1
    return _BootstrapMessage(made.data), made.descriptor


def _build(kind: Kind[BuiltT], group: EngineGroup, bootstrap: Bootstrap, deadline: float) -> tuple[BuiltT | None, str]:
    """The communicator that this rank has built, or None and the reason why it failed."""
    try:
        return kind.build(group, bootstrap, deadline), ""
    except (EngineError, OSError, ValueError, RuntimeError) as error:
        return None, str(error) or repr(error)


def _first_failure(built: Closable | None, obstacle: str, exchange: MemberExchange) -> tuple[int, str] | None:
    """The first rank that failed, with its reason, or None. All ranks call it. After a failure, it releases what this rank has
    built."""
    failed: list[tuple[int, str]] | None = None
    try:
        outcomes = [each.decode() for each in exchange.allgather(obstacle.encode())]
        failed = [(rank, outcome) for rank, outcome in zip(exchange.ranks, outcomes, strict=True) if outcome]
    finally:
        if built is not None and failed != []:
            if isinstance(built, Communicator):
                built.abort()
            built.close()
    return failed[0] if failed else None


def _why(failures: Mapping[str, tuple[int, str]], own_obstacles: Mapping[str, str], chosen: str) -> str:
    """Why no better engine was chosen, for the log."""
    reasons = [f"rank {rank}: {obstacle}" for rank, obstacle in failures.values()]
    for name, obstacle in own_obstacles.items():
        if name == chosen:
            break
        if obstacle and name not in failures:
            reasons.append(f"{name}: {obstacle}")
    return "; ".join(reasons)
