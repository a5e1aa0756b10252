"""The role of a process set's first rank: it counts the announcements of all ranks, and orders batches."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import msgspec

from horovod._base.config import Config
from horovod.autotune.kept import Tuned
from horovod.autotune.tuner import Tuner
from horovod.comm.shm.proposals import Proposals
from horovod.control.sealing import Message
from horovod.core.negotiation.fusion import fuse
from horovod.core.negotiation.host_tally import ALL_MEMBERS
from horovod.core.negotiation.messages import (
    UNNAMED,
    Decision,
    Gather,
    Leave,
    MessageError,
    Operation,
    Order,
    Relayed,
    Request,
    StepsMade,
    Stop,
    decode_from_member,
    encode,
)
from horovod.core.negotiation.negotiator import IncompleteRequest, Negotiator
from horovod.core.negotiation.ready_request import ReadyRequest
from horovod.core.negotiation.request_dictionary import RequestDecoder
from horovod.core.negotiation.tree import COORDINATOR, Tree
from horovod.core.requests.batch import Batch
from horovod.core.requests.devices import engine_of
from horovod.core.worker.connections import Connections
from horovod.core.worker.observer import Observer
from horovod.core.worker.role import NOT_RECORDED, Role, Schedule, Watch
from horovod.core.worker.stall_reporter import StallReporter
from horovod.observe.activities import activity
from horovod.observe.clock_offset import ClockOffset
from horovod.observe.timeline import TensorLabel, Timeline

_log = logging.getLogger("horovod.core")


def labels(request: Request) -> list[TensorLabel]:
    """The tensors of a request as the timeline shows them; the request's name if it has none."""
    found = [TensorLabel(each.name, each.data_type.label, each.shape) for each in request.tensors]
    return found or [TensorLabel(request.name, "", ())]


class _Plan(NamedTuple):
    """How decisions are carried out. A burst that is repeated (:class:`Negotiator`) has the same list of decisions each time.

    Attributes:
        ready: the decisions.
        threshold: the fusion threshold.
        batches: the decisions of each batch.
        items: the same for :class:`Order`: a decision that members know is its number.
        divided: new decisions of which each member gets only its part.
    """

    ready: list[ReadyRequest]
    threshold: int
    batches: list[list[Decision]]
    items: list[list[int | Decision]]
    divided: list[ReadyRequest]

    @classmethod
    def of(cls, ready: list[ReadyRequest], threshold: int, groups_apart: bool) -> _Plan:
        batches = fuse(ready, threshold, groups_apart)
        items: list[list[int | Decision]] = []
        divided: list[ReadyRequest] = []
        for batch in batches:
            items.append([])
            for item in batch:
                if item.fresh and item.received:
                    divided.append(item)
                    items[-1].append(item.for_all())
                else:
                    items[-1].append(item.decision if item.fresh else item.decision.identifier)
        return cls(ready, threshold, [[item.decision for item in batch] for batch in batches], items, divided)


