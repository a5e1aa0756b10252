"""What an optimizer carries along: state dictionaries, a compressor's memory, copies, pickles, hooks, schedulers."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import horovod.torch as hvd
from regression import MAKERS, assert_close, assert_same_on_all_ranks, batches, loss_of, network, train
from torch_versions import needs_lasting_hooks


def compressor(kind: str) -> Any:
    return {"powersgd": lambda: hvd.Compression.powersgd(1), "topk": lambda: hvd.Compression.topk(0.1)}[kind]()


def compressed(kind: str) -> tuple[nn.Module, Any]:
    model = network()
    optimizer = MAKERS["momentum"](model.parameters())
    return model, hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compressor(kind))


def bits(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("kind", ["powersgd", "topk"])
def test_a_resumed_training_goes_on_as_if_it_had_not_been_interrupted(job: Any, kind: str) -> None:
    """To the bit, where every rank saved and loads its own; also where the buckets are cut otherwise afterwards."""

    def check() -> None:
        import os

        model, optimizer = compressed(kind)
        data = list(batches(8, 3, hvd.rank()))
        train(model, optimizer, iter(data[:4]))
        file = io.BytesIO()
        torch.save((model.state_dict(), optimizer.state_dict()), file)
        train(model, optimizer, iter(data[4:]))
        assert_same_on_all_ranks(model)
        for bucket_bytes in ("0", "1", None):
            if bucket_bytes is None:
                again, resumed = model, optimizer  # set back, in place
            else:
                os.environ["HOROVOD_BUCKET_BYTES"] = bucket_bytes
                try:
                    again, resumed = compressed(kind)
                finally:
                    del os.environ["HOROVOD_BUCKET_BYTES"]
            wanted = bits(model)
            file.seek(0)
            parameters, state = torch.load(file, weights_only=True)
            again.load_state_dict(parameters)
            resumed.load_state_dict(state)
            train(again, resumed, iter(data[4:]))
            assert all(map(torch.equal, bits(again), wanted))
        forgetful, without = compressed(kind)
        forgetful.load_state_dict(parameters)
        without.load_state_dict({key: state[key] for key in ("state", "param_groups")})
        train(forgetful, without, iter(data[4:]))
        assert not all(map(torch.equal, bits(forgetful), wanted)), "the memory makes no difference"

    job(3, check)


@pytest.mark.parametrize("kind", ["powersgd", "topk"])
def test_a_checkpoint_of_rank_0_gives_all_what_is_common_and_no_rank_anothers_own(job: Any, kind: str) -> None:
    """What is rank 0's own stays rank 0's; what is common reaches all, by the file or by broadcast."""

    def memory(optimizer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        saved = optimizer.state_dict()["horovod_compression"]
        assert saved["rank"] == hvd.rank() and saved["size"] == hvd.size()
        return saved["common"], saved["own"]

    def same(one: dict[str, Any], two: dict[str, Any]) -> bool:
        return one.keys() == two.keys() and all(
            torch.equal(one[name][key], two[name][key]) for name in one for key in one[name]
        )

    def check() -> None:
        model, optimizer = compressed(kind)
        train(model, optimizer, batches(3, 2, hvd.rank()))
        state = copy.deepcopy(optimizer.state_dict())
        of_rank_0 = hvd.broadcast_object(state, 0)["horovod_compression"]
        common, own = memory(optimizer)
        assert bool(common) == (kind == "powersgd") and own
        assert same(common, of_rank_0["common"])
        assert same(own, of_rank_0["own"]) == (hvd.rank() == 0)
        for way in ("file", "broadcast", "broadcast of all"):
            other, resumed = compressed(kind)
            if way == "file":
                resumed.load_state_dict(hvd.broadcast_object(state, 0))
            else:
                if hvd.rank() == 0 or way == "broadcast of all":
                    resumed.load_state_dict(state)
                hvd.broadcast_optimizer_state(resumed, 0)
            common, found = memory(resumed)
            assert same(common, of_rank_0["common"])
            if hvd.rank() == 0 or way == "broadcast of all":
                assert same(found, own)
            else:
                assert not found
            hvd.broadcast_parameters(model.state_dict(), 0)
            other.load_state_dict(model.state_dict())
            train(other, resumed, batches(2, 2, hvd.rank()))
            assert_same_on_all_ranks(other)

    job(2, check)


def test_a_state_with_compression_loads_without_horovod_and_the_reverse(job: Any) -> None:
    def check() -> None:
        model, optimizer = compressed("powersgd")
        train(model, optimizer, batches(2, 2, hvd.rank()))
        wanted = network()
        plain = MAKERS["momentum"](wanted.parameters())
        plain.load_state_dict(optimizer.state_dict())
        assert plain.state_dict().keys() == {"state", "param_groups"}
        for one, two in zip(model.parameters(), wanted.parameters(), strict=True):
            assert torch.equal(optimizer.state[one]["momentum_buffer"], plain.state[two]["momentum_buffer"])
        optimizer.load_state_dict(plain.state_dict())
        uncompressed = hvd.DistributedOptimizer(plain)
        assert uncompressed.state_dict().keys() == {"state", "param_groups"}
        uncompressed.load_state_dict(optimizer.state_dict())
        assert uncompressed.state_dict().keys() == {"state", "param_groups"}

    job(2, check)


@pytest.mark.parametrize("op", ["Average", "Adasum"])
def test_a_deep_copy_is_distributed_and_trains_apart_from_the_original(job: Any, op: str) -> None:
    """Of model and optimizer together; both go on by themselves."""

    def check() -> None:
        model = network()
        optimizer = hvd.DistributedOptimizer(
            MAKERS["adam"](model.parameters()),
            model.named_parameters(),
            op=getattr(hvd, op),
            backward_passes_per_step=1,
            groups=[[model[0].weight, model[0].bias]],
        )
        data = list(batches(6, 2, hvd.rank()))
        train(model, optimizer, iter(data[:2]))
        other, copied = copy.deepcopy((model, optimizer))
        assert type(copied).__name__ == "Adam" and copied.op == optimizer.op
        assert copied._parameter_names[other[0].weight] == "0.weight"
        before = bits(model)
        train(other, copied, iter(data[2:]))
        assert all(map(torch.equal, bits(model), before))
        train(model, optimizer, iter(data[2:]))
        assert all(map(torch.equal, bits(model), bits(other)))
        assert_same_on_all_ranks(other)

    job(2, check)


def test_a_pickled_optimizer_is_distributed_and_may_be_wrapped_again(job: Any) -> None:
    """Where no job runs, it is loaded as the wrapped class, which is said."""

    def check() -> None:
        model = network()
        optimizer = hvd.DistributedOptimizer(MAKERS["adam"](model.parameters()), model.named_parameters())
        train(model, optimizer, batches(2, 2, hvd.rank()))
        file = io.BytesIO()
        torch.save((model, optimizer), file)
        file.seek(0)
        for other, loaded in (
            pickle.loads(pickle.dumps((model, optimizer))),
            torch.load(file, weights_only=False),
        ):
            assert type(loaded).__name__ == "Adam" and loaded.op == hvd.Average
            assert loaded.process_set is hvd.global_process_set
            wanted = copy.deepcopy(other)
            again = hvd.DistributedOptimizer(loaded, other.named_parameters())
            train(other, again, batches(2, 2, hvd.rank()))
            plain = MAKERS["adam"](wanted.parameters())
            plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # PyTorch keeps the tensors it is given
            train(wanted, plain, batches(2, 2))
            assert_close(other, wanted)
        assert copy.copy(optimizer).param_groups[0]["params"][0] is model[0].weight
        saved = pickle.dumps(optimizer)
        hvd.shutdown()
        with pytest.warns(UserWarning, match="loaded as Adam, which trains alone"):
            assert type(pickle.loads(saved)) is torch.optim.Adam

    job(2, check)


def test_an_optimizer_of_a_process_set_is_loaded_where_the_set_exists(job: Any) -> None:
    def check(sets: Any) -> None:
        (pair,) = sets
        model = network()
        optimizer = hvd.DistributedOptimizer(MAKERS["adam"](model.parameters()), process_set=pair)
        saved = pickle.dumps(optimizer)
        assert pickle.loads(saved).process_set.process_set_id == pair.process_set_id
        hvd.remove_process_set(pair)
        with pytest.raises(ValueError, match=r"made for the ranks \[0, 1\]; register this process set"):
            pickle.loads(saved)

    job(3, check, sets=[[0, 1]], env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})


@needs_lasting_hooks  # tests before this one compile in the same processes
@pytest.mark.parametrize("op", ["Average", "Adasum"])
def test_step_hooks_run_once_a_step(job: Any, op: str) -> None:
    """PyTorch's own hooks, before and after a state dictionary was loaded; they see reduced gradients."""

    def check() -> None:
        parameter = nn.Parameter(torch.zeros(2))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), op=getattr(hvd, op))
        seen: list[Any] = []
        optimizer.register_step_pre_hook(lambda *_: seen.append(parameter.grad.tolist()))
        optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        for _ in range(2):
            optimizer.zero_grad()
            (parameter * (hvd.rank() + 1)).sum().backward()
            optimizer.step()
            gradient = [1.5, 1.5] if op == "Average" else [hvd.rank() + 1.0] * 2
            assert seen == [gradient, "after"]
            seen.clear()
            optimizer.load_state_dict(optimizer.state_dict())
        optimizer.register_state_dict_post_hook(lambda _, state: {**state, "mine": 1})
        assert optimizer.state_dict()["mine"] == 1

    job(2, check)


