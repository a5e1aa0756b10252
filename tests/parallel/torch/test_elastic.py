"""Elastic training on real ranks: what they have in common after a failure, and what a change of size does to the result.

The launcher's part is played by :class:`scripted_launcher.ScriptedLauncher`: the test says which ranks take part in a round.
"""

from __future__ import annotations

import gc
import os
import signal
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import horovod.torch as hvd
from horovod._base import config
from horovod.common.elastic import HostUpdateResult
from ranks import Death, RankPool
from scripted_launcher import ScriptedLauncher

SAMPLES = 36
GLOBAL_BATCH = 6
STEPS = SAMPLES // GLOBAL_BATCH
EPOCHS = 2

Ranks = Callable[..., RankPool]


class Training:
    """A small training whose result does not depend on the number of ranks, but for rounding."""

    def __init__(self, rollback: Any = "commit", seed: int = 0) -> None:
        torch.manual_seed(seed)
        x = torch.randn(SAMPLES, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        self.data = torch.utils.data.TensorDataset(x, x @ torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64))
        self.model = torch.nn.Linear(3, 1).double()
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=self.model.named_parameters())
        self.sampler = hvd.elastic.GlobalBatchSampler(self.data, GLOBAL_BATCH, micro_batch=2)
        self.loader = torch.utils.data.DataLoader(self.data, batch_sampler=self.sampler)
        self.state = hvd.elastic.TorchState(
            self.model,
            self.optimizer,
            rollback=rollback,
            sampler=self.sampler,
            scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 4, gamma=0.5),
            epoch=0,
            step=0,
        )
        self.began: list[tuple[int, int]] = []

    def step(self, step: Any) -> None:
        self.optimizer.zero_grad()
        for (x, y), weight, last in step:
            loss = (self.model(x) - y).square().mean() * weight
            if last:
                loss.backward()
            else:
                with self.optimizer.no_sync():
                    loss.backward()
        self.optimizer.step()

    def run(self, between: Callable[[Training], None] = lambda training: None) -> list[float]:
        """Train to the end; ``between`` is called after each step, before its commit."""

        @hvd.elastic.run
        def train(state: Any) -> None:
            self.began.append((hvd.size(), state.step))
            while state.epoch < EPOCHS:
                for step in self.sampler.steps(self.loader):
                    self.step(step)
                    self.sampler.record_step()
                    state.scheduler.step()
                    state.step += 1
                    between(self)
                    state.commit()
                self.sampler.set_epoch(state.epoch + 1)
                state.epoch += 1

        train(self.state)
        return [*self.model.weight[0].tolist(), *self.model.bias.tolist(), self.optimizer.param_groups[0]["lr"]]


def uninterrupted() -> list[float]:
    with ScriptedLauncher([[int(os.environ[config.RANK])]]):
        hvd.init()
        return Training().run()


ROLLBACKS = pytest.mark.parametrize("rollback", ["commit", "step"])


@ROLLBACKS
def test_survivors_of_a_killed_rank_finish_with_the_result_of_an_undisturbed_job(ranks: Ranks, rollback: str) -> None:
    """Ranks are lost one after the other, the first of them rank 0, in the middle of a step."""

    def work(rollback: str) -> Any:
        with ScriptedLauncher([[0, 1, 2], [1, 2], [2]]) as launcher:
            hvd.init()
            training = Training(rollback, seed=launcher.process)

            def between(training: Training) -> None:
                if (launcher.process, training.state.step) in [(0, 4), (1, 9)]:
                    os.kill(os.getpid(), signal.SIGKILL)

            return training.run(between), training.began

    pool = ranks(3, framework="torch")
    try:
        *dead, (result, began) = pool.run(work, rollback, dies={0, 1})
    finally:
        pool.restart()
    assert all(isinstance(each, Death) for each in dead)
    sizes, steps = zip(*began, strict=True)
    assert sizes == (3, 2, 1)
    assert steps[1] in (3, 4) and steps[2] in (8, 9), "at most the step that was under way is done again"
    (alone,) = pool.run(uninterrupted, ranks=[0])
    assert result == pytest.approx(alone, abs=1e-9)


