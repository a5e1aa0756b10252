"""Small collectives that a waiting thread carries out without the coordinator's order (:mod:`horovod.comm.shm.proposals`).

A rank tries it when nothing else of its process set is under way. Where it does not succeed at once, because a peer does
something else or comes late, the request takes the ordinary way, as if nothing had been tried. The judge of the attempts is the
process set's first rank, on whose worker thread the coordinator lives: so a word to the coordinator can end an attempt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from horovod.comm.shm.proposals import IDENTITY_BYTES, Proposals
from horovod.core.coordination.messages import Operation, Request
from horovod.core.execution.batch import Entry, output_of, scaling
from horovod.core.execution.connections import Connections
from horovod.core.submission.handle import Handle
from horovod.core.submission.in_flight import InFlight

OPERATIONS = frozenset({Operation.ALLREDUCE, Operation.ALLGATHER, Operation.BROADCAST, Operation.BARRIER})

SPINS = 40
ROUNDS = 50
"""Looks at a peer's word in a row, and how often: about a hundred microseconds, where ranks do not share cores."""

SLEEP_SECONDS = 1e-3
SLEEPS = 10
"""How long it waits after that. Then a peer is so late that the ordinary way costs nothing more."""


class FastPath:
    """One rank's attempts. All methods are for whoever has the worker thread's role.

    Args:
        ranks: the members' global ranks, in set order; ``index`` is this rank's place in it.
        spins: whether every rank has a core, so that one may look instead of sleeping.
    """

    def __init__(
        self,
        proposals: Proposals,
        requests: InFlight,
        ranks: Sequence[int],
        index: int,
        connections: Connections,
        spins: bool,
    ) -> None:
        self._proposals = proposals
        self._requests = requests
        self._ranks = ranks
        self._index = index
        self._connections = connections
        self._rounds, self._spins = (ROUNDS, SPINS) if spins else (1, 1)
        self._unresolved: tuple[int, Entry] | None = None

    def carry_out(self, handle: Handle) -> Entry | None:
        """Carry out the small request of ``handle`` if nothing else is in flight; returns it with its outputs, or None.

        Then it is announced before anything else.
        """
        entry = self._requests.take_alone(handle)
        if entry is None:
            return None
        done = False
        try:
            done = self._try(entry)
        finally:
            if not done:
                self._requests.put_back(entry)
        return entry if done else None

    def _try(self, entry: Entry) -> bool:
        request = entry.request
        if request.operation not in OPERATIONS or entry.size() > self._proposals.data_bytes or not _uniform(request):
            return False
        identity = request.identity
        if len(identity) > IDENTITY_BYTES:
            return False
        self._unresolved = None
        succeeded = (self._lead if self._proposals.leads else self._follow)(entry, identity)
        if succeeded:
            self._collect(entry)
        return succeeded

    def _disturbed(self) -> bool:
        """Whether this thread has something better to do than to wait for an attempt."""
        return self._requests.waiting() or self._requests.closed

    def _lead(self, entry: Entry, identity: bytes) -> bool:
        proposals = self._proposals
        proposals.reopen()
        number = self._propose(entry, identity)
        success = all(
            self._proposes_in_time(peer, number) and proposals.alike(peer, identity)
            for peer in range(1, len(self._ranks))
        )
        proposals.leader(success)
        return success

    def _proposes_in_time(self, peer: int, number: int) -> bool:
        proposals, arrivals = self._proposals, self._connections.arrivals
        for _ in range(self._rounds):
            if proposals.await_proposal(peer, number, self._spins, 0):
                return True
            if arrivals(0).readable:
                return False
        for _ in range(SLEEPS):
            if proposals.await_proposal(peer, number, 1, SLEEP_SECONDS):
                return True
            if self._disturbed() or arrivals(0).readable:
                return False
        return False

    def _follow(self, entry: Entry, identity: bytes) -> bool:
        proposals = self._proposals
        if proposals.closed():
            return False
        number = self._propose(entry, identity)
        self._unresolved = (number, entry)
        if not self._decided_in_time(number) and not proposals.over(number):
            return False
        self._unresolved = None
        return proposals.succeeded()

    def _decided_in_time(self, number: int) -> bool:
        proposals = self._proposals
        for _ in range(self._rounds):
            if proposals.await_outcome(number, self._spins, 0):
                return True
            if proposals.closed():
                return False
        for _ in range(SLEEPS):
            if proposals.await_outcome(number, 1, SLEEP_SECONDS):
                return True
            if self._disturbed() or proposals.closed():
                return False
        return False

    def has_succeeded(self) -> bool:
        """Whether this rank has given up an attempt that the judge says has succeeded."""
        return (
            self._unresolved is not None and self._proposals.over(self._unresolved[0]) and self._proposals.succeeded()
        )

    def resolve(self) -> Entry:
        """What this rank has given up, and the judge says has succeeded: with its outputs.

        Raises:
            ValueError: it has given up nothing.
        """
        if self._unresolved is None or not self.has_succeeded():
            raise ValueError("no attempt that was given up has succeeded")
        entry = self._unresolved[1]
        self._unresolved = None
        self._collect(entry)
        return entry

    def given_up(self, request: Request) -> int:
        """The number of the attempt that must be named where this request is announced; 0 for none. Asked once."""
        if self._unresolved is None or self._unresolved[1].request is not request:
            return 0
        number = self._unresolved[0]
        if self._proposals.over(number) and not self._proposals.succeeded():
            self._unresolved = None
            return 0
        return number

    def _propose(self, entry: Entry, identity: bytes) -> int:
        request, arrays, rows = entry.request, entry.inputs, 0
        if request.operation is Operation.BROADCAST:
            arrays = entry.outputs if self._ranks[self._index] == request.root else ()
        elif request.operation is Operation.ALLGATHER:
            rows = request.tensors[0].shape[0]
        return self._proposals.propose(identity, arrays, rows)

    def _collect(self, entry: Entry) -> None:
        request = entry.request
        if request.operation is Operation.ALLREDUCE:
            self._proposals.allreduce(entry.outputs, *scaling(request, len(self._ranks)))
        elif request.operation is Operation.BROADCAST:
            self._proposals.broadcast(entry.outputs, self._ranks.index(request.root))
        elif request.operation is Operation.ALLGATHER:
            rows = self._proposals.notes()
            entry.handle.result = (tuple(rows),)
            row_elements = math.prod(request.tensors[0].shape[1:])
            self._proposals.allgather(output_of(entry, 0, sum(rows)), [row_elements * each for each in rows])


def _uniform(request: Request) -> bool:
    """Whether all its elements are of one type; and for an allgather, whether its rows are one number."""
    tensors = request.tensors
    if request.operation is Operation.ALLGATHER:
        return len(tensors) == 1 and len(tensors[0].shape) > 0
    return len(tensors) < 2 or all(each.data_type is tensors[0].data_type for each in tensors[1:])