class Coordinator(Role):
    """Decides for all ranks of one process set.

    Args:
        ranks: the members' global ranks, in set order; this rank is the first.
        engine: the name of the set's engine, for the timeline.
        tree: the tree of the members' connections; None: all members are connected with this rank.
        proposals: None if the ranks share no memory.
        observer: has the timeline.
        tuner: autotuning, on rank 0 for the global process set; None for others.
    """

    announces_between_batches = False

    def __init__(
        self,
        ranks: Sequence[int],
        connections: Connections,
        schedule: Schedule,
        proposals: Proposals | None,
        config: Config,
        watch: Watch,
        engine: str,
        tree: Tree | None = None,
        observer: Observer | None = None,
        tuner: Tuner | None = None,
    ) -> None:
        tree = tree or Tree.flat(len(ranks))
        self.observer = observer or Observer()
        self.tuner = tuner
        self._groups = {member: tree.group(member) for member in tree.children(COORDINATOR)}
        self._relays = [member for member, group in self._groups.items() if len(group) > 1]
        self._gathering = True
        self._ranks = ranks
        self._connections = connections
        self._schedule = schedule
        self._proposals = proposals
        self._config = config
        self._engine = engine
        self._negotiator = Negotiator(ranks, config.cache_capacity)
        self._stalls = StallReporter(ranks, self._negotiator, config, watch)
        # By member, and by relay for requests that all members of its host have announced alike.
        self._decoders = {member: RequestDecoder(config.cache_capacity) for member in range(1, len(ranks))}
        self._host_decoders = {member: RequestDecoder(config.cache_capacity) for member in self._relays}
        self._window = config.cycle_time.total_seconds()
        self._window_end = 0.0
        self._clocks = {member: ClockOffset() for member in self._groups}
        self._fusion_threshold = config.fusion_threshold
        self._plan: _Plan | None = None

    # Messages

    def announce(self, requests: Sequence[Request], since: Sequence[float] = ()) -> None:
        if self._proposals is not None:
            self._proposals.shut()
        if self.tuner is not None:
            for request in requests:
                self.seen(request)
        self._count(0, requests, since)

    def receive(self, member: int, body: bytes) -> None:
        message = decode_from_member(body)
        if isinstance(message, Leave):
            member = member if message.member < 0 else self._spoken_for(member, message.member)
            self._schedule.stop = self._schedule.stop or Stop(self._ranks[member], message.reason, message.steps)
            return
        if isinstance(message, Relayed):
            self._receive_shares(member, message)
            return
        requests = self._decoders[member].requests(message.items)
        if message.proposal and self._had_succeeded(member, message.proposal):
            del requests[: message.proposed]  # the member has got the message (FastPath)
        self._count(member, requests, self._submitted(member, message.sent, message.ages, len(requests)))
        if self._proposals is not None and not self.fast_path_open():
            self._proposals.shut()  # a member that has announced or joined proposes nothing

    def _receive_shares(self, relay: int, message: Relayed) -> None:
        now = time.monotonic()
        for share in message.shares:
            if share.member == ALL_MEMBERS and relay in self._host_decoders:
                requests = self._host_decoders[relay].requests(share.items)
                for request in requests:
                    members = self._negotiator.taking_part(self._groups[relay], request)
                    self._mark(members, (request,), ())
                    self._negotiator.announce_together(members, request, now)
            else:
                member = self._spoken_for(relay, share.member)
                requests = self._decoders[member].requests(share.items)
                self._count(member, requests, self._submitted(relay, message.sent, share.ages, len(requests)))

    def _spoken_for(self, relay: int, member: int) -> int:
        """``member``, if the relay speaks for it."""
        if member not in self._groups[relay]:
            raise MessageError(f"it spoke for member {member}, which is not of its host")
        return member

    def leave(self, reason: str, steps: Sequence[StepsMade] = ()) -> None:
        self._schedule.stop = self._schedule.stop or Stop(self._ranks[0], reason, list(steps))

    def stop(self, stop: Stop) -> None:
        """Send Stop to all members, behind everything that was decided before. Relays pass it on."""
        body = Message(encode(stop))
        for member in self._groups:
            self._connections.send(member, body)
        self._connections.flush_all(self._config.timeout.total_seconds() / 3)

    def _submitted(self, member: int, sent: float, ages: Sequence[float], count: int) -> Sequence[float]:
        """When the last ``count`` requests of a message were submitted, by this rank's clock; empty if nothing is recorded.

        Args:
            member: the sender of the message, sent at ``sent`` by its clock.

        The message may have waited in its socket, while a collective ran here. Of all messages of the member, one that did not
        wait shows the offset of its clock.
        """
        clock = self._clocks[member]
        clock.message(sent, time.monotonic())
        if self.observer.timeline is None:
            return ()
        found = ages[-count:] if len(ages) >= count else [0.0] * count
        return [sent + clock.seconds - age for age in found]

    def _count(self, member: int, requests: Sequence[Request], since: Sequence[float]) -> None:
        self._mark((member,), requests, since)
        self._negotiator.announce(member, requests, time.monotonic())

    def _mark(self, members: Sequence[int], requests: Sequence[Request], since: Sequence[float]) -> None:
        """Note in the timeline that members are ready."""
        timeline = self.observer.timeline
        if timeline is None:
            return
        for index, request in enumerate(requests):
            if request.operation != Operation.JOIN:
                at = since[index] if index < len(since) else time.monotonic()
                for member in members:
                    timeline.ready(request.operation.name, labels(request), member, at)

    def _had_succeeded(self, member: int, proposal: int) -> bool:
        if self._proposals is None:
            raise MessageError("there are no proposals without shared memory")
        try:
            return self._proposals.give_up(member, proposal)
        except ValueError as error:
            raise MessageError(str(error)) from error

    # The fast path

    def fast_path_open(self) -> bool:
        """Whether small collectives may run without an order now."""
        if self.tuner is not None and self.tuner.due is not None:
            return False  # only an order can carry the settings
        return self._negotiator.idle and self.observer.timeline is None

    def settled(self) -> None:
        """Note that this rank has nothing in flight."""
        if self._proposals is not None and self.fast_path_open():
            self._proposals.reopen()

    # Decisions

    def decide(self) -> None:
        if self._relays:
            self._tell_relays()
        if self._negotiator.ready and not self._in_window():
            tuned = self._take_tuned() if self.tuner is not None else None
            ready = self._negotiator.take()
            plan = self._plan
            if plan is None or plan.ready is not ready or plan.threshold != self._fusion_threshold:
                plan = self._plan = _Plan.of(ready, self._fusion_threshold, self._config.disable_group_fusion)
            timeline = self.observer.timeline
            if timeline is not None:
                timeline.cycle()
            self._order(plan, tuned)
            if tuned is not None:
                self._schedule.batches.append(tuned)
            self._schedule.batches.extend(plan.batches)

    # Autotuning

    def seen(self, request: Request) -> None:
        """Let the tuner count a request of this rank, on the thread that drives the worker."""
        tuner = self.tuner
        if tuner is None or request.operation is Operation.JOIN:
            return
        name, unnamed, _ = request.name.partition(UNNAMED)
        tensors = (
            [f"{each.name} {each.data_type.label} {each.shape}" for each in request.tensors] if tuner.looking else ()
        )
        try:
            tuner.seen(name + unnamed, request.nbytes, tensors, time.monotonic())
        except Exception:  # the search must not end the job
            self.tuner = None
            _log.exception("autotuning has failed; the job goes on with the present settings")

    def _take_tuned(self) -> Tuned | None:
        """The settings for the order that is sent now."""
        tuner = self.tuner
        assert tuner is not None
        if self._negotiator.joined:
            tuner.interrupt()
        tuned = tuner.take()
        if tuned is not None:
            self._fusion_threshold, self._engine = tuned.settings.fusion_threshold, tuned.settings.engine
        if tuner.over:
            self.tuner = None
        return tuned

    def _in_window(self) -> bool:
        """Whether to wait for more requests: in the window (``HOROVOD_CYCLE_TIME``) that the first ready one opens."""
        if not self._window or self._schedule.stop is not None:
            return False
        now = time.monotonic()
        if not self._window_end:
            self._window_end = now + self._window
        if now < self._window_end:
            return True
        self._window_end = 0.0
        return False

    def _order(self, plan: _Plan, tuned: Tuned | None) -> None:
        if not self._groups:
            return
        items, divided = plan.items, plan.divided
        order = Order(items, tuned)
        if not divided:
            body = Message(encode(order))
            for member in self._groups:
                self._connections.send(member, body)
            return
        # A message for all members is encoded once. Of an alltoall, each member gets only its part: a table of all parts grows
        # with the square.
        order = msgspec.structs.replace(order, batches=msgspec.Raw(encode(items)))
        for member, group in self._groups.items():
            own, *others = [[item.received_by(each) for item in divided] for each in group]
            self._connections.send(member, encode(msgspec.structs.replace(order, received=own, shares=others)))

    def _tell_relays(self) -> None:
        """While a timeline is written it shows each rank's announcement, so relays pass each on at once."""
        gathering = self.observer.timeline is None
        if gathering != self._gathering:
            self._gathering = gathering
            body = Message(encode(Gather(gathering)))
            for relay in self._relays:
                self._connections.send(relay, body)

    # The timeline

    def record(self, batch: Batch) -> AbstractContextManager[None]:
        timeline = self.observer.timeline
        return NOT_RECORDED if timeline is None else self._recorded(timeline, batch)

    @contextmanager
    def _recorded(self, timeline: Timeline, batch: Batch) -> Iterator[None]:
        first = batch[0][0]
        tensors: list[TensorLabel] = []
        for decision, entry in batch:
            request = decision.template if entry is None else entry.request
            tensors += labels(request) if request is not None else []
        timeline.decided(tensors)
        if first.error or first.operation in (Operation.BARRIER, Operation.JOIN):
            yield
            return
        operation, engine = first.operation.name, engine_of(first.device) or self._engine
        timeline.begin(operation, activity(engine, operation), engine, tensors)
        try:
            yield
        finally:
            timeline.end(tensors)

    # Stalls

    def incomplete(self) -> list[IncompleteRequest]:
        """The requests that some members have announced and others have not, the oldest first."""
        return self._negotiator.waiting()

    def milliseconds(self) -> float | None:
        if self._negotiator.ready:
            self._stalls.pause()
            return max(0.0, (self._window_end - time.monotonic()) * 1000)
        return self._stalls.milliseconds()
