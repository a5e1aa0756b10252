"""The messages by which ranks agree on collectives, and their wire form.

A member *announces* requests to its process set's coordinator. The coordinator answers with *orders*: batches of decisions,
in the order in which every rank carries them out. A request or a decision is sent in full the first time, and as a small
integer afterwards: a member numbers its requests (:mod:`horovod.core.negotiation.request_dictionary`), the coordinator its
decisions.

On several hosts relays stand between the two (:mod:`horovod.core.negotiation.tree`): they send ``Relayed`` in place of their
host's announcements, and pass orders on.
"""

from __future__ import annotations

from enum import IntEnum
from functools import cached_property
from hashlib import blake2b

import msgspec

from horovod.autotune.kept import Tuned
from horovod.comm.datatypes import DataType
from horovod.comm.reduction import ReduceOp


class Operation(IntEnum):
    """Kinds of collective, with the numbers of the public interface."""

    ALLREDUCE = 0
    ALLGATHER = 1
    BROADCAST = 2
    JOIN = 3
    ADASUM = 4
    ALLTOALL = 5
    BARRIER = 6
    REDUCESCATTER = 7


HOST = "cpu"
"""The device of tensors that lie in host memory."""

_LONGEST_IDENTITY = 100
"""A longer :attr:`Request.identity` is a digest, so that a proposal of the fast path has room for some."""


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One tensor of a request: its name, type, and shape in elements."""

    name: str
    data_type: DataType
    shape: tuple[int, ...]


class Request(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """One rank's request: one collective on one tensor, or on a group of tensors that become ready together.

    Attributes:
        name: identifies the request within its process set.
        device: the kind of device that the tensors are on.
        caller: the line of the user's script, for errors.
        transient: the name will not be used again, so no dictionary keeps it.
        members: the global ranks that take part in a request on device memory of another process set than the one whose
            coordinator gets it; empty for all.
        unnamed: the call has no name and has not been counted yet, so its generated name lacks a number. Never sent.
        alike: further properties that must agree on all ranks, as text that errors quote.
        compression: the format of what travels between hosts of a sum of floating-point tensors, one of
            :data:`horovod.comm.compression.blocks.FORMATS`; "" for none.
    """

    # dict=True is for cached_property; what is in the dictionary is neither sent nor compared.
    operation: Operation
    name: str
    tensors: tuple[TensorSpec, ...] = ()
    reduce_op: ReduceOp = ReduceOp.AVERAGE
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    splits: tuple[int, ...] = ()
    device: str = HOST
    caller: str = ""
    transient: bool = False
    members: tuple[int, ...] = ()
    unnamed: bool = False
    alike: str = ""
    compression: str = ""

    @cached_property
    def nbytes(self) -> int:
        """The bytes of its tensors on this rank."""
        total = 0
        for tensor in self.tensors:
            elements = 1
            for dimension in tensor.shape:
                elements *= dimension
            total += elements * tensor.data_type.itemsize
        return total

    @cached_property
    def identity(self) -> bytes:
        """Everything that must agree on all ranks: all fields but the caller, and but the rows of an allgather or alltoall.

        That of a numbered request is that of the unnamed one with the number behind it. None is the beginning of another one.
        """
        tensors = self.tensors
        if self.operation in (Operation.ALLGATHER, Operation.ALLTOALL):
            tensors = tuple(TensorSpec(each.name, each.data_type, each.shape[1:]) for each in tensors)
        encoded: bytes = encode(
            (
                self.operation,
                self.name,
                tensors,
                self.reduce_op,
                self.prescale,
                self.postscale,
                self.root,
                self.device,
                self.alike,
                self.unnamed,
                self.compression,
            )
        )
        if len(encoded) <= _LONGEST_IDENTITY:
            return encoded
        return b"\xc1" + blake2b(encoded, digest_size=32).digest()  # no encoded value begins with this byte


UNNAMED = ".noname."
"""In the name of a call without one; its number comes behind it when the call is submitted."""


def numbered_name(name: str, number: int) -> str:
    """The name of the ``number``-th of the calls that share the unnumbered ``name``."""
    before, _, after = name.partition(UNNAMED)
    return f"{before}{UNNAMED}{number}{after}"


def numbered(request: Request, number: int) -> Request:
    """An ``unnamed`` request as the ``number``-th of its name."""
    unnumbered, tensors = request.name, request.tensors
    name = f"{unnumbered}{number}"
    if len(tensors) == 1 and tensors[0].name == unnumbered:
        tensors = (TensorSpec(name, tensors[0].data_type, tensors[0].shape),)
    else:
        tensors = tuple([TensorSpec(numbered_name(each.name, number), each.data_type, each.shape) for each in tensors])
    made = msgspec.structs.replace(request, name=name, tensors=tensors, unnamed=False)
    facts = made.__dict__  # of the cached properties: those of the request that all calls share take no time
    facts["nbytes"], facts["identity"] = request.nbytes, request.identity + number.to_bytes(8, "little")
    return made


class Definition(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request in full. ``identifier`` abbreviates it from now on, unless it is -1."""

    identifier: int
    request: Request


