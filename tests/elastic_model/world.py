"""The launcher, the rounds and the messages of the model, and what must hold whatever happens."""

from __future__ import annotations

import math
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from elastic_model.rank import Asks, Calls, Imports, Rank
from horovod.control.elastic_messages import Leaving, NoRank, RankAssignment, RankFailed, ReadyForRound, WorkerMessage
from horovod.core.errors import HorovodInternalError, RankRaisedError
from horovod.elastic.newest_state import StateReport
from horovod.runner.agent.messages import Exit
from horovod.runner.elastic.blacklist import Blacklist
from horovod.runner.elastic.decisions import (
    BeginRound,
    Dismiss,
    EndRound,
    KillProcess,
    NotifyHostsChanged,
    StartProcess,
    StopProcess,
)
from horovod.runner.elastic.elastic_policy import ElasticPolicy
from horovod.runner.elastic.job_state import JobState, Limits
from horovod.runner.elastic.phases import Running
from horovod.runner.hosts.slots import HostInfo
from horovod.runner.policy import EndAll, Say, Wake

KILLED = Exit(137, signal.SIGKILL)
GRACE_SECONDS = 5.0
Pick = Callable[[int], int]
"""``pick(n)`` chooses one of ``n`` possibilities: a number below ``n``."""


class Settings(NamedTuple):
    """What a sequence is about.

    Attributes:
        furthest: whether ranks take over the state of one that has come furthest, as models do; else that of rank 0.
        before_run: what the script calls between ``init()`` and ``hvd.elastic.run``: "broadcast" of parameters, another
            "collective", or "" for nothing.
    """

    limits: Limits
    cooldown: tuple[int, int] | None
    furthest: bool
    before_run: str


class End(NamedTuple):
    """How a process has ended.

    Attributes:
        exit: its exit code.
        round: that of its last assignment; 0 if it had none.
        asked: whether it had asked for a further round.
        begun: whether its runtime had run in that round.
        came: whether it had come to where the others of that round were.
    """

    exit: Exit
    round: int
    asked: bool
    begun: bool
    came: bool


class Collective:
    """One collective of a round."""

    def __init__(self, kind: tuple[str, int]) -> None:
        self.kind = kind
        self.brought: dict[int, Any] = {}


class Round:
    """A round, as its ranks see it.

    Attributes:
        members: the process of each rank.
        gone: ranks that have left it, or whose processes have ended.
        culprit: the rank that its failure is put down to; None if a rank has left in good order, or none has.
        over: whether the launcher has said that it is.
        raised: whether it has failed because the script of a rank has raised an error.
    """

    def __init__(self, number: int, members: dict[int, int]) -> None:
        self.number = number
        self.members = members
        self.gone: set[int] = set()
        self.culprit: int | None = None
        self.failed = False
        self.over = False
        self.raised = False
        self.collectives: list[Collective] = []


