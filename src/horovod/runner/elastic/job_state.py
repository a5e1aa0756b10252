"""The state of an elastic job: its hosts, its processes, and what each process and the whole job are doing. Pure.

The policy records each event in this state; :mod:`horovod.runner.elastic.reconciler` reads the state and decides what follows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from horovod.runner.elastic.blacklist import Blacklist
from horovod.runner.elastic.phases import MOST_REASONS, Early, Ending, Finishing, Gathering, Running, count
from horovod.runner.hosts.slots import HostInfo


class Limits(NamedTuple):
    """The user's settings of the job.

    Attributes:
        start: how many slots there must be before anything is started.
        least, most: how many ranks a round may have; ``most`` is None if all slots are used.
        resets: how many rounds may follow the first; None for any number.
        patience: seconds to wait for enough slots or ranks.
        starting: seconds that processes may take until they call ``init()``; the first round does not wait longer for processes
            that are not needed.
        fixed: whether the hosts never change.
        continues: whether scripts go on without a new beginning (``--on-loss continue``): then no process joins later.
        attached: whether something else starts the processes: each host is one, and comes whether it is needed or not.
        needs_first: whether rank 0 must not be lost.
    """

    start: int
    least: int
    most: int | None
    resets: int | None
    patience: float
    starting: float
    fixed: bool
    continues: bool = False
    attached: bool = False
    needs_first: bool = False


# The states of a process. They are not tuples: tuples of two kinds with the same content would be equal.


@dataclass(frozen=True)
class Starting:
    """The process has not asked for a rank yet."""


@dataclass(frozen=True)
class WaitingForRound:
    """The process has asked for a rank in the next round.

    Attributes:
        question: how many times it had asked before.
        kept: the round whose ranks all stopped at one check with the state that this process has; None if there is none.
        line, reason: at which line of the script the process was, and why it asks.
        collective: the operation and the name of the collective that has failed there; "" if none has.
    """

    question: int
    kept: int | None = None
    line: str = ""
    reason: str = ""
    collective: str = ""

    def describe(self) -> str:
        return f"waited at {self.line}: {self.reason}" if self.line else f"asks for another round: {self.reason}"


@dataclass(frozen=True)
class Training:
    """The process has a rank in a round, and is not known to have left the round."""

    round: int
    rank: int


@dataclass(frozen=True)
class Dismissed:
    """The process has no rank any more, and ends."""


class LostRank(NamedTuple):
    """A rank of a round whose process has failed."""

    round: int
    rank: int
    number: int
    host: str
    how: str

    def describe(self) -> str:
        return f"rank {self.rank} on {self.host} (process {self.number}, {self.how})"


@dataclass
class JobProcess:
    """A process that has been started and has not ended."""

    number: int
    host: str
    slot: int
    machine: str
    """The host, or the machine of which the host is a part."""
    machine_slot: int
    """The number of the slot there."""
    state: Starting | WaitingForRound | Training | Dismissed = field(default_factory=Starting)
    trained: bool = False
    """Whether its runtime has run in a round."""
    has_state: bool = False
    """Whether it has reported that it has the job's state. If a failure came first, its runtime has run without that state."""
    in_run: bool = False
    """Whether it has asked for its rank from ``hvd.elastic.run``, or has come there since."""
    commits: int | None = None
    """How many commits it had made when ``hvd.elastic.run`` returned; None if it has not returned."""
    leaving: bool = False
    """Whether something other than this launcher has asked it to end."""
    given_up: str = ""
    """Why this launcher kills it; "" if it does not."""


