"""Elastic local training: hosts that stay keep what they have learned, and others begin with the outer parameters.

The launcher's part is played by :class:`scripted_launcher.ScriptedLauncher`, and each process says which host it is on. What
comes out is compared with DiLoCo in NumPy, from which the same hosts were taken away, and to which they were added.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import diloco
import horovod.torch as hvd
from diloco import Case
from horovod._base import config
from horovod.common.elastic import HostUpdateResult
from ranks import Death, RankPool
from scripted_launcher import ScriptedLauncher
from time_limits import await_file

Ranks = Callable[..., RankPool]
CASE = Case("abc", 6, 2, 0, 20, 0.7, 0.9, True, 0.0)
LATE = replace(CASE, delay=2, mixing=0.5)


class LocalTraining:
    """The training of :mod:`diloco` as an elastic job, whose ranks average something of their own in every step.

    Args:
        process: the number of this process, whose data it trains on; not that of a rank, which changes.
    """

    def __init__(self, case: Case, process: int) -> None:
        self.case, self.process = case, process
        self.model = diloco.torch_model()
        with torch.no_grad():
            self.model.bias.add_(process)  # all begin with those of rank 0, the first time
        inner = torch.optim.SGD(self.model.parameters(), lr=diloco.INNER_LR, momentum=diloco.INNER_MOMENTUM)
        outer = hvd.OuterSGD(case.lr, case.momentum, case.nesterov)
        named = self.model.named_parameters()
        self.optimizer = hvd.LocalOptimizer(
            inner, case.every, outer, case.fragments, case.delay, named_parameters=named, mixing=case.mixing
        )
        self.state = hvd.elastic.TorchState(self.model, self.optimizer, step=0)
        self.began: list[tuple[int, int, diloco.Parameters, diloco.Parameters]] = []
        """Of each round, its size and first step, and the parameters and outer parameters there."""

    def run(self, within: Callable[[LocalTraining], None]) -> tuple[diloco.Parameters, dict[str, int], list[Any]]:
        """Train to the end; ``within`` is called in each step. The parameters, the fragment of each, and the rounds."""

        @hvd.elastic.run
        def train(state: Any) -> None:
            self.began.append((hvd.size(), state.step, diloco.arrays(self.model), self.outer()))
            while state.step < self.case.steps:
                diloco.torch_step(self.model, self.optimizer, state.step + 1, self.process)
                within(self)
                hvd.allreduce(torch.ones(1), name="mean loss")
                state.step += 1
                state.commit()

        train(self.state)
        saved = self.optimizer.state_dict()["horovod_outer"]["parameters"]
        return diloco.arrays(self.model), {name: each["fragment"] for name, each in saved.items()}, self.began

    def outer(self) -> diloco.Parameters:
        """The outer parameters."""
        saved = self.optimizer.state_dict().get("horovod_outer", {"parameters": {}})["parameters"]
        return {name: each["outer"].numpy().copy() for name, each in saved.items()}


@pytest.mark.parametrize("case", [CASE, LATE], ids=["at once", "late"])
@pytest.mark.parametrize(("hosts", "lost"), [("abc", "b"), ("abc", "a"), ("aabb", "b")])
def test_a_host_that_is_lost_in_the_middle_of_a_round_misses_it(
    ranks: Ranks, case: Case, hosts: str, lost: str
) -> None:
    case = replace(case, hosts=hosts)
    dying = {process for process, host in enumerate(hosts) if host == lost}
    last = 10  # outer steps are made after 9 and 12

    def work() -> Any:
        members = list(range(len(hosts)))
        with ScriptedLauncher([members, [each for each in members if each not in dying]]) as launcher:
            os.environ[config.HOSTNAME] = hosts[launcher.process]
            hvd.init()

            def within(training: LocalTraining) -> None:
                if launcher.process in dying and training.state.step == last:
                    os.kill(os.getpid(), signal.SIGKILL)

            return LocalTraining(case, launcher.process).run(within)

    pool = ranks(len(hosts), {config.CHECK: "error"}, "torch")
    try:
        found = pool.run(work, dies=dying)
    finally:
        pool.restart()
    for process, result in enumerate(found):
        if process in dying:
            assert isinstance(result, Death)
            continue
        parameters, fragments, began = result
        assert [each[:2] for each in began] == [(len(hosts), 0), (len(hosts) - len(dying), last)]
        wanted = diloco.train(case, fragments, lost={lost: last})
        assert diloco.distance(parameters, wanted[hosts[process]]) < 1e-12, process


@pytest.mark.parametrize("case", [CASE, LATE], ids=["at once", "late"])
@pytest.mark.parametrize("at", [2, 11])
def test_a_new_host_takes_the_outer_parameters(ranks: Ranks, case: Case, at: int, tmp_path: Path) -> None:
    """Also before the first outer step, when these are the first parameters."""

    def work(path: Path) -> Any:
        rounds = [[0, 1], [2, 0, 1]]
        new = os.environ[config.RANK] == "2"
        with ScriptedLauncher(rounds[1:] if new else rounds) as launcher:
            os.environ[config.HOSTNAME] = case.hosts[launcher.process]
            if new:
                await_file(path)
            hvd.init()
            training = LocalTraining(case, launcher.process)

            def within(training: LocalTraining) -> None:
                if launcher.number == 0 and launcher.process == 0 and training.state.step == at - 1:
                    launcher.news = HostUpdateResult.added

            following = launcher.next

            def next_round(reason: Any, **state: bool) -> None:
                following(reason, **state)
                path.touch()

            launcher.next = next_round  # type: ignore[method-assign]
            return training.run(within)

    found = ranks(3, {config.CHECK: "error"}, "torch").run(work, tmp_path / "second round")
    for process, (parameters, fragments, began) in enumerate(found):
        assert [each[:2] for each in began] == ([(3, at)] if process == 2 else [(2, 0), (3, at)])
        wanted = diloco.train(case, fragments, joined={"c": at})
        assert diloco.distance(parameters, wanted[case.hosts[process]]) < 1e-12, process


def test_a_host_with_a_new_rank_takes_the_outer_parameters_and_one_without_a_lost_rank_its_own(
    ranks: Ranks, tmp_path: Path
) -> None:
    """Hosts a and b have two ranks, and each loses one. Only that of a is replaced."""
    hosts = "aabba"

    def work(path: Path) -> Any:
        rounds = [[0, 1, 2, 3], [3, 0, 4]]
        new = os.environ[config.RANK] == "4"
        with ScriptedLauncher(rounds[1:] if new else rounds) as launcher:
            os.environ[config.HOSTNAME] = hosts[launcher.process]
            if new:
                await_file(path)
            hvd.init()

            def within(training: LocalTraining) -> None:
                if launcher.process in (1, 2) and training.state.step == 10:
                    # Otherwise the first end could make the other go on to the next round.
                    path.with_name(f"{launcher.process} ends").touch()
                    await_file(path.with_name(f"{3 - launcher.process} ends"))
                    os.kill(os.getpid(), signal.SIGKILL)

            following = launcher.next

            def next_round(reason: Any, **state: bool) -> None:
                following(reason, **state)
                path.touch()

            launcher.next = next_round  # type: ignore[method-assign]
            return LocalTraining(replace(CASE, hosts=hosts), launcher.process).run(within)

    pool = ranks(5, {config.CHECK: "error"}, "torch")
    try:
        found = pool.run(work, tmp_path / "second round", dies={1, 2})
    finally:
        pool.restart()
    for process in (0, 3, 4):
        size, step, present, outer = found[process][2][-1]
        assert (size, step) == (3, 10)
        assert (diloco.distance(present, outer) == 0) == (hosts[process] == "a"), process
