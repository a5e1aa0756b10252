"""The decisions of an elastic job's policy, in addition to those of every policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from horovod.control.elastic_messages import HostUpdateResult
from horovod.runner.hosts.slots import HostInfo, SlotInfo
from horovod.runner.policy import Decision


class StartProcess(NamedTuple):
    """Start a process."""

    number: int
    host: HostInfo
    slot: int
    assignment: SlotInfo
    """The likely rank of the process; the first round may still change it."""


class BeginRound(NamedTuple):
    """Begin a round: send its rank to each process, which its number and its question identify."""

    round: int
    assignments: Sequence[tuple[int, int, SlotInfo]]
    same_state: bool
    """Whether all of them have the same state, so that they need not synchronise."""
    in_run: bool
    """Whether some of them are in ``hvd.elastic.run``."""
    lost: Sequence[str] = ()
    """The ranks that the job has gone on without; the latest."""


class NotifyHostsChanged(NamedTuple):
    """Tell the ranks of a round that hosts have changed."""

    round: int
    result: HostUpdateResult


class EndRound(NamedTuple):
    """Tell ranks that are still beginning this round that it is over."""

    round: int
    reason: str


class Dismiss(NamedTuple):
    """Tell a process that waits for a rank that it gets none."""

    number: int
    question: int
    reason: str
    job_ends: bool


class StopProcess(NamedTuple):
    """Ask a process to end, and kill it if it does not."""

    number: int


class KillProcess(NamedTuple):
    """Kill a process that is stuck."""

    number: int


ElasticDecision = (
    Decision | StartProcess | BeginRound | NotifyHostsChanged | EndRound | Dismiss | StopProcess | KillProcess
)