@ROLLBACKS
@pytest.mark.parametrize("leader", [0, 1])
def test_ranks_follow_the_one_that_has_committed_a_step_more(ranks: Ranks, rollback: str, leader: int) -> None:
    """All but one fail between a step and its commit; that one finds out in the next step. It need not be rank 0."""

    def work(rollback: str, leader: int) -> Any:
        with ScriptedLauncher([[0, 1, 2]] * 2):
            hvd.init()
            training = Training(rollback)
            failed = []

            def between(training: Training) -> None:
                if training.state.step == 5 and hvd.rank() != leader and not failed:
                    failed.append(True)
                    raise hvd.HorovodInternalError("a rank was lost")

            training.state._bcast_object = lambda obj: obj  # no collective in the commit, so that it is complete
            return training.run(between), training.began

    results = ranks(3, framework="torch").run(work, rollback, leader)
    (alone,) = ranks(3, framework="torch").run(uninterrupted, ranks=[0])
    for result, began in results:
        assert began == [(3, 0), (3, 5)]
        assert result == pytest.approx(alone, abs=1e-9)


def test_where_no_rank_is_at_the_end_of_a_step_all_go_back_to_the_last_save(ranks: Ranks) -> None:
    def work() -> Any:
        with ScriptedLauncher([[0, 1]] * 2):
            hvd.init()
            training = Training("step")
            failed = []

            def between(training: Training) -> None:
                if training.state.step == 6 and not failed:
                    failed.append(True)
                    raise hvd.HorovodInternalError("the average of the losses failed")

            commit = training.state.commit

            def committed() -> None:
                commit()
                if training.state.step == 4:
                    training.state.save()

            training.state.commit = committed
            return training.run(between), training.began

    results = ranks(2, framework="torch").run(work)
    (alone,) = ranks(3, framework="torch").run(uninterrupted, ranks=[0])
    for result, began in results:
        assert began == [(2, 0), (2, 4)]
        assert result == pytest.approx(alone, abs=1e-9)


@ROLLBACKS
def test_a_new_process_takes_over_the_state_and_nothing_is_lost(ranks: Ranks, rollback: str, tmp_path: Path) -> None:
    def work(rollback: str, path: Path) -> Any:
        rounds = [[0, 1], [2, 0, 1], [2, 0]]
        with ScriptedLauncher(rounds) if os.environ[config.RANK] != "2" else ScriptedLauncher(rounds[1:]) as launcher:
            if launcher.process == 2:
                while not path.exists():
                    time.sleep(0.01)
            hvd.init()
            training = Training(rollback, seed=launcher.process)

            def between(training: Training) -> None:
                if launcher.number == 0 and training.state.step == 3:
                    launcher.news = HostUpdateResult.added
                elif launcher.process == 2 and training.state.step == 7:
                    launcher.news = HostUpdateResult.removed

            following = launcher.next

            def next_round(reason: Any, **state: bool) -> None:
                following(reason, **state)
                path.touch()

            launcher.next = next_round  # type: ignore[method-assign]
            try:
                return training.run(between), training.began
            except SystemExit:
                return None, training.began

    found = ranks(3, framework="torch").run(work, rollback, tmp_path / "second round")
    (alone,) = ranks(3, framework="torch").run(uninterrupted, ranks=[0])
    assert [began for _, began in found] == [[(2, 0), (3, 3), (2, 7)], [(2, 0), (3, 3)], [(3, 3), (2, 7)]]
    assert found[0][0] == pytest.approx(alone, abs=1e-9) and found[2][0] == pytest.approx(alone, abs=1e-9)
    assert found[1][0] is None


