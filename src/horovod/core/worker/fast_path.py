"""Runs quick collectives of one host without an order of the coordinator (:mod:`horovod.comm.shm.proposals`).

The set's first rank leads; it is also the rank of the coordinator. Proposal n runs as follows:

1. A thread that waits for a quick collective proposes it, if nothing else of its process set is in flight here: it writes its
   request, and its contribution if that is small, into shared memory, then the number n (:meth:`FastPath._propose`).
2. The leader waits a moment for the proposals of all ranks. The proposal succeeds if all are the same, and fails otherwise or
   when a message arrives. The leader writes the outcome, which is the same for all ranks (:meth:`FastPath._lead`).
3. A member that finds all proposals alike, because it has come last, goes on at once. Another waits a moment for the leader's
   outcome (:meth:`FastPath._follow`). On success every rank computes the result from
   all contributions, or runs the collective with the engine if it is not small (:meth:`FastPath.finish`). On failure every rank
   announces its request as if nothing had been proposed.
4. A member cannot withdraw a proposal. After waiting long enough, it announces the request and names n
   (:meth:`FastPath.given_up`). If n is still undecided when the coordinator reads that, it lets n fail and counts the request.
   If n succeeds before, the leader sends ``Succeeded`` at once, because it may wait for the member in the engine; the member
   carries n out (:meth:`FastPath.resolve`), and the coordinator does not count the request when it comes to it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial

from horovod.comm.ranges import parts_of
from horovod.comm.shm.proposals import Proposals, fits
from horovod.comm.spans import Vectors, arrays_of, vector_of
from horovod.core.negotiation.messages import Operation, Request, Succeeded, encode
from horovod.core.requests.batch import Entry, output_of, shard_rows
from horovod.core.requests.handle import Handle
from horovod.core.worker.connections import Connections
from horovod.core.worker.coordinator import Coordinator
from horovod.core.worker.executor import Executor
from horovod.core.worker.in_flight import InFlight
from horovod.core.worker.waiting import SLEEP_SECONDS, SLEEPS, Patience, Polls

_BY_ROWS = frozenset({Operation.ALLGATHER, Operation.ALLTOALL})
"""Operations in which ranks need the others' numbers of rows."""

OPERATIONS = _BY_ROWS | {Operation.ALLREDUCE, Operation.BROADCAST, Operation.BARRIER, Operation.REDUCESCATTER}
"""Operations about which each rank knows everything from its own request and the numbers of rows in the others' proposals."""


FAST_PATH = "fast path"
"""The engine's name in the flight recorder for collectives that run only here."""


