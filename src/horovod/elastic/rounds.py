"""Takes a process from one round of an elastic job to the next.

A round is the time between two changes of the ranks: one generation of the runtime, with one identity for each process. The
elastic launcher decides who takes part in the next round. The ranks get its answers from a :class:`Rounds` and a
:class:`~horovod.elastic.updates.HostUpdates`, which :func:`connect` is handed: for ``horovodrun`` by
:mod:`horovod.elastic.launched`, when ``hvd.elastic.run`` begins. Without an elastic launcher both are a :class:`FixedJob`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from horovod.core.errors import HorovodInternalError, HostsUpdatedInterrupt, NoNextRound
from horovod.elastic.updates import HostUpdateResult, HostUpdates

Reason: TypeAlias = HorovodInternalError | HostsUpdatedInterrupt
"""Why a round ends."""


class Rounds(Protocol):
    """This process's ranks in the next round. The launcher implements it."""

    def next(self, reason: Reason, *, has_state: bool, keeps_state: bool) -> None:
        """Block until this process has its rank in the next round.

        Called in the script's thread, while the runtime does not run, once for each attempt to begin a round. When it returns,
        the environment has the new identity: HOROVOD_RANK, HOROVOD_SIZE, HOROVOD_LOCAL_RANK, HOROVOD_LOCAL_SIZE,
        HOROVOD_CROSS_RANK, HOROVOD_CROSS_SIZE, and variables by which ``init()`` distinguishes this rendezvous from earlier
        ones. ``init()`` follows at once; if that fails because a rank was lost meanwhile, ``next`` is called again.

        Args:
            reason: why the last round ended, or why the attempt to begin one failed. A HorovodInternalError: a rank was
                lost, or a collective failed. A HostsUpdatedInterrupt: hosts were added or removed.
            has_state: whether this process has the state of the job, because it has synchronised its own.
            keeps_state: whether it stopped at a check with the state that all ranks of the round had there.

        Raises:
            NoNextRound: the job ends, for example because too few hosts are left; the text says why.
            SystemExit: this process has no rank in the next round and ends.
        """

    def same_state(self) -> bool:
        """Whether all ranks of the round that has begun have the same state, so that none synchronises.

        Called once ``init()`` has succeeded, which may have asked for further rounds. Every rank gets the same answer: that
        all of them have said ``keeps_state`` when they left the round before.
        """


class FixedJob:
    """A job whose ranks never change, as launchers without elastic mode start it."""

    _same_state = False

    def next(self, reason: Reason, *, has_state: bool, keeps_state: bool) -> None:
        """The same ranks once more after an interrupt that all of them had; nothing after a failure."""
        if isinstance(reason, HorovodInternalError):
            raise NoNextRound(
                f"{reason} hvd.elastic.run cannot go on after this: the job was not started by an elastic launcher, so no "
                "rank can be replaced or left out. The state on this rank is what it was at its last commit or save."
            ) from reason
        self._same_state = keeps_state

    def same_state(self) -> bool:
        return self._same_state

    def poll(self) -> HostUpdateResult:
        return HostUpdateResult.no_update


_FIXED = FixedJob()
_rounds: Rounds = _FIXED
_updates: HostUpdates = _FIXED


def connect(rounds: Rounds, updates: HostUpdates) -> None:
    """Make this process follow an elastic launcher, from the next call of ``hvd.elastic.run`` on."""
    global _rounds, _updates
    _rounds, _updates = rounds, updates


def is_connected() -> bool:
    """Whether this process follows an elastic launcher."""
    return _rounds is not _FIXED


def disconnect() -> None:
    """Stop following: treat the job as fixed again."""
    connect(_FIXED, _FIXED)


def poll() -> HostUpdateResult:
    """The changes of hosts since the last call, from the connected launcher."""
    return _updates.poll()


class Reset:
    """Begins the next round: shuts the runtime down, waits for the new identity, and starts the runtime with it.

    Every binding passes it to :func:`~horovod.elastic.loop.run_fn` as ``reset``, which makes these calls one by one.

    Args:
        shutdown, init: the functions of the binding.
    """

    def __init__(self, shutdown: Callable[[], None], init: Callable[[], None]) -> None:
        self._shutdown = shutdown
        self._init = init

    def __call__(self) -> None:
        """Begin the next round once, as after an interrupt."""
        reason = HostsUpdatedInterrupt(skip_sync=False)
        self.shutdown(reason)
        self.next(reason, has_state=False, keeps_state=False)
        self.init()

    def shutdown(self, reason: Reason) -> None:
        """End the runtime, unless there is no next round after ``reason`` in a job of fixed ranks.

        Raises:
            NoNextRound: the job has fixed ranks. The runtime still answers ``rank()``: scripts save what they have then.
        """
        if _rounds is _FIXED:
            _FIXED.next(reason, has_state=False, keeps_state=False)
        self._shutdown()

    def next(self, reason: Reason, *, has_state: bool, keeps_state: bool) -> None:
        """See :meth:`Rounds.next`."""
        _rounds.next(reason, has_state=has_state, keeps_state=keeps_state)

    def init(self) -> bool:
        """Start the runtime. Whether all ranks have the same state; see :meth:`Rounds.same_state`.

        Raises:
            OSError, RuntimeError: ranks did not find each other; another attempt may succeed. NotImplementedError, however: the
                arguments are wrong.
            NoNextRound, SystemExit: as :meth:`Rounds.next`.
            ValueError: the environment or the ranks' settings are wrong; another attempt would not help.
        """
        self._init()
        return _rounds.same_state()