@ROLLBACKS
@pytest.mark.parametrize("where", ["in the step", "before the commit"])
def test_what_reset_callbacks_set_is_kept_on_all_ranks(ranks: Ranks, rollback: str, where: str) -> None:
    """Whether the state that all take over is the live one, or that of the last save."""

    def work(rollback: str, where: str) -> Any:
        with ScriptedLauncher([[0, 1], [1, 0]]):
            hvd.init()
            training = Training(rollback)
            model, optimizer = training.model, training.optimizer
            rates: list[float] = []

            def adapt() -> None:
                optimizer.param_groups[0]["lr"] = 0.025

            training.state.register_reset_callbacks([adapt])

            @hvd.elastic.run
            def train(state: Any) -> None:
                rates.append(optimizer.param_groups[0]["lr"])
                x = torch.ones(2, 3, dtype=torch.float64)
                for number in range(4):
                    optimizer.zero_grad()
                    model(x).sum().backward()
                    if len(rates) == 1 and number == 2 and where == "in the step":
                        raise hvd.HorovodInternalError("a rank was lost")
                    optimizer.step()
                    if len(rates) == 1 and number == 2:
                        raise hvd.HorovodInternalError("a rank was lost")
                    state.commit()

            train(training.state)
            return rates, model.weight.tolist()

    first, second = ranks(2, framework="torch").run(work, rollback, where)
    assert first == second
    assert first[0] == [0.1, 0.025]


@pytest.mark.parametrize("where", ["forward", "step"])
def test_a_survivor_lets_go_of_the_tensors_of_the_step_that_failed(ranks: Ranks, where: str) -> None:
    """Beside those of the next step they would not fit into the memory of a GPU."""

    def work(where: str) -> Any:
        with ScriptedLauncher([[0, 1], [0]]) as launcher:
            hvd.init()
            training = Training()
            activations: list[Any] = []
            alive: list[int] = []

            def note(_: Any, __: Any, output: Any) -> None:
                activations.append(weakref.ref(output))
                if where == "forward" and len(activations) > 8:
                    hvd.allreduce(output.detach().sum(), name="statistics")

            def between(training: Training) -> None:
                if (launcher.process, training.state.step) == (1, 3):
                    os.kill(os.getpid(), signal.SIGKILL)

            training.model.register_forward_hook(note)
            restore = training.state.restore

            def restored() -> None:
                alive.append(sum(each() is not None for each in activations))
                restore()

            training.state.restore = restored
            gc.disable()
            try:
                training.run(between)
            finally:
                gc.enable()
            return alive

    pool = ranks(2, framework="torch")
    try:
        alive, dead = pool.run(work, where, dies={1})
    finally:
        pool.restart()
    assert isinstance(dead, Death) and alive == [0]


@ROLLBACKS
def test_a_scaler_begins_anew_where_a_step_failed_between_unscaling_and_the_update(ranks: Ranks, rollback: str) -> None:
    scaler_of = getattr(torch.amp, "GradScaler", None)
    if scaler_of is None:
        pytest.skip("PyTorch 2.3 and later scale gradients in host memory")

    def work(rollback: str) -> Any:
        with ScriptedLauncher([[0, 1], [1, 0]]):
            hvd.init()
            model = torch.nn.Linear(3, 1)
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            scaler = scaler_of("cpu", init_scale=8.0)
            state = hvd.elastic.TorchState(model, optimizer, rollback=rollback, scaler=scaler, step=0)
            began = []

            @hvd.elastic.run
            def train(state: Any) -> None:
                began.append(state.step)
                while state.step < 4:
                    optimizer.zero_grad()
                    scaler.scale(model(torch.ones(2, 3)).sum()).backward()
                    optimizer.synchronize()
                    scaler.unscale_(optimizer)
                    if state.step == 2 and len(began) == 1:
                        raise hvd.HorovodInternalError("the norm of the gradients could not be averaged")
                    with optimizer.skip_synchronize():
                        scaler.step(optimizer)
                    scaler.update()
                    state.step += 1
                    state.commit()

            train(state)
            return began, scaler.get_scale(), model.weight.tolist()

    first, second = ranks(2, framework="torch").run(work, rollback)
    assert first == second
    assert first[:2] == ([0, 2], 8.0)


