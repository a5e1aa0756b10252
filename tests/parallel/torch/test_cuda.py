"""Everything with tensors on devices: on two ranks that share a GPU, where there is one, and on the stand-in everywhere.

The stand-in (``late_device``) is late on purpose, so that whoever does not wait for it gets wrong numbers. A scenario does
the same with tensors on a device and in host memory; both must come to the same bits.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.backend_registration
from torch import nn

import gpu_ranks
import horovod.torch as hvd
from horovod.torch import HorovodInternalError
from horovod.torch.device import staging
from horovod.torch.tensors import DATA_TYPES
from jobs import Job, make_job
from ranks import RankPool
from time_limits import SOON

LATE = "late:0"
APART = {"TEST_DEVICES": "late"}  # a device must be known before autograd starts
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no CUDA or ROCm device")
HAS_PYTHON_BACKENDS = hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend")
NEEDS_STAND_IN = pytest.mark.skipif(not HAS_PYTHON_BACKENDS, reason="this PyTorch takes no backend in Python")
EVERYWHERE = [pytest.param(LATE, id="late", marks=NEEDS_STAND_IN), pytest.param("cuda:0", id="cuda", marks=NEEDS_GPU)]


@pytest.fixture
def job(ranks: Callable[..., RankPool], request: pytest.FixtureRequest) -> Job:
    """In processes of their own."""
    if on_gpus(request):
        return make_job(lambda _: ranks(3, gpu_ranks.HOST), "horovod.torch")
    return make_job(lambda _: ranks(3, APART, framework="torch"), "horovod.torch")


def on_gpus(request: pytest.FixtureRequest) -> bool:
    """Whether the test that asks for a fixture runs on GPUs."""
    callspec = getattr(request.node, "callspec", None)
    return callspec is not None and callspec.params.get("device", "").startswith("cuda")


@contextlib.contextmanager
def prepared(device: str) -> Iterator[None]:
    """On a rank: what the stand-in needs, and that nothing is left behind."""
    late = device.startswith("late")
    late_device: Any = importlib.import_module("late_device") if late else None
    with late_device.reachable() if late else contextlib.nullcontext():
        yield
        gc.collect()  # an exception's traceback may hold some
        assert staging.pool.bytes_in_use() == 0
        hvd.shutdown()
    if late:
        late_device.drain()
        assert late_device.violations() == []


def on(job: Job, device: str, size: int, function: Callable[..., Any], *args: Any, **keywords: Any) -> list[Any]:
    """``function(*args)`` on every rank, with what the device needs."""

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        with prepared(device):
            return function(*args)

    result: list[Any] = job(size, run, *args, **keywords)
    return result


def made(device: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, factor: int = 1) -> torch.Tensor:
    """A tensor that tells whose it is, filled by several pieces of work that may be late."""
    tensor = torch.zeros(shape, dtype=torch.int64, device=device)
    count = tensor.numel()
    tensor.add_((torch.arange(count) % 7).reshape(shape).to(device))
    tensor.mul_(factor).add_(hvd.rank() + 1)
    return tensor.remainder_(3).to(torch.bool) if dtype == torch.bool else tensor.to(dtype)


Found = list[tuple[torch.dtype, torch.Tensor]]


def host(result: Any) -> Found:
    """Results as the caller sees them, with types and exact values."""
    several = result if isinstance(result, list | tuple) else [result]
    return [(each.dtype, each.detach().cpu().to(torch.complex128).clone()) for each in several]


# Scenarios


def every_form_of_allreduce(device: str) -> Found:
    found = []
    for dtype in DATA_TYPES:
        for shape in ((), (0,), (5,), (3, 4)) if dtype == torch.float32 else ((5,),):
            for form in (hvd.allreduce, lambda t, **k: hvd.synchronize(hvd.allreduce_async(t, **k))):
                found += host(form(made(device, shape, dtype), op=hvd.Sum))
            for form in (hvd.allreduce_, lambda t, **k: hvd.synchronize(hvd.allreduce_async_(t, **k))):
                tensor = made(device, shape, dtype)
                assert form(tensor, op=hvd.Sum if dtype.is_complex else hvd.Max) is tensor
                found += host(tensor)
    large = made(device, (700_001,))
    found += host(hvd.allreduce(large, prescale_factor=0.5, compression=hvd.Compression.fp16))
    return found + host(hvd.allreduce_(large, op=hvd.Adasum)) + host(large)


def groups(device: str) -> Found:
    def group() -> list[torch.Tensor]:
        kinds = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float32]
        return [
            made(device, shape, dtype) for shape, dtype in zip([(3,), (2, 2), (), (0, 4), (999,)], kinds, strict=True)
        ]

    found = []
    for name in "ab":
        found += host(hvd.grouped_allreduce(group(), op=hvd.Sum, name=name))
        found += host(hvd.synchronize(hvd.grouped_allreduce_async(group(), op=hvd.Sum, name=name)))
        for form in (hvd.grouped_allreduce_, lambda t, **k: hvd.synchronize(hvd.grouped_allreduce_async_(t, **k))):
            mine = group()
            result = form(mine, op=hvd.Sum, name=name)
            assert all(one is other for one, other in zip(mine, result, strict=True))
            found += host(mine)
    rows = [made(device, (hvd.rank() + 1, 3)), made(device, (2,), torch.int32)]
    found += host(hvd.grouped_allgather(rows)) + host(hvd.synchronize(hvd.grouped_allgather_async(rows)))
    rows = [made(device, (5, 2)), made(device, (2,), torch.float64)]
    found += host(hvd.grouped_reducescatter(rows))
    return found + host(hvd.synchronize(hvd.grouped_reducescatter_async(rows, op=hvd.Sum)))


def movements(device: str) -> Found:
    found = []
    for dtype in DATA_TYPES:
        rows = [3 * hvd.rank(), 2, 0][: hvd.size()]
        found += host(hvd.allgather(made(device, (rows[hvd.rank()], 2), dtype)))
        for root in range(hvd.size()):
            source = made(device, (4,), dtype)
            found += host(hvd.broadcast(source, root)) + host(source)
            assert hvd.broadcast_(source, root) is source
            found += host(source)
        splits = [hvd.rank() + 1, 2]
        source = made(device, (5, 2), dtype)
        found += host(hvd.alltoall(source, splits))
        output, received = hvd.alltoall(source, torch.tensor(splits, dtype=torch.int32).to(device))
        assert received.device == output.device == torch.device(device) and received.dtype == torch.int32
        found += host([output, received]) + host(hvd.alltoall(source[:4].clone()))
        if dtype not in (torch.bool, torch.uint8):
            found += host(hvd.reducescatter(source, op=hvd.Sum, postscale_factor=2.0))
    return found


def gradients(device: str) -> Found:
    found = []
    calls: dict[str, Callable[..., Any]] = {
        "allreduce": lambda x, y: [hvd.allreduce(x, op=hvd.Sum)],
        "grouped_allreduce": lambda x, y: hvd.grouped_allreduce([x, y]),
        "allgather": lambda x, y: [hvd.allgather(x)],
        "grouped_allgather": lambda x, y: hvd.grouped_allgather([x, y]),
        "broadcast": lambda x, y: [hvd.broadcast(x, 1)],
        "alltoall": lambda x, y: [hvd.alltoall(x)],
        "reducescatter": lambda x, y: [hvd.reducescatter(x, op=hvd.Sum)],
        "grouped_reducescatter": lambda x, y: hvd.grouped_reducescatter([x, y]),
    }
    for call in calls.values():
        x, y = (made(device, (4, 3), torch.float64).requires_grad_() for _ in range(2))
        loss = sum(((hvd.rank() + 2) * output).square().sum() for output in call(x, y))
        loss.backward()
        found += host([each.grad for each in (x, y) if each.grad is not None])
    return found


def many_at_once(device: str) -> list[torch.Tensor]:
    """Temporaries that nobody holds, results that are used at once, names in any order, memory that is used again."""
    found = []
    for turn in range(3):
        order = list(range(20)) if hvd.rank() else list(reversed(range(20)))
        handles = {
            n: hvd.allreduce_async(made(device, (n * 100,), factor=turn + 1), name=f"{n}", op=hvd.Sum) for n in order
        }
        for n in range(20):
            result = hvd.synchronize(handles[n])
            result.mul_(n)
            found += host(result)
    return found


def state(device: str) -> Found:
    torch.manual_seed(hvd.rank())
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4), nn.Linear(4, 2)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (hvd.rank() + 1))
    if hvd.rank() == 0:
        model(made("cpu", (3, 3)).square().to(device)).square().sum().backward()
        optimizer.step()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] == 0.1
    moments = [each["exp_avg"] for each in optimizer.state.values()]
    assert len(moments) == 6 and all(each.device == torch.device(device) for each in moments)
    found = hvd.broadcast_object({"weight": model[1].weight.detach().cpu()}, root_rank=0)["weight"]
    assert torch.equal(found, model[1].weight.detach().cpu())
    return host(list(model.state_dict().values())) + host(moments)


def batch_norm(device: str) -> Found:
    torch.manual_seed(0)
    layer = hvd.SyncBatchNorm(3).to(device)
    found = []
    for step in range(2):
        x = made(device, (4 + hvd.rank(), 3, 2), factor=step + 1).requires_grad_()
        y = layer(x)
        (y * made(device, tuple(y.shape))).sum().backward()
        found += host([y, x.grad, layer.weight.grad, layer.bias.grad, layer.running_mean, layer.running_var])
    return found


def optimizers(device: str) -> Found:
    """Every kind of optimizer, with a layer in host memory between those on the device."""
    several = [device, "cpu", device]
    kinds: list[dict[str, Any]] = [
        {},
        {"groups": 2},
        {"compression": hvd.Compression.fp16},
        {"compression": hvd.Compression.powersgd(1)},
        {"compression": hvd.Compression.topk(0.3)},
        {"op": hvd.Adasum},
        {"backward_passes_per_step": 2, "gradient_predivide_factor": 2.0},
    ]
    found = []
    for arguments in kinds:
        torch.manual_seed(1)
        layers = [nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 2)]
        for layer, where in zip(layers, several, strict=True):
            layer.to(where)
        parameters = [(f"{n}.{name}", p) for n, layer in enumerate(layers) for name, p in layer.named_parameters()]
        optimizer = torch.optim.SGD([p for _, p in parameters], lr=0.05, momentum=0.9, foreach=False)
        optimizer = hvd.DistributedOptimizer(optimizer, parameters, **arguments)
        for _ in range(3):
            optimizer.zero_grad()
            for turn in range(arguments.get("backward_passes_per_step", 1)):
                x = made("cpu", (4, 5)) * 0.1 + turn
                for layer, where in zip(layers, several, strict=True):
                    x = torch.tanh(layer(x.to(where)))
                x.square().sum().backward()
            optimizer.synchronize() if arguments.get("op") != hvd.Adasum else None
            found += host([p.grad for _, p in parameters])
            with optimizer.skip_synchronize() if arguments.get("op") != hvd.Adasum else contextlib.nullcontext():
                optimizer.step()
        found += host([p for _, p in parameters])
    return found


SCENARIOS = [every_form_of_allreduce, groups, movements, gradients, many_at_once, state, optimizers]
COMPUTING = [state, optimizers]
"""Scenarios with matrix products, which a GPU computes in another order than the host."""


@pytest.mark.parametrize("device", EVERYWHERE)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_the_same_bits_as_in_host_memory(job: Job, device: str, scenario: Callable[[str], Found]) -> None:
    on_device = on(job, device, 2, scenario, device)
    in_host_memory = job(2, scenario, "cpu")
    for rank, (found, wanted) in enumerate(zip(on_device, in_host_memory, strict=True)):
        assert len(found) == len(wanted) > 0
        for number, ((dtype, one), (same, other)) in enumerate(zip(found, wanted, strict=True)):
            rounded = device.startswith("cuda") and scenario in COMPUTING
            equal = torch.allclose(one, other, rtol=1e-2, atol=1e-5) if rounded else torch.equal(one, other)
            assert dtype == same and equal, (rank, number, one, other)


@pytest.mark.parametrize("device", EVERYWHERE)
def test_sync_batch_norm_computes_what_it_does_in_host_memory(job: Job, device: str) -> None:
    for found, wanted in zip(on(job, device, 2, batch_norm, device), job(2, batch_norm, "cpu"), strict=True):
        for number, ((_, one), (_, other)) in enumerate(zip(found, wanted, strict=True)):
            assert torch.allclose(one, other, rtol=1e-5, atol=1e-5), (number, one, other)


@pytest.mark.parametrize("device", EVERYWHERE)
def test_join_and_process_sets_work_with_tensors_on_the_device(job: Job, device: str) -> None:
    def check(sets: Any) -> None:
        (pair,) = sets  # ranks 0 and 2
        if hvd.rank() != 1:
            found = hvd.allgather(made(device, (1,)), process_set=pair)
            assert found.tolist() == [1.0, 3.0]
            assert hvd.broadcast(made(device, (1,)), 2, process_set=pair).tolist() == [3.0]
        before = hvd.allreduce_async(
            made(device, (2,)), name="before", op=hvd.Sum
        )  # must count, though it joins at once
        if hvd.rank() == 0:
            assert hvd.join() == 1
            assert hvd.synchronize(before).tolist() == [6.0, 9.0]
            return
        assert hvd.synchronize(before).tolist() == [6.0, 9.0]
        assert hvd.allreduce(made(device, (1,)), name="left", op=hvd.Sum).tolist() == [5.0]
        assert hvd.allreduce(made(device, (1,)), name="most", op=hvd.Min).tolist() == [2.0]
        assert hvd.allgather(made(device, (1,))).tolist() == [2.0, 3.0]
        with pytest.raises(HorovodInternalError, match="not supported with Join"):
            hvd.reducescatter(made(device, (3,)))
        if hvd.rank() == 1:
            time.sleep(0.2)
        assert hvd.join() == 1

    on(job, device, 3, check, sets=[[0, 2]])


@pytest.mark.parametrize("device", EVERYWHERE)
def test_bad_arguments_are_refused_and_the_job_goes_on(job: Job, device: str) -> None:
    def check(sets: Any) -> None:
        def still_works() -> bool:
            return bool(hvd.allreduce(made(device, (3,)), op=hvd.Sum).tolist() == [3.0, 5.0, 7.0])

        with pytest.raises(ValueError, match="same device"):
            hvd.grouped_allreduce([made(device, (2,)), torch.ones(2)])
        with pytest.raises(ValueError, match="same device"):
            hvd.grouped_allgather([torch.ones(2), made(device, (2,))])
        for call in (hvd.allreduce, hvd.allgather, hvd.alltoall, hvd.reducescatter, lambda t: hvd.broadcast(t, 0)):
            with pytest.raises(ValueError, match="contiguous"):
                call(made(device, (4, 4)).t())
        with pytest.raises(ValueError, match="cannot be averaged"):
            hvd.allreduce(made(device, (2,), torch.bool))
        with pytest.raises(ValueError, match="root rank"):
            hvd.broadcast_(made(device, (2,)), 5)
        with pytest.raises(ValueError, match="greater than the first dimension"):
            hvd.alltoall(made(device, (2,)), [5, 5])
        if hvd.rank() == 1:
            with pytest.raises(ValueError, match="not a member"):
                hvd.allreduce(made(device, (2,)), process_set=sets[0])
        assert still_works()
        with pytest.raises(HorovodInternalError, match=r"(?s)Mismatched ALLREDUCE tensor shapes.*rank 0: .*on gpu"):
            hvd.allreduce(made(device, (2 + hvd.rank(),)), name="shapes")
        mine = made(device, (2,)) if hvd.rank() else torch.ones(2)
        with pytest.raises(HorovodInternalError, match=r"CPU/GPU device selection: One rank's tensor is on cpu"):
            hvd.allreduce(mine, name="devices")
        assert mine.tolist() == ([2.0, 3.0] if hvd.rank() else [1.0, 1.0])
        if hvd.rank() == 1:
            hvd.barrier()
        first = hvd.allreduce_async(made(device, (3,)), name="twice", op=hvd.Sum)
        if hvd.rank() == 0:
            with pytest.raises(ValueError, match="same name"):
                hvd.allreduce_async(made(device, (3,)), name="twice")
            hvd.barrier()
        assert hvd.synchronize(first).tolist() == [3.0, 5.0, 7.0]
        assert still_works()

    on(job, device, 2, check, sets=[[0]])


@pytest.mark.parametrize("device", EVERYWHERE)
def test_results_are_right_on_whatever_stream_the_caller_makes_and_uses_them(job: Job, device: str) -> None:
    """Made on one stream, waited for on a second, used there, and let go of at once."""

    def check() -> None:
        module: Any = getattr(torch, torch.device(device).type)
        one, two = module.Stream(device=device), module.Stream(device=device)
        for turn in range(10):
            with module.stream(one):
                x = made(device, (1000,))
                handle, gathered = hvd.allreduce_async(x, op=hvd.Sum), hvd.allgather_async(x)
                in_place = hvd.allreduce_async_(made(device, (1000,)), op=hvd.Sum)
                del x
            with module.stream(two):
                results = [hvd.synchronize(each) for each in (handle, gathered, in_place)]
                totals = [result.mul_(turn).sum() for result in results]
                del results
                found = [total.item() for total in totals]
            total = (sum(n % 7 for n in range(1000)) * 2 + 3000) * turn
            assert found == [total] * 3

    on(job, device, 2, check)


@pytest.mark.parametrize("device", EVERYWHERE)
def test_tensors_are_reduced_without_gradients_and_in_inference_mode(job: Job, device: str) -> None:
    def check() -> None:
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode:
                x = made(device, (3,))
                assert hvd.allreduce(x, op=hvd.Sum).tolist() == [3.0, 5.0, 7.0]
                assert hvd.allreduce_(x, op=hvd.Sum).tolist() == [3.0, 5.0, 7.0]
                assert hvd.broadcast_(made(device, (1,)), 1).tolist() == [2.0]
        weight = nn.Parameter(made(device, (2,)))
        assert hvd.allreduce_(weight, op=hvd.Sum) is weight and weight.tolist() == [3.0, 5.0]
        assert weight.is_leaf and weight.requires_grad

    on(job, device, 2, check)


# What can be seen on the stand-in only, which does what it is told when it is told


@NEEDS_STAND_IN
def test_submitting_does_not_wait_for_the_device(job: Job) -> None:
    def check() -> None:
        gate = threading.Event()
        x = made(LATE, (3,))
        torch.late.current_stream().push(after=gate)  # type: ignore[attr-defined]  # the stand-in's
        x.add_(1)
        held = hvd.allreduce_async(x, name="held", op=hvd.Sum)
        new = hvd.allgather_async(x, name="rows")
        hvd.barrier()
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [2.0, 2.0]  # the worker threads are free
        assert not hvd.poll(held) and not hvd.poll(new)
        gate.set()
        later = threading.Event()
        torch.late.current_stream().push(after=later)  # type: ignore[attr-defined]
        result, rows = hvd.synchronize(held), hvd.synchronize(new)  # the host does not wait for the device
        later.set()
        assert result.tolist() == [5.0, 7.0, 9.0] and rows.tolist() == [2.0, 3.0, 4.0, 3.0, 4.0, 5.0]

    on(job, LATE, 2, check)


@NEEDS_STAND_IN
def test_polling_tells_when_the_result_is_there(job: Job) -> None:
    def check() -> None:
        import late_device

        late_device.dawdle(0.02)
        for _ in range(5):
            x = made(LATE, (4,))
            handle = hvd.allreduce_async_(x, op=hvd.Sum)
            deadline = time.monotonic() + SOON
            while not hvd.poll(handle) and time.monotonic() < deadline:
                time.sleep(0.001)
            assert x.inner.tolist() == [3.0, 5.0, 7.0, 9.0]  # without waiting
            hvd.synchronize(handle)
        late_device.dawdle(300e-6)

    on(job, LATE, 2, check)


@NEEDS_STAND_IN
def test_tensors_of_two_devices_are_reduced_but_not_in_one_group(job: Job) -> None:
    def check() -> None:
        for turn in range(5):
            tensors = [made(f"late:{number}", (50,), factor=turn) for number in (0, 1, 0)] + [
                made("cpu", (50,), factor=turn)
            ]
            handles = [hvd.allreduce_async_(each, name=f"{n}", op=hvd.Sum) for n, each in enumerate(tensors)]
            for handle in reversed(handles):
                hvd.synchronize(handle)
            assert all(torch.equal(each.cpu(), tensors[-1]) for each in tensors)
        parameters = [nn.Parameter(torch.zeros(5, device=where)) for where in ("late:0", "cpu", "late:1", "late:0")]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0, foreach=False), groups=2)
        for parameter in parameters:
            parameter.grad = made(str(parameter.device), (5,))
        optimizer.step()
        assert all(parameter.tolist() == [-1.5, -2.5, -3.5, -4.5, -5.5] for parameter in parameters)
        with pytest.raises(ValueError, match=r"same device. One is on late:0, another on late:1"):
            hvd.grouped_allreduce([made("late:0", (2,)), made("late:1", (2,))])

    on(job, LATE, 2, check)


@NEEDS_STAND_IN
@pytest.mark.parametrize("way", ["from", "to"])
def test_a_copy_that_fails_is_told_on_its_rank_and_named_to_the_others(job: Job, way: str) -> None:
    """One rank's copy fails: it is told so, the buffers are let go of, and the other is told when it leaves."""

    def check() -> str:
        from horovod.torch.device import staging

        x = made(LATE, (3,))
        torch.late.synchronize()  # type: ignore[attr-defined]
        if hvd.rank() == 1:
            port = staging.port(x.device)

            def broken(*_: Any) -> None:
                raise RuntimeError("an illegal memory access was encountered")

            if way == "to":
                port.enter = broken  # type: ignore[method-assign]
            else:
                port._out.push(broken)
        with pytest.raises(HorovodInternalError) as error:
            hvd.allreduce(x, name="x")
            raise HorovodInternalError("not here")
        return str(error.value)

    other, failing = on(job, LATE, 2, check)
    assert f"could not be copied {way} late:0: RuntimeError:" in failing and "illegal memory access" in failing
    assert other == "not here" if way == "to" else "shut down. This was caused by rank 1" in other


