"""``hvd.LocalOptimizer`` on real ranks that say that they are on several hosts: equal to DiLoCo in NumPy."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import diloco
import horovod.torch as hvd
from diloco import Case
from horovod._base import config
from part import draws
from ranks import RankPool
from torch_versions import needs_scaler

SIZE = 4
USUAL = Case("aabb", 4, 2, 1, 14, 0.7, 0.9, True, 0.5)


@pytest.fixture
def on_hosts(ranks: Callable[..., RankPool]) -> Callable[..., list[Any]]:
    """``on_hosts(hosts, function, *args)``: ``init()``, the function, ``shutdown()`` on ranks of these hosts, by letter."""
    pool = ranks(SIZE, {config.RELAY_THRESHOLD: "0", config.CHECK: "error"}, "torch")

    def run(hosts: str, function: Callable[..., Any], *args: Any) -> list[Any]:
        def job() -> Any:
            before = os.environ[config.HOSTNAME]
            os.environ[config.HOSTNAME] = hosts[int(os.environ[config.RANK])]
            hvd.init()
            try:
                return function(*args)
            finally:
                hvd.shutdown()
                os.environ[config.HOSTNAME] = before

        return pool.run(job)

    return run


def make(case: Case, **more: Any) -> tuple[Any, Any]:
    """The model and its optimizer."""
    model = diloco.torch_model()
    inner = torch.optim.SGD(model.parameters(), lr=diloco.INNER_LR, momentum=diloco.INNER_MOMENTUM)
    outer = hvd.OuterSGD(case.lr, case.momentum, case.nesterov)
    arguments = {"named_parameters": model.named_parameters(), "mixing": case.mixing, **more}
    return model, hvd.LocalOptimizer(inner, case.every, outer, case.fragments, case.delay, **arguments)


def trained(case: Case, **more: Any) -> tuple[diloco.Parameters, dict[str, int]]:
    """A rank's parameters at the end, and the fragment of each."""
    model, optimizer = make(case, **more)
    for step in range(1, case.steps + 1):
        diloco.torch_step(model, optimizer, step, hvd.rank())
    saved = optimizer.state_dict()["horovod_outer"]["parameters"]
    return diloco.arrays(model), {name: each["fragment"] for name, each in saved.items()}


def test_training_is_that_of_diloco_in_numpy(on_hosts: Any) -> None:
    for case in diloco.random_cases(draws(24), seed=4):
        found = on_hosts(case.hosts, trained, case)
        fragments = found[0][1]
        assert set(fragments.values()) == set(range(case.fragments))
        wanted = diloco.train(case, fragments)
        for rank, (parameters, same) in enumerate(found):
            assert same == fragments
            assert diloco.distance(parameters, wanted[case.hosts[rank]]) < 1e-12, (case, rank)


def test_hosts_that_meet_after_every_step_and_take_the_average_are_one_job(on_hosts: Any) -> None:
    case = Case("aabb", 1, 1, 0, 6, 1.0, 0.0, False, 0.0)
    found = on_hosts("aabb", trained, case)
    for parameters, _ in found:
        assert diloco.distance(parameters, found[0][0]) == 0


def test_changes_travel_compressed(on_hosts: Any) -> None:
    def both(case: Case) -> list[float]:
        exact, _ = trained(case)
        kinds: list[Any] = [hvd.Compression.fp16, hvd.Compression.bf16, hvd.Compression.int8]
        if not case.delay:
            kinds += [hvd.Compression.powersgd(rank=3), hvd.Compression.topk(ratio=0.5)]
        return [diloco.distance(trained(case, compression=each)[0], exact) for each in kinds]

    for case in (USUAL, replace(USUAL, delay=0)):
        for half, brain, *others in on_hosts("aabb", both, case):
            assert 0 < half < 1e-3 and half < brain < 1e-2 and all(0 <= each < 0.2 for each in others)


def test_a_saved_state_continues_to_the_bit(on_hosts: Any) -> None:
    """Also while a fragment is on its way, and with the memory of a compressor."""

    def resumed(case: Case, at: int, compression: Any) -> float:
        model, optimizer = make(case, compression=compression)
        for step in range(1, case.steps + 1):
            diloco.torch_step(model, optimizer, step, hvd.rank())
            if step == at:
                import io

                file = io.BytesIO()
                torch.save((model.state_dict(), optimizer.state_dict()), file)
        file.seek(0)
        parameters, state = torch.load(file)
        again, other = make(case, compression=compression)
        again.load_state_dict(parameters)
        other.load_state_dict(state)
        for step in range(at + 1, case.steps + 1):
            diloco.torch_step(again, other, step, hvd.rank())
        return diloco.distance(diloco.arrays(again), diloco.arrays(model))

    late = replace(USUAL, delay=3)
    for case, compression in (
        (late, hvd.Compression.none),
        (late, hvd.Compression.fp16),
        (replace(USUAL, delay=0), hvd.Compression.topk(ratio=0.4)),
    ):
        for at in (1, 5, 8):
            assert on_hosts("aabb", resumed, case, at, compression) == [0] * SIZE


