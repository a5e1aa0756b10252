"""What the ranks that are left can do after others have joined, on every engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import horovod.torch as hvd
from horovod.torch import HorovodInternalError
from horovod.torch.tensors import DATA_TYPES

ENGINES = [{"HOROVOD_CPU_OPERATIONS": engine} for engine in ("shm", "tcp")]


def wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.dtype.is_complex else torch.float64)


@pytest.mark.parametrize("env", ENGINES, ids=["shm", "tcp"])
def test_ranks_that_have_joined_leave_every_reduction_of_the_others_as_it_is(job: Any, env: dict[str, str]) -> None:
    """Rank 1 joins at once, rank 0 after the first half; so two contribute, and then one. Every type, alone and grouped."""

    def check() -> int:
        for left in ([0, 2], [2]):
            if hvd.rank() not in left:
                return hvd.join()
            for dtype in DATA_TYPES:
                name = f"{dtype}{left}"
                own = torch.tensor([2 + hvd.rank(), 1, 0]).to(dtype)
                theirs = [torch.tensor([2 + rank, 1, 0]).to(dtype) for rank in left]
                results = {"Sum": sum(each if dtype.is_complex else each.int() for each in theirs).to(dtype)}
                real = [] if dtype.is_complex else [each.double() for each in theirs]
                results |= real and {
                    "Min": torch.stack(real).amin(0).to(dtype),
                    "Max": torch.stack(real).amax(0).to(dtype),
                    "Product": torch.stack(real).prod(0).to(dtype),
                }
                for op, wanted in results.items():
                    found = hvd.grouped_allreduce([own, own[:1], own[:0]], name=name + op, op=getattr(hvd, op))
                    assert torch.equal(found[0], wanted), (dtype, op, found[0], wanted)
                    assert torch.equal(found[1], wanted[:1]) and found[2].numel() == 0
                    if dtype.is_floating_point and op != "Sum":
                        negative = hvd.allreduce(
                            own, name=f"{name}{op}scaled", op=getattr(hvd, op), prescale_factor=-1.0
                        )
                        opposite = {"Min": -results["Max"], "Max": -results["Min"]}.get(op)
                        wanted = wanted * (-1) ** len(left) if opposite is None else opposite
                        assert torch.equal(negative, wanted), (dtype, op, negative, wanted)
                if dtype != torch.bool:
                    average = hvd.allreduce(own, name=name)
                    assert torch.allclose(wide(average), wide((wide(results["Sum"]) / 3).to(dtype)), rtol=1e-2)
                if dtype.is_floating_point:
                    adasum = hvd.allreduce(own, name=f"{name}adasum", op=hvd.Adasum)
                    if len(left) == 1:
                        assert torch.equal(adasum, own)
                    else:  # both of them, and rank 1 has no say in the tree
                        a, b = (each.double() for each in theirs)
                        wanted = (1 - a @ b / (2 * a @ a)) * a + (1 - a @ b / (2 * b @ b)) * b
                        assert torch.allclose(adasum.double(), wanted, rtol=1e-2)
        return hvd.join()

    assert job(3, check, env=env) == [2, 2, 2]


@pytest.mark.parametrize("env", ENGINES, ids=["shm", "tcp"])
def test_allgather_and_alltoall_move_the_rows_of_ranks_that_have_not_joined(job: Any, env: dict[str, str]) -> None:
    def check() -> int:
        rank = hvd.rank()
        if rank == 1:
            return hvd.join()
        for length in (3, 40_000):
            own = torch.full((rank + 1, length), float(rank))
            gathered = hvd.allgather(own)
            assert gathered.shape == (4, length) and gathered[:, 0].tolist() == [0, 2, 2, 2]
            two, one = hvd.grouped_allgather([own.half(), own[:1].long()])
            assert two[:, -1].tolist() == [0, 2, 2, 2] and one[:, -1].tolist() == [0, 2]
            assert hvd.broadcast(own[:1], root_rank=2)[0, 0].item() == 2
            output, received = hvd.alltoall(own, splits=[rank // 2, 0, 1])
            expected = {0: ([2.0], [0, 0, 1]), 2: ([0.0, 2.0], [1, 0, 1])}[rank]
            assert (output[:, 0].tolist(), received.tolist()) == expected
        assert hvd.allgather_object({"rank": rank}) == [{"rank": 0}, {"rank": 2}]
        assert hvd.broadcast_object(rank, 0) == 0
        sparse = torch.sparse_coo_tensor([[rank]], [3.0], (4,))
        assert hvd.sparse_allreduce_async(sparse, "sparse", hvd.Average)().to_dense().tolist() == [1, 0, 1, 0]
        hvd.barrier()
        return hvd.join()

    job(3, check, env=env)


def test_the_gradient_of_an_allgather_is_this_rank_s_rows(job: Any) -> None:
    def check() -> int:
        rank = hvd.rank()
        if rank == 0:
            return hvd.join()
        x = torch.ones(rank + 1, 2, requires_grad=True)
        gathered = hvd.allgather(x)
        gradient = torch.arange(10.0).reshape(5, 2)
        gathered.backward(gradient)
        mine = gradient[:2] if rank == 1 else gradient[2:]
        assert torch.allclose(x.grad, mine * 2 / 3)  # an average over three ranks, to which two contribute
        return hvd.join()

    job(3, check)


def test_collectives_that_need_a_joined_rank_fail_and_name_it(job: Any) -> None:
    def check() -> int:
        if hvd.rank() == 1:
            return hvd.join()
        calls = {
            "rank 1, whose tensor it is, joined already": lambda: hvd.broadcast(torch.ones(1), 1),
            "rank 1 joined already, and rank 0 sends 2 rows to it": lambda: hvd.alltoall(
                torch.ones(5), splits=[2, 2, 1] if hvd.rank() == 0 else [5, 0, 0]
            ),
            "their rows of the result would be lost": lambda: hvd.reducescatter(torch.ones(6)),
        }
        for text, call in calls.items():
            with pytest.raises(HorovodInternalError, match=f"not supported with Join at this time: .*{text}"):
                call()
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2
        return hvd.join()

    job(3, check)


def test_unnamed_calls_match_again_after_a_join(job: Any) -> None:
    def check() -> list[int]:
        last = []
        for turn in range(3):
            for _ in range(1 + (hvd.rank() + turn) % 3):
                hvd.allreduce(torch.ones(2))
                hvd.allgather(torch.ones(1))
            last.append(hvd.join())
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 3
            assert hvd.allgather(torch.tensor([hvd.rank()])).tolist() == [0, 1, 2]
            assert hvd.alltoall(torch.arange(3)).tolist() == [hvd.rank()] * 3
        return last

    assert job(3, check) == [[2, 1, 0]] * 3


def test_what_was_submitted_before_joining_still_counts(job: Any) -> None:
    def check() -> None:
        handles = []
        if hvd.rank() == 0:
            handles = [hvd.allreduce_async(torch.ones(1), name=name, op=hvd.Sum) for name in "abc"]
            hvd.join()
        else:
            for name in "bcda":
                found = hvd.allreduce(torch.ones(1), name=name, op=hvd.Sum).item()
                assert found == (1 if name == "d" else 2)
            hvd.join()
        assert [hvd.synchronize(handle).item() for handle in handles] == [2] * len(handles)

    job(2, check)


@pytest.mark.parametrize("kind", ["none", "fp16", "powersgd", "topk", "adasum", "sparse", "sync_batch_norm"])
def test_optimizers_train_on_uneven_data_and_all_ranks_end_alike(job: Any, kind: str) -> None:
    """Ranks with more batches go on; afterwards everybody takes what the last one has, and training goes on together."""

    def check() -> None:
        arguments: dict[str, Any] = {
            "fp16": {"compression": hvd.Compression.fp16},
            "powersgd": {"compression": hvd.Compression.powersgd(1)},
            "topk": {"compression": hvd.Compression.topk(0.1)},
            "adasum": {"op": hvd.Adasum},
        }.get(kind, {})
        torch.manual_seed(0)
        table = nn.Embedding(20, 8, sparse=kind == "sparse")
        norm: nn.Module = hvd.SyncBatchNorm(8) if kind == "sync_batch_norm" else nn.Identity()
        model = nn.Sequential(table, norm, nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), **arguments
        )
        for epoch in range(2):
            for step in range(2 + hvd.rank()):
                random = torch.Generator().manual_seed(100 * epoch + 10 * step + hvd.rank())
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(
                    model(torch.randint(0, 20, (6,), generator=random)), torch.randint(0, 3, (6,), generator=random)
                )
                loss.backward()
                optimizer.step()
            last = hvd.join()
            assert last == 2
            hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        optimizer.zero_grad()
        model(torch.tensor([hvd.rank(), 3])).square().mean().backward()
        optimizer.step()
        flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        assert torch.isfinite(flat).all()
        everybodys = hvd.allgather(flat.reshape(1, -1))
        assert (everybodys == everybodys[0]).all()

    job(3, check)