def test_loading_after_the_job_has_failed_forgets_the_step_under_way(job: Any) -> None:
    """As elastic training does: what was under way is forgotten, whatever became of it."""

    def check() -> None:
        model, wanted = network(), network()
        optimizer = hvd.DistributedOptimizer(MAKERS["adam"](model.parameters()), model.named_parameters())
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        rank = hvd.rank()
        if rank == 0:
            with pytest.raises(hvd.HorovodInternalError, match="rank 1"):
                model[2:](torch.ones(1, 8)).sum().backward()
        hvd.shutdown()  # while rank 0 waits for rank 1's gradients
        with pytest.raises((hvd.HorovodInternalError, ValueError)):
            optimizer.step()
        if rank == 1:
            optimizer.zero_grad()
            with pytest.raises((hvd.HorovodInternalError, ValueError)):
                loss_of(model, next(batches(1, 2, 1))).backward()
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        hvd.init()
        train(model, optimizer, batches(3, 2, hvd.rank()))
        train(wanted, MAKERS["adam"](wanted.parameters()), batches(3, 2))
        assert_close(model, wanted)

    job(2, check, env={"HOROVOD_BUCKET_BYTES": "1"})


def test_every_form_of_zero_grad_does_what_it_says(job: Any) -> None:
    def check() -> None:
        model, wanted = network(), network()
        optimizer = hvd.DistributedOptimizer(MAKERS["adam"](model.parameters()), model.named_parameters())
        other = MAKERS["adam"](wanted.parameters())
        for arguments, keywords in (
            ((), {}),
            ((), {"set_to_none": True}),
            ((), {"set_to_none": False}),
            ((False,), {}),
        ):
            for which, stepper, rank in ((model, optimizer, hvd.rank()), (wanted, other, None)):
                for batch in batches(2, 2, rank):
                    stepper.zero_grad(*arguments, **keywords)
                    assert (which[0].weight.grad is None) == (False not in (*arguments, *keywords.values()))
                    loss_of(which, batch).backward()
                    stepper.step()
            assert_close(model, wanted)

    job(2, check)