@NEEDS_STAND_IN
def test_captures_of_graphs_stay_valid_while_copies_are_under_way(job: Job) -> None:
    """CUDA allows no other call that asks for events while a thread captures, so all are made beside captures."""

    def check() -> None:
        import late_device

        x, gate = made(LATE, (3,)), threading.Event()
        hvd.allreduce(x, name="x")  # its buffer is waited for when it is taken again
        torch.late.current_stream().push(after=gate)  # type: ignore[attr-defined]
        handle = hvd.allreduce_async(x, name="x", op=hvd.Sum)
        with late_device.capture():
            gate.set()
            deadline = time.monotonic() + SOON
            while not hvd.poll(handle):
                assert time.monotonic() < deadline
                time.sleep(0.001)
        assert hvd.synchronize(handle).tolist() == [3.0, 5.0, 7.0]

    on(job, LATE, 2, check)


@NEEDS_STAND_IN
def test_a_copy_that_cannot_be_started_is_the_callers_error(job: Job) -> None:
    def check() -> None:
        from horovod.torch.device import staging

        x = made(LATE, (3,))
        port = staging.port(x.device)

        def broken(*_: Any) -> None:
            raise RuntimeError("out of memory")

        good, port.leave = port.leave, broken  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="out of memory"):
            hvd.allreduce_async(x, name="x")
        port.leave = good  # type: ignore[method-assign]
        assert hvd.allreduce(x, name="x", op=hvd.Sum).tolist() == [3.0, 5.0, 7.0]  # the name is free

    on(job, LATE, 2, check)