def test_a_failure_without_an_elastic_launcher_is_told_with_its_cause(job: Any) -> None:
    def check() -> tuple[str, int, int]:
        training = Training()

        def between(training: Training) -> None:
            if training.state.step == 3:
                hvd.allreduce(torch.ones(hvd.rank() + 1), name="of.different.shapes")

        with pytest.raises(hvd.HorovodInternalError) as caught:
            training.run(between)
        return str(caught.value), training.state.step, hvd.rank()

    for number, (text, step, rank) in enumerate(job(2, check)):
        assert "of.different.shapes" in text and "not started by an elastic launcher" in text
        assert rank == number, "scripts that catch the error ask for the rank, to save what they have"
        assert step == 2, "the state is that of the last commit"


def test_all_ranks_begin_with_what_rank_0_has(job: Any) -> None:
    """Also what is only saved: a failure before the first commit leads back to it."""

    def check() -> Any:
        torch.manual_seed(hvd.rank())
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1 + hvd.rank())
        if hvd.rank() == 0:
            model(torch.randn(4, 2)).sum().backward()
            optimizer.step()
        state = hvd.elastic.TorchState(model, optimizer, epoch=hvd.rank() + 5)
        state.sync()
        values = [each.tolist() for each in model.state_dict().values()]
        with torch.no_grad():
            model[0].weight.zero_()
        optimizer.param_groups[0]["lr"] = 9.0
        state.epoch = 9
        state.restore()
        assert [each.tolist() for each in model.state_dict().values()] == values
        moments = [each["exp_avg"].tolist() for each in optimizer.state.values()]
        return values, moments, optimizer.param_groups[0]["lr"], state.epoch

    first, second = job(2, check)
    assert first == second
    assert first[1] and first[2:] == (0.1, 5)


def test_an_object_that_is_assigned_takes_the_place_of_the_old_one(job: Any) -> None:
    def check() -> None:
        state = hvd.elastic.TorchState(torch.nn.Linear(1, 1), None, batch=0)
        assert state.optimizer is None
        state.model = replacement = torch.nn.Linear(2, 2)
        weight = replacement.weight.tolist()
        with torch.no_grad():
            replacement.weight.fill_(7.0)
        state.restore()
        assert state.model is replacement and replacement.weight.tolist() == weight

    job(1, check)


def test_custom_objects_can_have_custom_handlers(job: Any) -> None:
    def check() -> None:
        from horovod.torch.elastic import state as module

        class Box:
            content = 1

        class BoxHandler(module.StateHandler):
            def save(self) -> None:
                self.saved = self.value.content

            def restore(self) -> None:
                self.value.content = self.saved

            def sync(self) -> None:
                self.value.content = hvd.broadcast_object(self.value.content, self.root_rank)

        before = module.get_handler_registry()
        module.set_handler_registry([(Box, BoxHandler), *before])
        try:
            box = Box()
            box.content = hvd.rank()
            state = hvd.elastic.TorchState(box=box)
            state.box.content = 8 + hvd.rank()
            state.commit()
            state.sync()
            assert box.content == 8
            with pytest.raises(NotImplementedError, match="BoxHandler cannot mark"):
                hvd.elastic.TorchState(rollback="step", box=box)
        finally:
            module.set_handler_registry(before)

    job(2, check)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="rollback='epoch'"):
        hvd.elastic.TorchState(rollback="epoch")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"TorchState\(sync=...\)"):
        hvd.elastic.TorchState(sync=1)
    with pytest.raises(ValueError, match=r"TorchState\(commit=...\)"):
        hvd.elastic.TorchState(commit=torch.nn.Linear(1, 1))


def test_a_commit_does_not_wait_for_ever_for_a_rank_that_has_left(job: Any) -> None:
    def check() -> str:
        state = hvd.elastic.TorchState(batch=0)
        if hvd.rank() == 1:
            return ""
        with pytest.raises(hvd.HorovodInternalError) as caught:
            state.commit()
        return str(caught.value)

    assert "rank 1" in job(2, check)[0]