def test_a_state_of_other_numbers_of_steps_or_of_no_local_training_can_be_loaded(on_hosts: Any) -> None:
    def job(case: Case) -> None:
        model, optimizer = make(case)
        for step in range(1, 8):
            diloco.torch_step(model, optimizer, step, hvd.rank())
        state = optimizer.state_dict()
        plain = torch.optim.SGD(model.parameters(), lr=diloco.INNER_LR, momentum=diloco.INNER_MOMENTUM)
        plain.load_state_dict({key: value for key, value in state.items() if key != "horovod_outer"})
        for loaded in (state, plain.state_dict()):
            again, other = make(replace(case, every=5, fragments=3, delay=2))
            other.load_state_dict(loaded)
            for step in range(8, 20):
                diloco.torch_step(again, other, step, hvd.rank())
        strange = torch.nn.Linear(3, 4)
        wrong = hvd.LocalOptimizer(torch.optim.SGD(strange.parameters(), lr=0.1), fragments=1)
        with pytest.raises(ValueError, match="has a parameter 'weight' of 18 elements, and this optimizer has none"):
            wrong.load_state_dict({**wrong.state_dict(), "horovod_outer": state["horovod_outer"]})

    on_hosts("aabb", job, USUAL)


def test_all_hosts_have_the_average_at_the_end(on_hosts: Any) -> None:
    def job(case: Case) -> tuple[list[diloco.Parameters], list[diloco.Parameters]]:
        model, optimizer = make(case)
        seen = []
        for step in range(1, 12):
            diloco.torch_step(model, optimizer, step, hvd.rank())
        before = diloco.arrays(model)
        optimizer.finish_round()
        seen.append(diloco.arrays(model))
        for step in range(12, 16):
            diloco.torch_step(model, optimizer, step, hvd.rank())
        optimizer.finish_round()
        seen.append(diloco.arrays(model))
        return [before], seen

    found = on_hosts("aabb", job, replace(USUAL, delay=0, mixing=0.0))
    for rank, (before, seen) in enumerate(found):
        assert all(diloco.distance(one, other) == 0 for one, other in zip(seen, found[0][1], strict=True))
        mean = {name: sum(each[0][0][name] for each in found) / SIZE for name in before[0]}
        assert diloco.distance(seen[0], mean) < 1e-12, rank


@needs_scaler
def test_steps_that_a_scaler_skips_on_one_host_count_on_all(on_hosts: Any) -> None:
    def job() -> int:
        model, optimizer = make(USUAL)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        skipped = 0
        for step in range(1, 10):
            x, y = (torch.from_numpy(each) for each in diloco.batch(step, hvd.rank()))
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            if hvd.rank() < 2 and step in (2, 4, 9):  # host a
                loss = loss * torch.inf
            scaler.scale(loss).backward()
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            skipped += scaler.get_scale() < scale
        optimizer.finish_round()
        assert optimizer.state_dict()["horovod_outer"]["steps"] == 9
        return skipped

    assert on_hosts("aabb", job) == [3, 3, 0, 0]


def test_parameters_that_are_added_or_unfrozen_are_averaged_from_then_on(on_hosts: Any) -> None:
    def job() -> diloco.Parameters:
        model = diloco.torch_model()
        model.gain.requires_grad_(False)
        inner = torch.optim.SGD([model.weight, model.bias, model.gain], lr=0.02)
        optimizer = hvd.LocalOptimizer(inner, every=3, fragments=2)
        for step in range(1, 14):
            if step == 5:
                model.gain.requires_grad_(True)
            if step == 8:
                optimizer.add_param_group({"params": [model.scale]})
            diloco.torch_step(model, optimizer, step, hvd.rank())
        assert len(optimizer.state_dict()["horovod_outer"]["parameters"]) == 4
        optimizer.finish_round()
        return diloco.arrays(model)

    found = on_hosts("aabb", job)
    assert all(diloco.distance(each, found[0]) == 0 for each in found)


def test_outer_parameters_that_differ_are_told_on_all_ranks(on_hosts: Any) -> None:
    def job() -> tuple[int, str]:
        model, optimizer = make(replace(USUAL, delay=0))
        for step in range(1, 20):
            try:
                diloco.torch_step(model, optimizer, step, hvd.rank())
            except hvd.HorovodInternalError as error:
                return step, str(error)
            if step == 5 and hvd.rank() >= 2:  # host b
                state = optimizer.state_dict()
                for each in state["horovod_outer"]["parameters"].values():
                    each["outer"] += 1
                optimizer.load_state_dict(state)
        return 0, ""

    found = on_hosts("aabb", job)
    assert len(set(found)) == 1
    step, text = found[0]
    assert 6 <= step <= 8, found
    assert "The outer parameters of the hosts differ after an outer step (of the optimizer made at" in text
    assert "on ranks 0, 1" in text and "on ranks 2, 3" in text


