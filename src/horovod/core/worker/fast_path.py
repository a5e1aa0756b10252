"""Runs quick collectives of one host without an order of the coordinator (:mod:`horovod.comm.shm.proposals`).

The set's first rank leads; it is also the rank of the coordinator. Proposal n runs as follows:

1. A thread that waits for a quick collective proposes it, with the others that are in flight here, if none was announced and
   all are quick: it writes their requests, and their contributions if these are small, into shared memory, then the number n
   (:meth:`FastPath._agree`).
2. The leader waits a moment for the proposals of all ranks. The proposal succeeds if all are the same, and fails otherwise or
   when a message arrives. The leader writes the outcome, which is the same for all ranks (:meth:`FastPath._lead`).
3. A member that finds all proposals alike, because it has come last, goes on at once. Another waits a moment for the leader's
   outcome (:meth:`FastPath._follow`). On success every rank computes the results from
   all contributions, or runs a collective with the engine if it is not small (:meth:`FastPath.finish`). On failure every rank
   announces its requests as if nothing had been proposed.
4. A member cannot withdraw a proposal. After waiting long enough, it announces the requests and names n
   (:meth:`FastPath.given_up`). If n is still undecided when the coordinator reads that, it lets n fail and counts the requests.
   If n succeeds before, the leader sends ``Succeeded`` at once, because it may wait for the member in the engine; the member
   carries n out (:meth:`FastPath.resolve`), and the coordinator does not count the requests when it comes to them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter

from horovod.comm.ranges import parts_of
from horovod.comm.reduction import without_average
from horovod.comm.shm.proposals import ALIGNMENT, Proposals, fits
from horovod.comm.spans import arrays_of, vector_of
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

FAST_PATH = "fast path"
"""The engine's name in the flight recorder for collectives that run only here."""

TOGETHER = 4
"""The most requests in one proposal. Of more, the coordinator makes larger batches."""

_BY_ENGINE = -1
"""In place of where a contribution lies: the engine moves the data."""

