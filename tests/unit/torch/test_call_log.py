"""The rule by which a group goes on after a loss, in random schedules: of calls in flight, numbers that ranks show each
other, meetings, and losses at any moment of them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from horovod.torch.distributed.on_loss.call_log import CallLog

CALLS = 12
MOST_IN_FLIGHT = 4
SEQUENCES = 400


@dataclass
class Round:
    """The ranks that carry calls out, from one loss to the next. What a rank has sent or shown stays when it is lost.

    Attributes:
        submitted: by member, the calls that it has submitted.
        shown: by member, up to which call the others see that it has completed all.
        positions: by member that waits for the others, up to which call it has handed out.
    """

    members: frozenset[int]
    submitted: dict[int, list[int]] = field(default_factory=dict)
    shown: dict[int, int] = field(default_factory=dict)
    positions: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for member in self.members:
            self.submitted[member], self.shown[member] = [], 0


@dataclass
class Rank:
    """One process.

    Attributes:
        round: the one it is in; None if it has left that, and waits for the next one.
        met: whether it knows where the others of the round are.
        results: by call that it has completed, the ranks that have carried it out.
        handed: what the script has seen: of each call, the ranks that have carried it out.
    """

    log: CallLog = field(default_factory=CallLog)
    round: Round | None = None
    met: bool = False
    results: dict[int, frozenset[int]] = field(default_factory=dict)
    handed: list[frozenset[int]] = field(default_factory=list)


class World:
    """Some ranks that make the same calls, and lose each other. Every step is one message or one decision of one rank."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        size = self.chance.randint(2, 5)
        self.living = {number: Rank() for number in range(size)}
        self.losses = self.chance.randint(0, size - 1)
        self.rounds = 0
        self._begin_round()

    def run(self) -> None:
        for _ in range(20_000):
            steps = self.steps()
            if not steps:
                break
            self.chance.choice(steps)()
            self.check()
        assert all(len(rank.handed) == CALLS for rank in self.living.values()), "the ranks wait for each other"

    def steps(self) -> list:
        """What may happen next."""
        found: list = []
        for number, rank in self.living.items():
            if rank.log.made < CALLS and rank.log.made - rank.log.handed < MOST_IN_FLIGHT:
                found.append(lambda rank=rank, number=number: self.call(number, rank))
            found += self.steps_in_round(number, rank)
        if all(rank.round is None for rank in self.living.values()):
            found.append(self._begin_round)
        if self.losses and len(self.living) > 1 and self.chance.random() < 0.3:
            found.append(self.lose)
        return found

    def steps_in_round(self, number: int, rank: Rank) -> list:
        now = rank.round
        if now is None:
            return []
        found: list = []
        if not now.members <= self.living.keys():
            found.append(lambda: self.leave(rank))
        if not rank.met:
            if number not in now.positions:
                found.append(lambda: now.positions.update({number: rank.log.handed}))
            elif now.positions.keys() == now.members:
                found.append(lambda: self.meet(number, rank))
            return found
        following = rank.log.completed + 1
        if all(following in calls for calls in now.submitted.values()):
            found.append(lambda: self.complete(rank, following))
        if now.shown[number] < rank.log.completed:
            found.append(lambda: now.shown.update({number: rank.log.completed}))
        if min(now.shown.values()) > rank.log.handed:
            found.append(lambda: self.hand_out(rank, rank.log.agreed(min(now.shown.values()))))
        return found

    # One step each.

    def call(self, number: int, rank: Rank) -> None:
        made = rank.log.call()
        if rank.round is not None and rank.met:
            rank.round.submitted[number].append(made)

    def complete(self, rank: Rank, call: int) -> None:
        assert rank.round is not None
        rank.log.complete(call)
        rank.results[call] = rank.round.members

    def leave(self, rank: Rank) -> None:
        rank.round = None

    def meet(self, number: int, rank: Rank) -> None:
        now = rank.round
        assert now is not None
        handing, again = rank.log.met(max(now.positions.values()))
        self.hand_out(rank, handing)
        for call in again:
            rank.results.pop(call, None)
        now.submitted[number] += again
        rank.met = True

    def lose(self) -> None:
        self.losses -= 1
        del self.living[self.chance.choice([*self.living])]

    def _begin_round(self) -> None:
        self.rounds += 1
        new = Round(frozenset(self.living))
        for rank in self.living.values():
            rank.round, rank.met = new, False

    def hand_out(self, rank: Rank, calls: range) -> None:
        for call in calls:
            assert call == len(rank.handed) + 1, "calls are handed out in their order, each once"
            members = rank.results[call]
            for number in members & self.living.keys():
                assert self.living[number].results.get(call) == members, "handed out before every member has it"
            rank.handed.append(members)

    def check(self) -> None:
        """What holds at every moment."""
        ranks = [*self.living.values()]
        furthest = max(ranks, key=lambda rank: len(rank.handed))
        for rank in ranks:
            assert rank.handed == furthest.handed[: len(rank.handed)], "one collective was handed out in two ways"
            if rank.round is not None and rank.met:
                first = {calls[0] for number, calls in rank.round.submitted.items() if calls}
                assert len(first) <= 1, "the ranks number the calls of a round differently"
                for calls in rank.round.submitted.values():
                    assert calls == [*range(calls[0], calls[0] + len(calls))] if calls else True


@pytest.mark.parametrize("hundred", range(SEQUENCES // 100))
def test_all_survivors_hand_out_the_same_calls_after_any_losses(hundred: int) -> None:
    lost = 0
    for seed in range(hundred * 100, hundred * 100 + 100):
        world = World(seed)
        losses = world.losses
        world.run()
        lost += losses - world.losses
    assert lost > 50


@pytest.mark.parametrize("rule", ["without the others", "the lowest position", "nothing again"])
def test_the_test_sees_a_broken_rule(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if rule == "without the others":
        agreed = CallLog.agreed
        monkeypatch.setattr(CallLog, "agreed", lambda self, lowest: agreed(self, self.completed))
    elif rule == "the lowest position":
        met = CallLog.met
        monkeypatch.setattr(CallLog, "met", lambda self, furthest: met(self, self.handed))
    else:
        monkeypatch.setattr(CallLog, "met", lambda self, furthest: (self.agreed(self.completed), range(0)))
    with pytest.raises((AssertionError, KeyError)):
        for seed in range(SEQUENCES):
            World(seed).run()
