"""A process set without sockets and threads: the real roles, joined by queues that the test delivers from in any order.

Every rank runs a program, a list of :class:`Action`. It goes on where its next action allows: a name that is in flight on the
rank is not submitted again, and a rank that has joined waits until all have.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from horovod._base.config import Config
from horovod.comm.datatypes import DataType
from horovod.control.sealing import Message
from horovod.core.negotiation.messages import Decision, Operation, Request, Stop, TensorSpec
from horovod.core.negotiation.tree import COORDINATOR, Tree
from horovod.core.worker.connections import Connections
from horovod.core.worker.coordinator import Coordinator
from horovod.core.worker.member import Member
from horovod.core.worker.relay import Relay
from horovod.core.worker.role import Role, Schedule
from unit.core.workers import Watch

GLOBAL = 10
"""The global rank of the first member; that of member i is as much more."""


class Action(NamedTuple):
    """What a rank does next: submit ``name`` of a ``kind``, or "join", or "leave".

    Attributes:
        variant: ranks with another one submit something else under the same name.
        together: announced in one message with the next action.
    """

    kind: str
    name: str = ""
    variant: int = 0
    together: bool = False


def request_of(action: Action, member: int, size: int) -> Request:
    name, operation = action.name, Operation.ALLREDUCE
    shape: tuple[int, ...] = (4, 2 + action.variant)
    fields: dict[str, Any] = {"caller": "train.py:1"}
    if action.kind == "join":
        return Request(Operation.JOIN, "join.noname", transient=True)
    if action.kind == "allgather":
        operation, shape = Operation.ALLGATHER, (member % 3 + action.variant, 2)
    elif action.kind == "alltoall":
        operation = Operation.ALLTOALL
        fields["splits"] = tuple((member + receiver) % 2 + action.variant for receiver in range(size))
        shape = (sum(fields["splits"]), 2)
    elif action.kind == "transient":
        fields["transient"] = True
    elif action.kind == "some":  # on device memory of a process set of some ranks
        fields |= {"device": "gpu", "members": tuple(range(GLOBAL, GLOBAL + size, 2))}
    return Request(operation, name, (TensorSpec(name, DataType.FLOAT32, shape),), **fields)


class Links:
    """Stands in for :class:`Connections`: what is sent waits until the simulation delivers it."""

    def __init__(self, own: int, wires: dict[tuple[int, int], deque[bytes]]) -> None:
        self._own = own
        self._wires = wires

    def send(self, member: int, body: bytes | Message) -> None:
        self._wires[self._own, member].append(body.body if isinstance(body, Message) else body)

    def drop(self, member: int) -> bool:
        return True

    def flush_all(self, seconds: float) -> None: ...


class Marks:
    """Stands in for the timeline: notes which member was ready for what."""

    def __init__(self) -> None:
        self.ready_marks: list[tuple[int, str]] = []

    def ready(self, operation: str, tensors: Sequence[Any], member: int, at: float) -> None:
        self.ready_marks.append((member, tensors[0].name))

    def cycle(self) -> None: ...


class SimulatedRank:
    def __init__(self, role: Role, schedule: Schedule, program: Sequence[Action]) -> None:
        self.role = role
        self.schedule = schedule
        self.program = deque(program)
        self.in_flight: set[str] = set()
        self.decisions: list[Decision] = []
        self.stop: Stop | None = None
        self.left = False

    def may_go_on(self) -> bool:
        if self.left or self.stop is not None or not self.program or "join.noname" in self.in_flight:
            return False
        return self.program[0].name not in self.in_flight


class SimulatedSet:
    """All ranks of one process set.

    Args:
        hosts: by member; one name for all: no relays.
        programs: by member.
    """

    def __init__(self, hosts: Sequence[str], programs: Sequence[Sequence[Action]], capacity: int) -> None:
        self.size = len(hosts)
        tree = Tree(hosts)
        self.wires: dict[tuple[int, int], deque[bytes]] = {}
        for member in range(1, self.size):
            for ends in ((member, tree.parent(member)), (tree.parent(member), member)):
                self.wires[ends] = deque()
        self.ranks: list[SimulatedRank] = []
        config = Config(cache_capacity=capacity)
        for member, program in enumerate(programs):
            links, schedule = cast(Connections, Links(member, self.wires)), Schedule()
            role: Role
            ranks = range(GLOBAL, GLOBAL + self.size)
            if member == COORDINATOR:
                role = self.coordinator = Coordinator(ranks, links, schedule, None, config, Watch(), "none", tree)
            elif tree.children(member):
                role = Relay(links, schedule, capacity, tree.group(member), ranks, 1.0)
            else:
                role = Member(links, schedule, None, capacity, tree.parent(member))
            self.ranks.append(SimulatedRank(role, schedule, program))

    def possible(self) -> list[Callable[[], None]]:
        """What may happen next."""
        actions: list[Callable[[], None]] = [
            lambda member=member: self._act(member)  # type: ignore[misc]
            for member, rank in enumerate(self.ranks)
            if rank.may_go_on()
        ]
        actions += [
            lambda sender=sender, receiver=receiver: self._deliver(sender, receiver)  # type: ignore[misc]
            for (sender, receiver), wire in self.wires.items()
            if wire and self.ranks[receiver].stop is None
        ]
        return actions

    def run(self, choose: Callable[[int], int]) -> None:
        """Go on until nothing can happen any more; ``choose`` says which of n things happens next."""
        while possible := self.possible():
            possible[choose(len(possible))]()

    def step_all(self) -> None:
        """A step of every rank, as if time had passed."""
        for member in range(self.size):
            self._step(member)

    def outcomes(self) -> list[dict[str, list[Decision]]]:
        """By member and name, what became of its submissions, without the numbers that abbreviate decisions."""
        return [_by_name(rank.decisions) for rank in self.ranks]

    def waiting(self) -> set[tuple[str, tuple[int, ...], tuple[int, ...]]]:
        """What the coordinator would report as stalled."""
        found = self.coordinator.incomplete()
        return {(each.request.name, tuple(sorted(each.announced)), tuple(sorted(each.missing))) for each in found}

    def _act(self, member: int) -> None:
        rank = self.ranks[member]
        requests: list[Request] = []
        together = True
        while together and rank.may_go_on():
            action = rank.program.popleft()
            if action.kind == "leave":
                rank.left = True
                break
            if action.kind != "some" or member % 2 == 0:
                requests.append(request_of(action, member, self.size))
                rank.in_flight.add(requests[-1].name)
            together = action.together
        if requests:
            rank.role.announce(requests)
        if rank.left:
            rank.role.leave("it left")
        self._step(member)

    def _deliver(self, sender: int, receiver: int) -> None:
        self.ranks[receiver].role.receive(sender, self.wires[sender, receiver].popleft())
        self._step(receiver)

    def _step(self, member: int) -> None:
        rank = self.ranks[member]
        if rank.stop is not None:
            return
        rank.role.decide()
        while rank.schedule.batches:
            for decision in rank.schedule.batches.popleft():
                rank.decisions.append(decision)
                rank.in_flight.discard(decision.name)
        if rank.schedule.stop is not None:
            rank.stop = rank.schedule.stop
            rank.role.stop(rank.stop)


def _by_name(decisions: Sequence[Decision]) -> dict[str, list[Decision]]:
    found: dict[str, list[Decision]] = {}
    for each in decisions:
        plain = Decision(
            -1,
            each.name,
            each.operation,
            each.rows,
            each.received,
            each.longest,
            each.template,
            -1,  # who joined last depends on what comes first
            each.error,
            each.device,
            each.members,
            each.call_sites,
        )
        found.setdefault(each.name, []).append(plain)
    return found
