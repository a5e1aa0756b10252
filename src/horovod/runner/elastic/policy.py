"""What an elastic job does about hosts and processes that come and go. Pure: events in, decisions out.

Processes have numbers, which they keep; ranks are given anew in each round. Whatever happens, the policy notes it and then
looks at the whole job: which processes are not needed any more, where new ones can be started, whether a round can begin,
whether the round that runs has to be interrupted, whether the job is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from horovod.control.elastic_messages import Connected, HostUpdateResult, Leaving, RankFailed, Ready, Told
from horovod.runner.agent.messages import Exit
from horovod.runner.elastic.blacklist import Blacklist
from horovod.runner.elastic.places import Member, assign
from horovod.runner.hosts.slots import HostInfo, SlotInfo
from horovod.runner.output.outcome import Failure
from horovod.runner.policy import Decision, FirstFailure, Policy, Say, Wake

HUNG_SECONDS = 5.0
"""How long a rank that the others have found to be stuck may take to show that it is not."""
SLOW_SECONDS = 30.0
"""After so long the user is told whom the others wait for."""
SETTLE_SECONDS = 5.0
"""How long new processes that are ready wait for others that start, so that all join in one round."""
FINAL_WORDS_SECONDS = 5.0
"""How long ranks that are told that the job ends may take to save what they have."""
MOST_FRUITLESS_ROUNDS = 3
"""So many rounds in a row may fail to begin although no process is lost."""


class Limits(NamedTuple):
    """What the user asks for.

    Attributes:
        start: how many slots there must be before anything is started.
        least, most: how many ranks a round may have; ``most`` is None where all slots are used.
        resets: how many rounds may follow the first; None for any number.
        patience: seconds to wait for enough slots, or ranks.
        starting: seconds that processes may take until they call ``init()``; the first round does not wait longer for those
            that are not needed.
        fixed: whether no other hosts can ever come.
    """

    start: int
    least: int
    most: int | None
    resets: int | None
    patience: float
    starting: float
    fixed: bool


# What a process is doing.


class Starting(NamedTuple):
    """It has not asked for a place yet."""


class Waiting(NamedTuple):
    """It has asked for a place in the next round."""

    question: int


class Training(NamedTuple):
    """It has its place in a round, and is not known to have left it."""

    round: int
    rank: int


class Dismissed(NamedTuple):
    """It has no place any more, and ends."""


@dataclass
class Process:
    """One that has been started and has not ended."""

    number: int
    host: str
    slot: int
    state: Starting | Waiting | Training | Dismissed = field(default_factory=Starting)
    trained: bool = False
    """Whether its runtime has run in a round, so that it has the job's state."""
    leaving: bool = False
    """Whether it was asked to end, by somebody else than this launcher."""


# What the job is doing.


class Gathering(NamedTuple):
    """No round runs: processes are awaited for the next one."""

    number: int
    """How many rounds have ended."""


class Running(NamedTuple):
    """A round runs, or begins."""

    announced: bool
    """Whether its ranks were told to meet anew."""


class Finishing(NamedTuple):
    """A process has done its work: no further round begins."""

    process: int


class Ending(NamedTuple):
    """The job cannot go on."""

    why: str


# What to do, beside what every policy may decide.


class Start(NamedTuple):
    """Start a process."""

    number: int
    host: HostInfo
    slot: int
    place: SlotInfo
    """What it will probably get; the first round may still change it."""


class Begin(NamedTuple):
    """Begin a round: tell each process, by its number and its question, its place."""

    round: int
    places: Sequence[tuple[int, int, SlotInfo]]


class Announce(NamedTuple):
    """Tell the ranks of a round that hosts have changed."""

    round: int
    result: HostUpdateResult


class EndRound(NamedTuple):
    """Tell ranks that still begin this round that it is over."""

    round: int
    reason: str


class Dismiss(NamedTuple):
    """Tell a process that waits for a place that it gets none."""

    number: int
    question: int
    reason: str
    job_ends: bool


class Stop(NamedTuple):
    """Ask a process to end, and make it if it does not."""

    number: int


class Kill(NamedTuple):
    """End a process that is stuck."""

    number: int


ElasticDecision = Decision | Start | Begin | Announce | EndRound | Dismiss | Stop | Kill