@pytest.mark.parametrize("op", ["Average", "Adasum"])
def test_a_scheduler_of_the_original_steers_after_state_was_loaded(job: Any, op: str) -> None:
    """By load_state_dict() on every rank, or by broadcast_optimizer_state(), which loads on all ranks but the root."""

    def check() -> list[float]:
        rates = []
        for load in (True, False):
            model = network()
            plain = MAKERS["momentum"](model.parameters())
            scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
            optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), op=getattr(hvd, op))
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "lr": 1.0})
            if load:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            else:
                hvd.broadcast_optimizer_state(optimizer, 0)
            for batch in batches(3, 2, hvd.rank()):
                train(model, optimizer, iter([batch]))
                scheduler.step()
            assert optimizer.param_groups is plain.param_groups
            assert_same_on_all_ranks(model)
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    assert job(2, check) == [[0.05 / 8] * 2] * 2


def test_schedulers_made_before_and_after_wrapping_both_steer_without_warnings(job: Any) -> None:
    """Made before wrapping, after it, and one that saw a state dictionary loaded: none complains, all steer."""

    def check() -> None:
        model, wanted = network(), network()
        plain = MAKERS["momentum"](model.parameters())
        before = torch.optim.lr_scheduler.StepLR(plain, 2, gamma=0.5)
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
        after = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
        other = MAKERS["momentum"](wanted.parameters())
        others = [
            torch.optim.lr_scheduler.StepLR(other, 2, gamma=0.5),
            torch.optim.lr_scheduler.LambdaLR(other, lambda epoch: 0.9**epoch),
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for which, stepper, schedulers, rank in (
                (model, optimizer, [before, after], hvd.rank()),
                (wanted, other, others, None),
            ):
                for batch in batches(5, 2, rank):
                    train(which, stepper, iter([batch]))
                    for scheduler in schedulers:
                        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == other.param_groups[0]["lr"]
        assert_close(model, wanted)

    job(2, check)