_DATA_TYPE = attrgetter("data_type")


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
        self._places: list[int] = []  # by request of the last proposal, the byte where its contribution begins
        self._unresolved: tuple[int, list[Entry]] | None = None

    def carry_out(self, handle: Handle) -> bool:
        """Run and complete the quick collectives in flight, of which ``handle`` is one, if nothing else is in flight and all
        ranks agree in time.

        Returns False if they were not run. They are then announced before anything else.

        Raises:
            PeerFailure, Aborted: the engine could not run it.
        """
        coordinator = self._coordinator
        if coordinator is not None and not coordinator.fast_path_open():
            return False
        entries = self._requests.take_quick(handle, TOGETHER)
        if not entries:
            return False
        agreed = False
        try:
            agreed = self._agree(entries)
        finally:
            if not agreed:
                self._requests.put_back(entries)
        if agreed:
            if coordinator is not None and coordinator.tuner is not None:
                for entry in entries:
                    coordinator.seen(entry.request)
            self.finish(entries)
        return agreed

    def _agree(self, entries: list[Entry]) -> bool:
        """Propose these requests. Returns whether all ranks have proposed the same in time."""
        proposals = self._proposals
        if not proposals.leads and proposals.closed():
            return False
        notes: Sequence[int] = ()
        if len(entries) == 1:
            request = entries[0].request
            identity = request.identity
            if request.operation in _BY_ROWS:
                if len(request.tensors) != 1 or not request.tensors[0].shape:
                    return False  # the numbers of rows are those of one tensor
                notes = _rows(request)
                if not fits(identity, notes):
                    return False
        else:  # no request's identity begins with a small number
            identity = b"".join([bytes([len(entries)]), *[entry.request.identity for entry in entries]])
        self._places = self._contribute(entries)
        if not self._places:
            return False
        self._unresolved = None
        number = self._last = proposals.propose(identity, notes)
        return (self._lead if proposals.leads else self._follow)(number, entries, identity)

    def _contribute(self, entries: list[Entry]) -> list[int]:
        """Write the contributions to the next proposal, and return where they begin; an empty list if there can be none.

        All ranks come to the same if their requests are alike; for an allgather or alltoall, this rank's rows decide.
        """
        places: list[int] = []
        end = 0
        for entry in entries:
            request, vectors = entry.request, entry.inputs
            nbytes, tensors = request.nbytes, request.tensors
            if request.operation in _BY_ROWS:
                if len(entries) > 1:
                    return []
                elements = sum(_rows(request)) * _row_elements(request)
                nbytes = elements * tensors[0].data_type.itemsize
                if request.operation is Operation.ALLTOALL:  # without the rows that no rank gets
                    if len(vectors) == 1:
                        vectors = [arrays_of(vectors)[0][:elements]]
                    else:
                        vectors = parts_of(vectors, [each * _row_elements(request) for each in request.splits])
            elif request.operation is Operation.BROADCAST:
                vectors = entry.outputs if self._ranks[self._index] == request.root else ()
            fits_in = end + nbytes <= self._proposals.data_bytes
            if fits_in and len(tensors) > 1:
                types = [*map(_DATA_TYPE, tensors)]
                fits_in = types.count(types[0]) == len(types)
            if fits_in:
                self._proposals.contribute(vectors, end)
                places.append(end)
                end += -(-nbytes // ALIGNMENT) * ALIGNMENT
            elif _BY_ENGINE in places:
                return []  # the coordinator makes one batch of them
            else:
                places.append(_BY_ENGINE)
        return places

    def _all_fit(self, notes: Sequence[Sequence[int]], request: Request) -> bool:
        """Whether the rows that each rank contributes, the sum of its notes, fit into its proposal."""
        row_bytes = _row_elements(request) * request.tensors[0].data_type.itemsize
        return max(map(sum, notes)) * row_bytes <= self._proposals.data_bytes

    def finish(self, entries: list[Entry]) -> None:
        """Carry out the entries of this rank's last proposal, on which all ranks have agreed, and complete them.

        Raises:
            PeerFailure, Aborted: the engine could not run one.
        """
        self._executor.agreed = time.monotonic()
        for entry, place in zip(entries, self._places, strict=True):
            request = entry.request
            if request.operation is Operation.ALLGATHER:
                self._finish_allgather(entry)
            elif request.operation is Operation.ALLTOALL:
                self._finish_alltoall(entry)
            elif place == _BY_ENGINE:
                self._executor.carry_out_alone(entry)
            else:
                if request.operation is Operation.ALLREDUCE:
                    how = without_average(request.reduce_op, request.prescale, request.postscale, len(self._ranks))
                    self._proposals.reduce(entry.outputs, *how, place)
                elif request.operation is Operation.REDUCESCATTER:
                    self._compute_shards(entry, place)
                elif request.operation is Operation.BROADCAST:
                    self._proposals.broadcast(entry.outputs, self._ranks.index(request.root), place)
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

    def _lead(self, number: int, entries: list[Entry], identity: bytes) -> bool:
        proposals, messages = self._proposals, self._connections.poll_messages
        success = True
        for peer in range(1, len(self._ranks)):
            in_time = proposals.await_proposal(peer, number, self._polls, 0) or self._await(
                partial(proposals.await_proposal, peer, number),
                lambda: messages(0).readable,
                lambda: self._disturbed() or messages(0).readable,
            )
            if not in_time or not proposals.alike(peer, identity):
                success = proposals.withdraw(number, identity)
                break
        for member in proposals.decide(success):
            self._connections.send(member, encode(Succeeded(number)))
        return success

    def _await(
        self,
        arrived: Callable[[int, float], bool],
        ended: Callable[[], object],
        ended_asleep: Callable[[], object],
    ) -> bool:
        """Poll, then sleep, until a word has arrived; whether it has, before another end of the wait.

        The caller has polled for one round, in which the word mostly arrives.

        Args:
            arrived: polls as often as its first argument says, then sleeps for the seconds of its second.
            ended: whether to stop waiting, asked after each round of polls, that of the caller included.
            ended_asleep: the same, asked after each sleep.
        """
        patience, polls = self._patience, self._polls
        for _ in range(1, patience.polls):
            if ended():
                return False
            if arrived(polls, 0):
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

    def _follow(self, number: int, entries: list[Entry], identity: bytes) -> bool:
        proposals = self._proposals
        if proposals.conclude(number, identity):
            return True
        self._unresolved = (number, entries)
        in_time = proposals.await_outcome(number, self._polls, 0) or self._await(
            partial(proposals.await_outcome, number),
            proposals.closed,
            lambda: self._disturbed() or proposals.closed(),
        )
        if not in_time and not proposals.stop_waiting(number):
            return False
        self._unresolved = None
        return proposals.succeeded()

    def resolve(self, number: int) -> list[Entry]:
        """The entries of a proposal that this rank has given up and that has succeeded, for :meth:`finish`.

        Returns none if this rank saw the success itself.

        Raises:
            ValueError: this rank has not proposed it, or it has not succeeded.
        """
        if self._unresolved is None or self._unresolved[0] != number:
            if 0 < number <= self._last:
                return []
            raise ValueError(f"proposal {number} was never made")
        if not self._proposals.over(number) or not self._proposals.succeeded():
            raise ValueError(f"proposal {number} has not succeeded")
        entries = self._unresolved[1]
        self._unresolved = None
        return entries

    def given_up(self, request: Request) -> tuple[int, int]:
        """The number of the proposal that the announcement of ``request`` must name, and how many requests it has; 0 for none.
        Called once for each announcement, with its first request."""
        if self._unresolved is None or self._unresolved[1][0].request is not request:
            return 0, 0
        number, entries = self._unresolved
        if self._proposals.over(number) and not self._proposals.succeeded():
            self._unresolved = None
            return 0, 0
        return number, len(entries)

    def forget(self) -> None:
        """Drop the entries of a proposal whose outcome is not known, with their tensors: no further proposal is made."""
        self._unresolved = None

    def _compute_shards(self, entry: Entry, start: int) -> None:
        request, size = entry.request, len(self._ranks)
        how = without_average(request.reduce_op, request.prescale, request.postscale, size)
        for index, tensor in enumerate(request.tensors):
            rows, *others = tensor.shape
            row_bytes = math.prod(others) * tensor.data_type.itemsize
            before = sum(shard_rows(rows, size)[: self._index])
            self._proposals.reduce(vector_of(entry.outputs, index), *how, start + before * row_bytes)
            start += rows * row_bytes


def _rows(request: Request) -> tuple[int, ...]:
    """The numbers of this rank's rows for the other ranks: how many there are, or how many go to each rank."""
    if request.operation is Operation.ALLGATHER:
        return request.tensors[0].shape[:1]
    return request.splits


def _row_elements(request: Request) -> int:
    return math.prod(request.tensors[0].shape[1:])