@NEEDS_STAND_IN
def test_collectives_in_flight_fail_when_a_rank_leaves(job: Job) -> None:
    def check() -> None:
        if hvd.rank() == 1:
            hvd.barrier()
            return
        gate = threading.Event()
        held, waiting = made(LATE, (3,)), made(LATE, (3,))
        waits = hvd.allreduce_async_(waiting, name="waits")
        torch.late.current_stream().push(after=gate)  # type: ignore[attr-defined]
        handle = hvd.allreduce_async_(held, name="held")
        hvd.barrier()
        for each in (handle, waits):
            with pytest.raises(HorovodInternalError, match="caused by rank 1"):
                hvd.synchronize(each)
        gate.set()

    on(job, LATE, 2, check)


@NEEDS_STAND_IN
def test_nothing_stays_after_shutdown(ranks: Any) -> None:
    def generation() -> list[str]:
        import late_device

        hvd.init()
        with late_device.reachable():
            hvd.allreduce(made(LATE, (3,)))
            assert any("staging" in thread.name for thread in threading.enumerate())
            hvd.shutdown()
        late_device.drain()
        return [thread.name for thread in threading.enumerate() if "staging" in thread.name or "late" in thread.name]

    pool = ranks(3, APART, framework="torch")
    pool.run(generation)
    with pool.leaves_nothing():
        assert pool.run(generation) == [[], [], []]
