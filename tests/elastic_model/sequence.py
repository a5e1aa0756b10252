"""One random sequence of events, from the start of a job to a state of calm."""

from __future__ import annotations

import random
import re
import signal
from typing import NamedTuple

from elastic_model.rank import Imports, Rank
from elastic_model.world import Pick, Settings, World
from horovod.runner.agent.messages import Exit
from horovod.runner.elastic.job_state import Limits, Training, WaitingForRound
from horovod.runner.elastic.phases import Finishing, Running

HOSTS = ["alpha", "beta", "gamma", "delta"]
EVENTS = 250
SLOWEST_TIMER = 60.0
"""Seconds: timers up to this may end while anything else is under way, longer ones when nothing else can happen."""
CALM_STEPS = 8
"""So many steps of one round without a disturbance: the job runs."""
DELIVERIES_EACH = 150
"""What may be delivered after the last disturbance, for each process that there is or can be, until the job runs or is over."""


class Ended(NamedTuple):
    """How a sequence has ended."""

    over: bool
    stopped: str
    rounds: int
    deliveries: int

    @property
    def kind(self) -> str:
        if not self.over:
            return "running"
        return re.sub(r"Process \d+.*? ended", "a rank ended", self.stopped.split(":")[0]) or "over"


def of_seed(seed: int) -> Pick:
    return random.Random(seed).randrange


def of_bytes(data: bytes) -> Pick:
    """Choices that hypothesis can shrink. After the last byte each is the first possibility."""
    numbers = iter(data)
    return lambda count: next(numbers, 0) % count


def run(pick: Pick, log: list[str] | None = None) -> Ended:
    """Play a sequence.

    Args:
        pick: makes all choices.
        log: gets what happens.

    Raises:
        AssertionError: something that must always hold does not.
    """
    world = World(_settings(pick), pick)
    if log is not None:
        world.log = log
    world.note(str(world.settings))
    present = {name: 1 + pick(3) for name in HOSTS[: 1 + pick(3)]}
    if pick(8) or world.settings.limits.fixed:
        present["alpha"] = max(present["alpha"], world.settings.limits.start)
    world.hosts(present)
    for _ in range(EVENTS):
        if world.over:
            break
        _happen(world, present)
    return _calm(world)


def _settings(pick: Pick) -> Settings:
    least = 1 + pick(3)
    start = least + pick(2)
    most = None if pick(2) else start + pick(3)
    limits = Limits(
        start=start,
        least=least,
        most=most,
        resets=None if pick(4) else pick(4),
        patience=600.0,
        starting=30.0,
        fixed=not pick(4),
    )
    cooldown, furthest = (1, 4) if pick(2) else None, bool(pick(2))
    return Settings(limits, cooldown, furthest, ("", "", "broadcast", "collective")[pick(4)])


def _happen(world: World, present: dict[str, int]) -> None:
    """One event: mostly a delivery, which is also what the smallest choice leads to."""
    chance = world.pick(100)
    if chance >= 96:
        _disturb(world, present)
        return
    if chance >= 91:
        timers = sorted(key for key, due in world.timers.items() if due - world.now < SLOWEST_TIMER)
        if timers:
            world.fire(timers[world.pick(len(timers))])
            return
    if not _deliver(world):
        _fire_first(world)


def _deliver(world: World) -> bool:
    found = world.deliveries()
    if not found:
        return False
    words, act = found[world.pick(len(found))]
    world.note(words)
    act()
    return True


def _fire_first(world: World) -> bool:
    if not world.timers:
        return False
    world.fire(min(world.timers, key=lambda key: (world.timers[key], key)))
    return True


def _disturb(world: World, present: dict[str, int]) -> None:
    pick = world.pick
    ranks = sorted(world.ranks)
    rank = world.ranks[ranks[pick(len(ranks))]] if ranks else None
    kind = pick(28)
    if kind < 8 and not world.settings.limits.fixed:
        name = HOSTS[pick(len(HOSTS))]
        slots = pick(4)
        if slots:
            present[name] = slots
        else:
            present.pop(name, None)
        if not pick(4):
            for other in [each for each in present if each != name]:
                del present[other]
        world.hosts(present)
    elif kind == 8 and present:
        _lose_host(world, sorted(present)[pick(len(present))])
    elif kind == 9 and world.unstarted:
        number = sorted(world.unstarted)[pick(len(world.unstarted))]
        world.note(f"{number} cannot be started")
        world.not_started(number)
    elif rank is not None:
        _disturb_rank(world, rank, kind)


def _lose_host(world: World, name: str) -> None:
    signalled = world.pick(2)
    world.note(f"host {name} is lost, signalled: {signalled}")
    if signalled:
        world.do(world.policy.host_signalled([name], signal.SIGTERM))
    for number in [number for number, rank in world.ranks.items() if rank.host == name]:
        world.kill(number, Exit(255, reason="lost"))
    for number in [number for number, host in world.unstarted.items() if host == name]:
        if number in world.unstarted:
            world.not_started(number)


