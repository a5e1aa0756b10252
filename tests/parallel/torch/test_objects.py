"""broadcast_object, allgather_object, broadcast_parameters, broadcast_optimizer_state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import horovod.torch as hvd

ODD = [
    None,
    0,
    "",
    "grüße" * 1000,
    b"\0" * 100_000,
    {"nested": [1, (2, {3}), {"tensor": torch.arange(3)}]},
    float("inf"),
    range(3),
    ValueError("an exception"),
]


def same(one: Any, two: Any) -> bool:
    return repr(one) == repr(two) and type(one) is type(two)


@pytest.mark.parametrize("size", [1, 3])
def test_broadcast_object_gives_every_rank_what_the_root_has(job: Any, size: int) -> None:
    def check() -> None:
        for root in range(size):
            for item in ODD:
                own = item if hvd.rank() == root else f"what rank {hvd.rank()} has counts for nothing"
                found = hvd.broadcast_object(own, root)
                assert same(found, item)
                if hvd.rank() == root:
                    assert found is own
                assert same(hvd.broadcast_object(own, root, "named", hvd.global_process_set), item)
        factor = 3
        triple = hvd.broadcast_object((lambda x: factor * x) if hvd.rank() == 0 else None)  # root_rank=0
        assert triple(5) == 15

    job(size, check)


@pytest.mark.parametrize("size", [1, 3])
def test_allgather_object_gives_every_rank_all_objects_in_rank_order(job: Any, size: int) -> None:
    def check() -> None:
        for item in ODD:
            found = hvd.allgather_object(item)
            assert len(found) == size and all(same(each, item) for each in found)
        assert hvd.allgather_object([hvd.rank()] * hvd.rank(), name="uneven") == [[r] * r for r in range(size)]

    job(size, check)


class Unpicklable:
    """Says why, and where."""

    def __reduce__(self) -> Any:
        raise ZeroDivisionError("no object like this")


class Stubborn(torch.optim.SGD):
    """An optimizer whose state cannot be read."""

    def state_dict(self) -> Any:
        raise KeyError("momentum of layer 3")


def optimizer_of(kind: str) -> torch.optim.Optimizer:
    parameters = [torch.nn.Parameter(torch.ones(2))]
    optimizer = Stubborn(parameters, lr=0.1) if kind == "state_dict" else torch.optim.SGD(parameters, lr=0.1)
    optimizer.state[parameters[0]] = {
        "value": {"state": Unpicklable(), "type": torch.ones(2).to(torch.float8_e5m2)}.get(kind, 1)
    }
    return optimizer


# What the root calls with something that it cannot send, and what others pass; the root's error, and what all texts have.
UNSENDABLE: dict[str, tuple[Callable[[], Any], Callable[[], Any], type[Exception], str]] = {
    "an object": (
        lambda: hvd.broadcast_object(Unpicklable(), 1, "x"),
        lambda: hvd.broadcast_object(None, 1, "x"),
        ZeroDivisionError,
        "no object like this",
    ),
    "an object of all": (
        lambda: hvd.allgather_object(Unpicklable(), "x"),
        lambda: hvd.allgather_object(hvd.rank(), "x"),
        ZeroDivisionError,
        "no object like this",
    ),
    "something in an optimizer's state": (
        lambda: hvd.broadcast_optimizer_state(optimizer_of("state"), 1),
        lambda: hvd.broadcast_optimizer_state(optimizer_of("none"), 1),
        ZeroDivisionError,
        "no object like this",
    ),
    "an optimizer's state": (
        lambda: hvd.broadcast_optimizer_state(optimizer_of("state_dict"), 1),
        lambda: hvd.broadcast_optimizer_state(optimizer_of("none"), 1),
        KeyError,
        "momentum of layer 3",
    ),
    "a tensor of an optimizer's state": (
        lambda: hvd.broadcast_optimizer_state(optimizer_of("type"), 1),
        lambda: hvd.broadcast_optimizer_state(optimizer_of("none"), 1),
        ValueError,
        "not supported",
    ),
    "a parameter": (
        lambda: hvd.broadcast_parameters({"weight": torch.eye(2).to_sparse()}, 1),
        lambda: hvd.broadcast_parameters({"weight": torch.eye(2)}, 1),
        ValueError,
        "'weight': Tensor type torch.sparse.FloatTensor is not supported",
    ),
    "parameters": (
        lambda: hvd.broadcast_parameters(torch.nn.Linear(1, 1).named_parameters(), 1),
        lambda: hvd.broadcast_parameters(list(torch.nn.Linear(1, 1).named_parameters()), 1),
        ValueError,
        "invalid params of type",
    ),
}


@pytest.mark.parametrize("kind", UNSENDABLE)
def test_an_object_that_one_rank_cannot_pickle_is_an_error_on_all(job: Any, kind: str) -> None:
    """It names the rank, the reason and the line, nobody waits, and the job goes on."""
    bad, good, error, reason = UNSENDABLE[kind]

    def check() -> str:
        for _ in range(2):
            with pytest.raises(error if hvd.rank() == 1 else RuntimeError, match=reason) as found:
                (bad if hvd.rank() == 1 else good)()
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="afterwards").item() == 3.0
        assert hvd.broadcast_object(hvd.rank(), 2, "x") == 2
        return str(found.value)

    texts = job(3, check)
    assert texts[0] == texts[2] and "rank 1 failed with" in texts[0]
    assert error.__name__ in texts[0] and f"{__file__}:" in texts[0], texts[0]
    assert kind[:2] != "an" or "failed on all ranks" in texts[0]


def test_parameters_of_different_names_are_refused_with_the_ranks_that_lack_them(job: Any) -> None:
    def check() -> str:
        names = ["a", "b"] if hvd.rank() else ["a", "b", "layer.weight"]
        with pytest.raises(ValueError, match="have different parameters") as found:
            hvd.broadcast_parameters({name: torch.zeros(1) for name in names}, 0)
        hvd.broadcast_parameters({"a": torch.zeros(1)}, 0)
        return str(found.value)

    texts = job(3, check)
    assert len(set(texts)) == 1 and "on rank 0 there is 'layer.weight', but not on ranks 1-2" in texts[0]


def test_parameters_whose_elements_share_memory_are_broadcast_where_that_is_possible(job: Any) -> None:
    def check() -> None:
        rank = hvd.rank()
        everywhere = torch.full((1, 3), float(rank)).expand(4, 3)
        rows = (torch.arange(3.0) + rank)[:, None].expand(3, 2)
        missing = torch.full((1,), float("nan") if rank == 0 else 0.0).expand(2)
        conjugate = torch.tensor([1j + rank, 2]).conj()
        hvd.broadcast_parameters({"a": everywhere, "b": rows, "c": missing, "d": conjugate}, 0)
        assert everywhere.tolist() == [[0.0] * 3] * 4 and rows.tolist() == [[0.0] * 2, [1.0] * 2, [2.0] * 2]
        assert missing.isnan().all() and conjugate.tolist() == [-1j, 2]
        mine = torch.arange(2.0) if rank == 0 else torch.zeros(1).expand(2)
        if rank == 0:
            hvd.broadcast_parameters({"a": mine}, 0)
        else:
            with pytest.raises(ValueError, match="elements of 'a' share memory on rank 1"):
                hvd.broadcast_parameters({"a": mine}, 0)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2.0

    job(2, check)


def test_a_group_whose_tensors_share_memory_is_refused_in_place_alone(job: Any) -> None:
    """In place, some elements would be reduced twice; out of place it is as good as any."""

    def check() -> None:
        x = torch.arange(6.0)
        for group in ([x, torch.ones(2), x], [x[:4], x[3:]], [x[2:3], x]):
            for call in (hvd.grouped_allreduce_, hvd.grouped_allreduce_async_):
                with pytest.raises(ValueError, match=r"Tensors 1 and [23] of the group share memory"):
                    call(group)
            assert [each.sum().item() for each in hvd.grouped_allreduce(group)] == [each.sum().item() for each in group]
        hvd.grouped_allreduce_([x[:3], x[3:], x[:0]], op=hvd.Sum)
        assert x.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]

    job(2, check)


class Pair(NamedTuple):
    first: torch.Tensor
    second: int


def test_hyper_parameters_in_named_tuples_become_those_of_the_root(job: Any) -> None:
    def check() -> list[float]:
        pair = Pair(torch.full((2,), float(hvd.rank())), hvd.rank())
        optimizer = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(2))], "range": pair}], lr=0.1)
        hvd.broadcast_optimizer_state(optimizer, 1)
        pair = optimizer.param_groups[0]["range"]
        return [*pair.first.tolist(), pair.second]

    assert job(2, check) == [[1.0, 1.0, 1]] * 2


@pytest.mark.parametrize("size", [1, 2, 4])
def test_broadcast_parameters_writes_those_of_the_root_where_they_are(job: Any, size: int) -> None:
    def check() -> None:
        for root in {0, size - 1}:
            torch.manual_seed(hvd.rank())
            model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
            model[1].running_mean.fill_(hvd.rank())
            model = model.to(memory_format=torch.channels_last)  # weights that are not contiguous in the usual sense
            model[1].num_batches_tracked.fill_(10 * hvd.rank())
            addresses = {name: value.data_ptr() for name, value in model.state_dict().items()}
            torch.manual_seed(root)
            wanted = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)).state_dict()
            hvd.broadcast_parameters(model.state_dict(), root_rank=root)
            for name, value in model.state_dict().items():
                assert value.data_ptr() == addresses[name]  # in place
                if "running_mean" in name:
                    assert value.tolist() == [float(root)] * 4
                elif "tracked" in name:
                    assert value.item() == 10 * root
                else:
                    assert torch.equal(value, wanted[name])
            assert all(parameter.requires_grad for parameter in model.parameters())
        for make in (list, lambda named: [value for _, value in named], dict):
            model = torch.nn.Linear(2, 2)
            torch.nn.init.constant_(model.weight, float(hvd.rank()))
            hvd.broadcast_parameters(make(model.named_parameters()), size - 1)
            assert torch.equal(model.weight, torch.full((2, 2), size - 1.0))
        hvd.broadcast_parameters({}, 0)
        hvd.broadcast_parameters([], 0)

    job(size, check)


def test_broadcast_parameters_refuses_other_containers_values_and_roots(job: Any) -> None:
    def check() -> None:
        model = torch.nn.Linear(2, 2)
        for wrong in (model.named_parameters(), model.parameters(), model, 5, tuple(model.parameters())):
            with pytest.raises(ValueError, match="invalid params of type"):
                hvd.broadcast_parameters(wrong, 0)
        with pytest.raises(ValueError, match="'step'"):
            hvd.broadcast_parameters({"step": 5}, 0)
        with pytest.raises(ValueError, match="root rank 2"):
            hvd.broadcast_parameters(model.state_dict(), 2)

    job(2, check)


def make_optimizer(kind: str, parameters: Any, lr: float) -> torch.optim.Optimizer:
    makers = {
        "sgd": lambda: torch.optim.SGD(parameters, lr=lr),
        "momentum": lambda: torch.optim.SGD(parameters, lr=lr, momentum=0.9 * lr, nesterov=True),
        "adam": lambda: torch.optim.Adam(parameters, lr=lr, betas=(lr, 0.99), amsgrad=True),
        "adamw": lambda: torch.optim.AdamW(parameters, lr=lr, weight_decay=lr),
        "rmsprop": lambda: torch.optim.RMSprop(parameters, lr=lr, centered=True, momentum=0.5),
        "adagrad": lambda: torch.optim.Adagrad(parameters, lr=lr),
        "tensor-lr": lambda: torch.optim.Adam(parameters, lr=torch.tensor(lr)),
    }
    return makers[kind]()


KINDS = ["sgd", "momentum", "adam", "adamw", "rmsprop", "adagrad", "tensor-lr"]


def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()


def text(state: Any) -> str:
    with torch.no_grad():
        return repr(state)


def test_the_state_of_every_optimizer_becomes_that_of_the_root_and_training_goes_on_alike(job: Any) -> None:
    """What the root has is what all have, whether ranks had state, none, or other hyper-parameters."""

    def check(kind: str, wrap: bool, stepped: list[int], root: int) -> tuple[str, str, bool]:
        rank = hvd.rank()
        torch.manual_seed(rank)
        model = torch.nn.Linear(3, 2)
        optimizer = make_optimizer(kind, model.parameters(), 0.1 * (rank + 1))
        steps(model, optimizer, stepped[rank])
        before = text(optimizer.state_dict())
        if wrap:
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        hvd.broadcast_optimizer_state(optimizer, root_rank=root)
        found = text(optimizer.state_dict())
        hvd.broadcast_parameters(model.state_dict(), root_rank=root)
        steps(model, optimizer, 2)  # goes on as one
        return before, found, hvd.allgather_object(text(model.state_dict())).count(text(model.state_dict())) == 2

    for kind in KINDS:
        for wrap in (False, True):
            for stepped in ([3, 0], [0, 3], [2, 1], [0, 0]):
                for root in (0, 1):
                    found = job(2, check, kind, wrap, stepped, root)
                    assert found[0][1] == found[1][1] == found[root][0], (kind, wrap, stepped, root)
                    assert found[0][2] and found[1][2], (kind, wrap, stepped, root)


def test_hyper_parameters_of_several_groups_become_those_of_the_root(job: Any) -> None:
    def check() -> str:
        first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
        lr = 0.1 * (hvd.rank() + 1)
        groups = [
            {"params": first.parameters(), "lr": lr},
            {"params": second.parameters(), "weight_decay": lr, "tag": lr},
        ]
        optimizer = torch.optim.Adam(groups, lr=5 * lr)
        identities = [id(p) for group in optimizer.param_groups for p in group["params"]]
        hvd.broadcast_optimizer_state(optimizer, 0)
        assert [id(p) for group in optimizer.param_groups for p in group["params"]] == identities
        return text([{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups])

    found = job(2, check)
    assert found[0] == found[1] and "'lr': 0.1" in found[0] and "'tag': 0.1" in found[0]


def test_the_state_of_lbfgs_is_refused(job: Any) -> None:
    def check() -> None:
        with pytest.raises(ValueError, match=r"cannot broadcast torch\.optim\.LBFGS state"):
            hvd.broadcast_optimizer_state(torch.optim.LBFGS([torch.nn.Parameter(torch.ones(1))]), 0)

    job(2, check)


def test_all_ranks_resume_from_a_checkpoint_that_one_rank_has_read(job: Any) -> None:
    def check() -> tuple[str, int]:
        torch.manual_seed(5)
        model = torch.nn.Linear(3, 2)
        optimizer = make_optimizer("adam", model.parameters(), 0.1)
        epoch = 0
        if hvd.rank() == 0:  # only here is there a file to read
            old = torch.nn.Linear(3, 2)
            old_optimizer = make_optimizer("adam", old.parameters(), 0.05)
            steps(old, old_optimizer, 3)
            model.load_state_dict(copy.deepcopy(old.state_dict()))
            optimizer.load_state_dict(copy.deepcopy(old_optimizer.state_dict()))
            epoch = 7
        epoch = hvd.broadcast_object(epoch, 0, "epoch")
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), 0)
        hvd.broadcast_optimizer_state(optimizer, 0)
        steps(model, optimizer, 2)
        return text((model.state_dict(), optimizer.state_dict())), epoch

    found = job(3, check)
    assert found[0] == found[1] == found[2] and found[0][1] == 7
