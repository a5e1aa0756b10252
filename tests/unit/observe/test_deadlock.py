"""The proof of a deadlock, on simulated ranks: it never names one that could continue, and finds each one that cannot."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horovod.observe.deadlock import Deadlock, DeadlockDetector, Expected, Standing, Submitted
from part import draws

SECONDS = 20.0
JOIN = "join"
Key = tuple[int, str]


@dataclass
class Thread:
    """A thread of a simulated rank: a program of calls, and the call that it waits for."""

    program: list[tuple[str, int, str]]
    position: int = 0
    busy: int = 0
    awaits: Key | None = None

    @property
    def ended(self) -> bool:
        return self.position >= len(self.program) and self.awaits is None and not self.busy


@dataclass
class Rank:
    """A simulated rank, with what it has submitted, and which orders it has begun."""

    number: int
    threads: list[Thread]
    flying: dict[Key, Thread] = field(default_factory=dict)
    started: set[Key] = field(default_factory=set)
    begun: dict[int, int] = field(default_factory=dict)
    happened: int = 0
    changed: float = 0.0


class Job:
    """Ranks whose collectives are decided by one coordinator for each set, and carried out by each rank in its own time."""

    def __init__(self, sets: list[tuple[int, ...]], ranks: list[Rank], chance: random.Random) -> None:
        self.sets, self.ranks, self.chance = sets, ranks, chance
        self.exaggerates = chance.random() < 0.5
        self.orders: dict[int, list[str]] = {number: [] for number in range(len(sets))}
        self.joined: dict[int, set[int]] = {number: set() for number in range(len(sets))}
        for rank in ranks:
            rank.begun = {number: 0 for number, members in enumerate(sets) if rank.number in members}

    def choices(self) -> list[Any]:
        """Everything that may happen next."""
        return [*self.of_threads(), *self.of_workers()]

    def of_threads(self) -> Iterator[Any]:
        for rank in self.ranks:
            for thread in rank.threads:
                if thread.busy:
                    yield lambda rank=rank, thread=thread: self._compute(rank, thread)
                elif thread.awaits is not None:
                    if thread.awaits not in rank.flying:
                        yield lambda rank=rank, thread=thread: self._woken(rank, thread)
                elif thread.position < len(thread.program):
                    yield lambda rank=rank, thread=thread: self._call(rank, thread)

    def of_workers(self) -> Iterator[Any]:
        for rank in self.ranks:
            for number, begun in rank.begun.items():
                running = [key for key in rank.started if key[0] == number]
                if running:
                    yield lambda rank=rank, key=running[0]: self._finish(rank, key)
                elif begun < len(self.orders[number]):
                    yield lambda rank=rank, number=number: self._begin(rank, number)

    def _compute(self, rank: Rank, thread: Thread) -> None:
        rank.happened += 1
        thread.busy -= 1

    def _woken(self, rank: Rank, thread: Thread) -> None:
        rank.happened += 1
        thread.awaits = None

    def _call(self, rank: Rank, thread: Thread) -> None:
        rank.happened += 1
        what, number, name = thread.program[thread.position]
        key = (number, name)
        if what == "compute":
            thread.busy = 5
        elif what == "wait":
            thread.awaits = next((each for each, owner in rank.flying.items() if owner is thread), None)
        elif key in rank.flying or number not in rank.begun or (number, JOIN) in rank.flying:
            pass  # it would be an error of the call
        else:
            rank.flying[key] = thread
            if name == JOIN:
                self.joined[number].add(rank.number)
            thread.awaits = key if what == "call" or name == JOIN else None
            self._decide(number)
        thread.position += 1

    def _decide(self, number: int) -> None:
        members = set(self.sets[number])
        for name in sorted({name for rank in self.ranks for at, name in rank.flying if at == number}):
            key = (number, name)
            having = {rank.number for rank in self.ranks if key in rank.flying and key not in rank.started}
            pending = self.orders[number].count(name) > max(
                (self._carried_out(rank, number, name) for rank in self.ranks if rank.number in members), default=0
            )
            excused = set() if name == JOIN else self.joined[number]
            if having | excused == members and having and not pending and self._is_new(having, number, name):
                self.orders[number].append(name)
                if name == JOIN:
                    self.joined[number] = set()

    def _carried_out(self, rank: Rank, number: int, name: str) -> int:
        return self.orders[number][: rank.begun[number]].count(name)

    def _is_new(self, having: set[int], number: int, name: str) -> bool:
        return all(
            self._carried_out(self.ranks[each], number, name) == self.orders[number].count(name) for each in having
        )

    def _begin(self, rank: Rank, number: int) -> None:
        name = self.orders[number][rank.begun[number]]
        rank.begun[number] += 1
        rank.happened += 1
        if (number, name) in rank.flying:
            rank.started.add((number, name))

    def _finish(self, rank: Rank, key: Key) -> None:
        rank.happened += 1
        rank.started.remove(key)
        del rank.flying[key]
        self._decide(key[0])

    def standing(self, rank: Rank, now: float) -> Standing | None:
        """As horovod.core.lifecycle.standing makes it."""
        threads = [thread for thread in rank.threads if not thread.ended]
        if (
            not threads
            or rank.started
            or any(each.awaits is None or each.awaits not in rank.flying for each in threads)
        ):
            return None
        awaited = {thread.awaits for thread in threads}
        submitted = [
            Submitted(
                number,
                name,
                () if len(self.sets[number]) == len(self.ranks) else self.sets[number],
                True,
                name == JOIN,
                f"{name} at line {number}",
                (number, name) in awaited,
            )
            for number, name in rank.flying
        ]
        # The proof must not need the time: threads that only wait for others of the process do not count in it.
        idle = 1e6 if self.exaggerates else now - rank.changed
        return Standing(rank.happened, idle, dict(rank.begun), submitted)

    def state(self) -> list[list[tuple[int, Key | None]]]:
        return [[(thread.position, thread.awaits) for thread in rank.threads] for rank in self.ranks]

    def run_to_the_end(self) -> None:
        for _ in range(10000):
            choices = self.choices()
            if not choices:
                return
            self.chance.choice(choices)()
        raise AssertionError("the simulation does not end")


def made(chance: random.Random) -> Job:
    """A job of random programs, most of them nearly the same on all ranks."""
    size = chance.randint(2, 4)
    everyone = tuple(range(size))
    sets = [everyone, *(tuple(sorted(chance.sample(everyone, chance.randint(1, size)))) for _ in range(2))]
    common = [
        [
            (
                chance.choice(["call", "call", "submit", "wait", "compute"]),
                chance.randrange(len(sets)),
                chance.choice("abc") + str(number),
            )
            for _ in range(chance.randint(1, 5))
        ]
        for number in range(chance.randint(1, 2))
    ]
    ranks = []
    for number in everyone:
        programs = [list(each) for each in common]
        for program in programs:
            if chance.random() < 0.3:
                chance.shuffle(program)
            if chance.random() < 0.2:
                program.pop()
            if chance.random() < 0.3:
                program.append(("call", 0, JOIN))
        ranks.append(Rank(number, [Thread(program) for program in programs]))
    return Job(sets, ranks, chance)


def watched(job: Job, detector: DeadlockDetector, chance: random.Random) -> Deadlock | None:
    """Run a job while rank 0 asks: answers are made and arrive at any moment after the question."""
    now = 0.0
    questions: dict[int, float] = {}
    answers: dict[int, tuple[float, Standing | None]] = {}
    quiet, work = 0, chance.choice([0.5, 0.02])  # orders may be on their way for long
    while quiet < 150:
        now += 1.0
        before = [rank.happened for rank in job.ranks]
        for choices, often in ((list(job.of_threads()), 0.5), (list(job.of_workers()), work)):
            if choices and chance.random() < often:
                chance.choice(choices)()
        for rank, count in zip(job.ranks, before, strict=True):
            rank.changed = rank.changed if rank.happened == count else now
        quiet = 0 if job.choices() else quiet + 1
        for rank in job.ranks:
            number = rank.number
            if number not in questions and number not in answers and chance.random() < 0.5:
                questions[number] = now
            elif number in questions and chance.random() < 0.5:
                answers[number] = questions.pop(number), job.standing(rank, now)
            elif number in answers and chance.random() < 0.5:
                asked, standing = answers.pop(number)
                detector.take(number, standing, asked, now)
                found = detector.found()
                if found is not None:
                    return found
    return None


@given(st.integers(0, 1 << 40), st.sampled_from([0.5, SECONDS]))
@settings(max_examples=draws(300), deadline=None)
def test_a_job_is_ended_only_if_no_thread_can_continue_and_then_always(seed: int, seconds: float) -> None:
    chance = random.Random(seed)
    job = made(chance)
    found = watched(job, DeadlockDetector(len(job.ranks), seconds), chance)
    before = job.state()
    job.run_to_the_end()
    if found is not None:
        assert job.state() == before, found.text
        assert found.certain and found.text.startswith("No rank can continue")
    elif all(any(not thread.ended for thread in rank.threads) for rank in job.ranks):
        raise AssertionError(f"all ranks wait for ever, and this is not found: {job.state()}")


def waits(
    rank: int, name: str, progress: int = 1, doubtful: list[str] | None = None, idle: float = 0.0, **changes: Any
) -> Standing:
    submitted = Submitted(0, name, (), True, False, f"allreduce at train.py:{rank}", True)
    return Standing(progress, idle, {0: 4}, [submitted], doubtful=doubtful or [], **changes)


def looked(detector: DeadlockDetector, *rounds: list[Standing | None]) -> Deadlock | None:
    """Ask all ranks, once for each round, every ten seconds. Returns the last finding."""
    found = None
    for number, standings in enumerate(rounds):
        for rank, standing in enumerate(standings):
            detector.take(rank, standing, 10.0 * number, 10.0 * number + 1)
        found = detector.found()
    return found


def test_the_message_names_ranks_collectives_and_lines() -> None:
    found = looked(DeadlockDetector(3, 5), *[[waits(0, "a"), waits(1, "b"), waits(2, "a")]] * 3)
    assert found is not None and found.certain and found.blamed == 1 and found.name == "a"
    assert found.text == (
        "No rank can continue: for 19 seconds every rank has waited for a collective that another rank has not called, and "
        "that rank waits, too:\nranks 0, 2: a, submitted as allreduce at train.py:0; rank 1 has not called it\n"
        "rank 1: b, submitted as allreduce at train.py:1; ranks 0, 2 have not called it\n"
        "They are called in another order, under other names, or by ranks that take different paths through the script."
    )


@pytest.mark.parametrize(
    "rounds",
    [
        pytest.param([[waits(0, "a", idle=99.0), waits(1, "b", idle=99.0)]], id="one look"),
        pytest.param([[waits(0, "a"), waits(1, "b")], [waits(0, "a"), waits(1, "b", 2)]], id="progress between"),
        pytest.param([[waits(0, "a"), None]] * 9, id="a rank computes"),
        pytest.param([[waits(0, "a"), waits(1, "a")]] * 9, id="all have submitted it"),
        pytest.param(
            [[waits(0, "a"), Standing(1, 0.0, {0: 5}, waits(1, "b").submitted)]] * 9, id="carried out on one rank only"
        ),
        pytest.param([[waits(0, "a"), Standing(1, 0.0, {0: 4})]] * 9, id="a rank waits for nothing"),
    ],
)
def test_no_proof(rounds: list[list[Standing | None]]) -> None:
    assert looked(DeadlockDetector(2, 5), *rounds) is None


def test_threads_of_which_nothing_is_known_are_named_once_and_the_job_goes_on() -> None:
    detector = DeadlockDetector(2, 5)
    standings: list[Standing | None] = [waits(0, "a"), waits(1, "b", doubtful=["thread loader at load.py:3 in read"])]
    found = looked(detector, *[standings] * 2)
    assert found is not None and not found.certain
    assert found.text.endswith("may still call it:\nrank 1: thread loader at load.py:3 in read")
    assert looked(detector, *[standings] * 3) is None


def test_a_message_that_was_never_sent() -> None:
    def receives(sent: int, arrived: int) -> list[Standing | None]:
        return [
            Standing(1, 0.0, {}, [], [Expected((1,), "recv from rank 1 at train.py:5", True)], {}, {1: arrived}),
            waits(1, "a", sent={0: sent} if sent else {}),
        ]

    found = looked(DeadlockDetector(2, 5), *[receives(3, 3)] * 3)
    assert found is not None and "rank 0: recv from rank 1 at train.py:5; rank 1 has not called it" in found.text
    assert looked(DeadlockDetector(2, 5), *[receives(4, 3)] * 3) is None  # one is on its way


def test_a_message_that_waits_for_a_connection() -> None:
    def sends(listens: bool) -> list[Standing | None]:
        message = Expected((1,), "send of 16 bytes to rank 1 at train.py:5", True)
        return [
            Standing(1, 0.0, {}, [], [message], unconnected=[1], listens=True),
            waits(1, "metric", listens=listens),
        ]

    assert looked(DeadlockDetector(2, 3.0), *[sends(listens=True)] * 9) is None
    found = looked(DeadlockDetector(2, 3.0), *[sends(listens=False)] * 9)
    assert found is not None and "rank 1 has not called it" in found.text, found
