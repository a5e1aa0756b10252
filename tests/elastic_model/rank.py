"""One process of the model: the calls that ``hvd.elastic.run`` makes, as a generator that stops wherever a real one waits."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Any, NamedTuple

from horovod.control.elastic_messages import Connected, NoRank, RankAssignment, ReadyForRound, Returned
from horovod.core.errors import HorovodInternalError, HostsUpdatedInterrupt, NoNextRound, RepeatedFailureError
from horovod.elastic.loop import outcome_of
from horovod.elastic.newest_state import StateReport, furthest
from horovod.elastic.rank_policy import Begun, Call, Completed, ErrorKind, Failed, Outcome, RankPolicy
from horovod.elastic.repetition import Repetition
from horovod.elastic.updates import Heard, hear

if TYPE_CHECKING:
    from elastic_model.world import World


class Imports(NamedTuple):
    """It starts, and has not called ``init()`` yet."""


class Asks(NamedTuple):
    """It waits for the launcher's answer to its question."""

    question: int


class Calls(NamedTuple):
    """It waits in a collective of its round. The result is what every rank has brought, by rank.

    Attributes:
        kind: which collective, and of which step. All members of a round have to make the same calls in the same order.
    """

    kind: tuple[str, int]
    brings: Any


Wait = Imports | Asks | Calls
Waits = Generator[Wait, Any, Any]


class Killed(Exception):
    """Ends the generator of a process that has been killed."""