@dataclass
class JobState:
    """All that the policy knows.

    Attributes:
        limits: the user's settings.
        blacklist: the hosts that get no new processes.
        hosts: the hosts that are available now, by name, in the order in which they came.
        processes: the processes that have not ended, by number.
        started: how many processes have been started.
        used: the hosts that have been given a process.
        phase: what the job is doing.
        asked: whether any process has ever asked for a rank.
        early: the processes that ended with exit code 0 before they had a rank in a round that ran.
        round: the number of the last round that has begun; 0 before the first.
        ranks: the process of each rank of that round.
        connected: whether the runtime of a rank of that round has run.
        in_run: whether ranks of that round were in ``hvd.elastic.run`` when it began.
        resets: how many rounds have followed the first.
        fruitless: how many rounds in a row failed to begin although no process was lost.
        has_state: whether a process has ever had a state that others can lack, and that must not be lost.
        formed: whether the runtime of a rank of any round has run.
        overdue: whether the first round has stopped waiting for processes that have not called ``init()``.
        settled: whether new processes that are ready have stopped waiting for others that start.
        short: whether there are too few ranks for a round, and more can come.
        shortages: how many times ``short`` has become true.
        said: the last message to the user about what the job waits for.
        lost: the ranks that were lost, in their order.
        survived: how many of them were lost before the last round began.
        cut: pairs of hosts that could not reach each other when the last round was to begin.
    """

    limits: Limits
    blacklist: Blacklist
    hosts: dict[str, HostInfo] = field(default_factory=dict)
    processes: dict[int, JobProcess] = field(default_factory=dict)
    started: int = 0
    used: set[str] = field(default_factory=set)
    phase: Gathering | Running | Finishing | Ending = field(default_factory=lambda: Gathering(0))
    asked: bool = False
    early: dict[int, Early] = field(default_factory=dict)
    round: int = 0
    ranks: dict[int, int] = field(default_factory=dict)
    connected: bool = False
    in_run: bool = False
    resets: int = 0
    fruitless: int = 0
    has_state: bool = False
    formed: bool = False
    overdue: bool = False
    settled: bool = False
    short: bool = False
    shortages: int = 0
    said: str = ""
    lost: list[LostRank] = field(default_factory=list)
    survived: int = 0
    cut: set[frozenset[str]] = field(default_factory=set)

    @property
    def least(self) -> int:
        """How many ranks the next round needs. Nobody joins scripts that go on, so these begin with all ranks."""
        return self.limits.start if self.limits.continues and not self.formed else self.limits.least

    @property
    def over(self) -> bool:
        """Whether the last process has ended and no more are started."""
        return not self.processes and isinstance(self.phase, Finishing | Ending)

    def update_hosts(self, hosts: Iterable[HostInfo]) -> None:
        """Record the hosts that are available now. Hosts that stay keep their positions in the order."""
        found = {host.hostname: host for host in hosts}
        stay = {name: found.pop(name) for name in self.hosts if name in found}
        self.hosts = {**stay, **found}

    def usable_hosts(self) -> list[HostInfo]:
        out = self.used if self.limits.attached else ()
        return [host for name, host in self.hosts.items() if name not in self.blacklist and name not in out]

    def new_process(self, host: HostInfo, slot: int) -> JobProcess:
        machine = host.machine or host.hostname
        process = JobProcess(self.started, host.hostname, slot, machine, host.first_slot + slot)
        self.started += 1
        self.used.add(host.hostname)
        self.processes[process.number] = process
        return process

    def wanted(self) -> frozenset[int]:
        """The numbers of the processes that are to have a rank in the next round: those that stay, and whose slots are the
        job's. If there are more than the user allows, for example when a withdrawn host comes back, these are the processes
        that have trained, and the oldest of the others.
        """
        found = [process for process in self.processes.values() if self._has_slot(process)]
        if self.limits.most is not None and len(found) > self.limits.most:
            found = sorted(found, key=lambda each: (not each.trained, each.number))[: self.limits.most]
        return frozenset(process.number for process in found)

    def _has_slot(self, process: JobProcess) -> bool:
        host = self.hosts.get(process.host)
        finishing = isinstance(self.phase, Finishing) and not process.trained
        late = self.limits.continues and self.formed and not process.trained
        gone = process.leaving or finishing or late or isinstance(process.state, Dismissed)
        return host is not None and process.slot < host.slots and not gone

    def training(self) -> list[JobProcess]:
        """The processes of the last round that have neither asked for a rank in the next one nor ended."""
        return [process for process in self.processes.values() if isinstance(process.state, Training)]

    def waiting(self) -> list[JobProcess]:
        """The processes that have asked for a rank in the next round."""
        return [process for process in self.processes.values() if isinstance(process.state, WaitingForRound)]

    def has_rank(self, number: int) -> bool:
        """Whether a process has, or had, a rank in the last round that has begun."""
        return number in self.ranks.values()

    def rank_of(self, number: int) -> int | None:
        """The rank that a process has, or had, in the last round that has begun."""
        return next((rank for rank, each in self.ranks.items() if each == number), None)

    def host_of(self, rank: int) -> str:
        """The host of a rank of the last round that has begun; "" if its process has ended."""
        process = self.processes.get(self.ranks.get(rank, -1))
        return "" if process is None else process.host

    def awaited_ranks(self, number: int) -> list[JobProcess]:
        """The processes of round ``number`` that neither come to the next one nor end, while others have left it because of a
        failure."""
        left = self.phase == Gathering(number) or (isinstance(self.phase, Finishing) and bool(self.phase.unfinished))
        return self.training() if left and number == self.round else []

    def have_same_state(self, members: Iterable[JobProcess]) -> bool:
        """Whether all members have stopped at the same check of the last round, and so have the same state."""
        return all(isinstance(each.state, WaitingForRound) and each.state.kept == self.round for each in members)

    def lost_all(self) -> bool:
        """Whether no process is left of the last round, which had begun to train."""
        return self.connected and not any(number in self.processes for number in self.ranks.values())

    def lost_first(self) -> bool:
        """Whether rank 0 was lost of a job that cannot go on without it."""
        return self.limits.needs_first and self.formed and self.ranks[0] not in self.processes

    def may_reset(self) -> bool:
        return self.limits.resets is None or self.resets < self.limits.resets

    def hosts_come_back(self) -> bool:
        """Whether a host's cool-down will end."""
        return self.blacklist.ends and any(name in self.blacklist for name in self.hosts)

    def is_hopeless(self) -> bool:
        """Whether no further process can join those that wait for a rank.

        Hosts on which processes have failed get no new ones. If a discovery script may name other hosts, ranks that have the
        state of the job wait for those. Other ranks do not: an error before the first step would occur on other hosts, too.
        """
        for process in self.processes.values():
            if isinstance(process.state, Starting | Dismissed):
                return False  # it may ask for a rank, or end and free its slot
        if self.hosts_come_back():
            return False
        return self.limits.fixed or (
            bool(self.hosts) and not self.has_state and all(name in self.blacklist for name in self.hosts)
        )

    def all_failed(self) -> bool:
        """Whether no process is left that could take part in a round. Called when a process has failed."""
        return isinstance(self.phase, Gathering) and all(
            isinstance(process.state, Dismissed) for process in self.processes.values()
        )

    # Texts for the user.

    def describe(self, process: JobProcess) -> str:
        rank = self.rank_of(process.number)
        return f"Process {process.number} ({'' if rank is None else f'rank {rank}, '}on {process.host})"

    def gone_on_without(self) -> list[str]:
        """The ranks that were lost before the last round began."""
        return [f"in round {each.round} {each.describe()}" for each in self.lost[: self.survived]]

    def goes_on(self, ready: Iterable[JobProcess]) -> str:
        """The text that says which ranks were lost since the last round began, in which collective and where the others were,
        and how many of those are left; "" if none was lost.

        Args:
            ready: the processes of the next round, which wait for it.
        """
        lost = self.lost[self.survived :]
        if not lost:
            return ""
        stay = [each for each in ready if each.trained]
        found = [each.state for each in stay if isinstance(each.state, WaitingForRound) and each.state.line]
        where = ""
        if found:
            first = next((each for each in found if each.collective), found[0])
            where = f" while the others were {f'in {first.collective} ' if first.collective else ''}at {first.line}"
        who = ", ".join(each.describe() for each in lost)
        verb, goes = "was" if len(lost) == 1 else "were", "goes" if len(stay) == 1 else "go"
        return f"{who} {verb} lost{where}; {count(len(stay), 'rank')} {goes} on"

    def how_many(self) -> str:
        wanted = self.wanted()
        there = sum(process.number in wanted for process in self.waiting())
        return f"{count(there, 'rank')} of at least {self.least} {'is' if there == 1 else 'are'} left"

    def too_few(self) -> str:
        """Why no round can begin."""
        if not self.started:
            return self.too_few_slots()
        failed = [name for name in self.hosts if name in self.blacklist]
        reasons = [early.text for early in list(self.early.values())[-MOST_REASONS:]]
        if failed and not all(name in {early.host for early in self.early.values()} for name in failed):
            reasons.append(f"processes have failed on {', '.join(failed[:16])}")
        where = f": {'; '.join(reasons)}" if reasons else ""
        return f"{self.how_many()}, and no more can be started{where}"

    def awaited(self) -> str:
        """The text that says what a job waits for before it begins to train."""
        if self.started:
            return f"waiting for at least {self.least} ranks; {count(len(self.waiting()), 'rank')} there"
        hosts = self.usable_hosts()
        there = ", ".join(f"{host.hostname}:{host.slots}" for host in hosts[:16]) or "none"
        slots = count(sum(host.slots for host in hosts), "slot")
        return f"waiting for at least {self.limits.start} slots; {slots} there ({there})"

    def too_few_slots(self) -> str:
        return (
            "Timed out waiting for minimum number of slots to become available. Please check that you have enough resources "
            f"to run at least {self.limits.start} Horovod processes"
        )
