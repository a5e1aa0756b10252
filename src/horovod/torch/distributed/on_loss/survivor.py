"""Hands out results, and takes the group to the next carrier when a rank is lost.

One thread at a time does this, one thing after another, so that it is a sequence of decisions of
:class:`~horovod.torch.distributed.on_loss.call_log.CallLog`. A thread of the script that waits for a call does it itself. A
thread of this module does it if the result is needed without a wait, or after a loss.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed

from horovod._base.signal_deferral import with_signals_deferred
from horovod.core.errors import (
    CollectiveTimeoutError,
    EngineFailureError,
    HorovodInternalError,
    MismatchError,
    NoNextRound,
)
from horovod.core.lifecycle import context, crash, elastic_process
from horovod.core.lifecycle.standing import Messages
from horovod.core.requests.handle import Handle
from horovod.core.worker.liveness_probes import LivenessProbes
from horovod.environments import identity
from horovod.torch.distributed import membership as memberships
from horovod.torch.distributed.membership import GroupMembership
from horovod.torch.distributed.on_loss import samplers
from horovod.torch.distributed.on_loss.call_log import CallLog
from horovod.torch.distributed.on_loss.carrier import Carrier, met
from horovod.torch.distributed.on_loss.repeatable_call import RepeatableCall

_log = logging.getLogger("horovod.torch")
_c10d: Any = torch.distributed.distributed_c10d

_FINAL = (MismatchError, CollectiveTimeoutError, EngineFailureError)
"""What other ranks would not mend. It ends the job, as without ``--on-loss continue``."""
_DRIVE_SECONDS = 0.05
"""How long a thread of the script waits before it leaves handing out to this module's thread. Signal handlers are deferred
meanwhile."""
_END_SECONDS = 2.0
"""How long a runtime may take to know that it has ended, after its first call has failed."""


class Survivor:
    """One process of a group that goes on.

    Args:
        membership: the first membership of the group.
        time_limit: the time limit of the group.
        shown: called with this rank's number and the number of ranks, whenever the script begins to see others.

    Raises:
        HorovodInternalError: ranks were lost while the group was made, and nothing goes on.
    """

    def __init__(self, membership: GroupMembership, time_limit: timedelta, shown: Callable[[int, int], None]) -> None:
        self._origin = membership.own_rank
        process = elastic_process.this_process()
        if process is not None and process.round > 1:  # a rank was lost before: others may have their groups
            first, _ = met(membership, self._origin, 0, {}, new=True)
        else:
            first = Carrier(membership, tuple(range(len(membership.ranks))))
        self._time_limit = time_limit
        self._tell = shown
        self._log = CallLog()
        self._calls: deque[RepeatableCall] = deque()  # those that were not handed out
        self._order = threading.RLock()  # completions may be called while a call is submitted
        """Held while a call is made, so that all calls reach a carrier in the order of their numbers. Guards the carrier, the
        log and the calls."""
        self._handing_out = threading.Lock()
        """Held by the thread that hands out results or goes on after a loss."""
        self._carrier: Carrier | None = first
        self._latest = self._shown = first
        self._news: deque[tuple[int, Carrier]] = deque()  # from which call on the script sees which carrier
        self._showing = threading.Lock()
        self._wake = threading.Condition()
        self._hurried = 0  # up to this call, the thread of this module hands out results
        self._ending = False
        self._over: HorovodInternalError | None = None
        self._watch(membership)
        samplers.install()
        samplers.begin(self._origin, first.size)
        atexit.register(self.end)
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="horovod-on-loss", daemon=True)
        self._thread.start()

    # The script's threads.

    @property
    def membership(self) -> GroupMembership:
        """The latest membership of the group, which the script may not see yet."""
        return self._latest.membership

    @property
    def shown_origins(self) -> tuple[int, ...]:
        """By rank, as the script sees the ranks, the rank that the process had first."""
        return self._shown.origins

    def submit(self, make: Callable[[int], RepeatableCall]) -> RepeatableCall:
        """Take a call of the script.

        Args:
            make: makes the call of a number.

        Raises:
            ValueError, TypeError: its arguments have no meaning; it does not count.
            HorovodInternalError: the job cannot go on, or this process was forked from a rank.
        """
        if os.getpid() != self._process:
            raise HorovodInternalError(
                f"this process was forked from rank {self._shown.index} and cannot communicate for it; call collectives "
                "in the process that called init_process_group()"
            )
        with self._order:
            if self._over is not None:
                raise self._over.again()
            if self._ending:
                raise HorovodInternalError(
                    f"rank {self._shown.index}: the process group was destroyed: make all calls before destroy_process_group()"
                )
            call = make(self._log.made + 1)
            if self._carrier is not None:
                call.submit(self._carrier)
            self._log.call()
            self._calls.append(call)
            self._publish()
        return call

    def drive(self, handle: Handle) -> None:
        """Hand out results on the calling thread, which waits for a call, or return before that; see :class:`Driver`."""
        if os.getpid() == self._process:
            with_signals_deferred(self._drive, handle)

    def _drive(self, handle: Handle) -> None:
        until = time.monotonic() + _DRIVE_SECONDS
        if not self._handing_out.acquire(blocking=False):
            return
        try:
            while not handle.done() and self._drive_next(until):
                pass
        finally:
            self._handing_out.release()

    def take_over(self, handle: Handle) -> None:
        """Have this module's thread hand out all results of the calls that were made; see :class:`Driver`."""
        with self._wake:
            self._hurried = self._log.made
            self._wake.notify()

    def show_ranks(self, number: int) -> None:
        """The script has waited for a call: let it see the ranks that have carried out this call and earlier ones."""
        if not self._news or self._news[0][0] > number:
            return
        with self._showing:
            while self._news and self._news[0][0] <= number:
                before, (_, carrier) = self._shown, self._news.popleft()
                self._shown = carrier
                os.environ.update(carrier.environment)
                self._tell(carrier.index, carrier.size)
                group = _c10d.GroupMember.WORLD
                if group is not None:
                    _c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(carrier.size)}
                samplers.change(carrier.index, carrier.size, lost=sorted({*before.origins} - {*carrier.origins}))

    def end(self) -> None:
        """The script leaves the group: hand out what is in flight, or go on after a loss first, and end the thread."""
        if os.getpid() != self._process:
            return
        with self._wake:
            self._ending = True
            self._wake.notify()
        self._thread.join(self.membership.generation.config.timeout.total_seconds())
        atexit.unregister(self.end)

    # Any thread.

    def call_ended(self, call: RepeatableCall) -> None:
        """A carrier has ended a call."""
        with self._order:
            self._publish()
        if not call.completed:  # it has failed: find out whether a rank was lost
            self.take_over(call.shown)

    def _publish(self) -> None:
        """Let the other members see up to which call this rank has completed all. With ``_order`` held."""
        log, carrier = self._log, self._carrier
        if carrier is None:
            return
        before = number = log.completed
        while number < log.made and self._calls[number - log.handed].completed:
            number += 1
        if number > before:
            log.complete(number)
            carrier.publish(number)

    # The thread that hands out.

    def _drive_next(self, until: float) -> bool:
        """Carry out the next call and hand it out. False: do it on the thread of this module, or a rank was lost."""
        calls, carrier = self._calls, self._carrier
        if carrier is None or not calls:
            return False
        call = calls[0]
        if not call.drive(max(0.0, until - time.monotonic())):
            return False
        while not carrier.await_all(call.number):
            if self._has_left(carrier) or time.monotonic() > until:
                return False
        self._hand_out_complete(carrier)
        return True

    def _hand_out_complete(self, carrier: Carrier) -> None:
        """Hand out the calls that all members have completed."""
        with self._order:
            calls = self._take(self._log.agreed(carrier.lowest(self._log.completed)))
        self._hand_out(calls)

    def _take(self, numbers: range) -> list[RepeatableCall]:
        """Remove the calls that are handed out now from those that were not. With ``_order`` held."""
        return [self._calls.popleft() for _ in numbers]

    # The thread of this module.

    def _run(self) -> None:
        try:
            while self._await_work():
                with self._handing_out:
                    if not self._hand_out_next():
                        self._go_on()
        except BaseException as error:
            self._give_up(error)

    def _await_work(self) -> bool:
        """Wait for a call to hand out or a loss. False: the script has left the group, and everything was handed out."""
        with self._wake:
            while not (self._is_lost() or self._log.handed < (self._log.made if self._ending else self._hurried)):
                if self._ending:
                    return False
                self._wake.wait()  # who needs a result without a wait, the script's end, and the runtime's watch all notify
        return True

    def _is_lost(self) -> bool:
        """Whether the present carrier has lost a rank. A rank that leaves in good order is none, unless others need it."""
        return self._latest.membership.generation.termination.failure is not None

    def _hand_out_next(self) -> bool:
        """Hand out the next call, and all others that all members have completed. False: a rank was lost."""
        carrier = self._carrier
        assert carrier is not None
        if not self._calls:
            return not self._is_lost()
        call = self._calls[0]
        if not call.await_completion(lambda error: self._has_ended(carrier, error)):
            return False
        with self._order:
            self._publish()
        generation, since = carrier.membership.generation, time.monotonic()
        probes = LivenessProbes(generation.watch.probe, generation.config.timeout)
        while not carrier.await_all(call.number):
            if self._has_left(carrier):
                return False
            probes.look(since)
        self._hand_out_complete(carrier)
        return True

    def _has_left(self, carrier: Carrier) -> bool:
        """Whether the other members of a carrier cannot complete calls any more."""
        return self._is_lost() or carrier.is_released()

    def _has_ended(self, carrier: Carrier, error: Exception) -> bool:
        """Whether a carrier has ended, after a call of it has failed with ``error``."""
        if isinstance(error, MismatchError) or not isinstance(error, HorovodInternalError):
            return False
        termination = carrier.membership.generation.termination
        if termination.error is None:
            termination.failed.wait(_END_SECONDS)
        return termination.error is not None

    def _go_on(self) -> None:
        """Meet the ranks that are left, and have them carry out what was not handed out.

        Raises:
            NoNextRound: the job ends, or this process does; the text says why.
        """
        with self._order:
            self._carrier = None
        if why := crash.ending():
            raise NoNextRound(f"Rank {self._shown.index} goes on with no other ranks: {why}.")
        reason = self._latest.membership.generation.stopped or HorovodInternalError("a rank was lost")
        while True:  # each time that they do not meet has cost a rank
            membership, environment = self._next(reason)
            try:
                carrier, furthest = met(membership, self._origin, self._log.handed, environment, new=False)
                break
            except NoNextRound:
                raise
            except HorovodInternalError as error:
                reason = error
        with self._order:
            numbers, again = self._log.met(furthest)
            handing = self._take(numbers)
        self._hand_out(handing)
        self._latest = carrier
        with self._order:
            for call in self._calls:
                call.submit(carrier)
            self._carrier = carrier
            self._publish()
        _log.debug("calls %s are made again among %d ranks", again, carrier.size)

    def _next(self, reason: HorovodInternalError) -> tuple[GroupMembership, dict[str, str]]:
        """The membership that the launcher gives this process, and the environment variables that go with it. The script sees
        these later."""
        process = elastic_process.this_process()
        assert process is not None
        store = self._latest.membership.store
        before = {name: os.environ.get(name) for name in elastic_process.VARIABLES}
        context.shutdown()
        line = self._calls[0].line if self._calls else ""
        process.interrupted = self._calls[0].describe() if self._calls else ""
        try:
            process.next(True, str(reason), isinstance(reason, _FINAL), line=line)
            context.init(identity, foundation=context.Foundation(None, self._time_limit))
        finally:
            given = {name: os.environ[name] for name in before if name in os.environ}
            for name, value in before.items():
                if value is not None:
                    os.environ[name] = value
        membership = memberships.of_runtime(context.current(), store)
        self._watch(membership)
        return membership, given

    def _watch(self, membership: GroupMembership) -> None:
        membership.generation.termination.companions.append(_Watcher(self))
        self.look()

    def look(self) -> None:
        """A runtime may have ended: have the thread look. Any thread."""
        with self._wake:
            self._wake.notify()

    def _hand_out(self, calls: Sequence[RepeatableCall]) -> None:
        for call in calls:
            assert call.carrier is not None
            latest = self._news[-1][1] if self._news else self._shown
            if call.carrier is not latest:
                self._news.append((call.number, call.carrier))
            call.hand_out()

    def _give_up(self, error: BaseException) -> None:
        """Nothing more can be handed out: the job ends, or this process is not needed."""
        if not isinstance(error, HorovodInternalError):
            if not isinstance(error, SystemExit):
                _log.error("rank %d cannot go on: %r", self._shown.index, error, exc_info=error)
            error = NoNextRound(f"Rank {self._shown.index} cannot go on with other ranks: {error!r}")
        with self._order:
            self._over = error
            calls, self._calls = self._calls, deque()
        for call in calls:
            call.fail(error)


class _Watcher:
    """Tells a survivor when a runtime ends; one of the runtime's companions."""

    def __init__(self, survivor: Survivor) -> None:
        self._survivor = survivor

    def fail(self, error: HorovodInternalError, orderly: bool) -> None:
        self._survivor.look()

    def messages(self) -> Messages | None:
        return None  # results are handed out without a call of the script

    def close(self) -> None:
        pass

    def descriptors(self) -> list[int]:
        return []