class World:
    """One job.

    Attributes:
        goal: the step at which training ends.
        stopped: why the job was given up; "" if it was not.
    """

    def __init__(self, settings: Settings, pick: Pick) -> None:
        self.settings = settings
        self.pick = pick
        self.job = JobState(settings.limits, Blacklist(settings.cooldown, lambda: 0.5))
        self.policy = ElasticPolicy(self.job)
        self.ranks: dict[int, Rank] = {}  # those that have not ended
        self.unstarted: dict[int, str] = {}
        self.exits: dict[int, Exit] = {}  # that the launcher has not seen
        self.ends: dict[int, End] = {}
        self.asked = False
        self.sent: dict[int, deque[WorkerMessage]] = {}  # in the order in which a process has sent them
        self.sent_aside: list[
            tuple[int, WorkerMessage]
        ] = []  # by other threads of a process, which may come at any time
        self.answers: dict[tuple[int, int], RankAssignment | NoRank] = {}
        self.rounds: dict[int, Round] = {}
        self.news: dict[int, list[int]] = {}
        self.timers: dict[tuple[str, str], float] = {}
        self.now = 0.0
        self.clock = 0.0
        self.goal = math.inf
        self.furthest_step = 0
        self.trained = False
        self.terminated: set[int] = set()
        self.log: list[str] = []
        self.all_ended = False
        self._decided: deque[object] = deque()
        self._busy = False

    # What the launcher decides.

    def hosts(self, hosts: dict[str, int]) -> None:
        self.note(f"hosts {hosts}")
        self.do(self.policy.hosts_found([HostInfo(name, slots) for name, slots in hosts.items() if slots]))

    def do(self, decisions: Sequence[object]) -> None:
        self._decided.extend(decisions)
        if self._busy:
            return
        self._busy = True
        while self._decided:
            self._carry_out(self._decided.popleft())
        self._busy = False

    def _carry_out(self, decision: object) -> None:
        self.note(f"  -> {decision}")
        if isinstance(decision, StartProcess):
            assert decision.number not in self.ranks, "a number is given once"
            self.unstarted[decision.number] = decision.host.hostname
        elif isinstance(decision, BeginRound):
            self._begin(decision)
        elif isinstance(decision, NotifyHostsChanged):
            self.news[decision.round].append(int(decision.result))
        elif isinstance(decision, EndRound):
            self.rounds[decision.round].over = True
        elif isinstance(decision, Dismiss):
            self.answers[decision.number, decision.question] = NoRank(decision.reason, decision.job_ends)
        elif isinstance(decision, StopProcess):
            self._stop(decision.number)
        elif isinstance(decision, KillProcess):
            self.kill(decision.number)
        elif isinstance(decision, Wake):
            self.timers["policy", decision.reason] = self.now + decision.seconds
        elif isinstance(decision, EndAll):
            self.all_ended = True
            for number in [*self.ranks, *self.unstarted]:
                self.kill(number)
        else:
            assert isinstance(decision, Say), decision

    def _begin(self, begin: BeginRound) -> None:
        limits = self.settings.limits
        size = len(begin.assignments)
        hands_on = limits.most == 1 and size == 2  # the only rank hands on the state to the next one
        assert hands_on or limits.least <= size <= (limits.most or size), f"{size} ranks"
        assert sorted(slot.rank for _, _, slot in begin.assignments) == list(range(size))
        members = {slot.rank: number for number, _, slot in begin.assignments}
        self.rounds[begin.round] = Round(begin.round, members)
        self.news[begin.round] = []
        alive = [self.ranks[number] for number in members.values() if number in self.ranks]
        if self.trained:
            assert any(rank.rounds for rank in alive) or len(alive) < size, "the state of the job is lost"
        first = self.ranks.get(members[0])
        if first is not None and any(rank.rounds for rank in alive):
            assert first.rounds, "rank 0 has the state of the job"
        for number, question, slot in begin.assignments:
            assignment = RankAssignment(
                begin.round, slot.rank, slot.size, slot.local_rank, slot.local_size, slot.cross_rank, slot.cross_size,
                begin.same_state, begin.in_run, list(begin.lost),
            )  # fmt: skip
            self.answers[number, question] = assignment
            if number not in self.ranks:  # it has ended, and the launcher does not know it yet
                self.rounds[begin.round].gone.add(slot.rank)

    def _stop(self, number: int) -> None:
        if number in self.unstarted:
            del self.unstarted[number]
            self.do(self.policy.ended(number, Exit(0)))
            return
        self.terminate(number)
        self.timers["stop", str(number)] = self.now + GRACE_SECONDS

    # What happens to processes.

    def start(self, number: int) -> None:
        host = self.unstarted.pop(number)
        self.sent[number] = deque()
        self.ranks[number] = Rank(self, number, host)

    def not_started(self, number: int) -> None:
        del self.unstarted[number]
        self.do(self.policy.ended(number, Exit(255, reason="unreachable")))

    def kill(self, number: int, end: Exit = KILLED) -> None:
        if number in self.unstarted:
            self.not_started(number)
        elif number in self.ranks:
            self._end(self.ranks[number], end, blamed=True)

    def terminate(self, number: int) -> None:
        """SIGTERM. A process that is stopped gets it when it goes on."""
        rank = self.ranks.get(number)
        if rank is None or rank.stopped:
            return
        if rank.handles_sigterm and number not in self.terminated and not self.all_ended:
            self.terminated.add(number)
            self.sent_aside.append((number, Leaving(0 if rank.assignment is None else rank.assignment.round)))
        else:
            self.kill(number, Exit(143, signal.SIGTERM))

    def ended(self, rank: Rank, code: int) -> None:
        self._end(rank, Exit(code), blamed=code != 0)

    def _end(self, rank: Rank, end: Exit, *, blamed: bool) -> None:
        self._gone(rank, blamed=blamed)
        del self.ranks[rank.number]
        self.exits[rank.number] = end
        number = 0 if rank.assignment is None else rank.assignment.round
        came = rank.assignment is not None and (rank.in_run or not rank.assignment.in_run)
        self.ends[rank.number] = End(end, number, rank.asked, rank.begun, came)

    def leaves(self, rank: Rank) -> None:
        self._gone(rank, blamed=False)

    def raises(self, rank: Rank) -> None:
        """Its script raises an error, which the runtime tells the others."""
        found = self._round(rank)
        if found is not None and not found.failed:
            found.raised = True

    def break_round(self, rank: Rank, culprit: int) -> None:
        """A collective fails although no process is lost."""
        found = self._round(rank)
        if found is not None and not found.failed:
            found.failed, found.culprit = True, culprit

    def _gone(self, rank: Rank, *, blamed: bool) -> None:
        found = self._round(rank)
        if found is None or rank.assignment is None or rank.assignment.rank in found.gone:
            return
        found.gone.add(rank.assignment.rank)
        if not found.failed:
            found.failed, found.culprit = True, rank.assignment.rank if blamed else None

    def _round(self, rank: Rank) -> Round | None:
        return None if rank.assignment is None else self.rounds[rank.assignment.round]

    # What processes do.

    def tells(self, rank: Rank, message: WorkerMessage, *, in_order: bool) -> None:
        self.asked = self.asked or isinstance(message, ReadyForRound)
        self.sent[rank.number].append(message)

    def commits(self, rank: Rank) -> None:
        self.trained = True
        self.furthest_step = max(self.furthest_step, rank.step)

    def adopts(self, rank: Rank, step: int, reports: Sequence[StateReport]) -> None:
        if self.settings.furthest:
            assert step == max(each.saved for each in reports if each.rounds or not any(r.rounds for r in reports))
        elif any(each.rounds for each in reports):
            assert reports[0].rounds

    def _collective(self, rank: Rank) -> Collective | None:
        """The one that it waits in."""
        found = self._round(rank)
        if found is None or not isinstance(rank.waits, Calls) or rank.assignment is None:
            return None
        if rank.calls == len(found.collectives):
            found.collectives.append(Collective(rank.waits.kind))
        collective = found.collectives[rank.calls]
        assert collective.kind == rank.waits.kind, (
            f"process {rank.number} calls {rank.waits.kind} in round {found.number}, others {collective.kind}"
        )
        collective.brought[rank.assignment.rank] = rank.waits.brings
        return collective

    # What can happen next.

    def deliveries(self) -> list[tuple[str, Callable[[], object]]]:
        """All that can happen next without any disturbance or timer."""
        found: list[tuple[str, Callable[[], object]]] = []
        found += [(f"start {number}", lambda number=number: self.start(number)) for number in self.unstarted]
        found += [(f"exit {number}", lambda number=number: self._exit(number)) for number in self.exits]
        found += [
            (f"message of {number}", lambda number=number: self._tell(number)) for number, q in self.sent.items() if q
        ]
        found += [
            (f"message aside {each}", lambda index=index: self._tell_aside(index))
            for index, each in enumerate(self.sent_aside)
        ]
        for rank in self.ranks.values():
            if not rank.stopped:
                found += self._of_rank(rank)
        return found

    def _of_rank(self, rank: Rank) -> Iterator[tuple[str, Callable[[], object]]]:
        waits = rank.waits
        if isinstance(waits, Imports):
            yield f"{rank.number} calls init()", rank.go_on
        elif isinstance(waits, Asks):
            answer = self.answers.get((rank.number, waits.question))
            if answer is not None:
                yield f"{rank.number} gets {answer}", lambda: rank.go_on(answer)
        elif isinstance(waits, Calls):
            collective, found = self._collective(rank), self._round(rank)
            assert collective is not None and found is not None and rank.assignment is not None
            members = found.members
            if len(collective.brought) == len(members):
                yield f"{rank.number} has done {waits.kind}", lambda: self._complete(rank, collective)
            broken = found.failed or (waits.kind[0] == "init" and found.over)
            if broken:
                yield f"{rank.number} fails in {waits.kind}", lambda: self._fail(rank)
            missing = [self.ranks.get(number) for at, number in members.items() if at not in collective.brought]
            stuck = [each for each in missing if each is not None and each.stopped]
            if stuck and not broken:
                yield f"{rank.number} finds {stuck[0].number} stuck", lambda: self._find_stuck(rank, stuck[0])
            if rank.heard_news < len(self.news[found.number]):
                yield f"{rank.number} hears", lambda: self._hear(rank)

    def _complete(self, rank: Rank, collective: Collective) -> None:
        rank.calls += 1
        rank.go_on([collective.brought[each] for each in sorted(collective.brought)])

    def _fail(self, rank: Rank) -> None:
        found = self._round(rank)
        assert found is not None and rank.assignment is not None and isinstance(rank.waits, Calls)
        if rank.waits.kind[0] == "init":
            self._gone(rank, blamed=False)
            rank.fail(TimeoutError("a rank has not come"))
            return
        culprit, own = found.culprit, rank.assignment.rank
        if culprit is not None and (own in (0, culprit) or culprit == 0):
            self.sent_aside.append((rank.number, RankFailed(found.number, culprit, "failed")))
        rank.fail(RankRaisedError("an error of the script") if found.raised else HorovodInternalError("a rank failed"))

    def _find_stuck(self, rank: Rank, stuck: Rank) -> None:
        found = self._round(rank)
        assert found is not None and isinstance(rank.waits, Calls)
        culprit = next(at for at, number in found.members.items() if number == stuck.number)
        found.failed, found.culprit = True, culprit
        self._fail(rank)

    def _hear(self, rank: Rank) -> None:
        assert rank.assignment is not None
        rank.hear(self.news[rank.assignment.round][rank.heard_news])
        rank.heard_news += 1

    def _exit(self, number: int) -> None:
        while self.sent[number]:  # the launcher takes the messages first
            self._tell(number)
        self.do(self.policy.ended(number, self.exits.pop(number)))

    def _tell(self, number: int) -> None:
        message = self.sent[number].popleft()
        if isinstance(message, ReadyForRound) and number in self.policy.running:
            self.answers = {key: value for key, value in self.answers.items() if key[0] != number}
        self.do(self.policy.on_message(number, message))

    def _tell_aside(self, index: int) -> None:
        number, message = self.sent_aside.pop(index)
        self.do(self.policy.on_message(number, message))

    def fire(self, key: tuple[str, str]) -> None:
        """A timer ends."""
        self.now = max(self.now, self.timers.pop(key))
        kind, what = key
        self.note(f"timer {what}")
        if kind == "policy":
            phase = self.job.phase
            self.do(self.policy.woken(what))
            if isinstance(phase, Running):
                assert not self.policy.stopped, "a round runs"
        else:
            self.kill(int(what))

    @property
    def over(self) -> bool:
        """Whether the launcher ends: no process is left, and none comes."""
        return self.all_ended or not (self.policy.running or self.policy.undecided)

    @property
    def status(self) -> int:
        """The launcher's exit status, without its value."""
        return int(self.all_ended or self.policy.first_failure is not None or bool(self.policy.stopped))

    def note(self, text: str) -> None:
        self.log.append(text)