def test_ranks_of_a_host_that_drift_apart_are_told_on_that_host(on_hosts: Any) -> None:
    def job() -> str:
        model, optimizer = make(replace(USUAL, every=200, fragments=1))
        try:
            for step in range(1, 100):
                diloco.torch_step(model, optimizer, step, hvd.rank())
                if step == 3 and hvd.rank() == 3:
                    with torch.no_grad():
                        model.weight.add_(1.0)
        except hvd.HorovodInternalError as error:
            return str(error)
        return ""

    alone, same, one, other = on_hosts("aabb", job)
    assert one == other and "parameters" in one and "rank 3" in one
    assert alone == same


def test_an_optimizer_goes_on_after_a_restart_of_the_runtime(on_hosts: Any) -> None:
    def job() -> diloco.Parameters:
        model, optimizer = make(replace(USUAL, delay=3))
        for step in range(1, 20):
            diloco.torch_step(model, optimizer, step, hvd.rank())
            if step in (3, 9):  # a fragment is on its way after 9 steps
                hvd.barrier()
                hvd.shutdown()
                hvd.init()
        optimizer.finish_round()
        return diloco.arrays(model)

    found = on_hosts("aabb", job)
    assert all(diloco.distance(each, found[0]) == 0 for each in found)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"every": 0}, "every=0: must be a whole number of at least 1"),
        ({"every": 2.5}, "every=2.5: must be a whole number"),
        ({"every": True}, "every=True: must be a whole number"),
        ({"every": 4, "fragments": 5}, "fragments=5, every=4"),
        ({"fragments": 0}, "fragments=0"),
        ({"fragments": 5}, "the optimizer has 4 parameters to train"),
        ({"delay": -1}, "delay=-1"),
        ({"delay": 50}, "delay=50, every=50: a fragment must arrive before it is sent again"),
        ({"outer": torch.optim.SGD}, "pass an hvd.OuterSGD"),
        ({"mixing": 1}, "mixing=1: must be a number of at least 0 and below 1"),
        ({"mixing": "half"}, "mixing='half'"),
        ({"compression": 8}, "compression=8: pass one of hvd.Compression"),
        ({"compression": hvd.Compression.topk(), "delay": 1}, "compression=TopK needs several collectives"),
        ({"named_parameters": []}, "were not named"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step must be > 0"),
    ],
)
def test_bad_arguments_are_refused(job: Any, arguments: dict[str, Any], text: str) -> None:
    def check() -> str:
        model = diloco.torch_model()
        with pytest.raises(ValueError) as caught:
            hvd.LocalOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **arguments)
        return str(caught.value)

    assert text in job(1, check)[0]


def test_bad_outer_optimizers_and_wrapped_optimizers_are_refused(job: Any) -> None:
    for wrong in ({"lr": 0}, {"lr": float("nan")}, {"momentum": 1}, {"momentum": -0.1}, {"momentum": 0}, {"lr": "x"}):
        with pytest.raises(ValueError, match="OuterSGD"):
            hvd.OuterSGD(**wrong)  # type: ignore[arg-type]  # wrong on purpose

    def check() -> None:
        import copy
        import pickle

        model = diloco.torch_model()
        optimizer = hvd.LocalOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        assert isinstance(optimizer, torch.optim.SGD)
        for wrap in (hvd.LocalOptimizer, hvd.DistributedOptimizer):
            with pytest.raises(ValueError, match="already"):
                wrap(optimizer)
        for copied in (copy.deepcopy, pickle.dumps):
            with pytest.raises(NotImplementedError, match="copy its state_dict"):
                copied(optimizer)
        with pytest.raises(NotImplementedError, match='rollback="commit"'):
            hvd.elastic.TorchState(model, optimizer, rollback="step")

    job(1, check)
    with pytest.raises(ValueError, match="not been initialized"):
        hvd.LocalOptimizer(torch.optim.SGD(diloco.torch_model().parameters(), lr=0.1))


def test_different_arguments_are_an_error_on_all_ranks(on_hosts: Any) -> None:
    def check() -> str:
        model = diloco.torch_model()
        with pytest.raises(ValueError) as caught:
            hvd.LocalOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), every=10 + (hvd.rank() == 2))
        return str(caught.value)

    found = on_hosts("aabb", check)
    assert len(set(found)) == 1 and "ranks 0-1, 3: every=10, " in found[0] and "rank 2: every=11, " in found[0]


def test_the_process_set_of_a_host(on_hosts: Any) -> None:
    def check() -> list[int]:
        own = hvd.host_process_set()
        assert hvd.host_process_set() is own and own.included()
        total = hvd.allreduce(torch.tensor([hvd.rank()]), op=hvd.Sum, process_set=own)
        assert total.item() == sum(own.ranks or ())
        return own.ranks or []

    assert on_hosts("abab", check) == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert on_hosts("aaaa", check) == [[0, 1, 2, 3]] * SIZE
    assert on_hosts("abcb", check) == [[0], [1, 3], [2], [1, 3]]
