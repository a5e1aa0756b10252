"""One generation of the runtime, from ``init()`` to ``shutdown()``: its connections, its lanes, its sentinel.

``core.context`` holds the running one. It begins in three steps: the ranks meet, connect, and start their lanes. It ends
in good order (:meth:`Generation.stop`) or with a verdict (``core.ending``); then everything is given back.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from horovod.control.channel import Channel
from horovod.control.liveness import Sentinel
from horovod.control.processes import what_is_wrong
from horovod.control.secret import make_secret
from horovod.control.wiring import Card, Switchboard, Wire
from horovod.core import crash
from horovod.core.assembly import assemble, control_wires
from horovod.core.config import AUTOTUNE, Config
from horovod.core.ending import Ending, NobodyElse
from horovod.core.errors import SHUT_DOWN, HorovodInternalError
from horovod.core.introduction import Introduction, check_settings, introduce, meeting_place
from horovod.core.lane import Lane, Watch
from horovod.core.messages import Operation
from horovod.core.process_set import membership
from horovod.core.recording import Recording
from horovod.core.roster import Roster, place_by_hosts
from horovod.core.static_sets import StaticSets, Wish, settle
from horovod.core.workplace import ANYWHERE, crowded, own_workplace, placement_of
from horovod.observe import whereabouts

_log = logging.getLogger("horovod.core")

LIVENESS = "liveness"


class Generation:
    """A running job, as one of its ranks sees it.

    Args:
        roster: who takes part.
        earlier: the highest number of a generation in this process so far.
        attempt: how often these ranks have met before.

    Attributes:
        identity: this rank's place in the job.
        config: the settings in force.
        generation: its number, the same on all ranks and higher than that of any earlier one.
        lanes: by process set id, the lanes of the sets this rank is a member of.
        ending: what ended it, if it has ended.
        recording: its timeline.
        secret: of the job, for connections that are made later.
        watch: what lanes report failures to.
        crowded: on some host the ranks compute with as many threads as there are cores, so that none is free for
            communication; the same on all ranks.
        placement: of the threads of this rank's lanes.
        freed, changes: process set ids to be used again, and how often sets were added or removed.
        process: the process that started it; a forked child's copy is of no use.
    """

    def __init__(self, roster: Roster, config: Config, earlier: int = 0, attempt: int = 1) -> None:
        self.roster = roster
        self.identity = roster.identity
        self.config = config
        self.generation = earlier + 1
        self.lanes: dict[int, Lane] = {}
        self.ending = Ending(self.identity.rank, self.lanes, config.timeout.total_seconds())
        self.recording = Recording(config, self.identity.rank, self.lanes)
        self.process = os.getpid()
        self.secret = b""
        self.crowded = False
        self.placement = ANYWHERE
        self.watch: Watch = NobodyElse(self.ending)
        self.freed: list[int] = []
        self.changes = 0
        self._attempt = attempt
        self._cards: list[Card] = []
        self._sentinel: Sentinel | None = None
        self._abandoned = False
        self._sockets: list[socket.socket] = []

    @property
    def stopped(self) -> HorovodInternalError | None:
        """Why nothing can be submitted any more, or None."""
        return self.ending.error

    # Life

    def start(self, process_sets: Sequence[Wish] = ()) -> StaticSets:
        """Meet the other ranks, connect, and start the lanes; every rank of the job must call it.

        Raises:
            ValueError: the ranks contradict each other.
            TimeoutError, RuntimeError: they did not find each other; the message says who is missing.
        """
        deadline = time.monotonic() + self.config.start_timeout.total_seconds()
        switchboard = self._switchboard()
        try:
            introductions = self._meet(switchboard, process_sets)
            sets = settle([each.process_sets for each in introductions], self.identity.rank)
            groups = dict(enumerate([list(range(self.identity.size)), *sets.ranks]))
            self._connect(switchboard, groups, deadline)
        finally:
            if switchboard is not None:
                switchboard.close()
        membership.rank = self.identity.rank
        membership.ranks = groups
        if self.config.autotune and self.identity.rank == 0:
            _log.warning("%s is set, but this version has no autotuning; it is ignored", AUTOTUNE)
        return sets

    def _switchboard(self) -> Switchboard | None:
        if self.identity.size == 1:
            return None  # nobody to connect to
        identity, interface = self.identity, self.config.network_interface
        if self.roster.communicator is None:
            self.ending.place = meeting_place(self.roster.launched)
        return Switchboard(identity.rank, identity.hostname, self.roster.on_this_host, interface)

    def _meet(self, switchboard: Switchboard | None, process_sets: Sequence[Wish]) -> list[Introduction]:
        """Get to know the others, and what all have to agree on."""
        identity, place = self.identity, self.ending.place
        card = (
            Card(identity.rank, identity.hostname, os.getpid(), 0, (), "") if switchboard is None else switchboard.card
        )
        if identity.rank == 0 and (place is None or place.hosted):  # no launcher gave the job a secret
            card = msgspec.structs.replace(card, secret=make_secret())
        workplace = own_workplace(identity.hostname)
        own = Introduction(
            card,
            self.roster.launched.rank,
            self.generation,
            list(process_sets),
            workplace,
            self.config.common(),
        )
        seconds = self.config.start_timeout.total_seconds()
        introductions = introduce(own, self.roster, place, self._attempt, seconds)
        check_settings([each.settings for each in introductions])
        self._cards = [each.card for each in introductions]
        self.ending.introductions = introductions
        self.generation = max(each.generation for each in introductions)
        workplaces = [each.workplace for each in introductions]
        self.crowded = crowded(workplaces)
        self.secret = self._cards[0].secret or (place.secret if place is not None else b"")
        if not self.roster.is_launched_job:
            self.identity = place_by_hosts(identity, [card.host for card in self._cards])
        asked, local_rank = self.config.thread_affinity, self.identity.local_rank
        core = asked[local_rank] if local_rank < len(asked) else None
        self.placement = placement_of(workplaces, self.identity.rank, core)
        return introductions

    def _connect(self, switchboard: Switchboard | None, groups: Mapping[int, list[int]], deadline: float) -> None:
        """Connect to those this rank has to do with, and start the lanes of its process sets."""
        rank, size = self.identity.rank, self.identity.size
        mine = {group: ranks for group, ranks in groups.items() if rank in ranks}
        sockets: dict[Wire, socket.socket] = {}

        def connect(wires: list[Wire]) -> dict[Wire, socket.socket]:
            assert switchboard is not None
            return switchboard.connect(self._cards, wires, str(self.generation), self.secret, deadline)

        if switchboard is not None:
            wires = [wire for group, ranks in mine.items() for wire in control_wires(group, ranks, rank)]
            wires += [Wire(peer, LIVENESS, 0) for peer in (range(1, size) if rank == 0 else [0])]
            sockets = connect(wires)
            self._sockets = list(sockets.values())
            self.watch = self._sentinel = self._make_sentinel(sockets)
        for group, ranks in mine.items():
            self.lanes[group] = assemble(
                group,
                ranks,
                rank,
                self.placement,
                self._cards,
                sockets,
                connect,
                self.config,
                self.watch,
                self.ending.left,
                deadline,
            )
        self.recording.begin()
        if self._sentinel is not None:
            self._sentinel.start()
        for lane in self.lanes.values():
            lane.start()

    def _make_sentinel(self, sockets: Mapping[Wire, socket.socket]) -> Sentinel:
        timeout = self.config.timeout.total_seconds()  # who waits asks after a third of it
        return Sentinel(
            self.identity.rank,
            {
                wire.peer: Channel(made, reach_seconds=timeout * 2 / 3)
                for wire, made in sockets.items()
                if wire.role == LIVENESS
            },
            timeout / 3,
            self.config.stall_limit.total_seconds(),
            whereabouts.main_thread,
            self._look,
            self.ending.who,
            self.ending.fail,
        )

    def _look(self, rank: int) -> str | None:
        """Why a rank cannot answer, or "" if its process runs; None if this process cannot see it."""
        own, other = self._cards[self.identity.rank].sight, self._cards[rank]
        return what_is_wrong(other.pid) if own and own == other.sight else None

    def discard(self) -> None:
        """Give back what a failed :meth:`start` has taken. No thread runs yet."""
        for lane in self.lanes.values():
            lane.close()
        self.recording.stop()
        if self._sentinel is not None:
            self._sentinel.leave()
        for made in self._sockets:
            made.close()

    def stop(self) -> None:
        """End this generation: leave in good order, or at once if the job has failed. Gives everything back."""
        raised = crash.unhandled()
        if raised and self._sentinel is not None and self.stopped is None:
            self._sentinel.report(self.identity.rank, raised)
            self.ending.failed.wait(5.0)
        if crash.ended_by_the_job():
            self.ending.blame_leaver()
        deadline = time.monotonic() + self.config.timeout.total_seconds()
        for lane in self.lanes.values():
            lane.leave("it left the job (hvd.shutdown() or the end of its script)")
        for lane in self.lanes.values():
            self._await_end(lane, deadline)
        if self._sentinel is not None:
            self._sentinel.leave()
        self.recording.stop()
        for lane in self.lanes.values():
            lane.close()
        self.lanes.clear()

    def end_lane(self, group: int, reason: str) -> None:
        """End one process set's lane; all its members do.

        Raises:
            HorovodInternalError: the job has failed meanwhile.
        """
        lane = self.lanes[group]
        lane.leave(reason)
        self._await_end(lane, time.monotonic() + self.config.timeout.total_seconds())
        del self.lanes[group]  # not before: a verdict must find it as long as it may wait for a rank that is lost
        lane.close()
        if self.ending.verdict is not None and not lane.finished:
            raise HorovodInternalError(*self.ending.verdict.args)

    def _await_end(self, lane: Lane, deadline: float) -> None:
        if not lane.join(max(0.1, deadline - time.monotonic())):
            _log.warning(
                "rank %d: process set %s did not end in good order within %g seconds",
                self.identity.rank,
                lane.ranks,
                self.config.timeout.total_seconds(),
            )
            lane.abort(HorovodInternalError(SHUT_DOWN))
            lane.join(1.0)

    # Use

    def lane(self, process_set_id: int | None, operation: int) -> Lane:
        """The lane of a process set, for submitting an ``Operation``.

        Raises:
            ValueError: the set is not registered, or this rank is not a member.
            HorovodInternalError: this process is a forked child.
        """
        if self._abandoned:
            raise HorovodInternalError(
                f"this process was forked from rank {self.identity.rank} and cannot communicate for it; "
                "call collectives in the process that called hvd.init()"
            )
        lane = self.lanes.get(-1 if process_set_id is None else process_set_id)
        if lane is None:
            what = Operation(operation).name.capitalize()
            if process_set_id not in membership.ranks:
                raise ValueError(f"{what}: Process set provided does not exist, or has not been registered.")
            raise ValueError(f"{what}: Rank {self.identity.rank} is not a member of the provided process set.")
        return lane

    def is_homogeneous(self) -> bool:
        """Whether every host runs the same number of ranks."""
        return len(set(Counter(card.host for card in self._cards).values())) <= 1

    def auto_name(self, prefix: str, process_set_id: int | None) -> str:
        """A name for a request that has none: the n-th such call of all members of the set belongs together."""
        unnamed = self.lanes[-1 if process_set_id is None else process_set_id].unnamed
        unnamed[prefix] += 1
        return f"{prefix}.noname.{unnamed[prefix]}"

    def everybody_joined(self) -> None:
        """Called by the thread that joined, on every rank: as the ranks may have made different numbers of unnamed calls until
        now, their counting starts anew."""
        self.lanes[0].unnamed.clear()

    def abandon(self) -> None:
        """In a forked child: close what was inherited, so that this process neither uses nor holds the parent's connections."""
        if self._abandoned:
            return  # a child of a forked child: by now the numbers may stand for files of its own
        self._abandoned = True
        descriptors = [descriptor for lane in self.lanes.values() for descriptor in lane.descriptors()]
        if self._sentinel is not None:
            descriptors += self._sentinel.descriptors()
        for descriptor in descriptors:
            try:
                os.close(descriptor)
            except OSError:
                pass  # closed in the parent at the moment of the fork