class FastPath:
    """The proposals of one rank. All methods are for the thread that drives the worker.

    Args:
        ranks: the members' global ranks, in set order; ``index`` is this rank's position in it.
        polls: how often to poll before sleeping.
        executor: runs collectives that are not small.
        coordinator: the leader's; None on the others, which learn from the proposals whether small collectives may run without
            an order now.
    """

    def __init__(
        self,
        proposals: Proposals,
        requests: InFlight,
        ranks: Sequence[int],
        index: int,
        connections: Connections,
        polls: Polls,
        executor: Executor,
        coordinator: Coordinator | None = None,
    ) -> None:
        self._executor = executor
        self._coordinator = coordinator
        self._proposals = proposals
        self._requests = requests
        self._ranks = ranks
        self._index = index
        self._connections = connections
        self._patience, self._polls = Patience(polls.word_rounds), polls.word
        self._last = 0
        self._contributed = False  # whether this rank's contribution is in its last proposal
        self._unresolved: tuple[int, Entry] | None = None

    def carry_out(self, handle: Handle) -> bool:
        """Run the quick collective of ``handle`` and complete it, if nothing else is in flight and all ranks agree in time.

        Returns False if it was not run. It is then announced before anything else.

        Raises:
            PeerFailure, Aborted: the engine could not run it.
        """
        coordinator = self._coordinator
        if coordinator is not None and not coordinator.fast_path_open():
            return False
        entry = self._requests.take_alone(handle)
        if entry is None:
            return False
        agreed = False
        try:
            agreed = self._agree(entry)
        finally:
            if not agreed:
                self._requests.put_back(entry)
        if agreed:
            if coordinator is not None:
                coordinator.seen(entry.request)
            self.finish(entry)
        return agreed

    def _agree(self, entry: Entry) -> bool:
        request = entry.request
        if request.operation not in OPERATIONS:
            return False
        if request.operation in _BY_ROWS and (len(request.tensors) != 1 or not request.tensors[0].shape):
            return False
        identity = request.identity
        if not fits(identity, _rows(request) if request.operation in _BY_ROWS else ()):
            return False
        self._unresolved = None
        return (self._lead if self._proposals.leads else self._follow)(entry, identity)

    def _contributes(self, entry: Entry) -> bool:
        """Whether this rank's contribution goes into its proposal: on all ranks or on none if their requests are alike; for an
        allgather or alltoall, this rank's rows decide."""
        request = entry.request
        if request.operation in _BY_ROWS:
            return self._all_fit([_rows(request)], request)
        if request.nbytes > self._proposals.data_bytes:
            return False
        tensors = request.tensors
        return len(tensors) < 2 or all(each.data_type is tensors[0].data_type for each in tensors[1:])

    def _all_fit(self, notes: Sequence[Sequence[int]], request: Request) -> bool:
        """Whether the rows that each rank contributes, the sum of its notes, fit into its proposal."""
        row_bytes = _row_elements(request) * request.tensors[0].data_type.itemsize
        return max(map(sum, notes)) * row_bytes <= self._proposals.data_bytes

    def finish(self, entry: Entry) -> None:
        """Carry out the entry of this rank's last proposal, on which all ranks have agreed, and complete it.

        Raises:
            PeerFailure, Aborted: the engine could not run it.
        """
        self._executor.agreed = time.monotonic()
        if entry.request.operation is Operation.ALLGATHER:
            self._finish_allgather(entry)
        elif entry.request.operation is Operation.ALLTOALL:
            self._finish_alltoall(entry)
        elif not self._contributed:
            self._executor.carry_out_alone(entry)
        else:
            request = entry.request
            if request.operation is Operation.ALLREDUCE:
                self._proposals.reduce(entry.outputs, *request.scaling(len(self._ranks)))
            elif request.operation is Operation.REDUCESCATTER:
                self._compute_shards(entry)
            elif request.operation is Operation.BROADCAST:
                self._proposals.broadcast(entry.outputs, self._ranks.index(request.root))
            self._complete(entry)

    def _complete(self, entry: Entry) -> None:
        """Complete a request that ran without the engine."""
        executor = self._executor
        executor.begun += 1
        recorder = executor.recorder
        if recorder is not None:
            recorder.ran(entry.handle.record, FAST_PATH, executor.agreed)
        known = self._requests.finish_one(entry.request.name)
        if known is not None:  # else an abort has completed it
            known.handle.tuned = executor.tuned
            known.handle.complete(known.error)
        executor.ended += 1

    def _finish_allgather(self, entry: Entry) -> None:
        notes = self._proposals.notes(1)
        rows = tuple(note for (note,) in notes)
        if not self._all_fit(notes, entry.request):
            self._executor.carry_out_alone(entry, rows=(rows,))
            return
        entry.handle.result = (rows,)
        output = arrays_of(output_of(entry, 0, sum(rows)))[0]
        row_elements = _row_elements(entry.request)
        self._proposals.allgather(output, [row_elements * each for each in rows])
        self._complete(entry)

    def _finish_alltoall(self, entry: Entry) -> None:
        splits = self._proposals.notes(len(self._ranks))
        received = [row[self._index] for row in splits]
        if not self._all_fit(splits, entry.request):
            self._executor.carry_out_alone(entry, received=tuple(received), longest=max(map(max, splits)))
            return
        entry.handle.result = received
        rows, row_elements = sum(received), _row_elements(entry.request)
        if row_elements != 1:  # from here on numbers of elements
            splits = tuple([tuple([row_elements * each for each in row]) for row in splits])
            received = [row[self._index] for row in splits]
        self._proposals.alltoall(output_of(entry, 0, rows, received=received), received, splits)
        self._complete(entry)

    def _disturbed(self) -> bool:
        """Whether the thread must do something other than wait for a proposal."""
        return self._requests.waiting() or self._requests.closed

    def _lead(self, entry: Entry, identity: bytes) -> bool:
        proposals = self._proposals
        proposals.reopen()
        number = self._propose(entry, identity)
        success = True
        for peer in range(1, len(self._ranks)):
            if not self._proposes_in_time(peer, number) or not proposals.alike(peer, identity):
                success = proposals.withdraw(number, identity)
                break
        for member in proposals.decide(success):
            self._connections.send(member, encode(Succeeded(number)))
        return success

    def _proposes_in_time(self, peer: int, number: int) -> bool:
        messages = self._connections.poll_messages
        return self._await(
            partial(self._proposals.await_proposal, peer, number),
            lambda: messages(0).readable,
            lambda: self._disturbed() or messages(0).readable,
        )

    def _await(
        self,
        arrived: Callable[[int, float], bool],
        ended: Callable[[], object],
        ended_asleep: Callable[[], object],
    ) -> bool:
        """Poll, then sleep, until a word has arrived; whether it has, before another end of the wait.

        Args:
            arrived: polls as often as its first argument says, then sleeps for the seconds of its second.
            ended: whether to stop waiting, asked after each round of polls.
            ended_asleep: the same, asked after each sleep.
        """
        patience, polls = self._patience, self._polls
        for poll in range(patience.polls):
            if arrived(polls, 0):
                if poll:
                    patience.answered()
                return True
            if ended():
                return False
        began = time.monotonic()
        for _ in range(SLEEPS):
            if arrived(1, SLEEP_SECONDS):
                patience.slept(time.monotonic() - began)
                return True
            if ended_asleep():
                break
        patience.slept(time.monotonic() - began)
        return False

    def _follow(self, entry: Entry, identity: bytes) -> bool:
        proposals = self._proposals
        if proposals.closed():
            return False
        number = self._propose(entry, identity)
        if proposals.conclude(number, identity):
            return True
        self._unresolved = (number, entry)
        if not self._decided_in_time(number) and not proposals.stop_waiting(number):
            return False
        self._unresolved = None
        return proposals.succeeded()

    def _decided_in_time(self, number: int) -> bool:
        proposals = self._proposals
        return self._await(
            partial(proposals.await_outcome, number),
            proposals.closed,
            lambda: self._disturbed() or proposals.closed(),
        )

    def resolve(self, number: int) -> Entry | None:
        """The entry of a proposal that this rank has given up and that has succeeded, for :meth:`finish`.

        Returns None if this rank saw the success itself.

        Raises:
            ValueError: this rank has not proposed it, or it has not succeeded.
        """
        if self._unresolved is None or self._unresolved[0] != number:
            if 0 < number <= self._last:
                return None
            raise ValueError(f"proposal {number} was never made")
        if not self._proposals.over(number) or not self._proposals.succeeded():
            raise ValueError(f"proposal {number} has not succeeded")
        entry = self._unresolved[1]
        self._unresolved = None
        return entry

    def given_up(self, request: Request) -> int:
        """The number of the proposal that the announcement of ``request`` must name; 0 for none. Called once for each."""
        if self._unresolved is None or self._unresolved[1].request is not request:
            return 0
        number = self._unresolved[0]
        if self._proposals.over(number) and not self._proposals.succeeded():
            self._unresolved = None
            return 0
        return number

    def forget(self) -> None:
        """Drop the entry of a proposal whose outcome is not known, with its tensors: no further proposal is made."""
        self._unresolved = None

    def _propose(self, entry: Entry, identity: bytes) -> int:
        request = entry.request
        vectors: Vectors = entry.inputs
        self._contributed = self._contributes(entry)
        if not self._contributed:
            vectors = ()
        elif request.operation is Operation.BROADCAST:
            vectors = entry.outputs if self._ranks[self._index] == request.root else ()
        elif request.operation is Operation.ALLTOALL:  # without the rows that no rank gets
            row_elements = _row_elements(request)
            if len(vectors) == 1:
                vectors = [arrays_of(vectors)[0][: sum(request.splits) * row_elements]]
            else:
                vectors = parts_of(vectors, [each * row_elements for each in request.splits])
        rows = _rows(request) if request.operation in _BY_ROWS else ()
        self._last = self._proposals.propose(identity, vectors, rows)
        return self._last

    def _compute_shards(self, entry: Entry) -> None:
        start, size = 0, len(self._ranks)
        how = entry.request.scaling(size)
        for index, tensor in enumerate(entry.request.tensors):
            rows, *others = tensor.shape
            row_elements = math.prod(others)
            before = sum(shard_rows(rows, size)[: self._index])
            self._proposals.reduce(vector_of(entry.outputs, index), *how, start + before * row_elements)
            start += rows * row_elements


def _rows(request: Request) -> tuple[int, ...]:
    """The numbers of this rank's rows for the other ranks: how many there are, or how many go to each rank."""
    if request.operation is Operation.ALLGATHER:
        return request.tensors[0].shape[:1]
    return request.splits


def _row_elements(request: Request) -> int:
    return math.prod(request.tensors[0].shape[1:])