def _disturb_rank(world: World, rank: Rank, kind: int) -> None:
    number = rank.number
    if kind < 14:
        world.note(f"kill {number}")
        world.kill(number)
    elif kind < 17:
        world.note(f"SIGTERM {number}")
        world.terminate(number)
    elif kind < 19:
        world.note(f"SIGSTOP {number}")
        rank.stopped = True
    elif kind == 19:
        for each in world.ranks.values():
            each.stopped = False
        world.note("SIGCONT")
    elif kind == 20:
        world.note(f"{number} raises")
        world.kill(number, Exit(1))
    elif kind < 23:
        if rank.assignment is not None and not isinstance(rank.waits, Imports):
            world.note(f"a collective of {number} fails")
            world.break_round(rank, world.pick(rank.assignment.size))
    elif kind == 23:
        rank.returns = True
        world.note(f"{number} returns early")
    elif kind == 24:
        if not world.pick(2):
            rank.exits = True
            world.note(f"{number} calls sys.exit(0)")
        else:
            world.note(f"{number} calls os._exit(0)")
            world.kill(number, Exit(0))
    elif kind < 27:
        for each in [each for each in world.ranks.values() if isinstance(each.waits, Imports)][: 1 + world.pick(2)]:
            if world.pick(2):
                each.never_comes = True
            else:
                world.note(f"{each.number} ends with 0 before init()")
                world.kill(each.number, Exit(0))
    elif world.furthest_step > 3 and not world.pick(3):
        world.goal = world.furthest_step + 1 + world.pick(3)
        world.note(f"the goal is {world.goal}")


def _calm(world: World) -> Ended:
    """Nothing more happens from outside: the job has to run, or to end, soon."""
    most = DELIVERIES_EACH * (8 + len(world.ranks) + len(world.unstarted))
    began, round_before = world.furthest_step, world.policy.round
    for number in range(most):
        if world.over:
            _check_end(world)
            return Ended(True, world.policy.stopped, world.policy.round, number)
        if world.policy.round != round_before:
            began, round_before = world.furthest_step, world.policy.round
        if world.furthest_step >= began + CALM_STEPS:
            return Ended(False, "", world.policy.round, number)
        if not _deliver(world) and not _fire_first(world):
            assert _waits_for_a_script(world), f"nothing ends this: {_describe(world)}"
            return Ended(False, "", world.policy.round, number)
    raise AssertionError(f"after {most} deliveries the job neither runs nor is over: {_describe(world)}")


def _waits_for_a_script(world: World) -> bool:
    """Whether all that is left are processes that compute on after others have done their work, as they may."""
    job = world.job
    training = [each for each in job.processes.values() if isinstance(each.state, Training)]
    return (
        isinstance(job.phase, Finishing | Running)
        and bool(training)
        and all(each.number in world.ranks and world.ranks[each.number].stopped for each in training)
    )


def _check_end(world: World) -> None:
    job = world.job
    if world.policy.stopped.startswith("no remaining rank"):
        left = [rank.number for rank in world.ranks.values() if rank.rounds and not rank.stopped]
        assert not left or world.all_ended, f"{left} have the state"
    assert not any(isinstance(each.state, WaitingForRound) for each in job.processes.values()) or world.all_ended
    _check_status(world)


def _check_status(world: World) -> None:
    """The exit status is 0 only if every rank of the last round has ended by itself with 0, and then always."""
    job, last = world.job, world.policy.round
    if world.all_ended:
        return
    if not last:
        well = not world.asked and all(each.exit.code == 0 for each in world.ends.values())
        assert world.status == 0 or not well or world.policy.stopped
        assert world.status or well, "nothing has been done"
        return
    ends = {number: world.ends[number] for number in job.ranks.values()}
    finished = {number: each.exit.code == 0 and each.round == last and not each.asked for number, each in ends.items()}
    assert world.status or all(finished.values()), f"status 0 although {finished}"
    assert world.status or any(each.begun for each in ends.values()), "status 0 although the last round has not run"
    if all(finished.values()) and all(each.begun and each.came for each in ends.values()):
        assert not world.status, f"status 1 although {finished}: {world.policy.stopped}"
    if isinstance(job.phase, Finishing):
        first = [number for number in ends if job.phase.first.startswith(f"Process {number} ")]
        assert first and finished[first[0]] and ends[first[0]].came, f"{job.phase.first}, but {ends}"
        left = {rank for rank, number in job.ranks.items() if ends[number].asked}
        assert {rank for rank, _ in job.phase.unfinished} <= left
        assert bool(world.policy.stopped) == bool(job.phase.unfinished)


def _describe(world: World) -> str:
    job = world.job
    states = {
        each.number: (each.state, "stopped" if _is_stopped(world, each.number) else "")
        for each in job.processes.values()
    }
    return f"{job.phase}, round {job.round}, {states}, timers {world.timers}"


def _is_stopped(world: World, number: int) -> str:
    return "stopped" if number in world.ranks and world.ranks[number].stopped else ""