class Rank:
    """A process.

    Attributes:
        waits: where it is; None once it has ended.
        stopped: whether it is stuck (SIGSTOP).
        assignment: in the round that it is in.
        calls: how many collectives it has called in that round.
        rounds, step, saved: how often its state was synchronised, the step that it is of, and that of the last save.
        handles_sigterm: whether SIGTERM means to leave at the next check.
        returns: whether its function returns at the next step, although others go on.
        exits: whether its function calls ``sys.exit(0)`` at the next step.
        never_comes: whether it ends with exit code 0 before ``hvd.elastic.run`` if it joins a running job.
        in_run: whether it has come to ``hvd.elastic.run``.
        asked: whether it has asked for a further round after the one of its assignment.
        begun: whether its runtime has run in the round of its assignment.
    """

    def __init__(self, world: World, number: int, host: str) -> None:
        self.world = world
        self.number = number
        self.host = host
        self.stopped = False
        self.assignment: RankAssignment | None = None
        self.calls = 0
        self.rounds = self.step = self.saved = 0
        self.has_state: bool | None = None
        self.handles_sigterm = False
        self.returns = self.exits = self.never_comes = False
        self.asked = self.begun = self.in_run = False
        self.heard_news = 0
        self._news = 0
        self._heard_at = 0.0
        self._connected = False
        self._questions = 0
        self._left = 0  # the round that it was in last
        self._life = self._live()
        self.waits: Wait | None = next(self._life)

    def go_on(self, result: Any = None) -> None:
        """Go on with the result of what it waited for, to where it waits next."""
        self._resume(lambda: self._life.send(result))

    def fail(self, error: Exception) -> None:
        """Go on with an error of the collective that it waits in."""
        self._resume(lambda: self._life.throw(error))

    def hear(self, result: int) -> None:
        """A message of the launcher about hosts has come."""
        self._news |= result

    def _resume(self, step: Any) -> None:
        try:
            self.waits = step()
        except StopIteration as end:
            self.waits = None
            self.world.ended(self, int(end.value))

    # What it does.

    def _live(self) -> Waits:
        """The exit code."""
        yield Imports()
        try:
            yield from self._ask(failed=False, keeps_state=False)
            while True:
                try:
                    yield Calls(("init", 0), None)
                    break
                except OSError:
                    yield from self._ask(failed=True, keeps_state=False)
        except NoNextRound:
            return 1
        except SystemExit:
            return 0
        self._begin()
        assert self.assignment is not None
        if self.never_comes and self.assignment.in_run:
            return 0
        try:
            if self.world.settings.before_run == "broadcast" and not self.assignment.in_run:
                yield Calls(("parameters", 0), None)
            if self.world.settings.before_run == "collective":
                if self.assignment.in_run:
                    self.world.raises(self)  # nobody would take part
                    return 1
                yield Calls(("early", 0), None)
        except HorovodInternalError:
            return 1
        if self.assignment.in_run:
            self.world.tells(self, Connected(self._left, in_run=True), in_order=True)
        self.has_state, self.handles_sigterm, self.in_run = False, True, True
        policy, repetition = RankPolicy(), Repetition()
        while policy.call is not Call.RETURN:
            try:
                outcome = yield from self._make(policy)
            except SystemExit:
                return 0
            except Exception as error:
                if isinstance(error, AssertionError):
                    raise
                outcome = outcome_of(error, policy.call)
                if isinstance(error, HostsUpdatedInterrupt):
                    self._failed = False
                elif isinstance(error, HorovodInternalError | OSError):
                    self._failed = True
                if outcome == Failed(ErrorKind.COLLECTIVE) and isinstance(error, HorovodInternalError):
                    self._final = isinstance(repetition.after(error, self._checks), RepeatedFailureError)
            if policy.after(outcome) is Call.RAISE:
                return 1
        self.world.tells(self, Returned(self._left, self.step), in_order=True)
        self.world.leaves(self)
        return 0

    _failed = False
    _final = False
    _checks = 0

    def _make(self, policy: RankPolicy) -> Generator[Wait, Any, Outcome]:
        call = policy.call
        if call is Call.SYNC:
            yield from self._sync()
        elif call is Call.TRAIN:
            yield from self._train()
        elif call is Call.RESTORE:
            self.step = self.saved
        elif call is Call.SAVE:
            self.saved = self.step
        elif call is Call.SHUTDOWN:
            self.world.leaves(self)
        elif call is Call.NEXT:
            self.has_state = self.has_state or policy.has_state
            yield from self._ask(failed=self._failed, keeps_state=policy.keeps_state)
        elif call is Call.INIT:
            yield Calls(("init", 0), None)
            self._begin()
            assert self.assignment is not None
            return Begun(self.assignment.same_state)
        return Completed()

    def _ask(self, *, failed: bool, keeps_state: bool) -> Waits:
        question, self._questions = self._questions, self._questions + 1
        has_state = self._connected if self.has_state is None else self.has_state
        self.asked = self.assignment is not None
        ready = ReadyForRound(question, self._left, failed, "why", self._final, has_state, keeps_state, self.in_run)
        self.world.tells(self, ready, in_order=True)
        answer: RankAssignment | NoRank = yield Asks(question)
        if isinstance(answer, NoRank):
            raise NoNextRound(answer.reason) if answer.job_ends else SystemExit(0)
        self.assignment, self.calls, self._left = answer, 0, answer.round
        self.asked = self.begun = False
        self.heard_news = self._news = 0

    def _begin(self) -> None:
        self._connected, self._heard_at, self.begun = True, 0.0, True
        self.world.tells(self, Connected(self._left), in_order=True)

    def _sync(self) -> Waits:
        assert self.assignment is not None
        reports = yield Calls(("gather", 0), StateReport(self.rounds, self.saved, self.saved))
        root = furthest(reports) if self.world.settings.furthest else None
        steps = yield Calls(("broadcast", 0), self.saved)
        step = steps[0 if root is None else root.rank]
        self.world.adopts(self, step, reports)
        self.step = self.saved = step
        self.rounds += 1

    def _train(self) -> Waits:
        while self.step < self.world.goal and not self.returns:
            if self.exits:
                raise SystemExit(0)
            yield Calls(("allreduce", self.step), None)
            self.step += 1
            self.saved = self.step
            self.world.commits(self)
            heard = yield from self._check()
            if heard.interrupts:
                raise HostsUpdatedInterrupt(skip_sync=heard.only_removed)

    def _check(self) -> Generator[Wait, Any, Heard]:
        self.world.clock += 1
        updates = [(self.world.clock, self._news)] if self._news else []
        self._news = 0
        answers = yield Calls(("check", self.step), tuple(hear(self._heard_at, updates)))
        self._checks += 1
        heard = Heard(*answers[0])
        self._heard_at = heard.latest
        return heard