class Decision(msgspec.Struct, frozen=True, array_like=True):
    """The coordinator's decision on one name: run its collective now, or fail it.

    Attributes:
        identifier: abbreviates this decision from now on, unless it is -1.
        rows: for allgather, by tensor, the first dimension of every rank.
        received: for alltoall, by rank, the rows that this rank gets from it. Sent in the :class:`Order`.
        longest: for alltoall, the most rows that any rank sends to one.
        template: the request, for ranks that have joined and have none of their own.
        last_joined: for join, the global rank that joined last.
        error: why it fails on every rank; "" if it runs.
        call_sites: with an error, by global rank the line that submitted the request.
        device, members: as the requests have them.
    """

    identifier: int
    name: str
    operation: Operation
    rows: tuple[tuple[int, ...], ...] = ()
    received: tuple[int, ...] = ()
    longest: int = 0
    template: Request | None = None
    last_joined: int = -1
    error: str = ""
    device: str = HOST
    members: tuple[int, ...] = ()
    call_sites: dict[int, str] = {}


class Announce(msgspec.Struct, tag=0, array_like=True):
    """Member to coordinator: requests, each new or by its identifier, in order of submission.

    Attributes:
        proposal: the number of the fast path's proposal of the first requests, which this rank has given up; 0 for none.
        sent: when the message was sent, by the member's clock (``time.monotonic``), for the timeline.
        ages: how long ago each request was submitted, in seconds; empty if all were a moment ago.
        proposed: how many requests the proposal has.
    """

    items: list[int | Definition]
    proposal: int = 0
    sent: float = 0.0
    ages: list[float] = []
    proposed: int = 1


class StepsMade(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The number of steps that a rank has made with one optimizer, or of its calls of one process group.

    Attributes:
        optimizer: the name of the optimizer or group, the same on all ranks.
        ranks: the ranks that reduce its gradients, or the members.
        line: the line of the script that made it; "" if it is not known.
        calls: whether it is a process group.
    """

    optimizer: str
    ranks: tuple[int, ...]
    steps: int
    line: str = ""
    calls: bool = False


class Leave(msgspec.Struct, tag=1, array_like=True):
    """Member to coordinator: this rank shuts down and will announce nothing more.

    Attributes:
        steps: the numbers of steps of its optimizers.
        member: the member that sent it, if a relay passes it on; -1: the sender.
    """

    reason: str
    steps: list[StepsMade] = []
    member: int = -1


class Order(msgspec.Struct, tag=2, array_like=True):
    """Coordinator to member: batches to execute, each a list of decisions, new or by identifier.

    Attributes:
        tuned: the settings from the first batch on; None: as before.
        received: of each new decision on an alltoall, in order, the ``received`` of the member that gets this message. The
            decisions themselves are the same for all.
        shares: to a relay, the ``received`` of each member that it passes the order on to.
    """

    batches: list[list[int | Decision]]
    tuned: Tuned | None = None
    received: list[tuple[int, ...]] = []
    shares: list[list[tuple[int, ...]]] = []


class Stop(msgspec.Struct, tag=3, array_like=True):
    """Coordinator to member: the last order; ``rank`` (global) left, and had made ``steps``."""

    rank: int
    reason: str
    steps: list[StepsMade] = []


class Succeeded(msgspec.Struct, tag=4, array_like=True):
    """Coordinator to member: a proposal that the member has given up has succeeded.

    Attributes:
        proposal: its number.
    """

    proposal: int


class Share(msgspec.Struct, array_like=True):
    """A part of :class:`Relayed`.

    Attributes:
        member: the member that sent the requests; -1: all members of the relay that have not joined.
        items: as in :class:`Announce`. There is one dictionary for each member, and one for all members together.
        ages: how long ago each was submitted, in seconds; empty if the coordinator does not need it.
    """

    member: int
    items: list[int | Definition]
    ages: list[float] = []


class Relayed(msgspec.Struct, tag=10, array_like=True):
    """Relay to coordinator: what the members of its host have announced, in order.

    Attributes:
        sent: when the message was sent, by the relay's clock (``time.monotonic``).
    """

    shares: list[Share]
    sent: float = 0.0


class Gather(msgspec.Struct, tag=11, array_like=True):
    """Coordinator to relay: whether to wait until all members of the host have announced a name, or to pass on each at once."""

    on: bool


class MessageError(Exception):
    """The peer sent an invalid message, or used an identifier that it never defined."""


encode = msgspec.msgpack.Encoder().encode
_from_member = msgspec.msgpack.Decoder(Announce | Leave | Relayed)
_from_coordinator = msgspec.msgpack.Decoder(Order | Stop | Succeeded | Gather)


def decode_from_member(body: bytes) -> Announce | Leave | Relayed:
    """Raises :class:`MessageError` for anything else."""
    try:
        message: Announce | Leave | Relayed = _from_member.decode(body)
        return message
    except msgspec.DecodeError as error:
        raise MessageError(str(error)) from error


def decode_from_coordinator(body: bytes) -> Order | Stop | Succeeded | Gather:
    """Raises :class:`MessageError` for anything else."""
    try:
        message: Order | Stop | Succeeded | Gather = _from_coordinator.decode(body)
        return message
    except msgspec.DecodeError as error:
        raise MessageError(str(error)) from error