class ElasticPolicy(Policy):
    """An elastic job.

    A host on which a process fails gets no new ones, for ever or for its cool-down; what runs there goes on. After a failure
    the next round begins as soon as all that were in the last one have come or are lost, without waiting for replacements, if
    enough are left. Replacements and additions join later: the round that runs is interrupted when they are ready. Hosts that
    are withdrawn are given up as soon as enough ranks are left without them. Once a process has ended well, no further
    round begins.

    Attributes:
        phase: what the job is doing.
        round: the number of the last round that has begun; 0 before the first.
        resets: how many rounds have followed the first.
        stopped: why the job ended although no rank was to blame; "" if it did not.
    """

    def __init__(self, limits: Limits, blacklist: Blacklist, batch_job: str = "") -> None:
        super().__init__(None, batch_job)
        self._limits = limits
        self._blacklist = blacklist
        self._hosts: dict[str, HostInfo] = {}  # by age
        self._processes: dict[int, Process] = {}
        self._started = 0
        self._overdue = False  # the first round waits no longer for those that have not called init()
        self._timers: set[str] = set()
        self._connected = False
        self._settled = False  # new processes that are ready wait no longer for others
        self._ever_trained = False
        self._fruitless = 0
        self._over = False
        self._ranks: dict[int, int] = {}  # of the last round: the process of each rank
        self.phase: Gathering | Running | Finishing | Ending = Gathering(0)
        self.round = 0
        self.resets = 0

    @property
    def running(self) -> frozenset[int]:
        return frozenset(self._processes)

    @property
    def undecided(self) -> bool:
        return not (self._over or self.ending)

    @property
    def stopped(self) -> str:
        return self.phase.why if isinstance(self.phase, Ending) else ""

    # Events

    def hosts_found(self, hosts: Iterable[HostInfo]) -> list[ElasticDecision]:
        """The hosts of this moment."""
        found = {host.hostname: host for host in hosts}
        known = {name: found.pop(name) for name in list(self._hosts) if name in found}
        self._hosts = {**known, **found}
        return self._review()

    def told(self, number: int, told: Told) -> list[ElasticDecision]:
        """A process has told the launcher something."""
        process = self._processes.get(number)
        if process is None or self.ending:
            return []
        decisions: list[ElasticDecision] = []
        slots_changed = False
        if isinstance(told, Ready):
            if isinstance(self.phase, Ending):
                return [self._dismiss(process, told.question, self.phase.why, job_ends=True)]
            if isinstance(process.state, Dismissed):
                return [self._dismiss(process, told.question, "its host is withdrawn", job_ends=False)]
            was, process.state = process.state, Waiting(told.question)
            if isinstance(was, Training) and was.round == self.round:
                decisions += self._leave_round(told.reason)
        elif isinstance(told, Connected):
            if told.round != self.round:
                return []
            process.trained = self._ever_trained = True
            if self._connected:
                return []
            self._connected, self._fruitless = True, 0
        elif isinstance(told, RankFailed):
            decisions += self._on_rank_failed(told)
        elif isinstance(told, Leaving):
            process.leaving = slots_changed = True
        return decisions + self._review(slots_changed=slots_changed)

    def ended(self, number: int, end: Exit, reported: Failure | None = None) -> list[ElasticDecision]:
        process = self._processes.pop(number, None)
        if process is None:
            return []
        self.exits[number] = end
        if self.ending:
            return []
        decisions: list[ElasticDecision] = []
        dismissed = isinstance(process.state, Dismissed) or isinstance(self.phase, Ending)
        left = process.leaving and end.code == 0
        if end.code == 0 and not dismissed and not left and not isinstance(self.phase, Finishing):
            self.phase = Finishing(number)
            self.first_failure = None  # the job is there to survive what failed before
        elif end.code and not dismissed:
            decisions += self._on_failure(process, end)
        elif process.leaving and process.host in self._hosts and process.host not in self._blacklist:
            decisions += self._shun(process.host)[1]  # it is about to go, so nothing new is started there
        if process.number in self._ranks.values() and not isinstance(process.state, Waiting):
            decisions += self._leave_round(f"{self._describe(process)} has ended with exit code {end}", lost=True)
        return decisions + self._review()

    def woken(self, reason: str, reported: Failure | None = None) -> list[ElasticDecision]:
        self._timers.discard(reason)
        if self.ending:
            return []
        kind, *words = reason.split()
        if kind == "ending":
            return [*self._end_all()]
        if isinstance(self.phase, Ending):
            return []
        decisions: list[ElasticDecision] = []
        if kind == "cooldown":
            self._blacklist.remove(words[0])
        elif kind == "starting":
            self._overdue = True
        elif kind == "settle":
            self._settled = self._settled or int(words[0]) == self.round
        elif kind == "hung":
            process = self._processes.get(int(words[0]))
            if process is not None and isinstance(process.state, Training) and process.state.round == int(words[1]):
                decisions.append(Kill(process.number))
        elif kind == "slow" and self.phase == Gathering(int(words[0])):
            slow = ", ".join(self._describe(process) for process in self._awaited())
            if slow:
                decisions.append(Say(f"horovodrun: the next round waits for {slow}"))
        elif kind == "slots" and not self._started:
            return self._stop(self._too_few_slots())
        elif kind == "patience" and self.phase == Gathering(int(words[0])):
            return self._stop(self._too_few())
        return decisions + self._review()

    # What follows from an event alone.

    def _on_rank_failed(self, told: RankFailed) -> list[ElasticDecision]:
        number = self._ranks.get(told.rank)
        if told.round != self.round or number is None:
            return []
        decisions = self._leave_round(f"rank {told.rank} failed: {told.reason}")
        if number in self._processes and isinstance(self._processes[number].state, Training):
            decisions += self._wake(f"hung {number} {told.round}", HUNG_SECONDS)
        return decisions

    def _on_failure(self, process: Process, end: Exit) -> list[ElasticDecision]:
        if self.first_failure is None:
            self.first_failure = FirstFailure(process.number, process.number, end, "")
        words = f"horovodrun: {self._describe(process)} exit with status code {end}."
        decisions: list[ElasticDecision] = []
        if process.host not in self._blacklist:
            more, decisions = self._shun(process.host)
            words += more
        return [Say(words), *decisions]

    def _shun(self, host: str) -> tuple[str, list[ElasticDecision]]:
        """Start no new processes on a host, for ever or for its cool-down; and how to say so."""
        seconds = self._blacklist.add(host)
        if seconds is None:
            return f" No new processes are started on {host}.", []
        words = f" No new processes are started on {host} for {seconds:.3g} seconds."
        return words, self._wake(f"cooldown {host}", seconds)

    def _leave_round(self, reason: str, *, lost: bool = False) -> list[ElasticDecision]:
        """The round that runs is over: all its ranks will ask for a place in the next one, or end."""
        if not isinstance(self.phase, Running):
            return []
        self._fruitless = 0 if lost or self._connected else self._fruitless + 1
        self.phase = Gathering(self.round)
        decisions: list[ElasticDecision] = [EndRound(self.round, reason)]
        if self._fruitless >= MOST_FRUITLESS_ROUNDS:
            return decisions + self._stop(f"{self._fruitless} rounds in a row could not begin. {reason}")
        return decisions + self._wake(f"slow {self.round}", SLOW_SECONDS)

    # What follows from the state of the job.

    def _review(self, *, slots_changed: bool = True) -> list[ElasticDecision]:
        """Look at the whole job.

        Args:
            slots_changed: whether processes may have got, or lost, their slots. If not, that need not be looked at, which
                matters where hundreds of ranks come at the same time.
        """
        if self.ending or isinstance(self.phase, Ending):
            return self._conclude()
        decisions = self._stop_unwanted() if slots_changed else []
        if isinstance(self.phase, Finishing):
            return decisions + self._finish()
        if slots_changed:
            decisions += self._fill()
        decisions += self._announce() if isinstance(self.phase, Running) else self._begin()
        return decisions + self._conclude()

    def _stop_unwanted(self) -> list[ElasticDecision]:
        """End processes that have not trained and have no place in the job any more."""
        decisions: list[ElasticDecision] = []
        for process in list(self._processes.values()):
            if isinstance(process.state, Starting | Waiting) and not process.trained and not self._is_wanted(process):
                process.state = Dismissed()
                decisions.append(Stop(process.number))
        return decisions

    def _fill(self) -> list[ElasticDecision]:
        """Start processes in free slots."""
        if not self._started and sum(host.slots for host in self._usable()) < self._limits.start:
            return (
                self._stop(self._too_few_slots()) if self._limits.fixed else self._wake("slots", self._limits.patience)
            )
        active = sum(
            not isinstance(each.state, Dismissed) and self._is_wanted(each) for each in self._processes.values()
        )
        room = (1 << 30 if self._limits.most is None else self._limits.most) - active
        taken = {(process.host, process.slot) for process in self._processes.values()}
        new: list[tuple[Process, HostInfo]] = []
        for host in self._usable():
            for slot in range(host.slots):
                if len(new) < room and (host.hostname, slot) not in taken:
                    process = Process(self._started, host.hostname, slot)
                    self._started += 1
                    self._processes[process.number] = process
                    new.append((process, host))
        if not new:
            return []
        places = assign([_member(each) for each in self._processes.values() if not isinstance(each.state, Dismissed)])
        decisions: list[ElasticDecision] = [
            Start(process.number, host, process.slot, places[process.number]) for process, host in new
        ]
        return decisions + (self._wake("starting", self._limits.starting) if self.round == 0 else [])

    def _announce(self) -> list[ElasticDecision]:
        """Have the round that runs interrupted, if another one would be better."""
        assert isinstance(self.phase, Running)
        if self.phase.announced or not self._may_reset():
            return []
        members = [process for process in self._processes.values() if isinstance(process.state, Training)]
        new = [each for each in self._processes.values() if isinstance(each.state, Waiting) and self._is_wanted(each)]
        stay = [each for each in members if self._is_wanted(each)]
        leaving = any(each.leaving for each in members)
        if new and not leaving and not self._settled:
            starting = any(
                isinstance(each.state, Starting) and self._is_wanted(each) for each in self._processes.values()
            )
            if starting:  # one interruption for all that come at about the same time
                return self._wake(f"settle {self.round}", SETTLE_SECONDS)
        result = HostUpdateResult.no_update
        if new:
            result |= HostUpdateResult.added
        enough = len(stay) + len(new) >= self._limits.least
        if leaving or (len(members) > len(stay) and enough):
            result |= HostUpdateResult.removed
        if result == HostUpdateResult.no_update:
            return []
        self.phase = Running(announced=True)
        return [Announce(self.round, result)]

    def _begin(self) -> list[ElasticDecision]:
        """Begin the next round, if those who take part have come and are enough."""
        if any(isinstance(process.state, Training) for process in self._processes.values()):
            return []
        everybody = list(self._processes.values())
        starting = any(isinstance(process.state, Starting) for process in everybody)
        if self.round == 0 and starting and not self._overdue:
            return []
        if self._ever_trained and not any(process.trained for process in everybody):
            return self._stop("no rank is left that has the state of the job")
        waiting = [process for process in everybody if isinstance(process.state, Waiting)]
        ready = [process for process in waiting if self._is_wanted(process)]
        if self._ever_trained and not any(process.trained for process in ready):
            carrier = next(process for process in waiting if process.trained)  # hands on the state, and goes after that
            ready = [carrier, *ready][: self._limits.most]
        if len(ready) < self._limits.least:
            return self._wait(starting)
        if self.round and not self._may_reset():
            return self._stop(
                f"Horovod was shutdown because number of resets during elastic job exceeded limit: {self._limits.resets}"
            )
        chosen = {process.number for process in ready}
        gone = [each for each in waiting if each.number not in chosen and not self._is_wanted(each)]
        return self._begin_with(ready, gone)

    def _begin_with(self, ready: Sequence[Process], unwanted: Sequence[Process]) -> list[ElasticDecision]:
        self.resets += self.round > 0
        self.round += 1
        self._connected = self._settled = False
        self.phase = Running(announced=False)
        self.exits.clear()  # of processes that ended long ago
        self.first_failure = None
        decisions: list[ElasticDecision] = []
        for process in unwanted:
            assert isinstance(process.state, Waiting)
            why = "it was asked to end" if process.leaving else "its host is withdrawn"
            decisions.append(self._dismiss(process, process.state.question, why, job_ends=False))
        slots = assign([_member(process) for process in ready])
        self._ranks = {slots[process.number].rank: process.number for process in ready}
        places: list[tuple[int, int, SlotInfo]] = []
        for process in ready:
            assert isinstance(process.state, Waiting)
            places.append((process.number, process.state.question, slots[process.number]))
            process.state = Training(self.round, slots[process.number].rank)
        begin = Begin(self.round, places)
        if self.round == 1:
            return [*decisions, begin]
        hosts = len({process.host for process in ready})
        words = f"horovodrun: round {self.round} begins with {_count(len(ready), 'rank')} on {_count(hosts, 'host')}"
        return [*decisions, Say(words), begin]

    def _wait(self, starting: bool) -> list[ElasticDecision]:
        """Too few are there: wait, if there is hope."""
        ends = any(isinstance(process.state, Dismissed) for process in self._processes.values())  # and frees its slot
        if self._limits.fixed and not starting and not ends and not self._coming_back():
            return self._stop(self._too_few())
        assert isinstance(self.phase, Gathering)
        timer = f"patience {self.phase.number}"
        if timer in self._timers:
            return []
        decisions = self._wake(timer, self._limits.patience)
        if self.round:
            decisions.append(Say(f"horovodrun: {self._how_many()}; waiting for more"))
        return decisions

    def _finish(self) -> list[ElasticDecision]:
        """No further round: those who wait for one are not needed, those who train go on to their end."""
        assert isinstance(self.phase, Finishing)
        decisions: list[ElasticDecision] = []
        if not self._awaited():
            waiting = [process for process in self._processes.values() if isinstance(process.state, Waiting)]
            if waiting:
                who = ", ".join(self._describe(process) for process in waiting)
                words = f"process {self.phase.process} has done its work and ended with exit code 0"
                decisions.append(Say(f"horovodrun: {words}, so no further round begins: ending {who}"))
                decisions += [self._end_waiting(process, words) for process in waiting]
                decisions += self._wake("ending", FINAL_WORDS_SECONDS)
        return decisions + self._conclude()

    def _conclude(self) -> list[ElasticDecision]:
        """Note that the job is over, if it is."""
        if not self._processes and isinstance(self.phase, Finishing | Ending):
            self._over = True
        return []

    def _stop(self, why: str) -> list[ElasticDecision]:
        """The job cannot go on. Those who wait are told, and may save what they have."""
        self.phase = Ending(why)
        decisions: list[ElasticDecision] = []
        for process in self._processes.values():
            if isinstance(process.state, Waiting):
                decisions.append(self._end_waiting(process, why))
            elif isinstance(process.state, Starting):
                decisions.append(Stop(process.number))
        self._conclude()
        return decisions + ([] if self._over else self._wake("ending", FINAL_WORDS_SECONDS))

    # Small things

    def _usable(self) -> list[HostInfo]:
        return [host for name, host in self._hosts.items() if name not in self._blacklist]

    def _is_wanted(self, process: Process) -> bool:
        """Whether the slot of a process is still the job's, and the process stays."""
        host = self._hosts.get(process.host)
        finishing = isinstance(self.phase, Finishing) and not process.trained
        return host is not None and process.slot < host.slots and not process.leaving and not finishing

    def _awaited(self) -> list[Process]:
        """Those of the last round that have neither come nor ended."""
        return [process for process in self._processes.values() if isinstance(process.state, Training)]

    def _may_reset(self) -> bool:
        return self._limits.resets is None or self.resets < self._limits.resets

    def _coming_back(self) -> bool:
        return self._blacklist.ends and any(name in self._blacklist for name in self._hosts)

    def _dismiss(self, process: Process, question: int, reason: str, *, job_ends: bool) -> Dismiss:
        process.state = Dismissed()
        return Dismiss(process.number, question, reason, job_ends)

    def _end_waiting(self, process: Process, reason: str) -> Dismiss:
        assert isinstance(process.state, Waiting)
        return self._dismiss(process, process.state.question, reason, job_ends=True)

    def _wake(self, timer: str, seconds: float) -> list[ElasticDecision]:
        if timer in self._timers:
            return []
        self._timers.add(timer)
        return [Wake(timer, seconds)]

    def _describe(self, process: Process) -> str:
        rank = next((f"rank {rank}, " for rank, number in self._ranks.items() if number == process.number), "")
        return f"Process {process.number} ({rank}on {process.host})"

    def _how_many(self) -> str:
        there = sum(isinstance(process.state, Waiting) for process in self._processes.values())
        return f"{_count(there, 'rank')} of at least {self._limits.least} {'is' if there == 1 else 'are'} left"

    def _too_few(self) -> str:
        return (
            self._too_few_slots()
            if not self._started
            else f"{self._how_many()}, and no more can be started{self._out()}"
        )

    def _too_few_slots(self) -> str:
        return (
            "Timed out waiting for minimum number of slots to become available. Please check that you have enough resources "
            f"to run at least {self._limits.start} Horovod processes"
        )

    def _out(self) -> str:
        out = [name for name in self._hosts if name in self._blacklist]
        return f": processes have failed on {', '.join(out[:16])}" if out else ""


def _member(process: Process) -> Member:
    return Member(process.number, process.host, process.slot, process.trained)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
