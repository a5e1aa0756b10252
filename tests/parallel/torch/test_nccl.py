"""Tensors on devices whose memory NCCL moves: on GPUs, where there are, and on the stand-ins everywhere.

The stand-ins are a device that is late (``late_device``) and a library that plays NCCL on it (``recorded_nccl``). The scenarios
are those of :mod:`test_cuda`, where tensors are staged in host memory.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import itertools
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import gpu_ranks
import horovod.torch as hvd
from horovod.torch import HorovodInternalError
from horovod.torch.device import staging
from jobs import Job, make_job
from parallel.torch.test_cuda import NEEDS_STAND_IN, SCENARIOS, Found, batch_norm, host, made, on_gpus
from ranks import RankPool

LATE = "late:0"
STAND_IN = {"TEST_DEVICES": "late nccl", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
WHY_NOT = gpu_ranks.why_not_nccl(torch.cuda.device_count())
NEEDS_GPUS = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "it runs")
EVERYWHERE = [
    pytest.param("late", marks=NEEDS_STAND_IN),
    pytest.param("native", marks=NEEDS_STAND_IN),
    pytest.param("cuda", marks=NEEDS_GPUS),
]
"""On what: the stand-in of a device with NCCL in Python, the same with NCCL's calls in C, or GPUs."""


@pytest.fixture
def job(ranks: Callable[..., RankPool], request: pytest.FixtureRequest) -> Job:
    """In processes of their own, one a rank."""
    if on_gpus(request):
        return make_job(lambda size: ranks(size, gpu_ranks.nccl_env(torch.cuda.device_count())), "horovod.torch")
    return make_job(lambda size: ranks(size, STAND_IN, framework="torch"), "horovod.torch")


@pytest.fixture(autouse=True)
def native(request: pytest.FixtureRequest) -> Iterator[None]:
    """For tests with NCCL's calls in C, the library that has them."""
    if request.node.callspec.params.get("device") == "native" if hasattr(request.node, "callspec") else False:
        _library.append(request.getfixturevalue("stand_in"))
    yield
    _library.clear()


_library: list[str] = []


@contextlib.contextmanager
def generation(device: str, path: str, sets: list[list[int]], breaches: bool = True) -> Iterator[list[Any]]:
    """On a rank: a generation in which NCCL moves the device's memory; nothing is left, and no rule was broken."""
    hvd.shutdown()
    made_sets = [hvd.ProcessSet(ranks) for ranks in sets]
    if device == "cuda":
        torch.cuda.set_device(hvd_local_rank() % torch.cuda.device_count())
        hvd.init(process_sets=made_sets)
        yield made_sets
        hvd.shutdown()
        return
    late_device: Any = importlib.import_module("late_device")
    with late_device.with_nccl(path) as library:
        hvd.init(process_sets=made_sets)
        yield made_sets
        gc.collect()  # an exception's traceback may hold some
        assert staging.pool.bytes_in_use() == 0
        hvd.shutdown()
        late_device.drain()
        assert late_device.violations() == []
        assert not breaches or (library.breaches() if path else library.breaches) == []


def hvd_local_rank() -> int:
    return int(os.environ["HOROVOD_LOCAL_RANK"])


def where(device: str) -> str:
    return LATE if device != "cuda" else f"cuda:{hvd_local_rank() % torch.cuda.device_count()}"


def nccl_ran() -> bool:
    """Whether NCCL has carried out a collective of this rank."""
    from horovod.comm.nccl.communicator import NcclCommunicator
    from horovod.core.lifecycle.context import running

    devices = running().workers[0].executor.devices
    built = devices._built.values() if devices is not None else ()
    return any(isinstance(each, NcclCommunicator) and each._latest is not None for each in built)


def on(job: Job, device: str, size: int, function: Callable[..., Any], *args: Any, **keywords: Any) -> list[Any]:
    """``function(*args)`` on every rank, in a generation with NCCL, which must have carried out a collective at the end.

    Keywords: ``sets``, process sets, its first argument; ``idle``, whether the communicators may be gone at the end.
    """
    sets = keywords.pop("sets", None)
    breaches = keywords.pop("breaches", True)
    idle = keywords.pop("idle", False)
    path = "".join(_library)

    @functools.wraps(function)
    def run(*args: Any) -> Any:
        with generation(device, path, sets or [], breaches) as found:
            result = function(*args) if sets is None else function(found, *args)
            assert idle or device == "late" or nccl_ran(), "NCCL has done nothing"
            return result

    result: list[Any] = job(size, run, *args, **keywords)
    return result


def linger_before_dropping() -> None:
    """Let the other ranks be quicker when a process set goes, so that they would have left the job before this rank is done."""
    from horovod.core.lifecycle.context import running

    executor = running().workers[0].executor
    drop = executor.drop_members

    def late(*args: Any) -> None:
        time.sleep(0.2)
        drop(*args)

    executor.drop_members = late  # type: ignore[method-assign]


def calls() -> list[str]:
    """What this rank has called of the library that plays NCCL."""
    from horovod.comm.nccl import library

    found: list[str] = library.loaded().functions.names()
    return found


@pytest.mark.parametrize("device", EVERYWHERE)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_the_same_results_as_in_host_memory(job: Job, device: str, scenario: Callable[[str], Found]) -> None:
    def on_device() -> Found:
        found = scenario(where(device))
        assert nccl_ran() and (device != "late" or len(calls()) > 5)
        return found

    found_by_rank = on(job, device, 2, on_device)
    in_host_memory = job(2, scenario, "cpu")
    for rank, (found, wanted) in enumerate(zip(found_by_rank, in_host_memory, strict=True)):
        assert len(found) == len(wanted) > 0
        for number, ((dtype, one), (same, other)) in enumerate(zip(found, wanted, strict=True)):
            equal = torch.equal(one, other) if device != "cuda" else torch.allclose(one, other, rtol=1e-2, atol=1e-5)
            assert dtype == same and equal, (rank, number, one, other)


@pytest.mark.parametrize("device", EVERYWHERE)
def test_sync_batch_norm_computes_what_it_does_in_host_memory(job: Job, device: str) -> None:
    def on_device() -> Found:
        found = batch_norm(where(device))
        assert nccl_ran()
        return found

    found = on(job, device, 2, on_device)
    for one_rank, wanted in zip(found, job(2, batch_norm, "cpu"), strict=True):
        for number, ((_, one), (_, other)) in enumerate(zip(one_rank, wanted, strict=True)):
            assert torch.allclose(one, other, rtol=1e-5, atol=1e-5), (number, one, other)


def batch_norms(device: str) -> list[tuple[float, torch.Tensor]]:
    """Layers and batches of all kinds: ranks without elements, one value, 16 bits, other orders, types and settings. Each
    result with its precision."""
    torch.manual_seed(5)
    rank, found = hvd.rank(), list[tuple[float, torch.Tensor]]()
    precise = {torch.float64: 1e-8, torch.float32: 1e-4, torch.bfloat16: 3e-2}
    shapes: list[Any] = [
        (4 + rank, 3),
        (2 * rank, 3, 5),
        (2 * (1 - rank), 3, 2, 2),
        (1 - rank or 3, 3, 1),
        (3, 3, 2, 4),
    ]
    kinds: list[dict[str, Any]] = [
        {},
        {"momentum": None},
        {"affine": False},
        {"track_running_stats": False},
        {"eps": 0.1},
    ]
    types = [(torch.float32, torch.float32), (torch.float64, torch.float64), (torch.bfloat16, torch.float32)]
    for number, (shape, kind) in enumerate(itertools.product(shapes, kinds)):
        dtype, of = types[number % 3]
        layer = hvd.SyncBatchNorm(3, dtype=of, **kind)
        if kind.get("affine", True):
            nn.init.uniform_(layer.weight)
        layer = layer.to(device)
        for _ in range(2):
            start = (torch.arange(math.prod(shape)) * (rank + 2) % 11 + number).reshape(shape).to(dtype)
            x = start.to(device)
            if len(shape) == 4 and number % 2:
                x = x.contiguous(memory_format=torch.channels_last)
            x.requires_grad_()
            y = layer(x)
            y.square().sum().backward()
            grads = [each.grad for each in (x, layer.weight, layer.bias) if each is not None]
            found += [(precise[dtype], each.detach().cpu().double().clone()) for each in (y, *grads, *layer.buffers())]
    return found


@pytest.mark.parametrize("device", EVERYWHERE[1:])
def test_batch_norm_of_every_kind_computes_what_it_does_in_host_memory(job: Job, device: str) -> None:
    found = on(job, device, 2, lambda: batch_norms(where(device)))
    for one_rank, wanted in zip(found, job(2, batch_norms, "cpu"), strict=True):
        for number, ((precision, one), (_, other)) in enumerate(zip(one_rank, wanted, strict=True)):
            near = torch.allclose(
                one, other, rtol=precision, atol=4 * precision
            )  # gradients are sums in which much cancels
            assert near, (number, precision, one, other)


@NEEDS_STAND_IN
def test_batch_norm_does_not_wait_for_the_device(job: Job) -> None:
    def check() -> None:
        layer, gate = hvd.SyncBatchNorm(3).to(LATE), threading.Event()
        x = made(LATE, (4, 3)).requires_grad_()
        torch.late.current_stream().push(after=gate)  # type: ignore[attr-defined]
        y = layer(x)
        y.square().sum().backward()
        gate.set()
        assert torch.isfinite(x.grad.cpu()).all() and y.detach().cpu().std() > 0.5

    on(job, "late", 2, check)


@pytest.mark.parametrize("device", EVERYWHERE)
def test_too_few_values_for_a_variance_are_an_error_on_all_ranks(job: Job, device: str) -> None:
    def check() -> None:
        layer = hvd.SyncBatchNorm(3).to(where(device))
        with pytest.raises(ValueError, match="Expected more than 1 value per channel when training, got 1"):
            layer(made(where(device), (1 - hvd.rank(), 3)))

    on(job, device, 2, check)


@pytest.mark.parametrize("device", EVERYWHERE)
def test_averages_of_three_ranks_are_right_in_every_floating_type(job: Job, device: str) -> None:
    def check() -> None:
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            x = made(where(device), (40,), dtype)
            wanted = (torch.arange(40) % 7 + 2.0).double()
            precise = {torch.float16: 2e-3, torch.bfloat16: 1e-2}.get(dtype, 1e-6)  # each addition rounds
            found = hvd.allreduce(x).cpu().double()
            assert torch.allclose(found, wanted, rtol=precise)
            assert abs((found / wanted - 1).mean()) < 1e-3  # and in both directions
            rows = hvd.reducescatter(made(where(device), (7, 2), dtype))
            start = [0, 3, 5][hvd.rank()]
            wanted = (torch.arange(14) % 7 + 2.0).reshape(7, 2)[start : start + rows.shape[0]].double()
            assert torch.allclose(rows.cpu().double(), wanted, rtol=1e-2)

    on(job, device, 3, check)


@NEEDS_STAND_IN
def test_nothing_waits_for_the_device_neither_the_caller_nor_the_worker_thread(job: Job) -> None:
    def check() -> None:
        gate = threading.Event()
        x = made(LATE, (3,))
        torch.late.current_stream().push(after=gate)  # type: ignore[attr-defined]  # the stand-in's
        x.add_(1)
        handle = hvd.allreduce_async(x, name="held", op=hvd.Sum)
        rows = hvd.allgather_async(x, name="rows")
        hvd.barrier()
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [2.0, 2.0]
        assert not hvd.poll(handle) and not hvd.poll(rows)
        result, gathered = hvd.synchronize(handle), hvd.synchronize(rows)  # the device has not begun
        doubled = result * 2
        del x, result
        gate.set()
        assert doubled.tolist() == [10.0, 14.0, 18.0]
        assert gathered.tolist() == [2.0, 3.0, 4.0, 3.0, 4.0, 5.0]
        assert calls().count("allreduce") == calls().count("allgather") == 1

    on(job, "late", 2, check)


@pytest.mark.parametrize("device", EVERYWHERE)
def test_factors_that_16_bits_do_not_hold_give_right_results(job: Job, device: str) -> None:
    def check() -> None:
        for dtype in (torch.float16, torch.bfloat16):
            for value, factor in ((2.0**13, 1e-8), (2.0**-10, 1e5), (3.0, 1 / 3), (2.0, -0.3)):
                x = torch.full((70,), value, dtype=dtype).to(where(device))
                found = hvd.allreduce(x, op=hvd.Sum, prescale_factor=factor).cpu().double()
                assert torch.allclose(found, torch.tensor(2 * value * factor).double(), rtol=5e-3, atol=1e-7), found
                assert x.cpu().tolist() == [value] * 70
                rows = hvd.reducescatter(x, op=hvd.Sum, postscale_factor=factor).cpu().double()
                assert torch.allclose(rows, torch.tensor(2 * value * factor).double(), rtol=5e-3, atol=1e-7), rows
        wide = torch.ones(3).to(where(device))
        tiny = hvd.allreduce(wide * 1e30, op=hvd.Sum, postscale_factor=1e-50)  # no float32: host memory serves
        assert torch.allclose(tiny.cpu().double(), torch.tensor(2e-20).double())

    on(job, device, 2, check)


@NEEDS_STAND_IN
def test_tensors_are_released_when_the_stream_waits_for_the_collective(job: Job) -> None:
    """So the memory of a step's gradients serves the next step, as without communication."""

    def check() -> None:
        gate = threading.Event()
        tensors = [made(LATE, (3,)) for _ in range(3)]
        blocks = [weakref.ref(tensor.block) for tensor in tensors]  # type: ignore[attr-defined]  # the stand-in's
        torch.late.current_stream().push(after=gate)  # type: ignore[attr-defined]
        handle = hvd.grouped_allreduce_async_(tensors, name="held", op=hvd.Sum)
        hvd.allreduce(torch.ones(1), name="the worker thread has queued it")
        del tensors
        assert all(block() is not None for block in blocks)
        assert len(hvd.synchronize(handle)) == 3
        gc.collect()
        assert [block() for block in blocks] == [None] * 3  # and the device has not begun
        gate.set()

    on(job, "late", 2, check)


@pytest.mark.parametrize("device", EVERYWHERE)
def test_results_are_right_on_whatever_stream_the_caller_makes_and_uses_them(job: Job, device: str) -> None:
    """Made on one stream, waited for on a second, used there, and let go of at once."""

    def check() -> None:
        here = where(device)
        module: Any = getattr(torch, torch.device(here).type)
        one, two = module.Stream(device=here), module.Stream(device=here)
        for turn in range(10):
            with module.stream(one):
                x = made(here, (1000,))
                handle, gathered = hvd.allreduce_async(x, op=hvd.Sum), hvd.allgather_async(x)
                in_place = hvd.allreduce_async_(made(here, (1000,)), op=hvd.Sum)
                del x
            with module.stream(two):
                results = [hvd.synchronize(each) for each in (handle, gathered, in_place)]
                totals = [result.mul_(turn).sum() for result in results]
                del results
                found = [total.item() for total in totals]
            assert found == [(sum(n % 7 for n in range(1000)) * 2 + 3000) * turn] * 3

    on(job, device, 2, check)


@NEEDS_STAND_IN
def test_captures_of_graphs_refuse_collectives_and_say_what_to_do(job: Job) -> None:
    def check() -> None:
        import late_device

        x, short = made(LATE, (3,)), made(LATE, (3,), torch.int16)
        handle = hvd.allreduce_async(x, name="x", op=hvd.Sum)
        with late_device.capture():
            for call in (lambda: hvd.allreduce(x), lambda: hvd.allgather_async(x), lambda: hvd.synchronize(handle)):
                with pytest.raises(ValueError, match=r"cannot be captured in a CUDA graph.*between replays"):
                    call()
            with pytest.raises(ValueError, match="cannot be captured"):
                hvd.allreduce(short, op=hvd.Sum)  # through host memory
        assert hvd.synchronize(handle).tolist() == [3.0, 5.0, 7.0]  # the handle is as it was
        model = nn.Linear(3, 1, bias=False).to(LATE)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0, foreach=False))
        with late_device.capture(), optimizer.no_sync():
            model(x).sum().backward()  # as a graph does it: without hooks
        before = model.weight.detach().cpu()
        optimizer.step()
        assert torch.allclose(before - model.weight.detach().cpu(), torch.tensor([[1.5, 2.5, 3.5]]))
        model.weight.grad = made(LATE, (1, 3))
        with late_device.capture(), pytest.raises(ValueError, match=r"optimizer\.no_sync"):
            optimizer.step()

    on(job, "late", 2, check)


@NEEDS_STAND_IN
def test_types_and_reductions_that_nccl_lacks_use_host_memory(job: Job) -> None:
    def check() -> None:
        whole = made(LATE, (4,), torch.int32)
        assert hvd.allreduce(whole).tolist() == [1, 2, 3, 4]  # 1.5, ... towards zero
        assert hvd.allreduce(made(LATE, (2,), torch.int16), op=hvd.Sum).tolist() == [3, 5]
        assert hvd.allreduce(made(LATE, (2,), torch.complex64), op=hvd.Sum).tolist() == [3, 5]
        assert hvd.allreduce(made(LATE, (2,)), op=hvd.Max, postscale_factor=0.5).tolist() == [1.0, 1.5]
        hvd.allreduce(made(LATE, (2,)), op=hvd.Adasum)
        assert calls() == []
        assert hvd.allgather(made(LATE, (1,), torch.int16)).tolist() == [1, 2]
        assert "allgather" in calls()

    on(job, "late", 2, check)


@pytest.mark.parametrize("device", EVERYWHERE)
def test_join_makes_zeros_on_the_device(job: Job, device: str) -> None:
    def check() -> None:
        before = hvd.allreduce_async(made(where(device), (2,)), name="before", op=hvd.Sum)
        if hvd.rank() == 0:
            assert hvd.join() == 1
            assert hvd.synchronize(before).tolist() == [6.0, 9.0]
            return
        assert hvd.synchronize(before).tolist() == [6.0, 9.0]
        mixed = [made(where(device), (2,)), made(where(device), (3,), torch.float64)]
        found = hvd.grouped_allreduce(mixed, name="left", op=hvd.Sum)
        assert [each.tolist() for each in found] == [[5.0, 7.0], [5.0, 7.0, 9.0]]
        assert hvd.allreduce(made(where(device), (1,)), name="most", op=hvd.Min).tolist() == [2.0]
        assert hvd.allgather(made(where(device), (1,))).tolist() == [2.0, 3.0]
        assert hvd.broadcast(made(where(device), (1,)), 2).tolist() == [3.0]
        with pytest.raises(HorovodInternalError, match="not supported with Join"):
            hvd.reducescatter(made(where(device), (3,)))
        assert hvd.allreduce(torch.ones(1), name="last", op=hvd.Sum).tolist() == [2.0]
        if hvd.rank() == 1:
            time.sleep(0.2)
        assert hvd.join() == 1

    on(job, device, 3, check)


@pytest.mark.parametrize("device", EVERYWHERE)
def test_a_rank_that_has_never_used_a_device_can_join(job: Job, device: str) -> None:
    def check() -> None:
        if hvd.rank() == 0:
            assert hvd.join() == 1
        else:
            assert hvd.allreduce(made(where(device), (2,)), name="x", op=hvd.Sum).tolist() == [2.0, 3.0]
            hvd.join()

    on(job, device, 2, check)


@pytest.mark.parametrize("device", EVERYWHERE)
def test_overlapping_process_sets_may_submit_in_different_orders(job: Job, device: str) -> None:
    """Each rank is in three sets, and begins with another one."""

    def check(sets: list[Any]) -> None:
        mine = [each for each in [*sets, hvd.global_process_set] if each.included()]
        order = mine[hvd.rank() % len(mine) :] + mine[: hvd.rank() % len(mine)]
        for turn in range(15):
            handles = {}
            for each in order:
                x = made(where(device), (100,), factor=turn)
                handles[each.process_set_id] = hvd.allreduce_async(x, name="same", op=hvd.Sum, process_set=each)
                rows = x[: hvd.rank() + 1].clone()
                handles[-1 - each.process_set_id] = hvd.allgather_async(rows, name="rows", process_set=each)
            for each in mine:
                first = sum(rank + 1 for rank in each.ranks)
                wanted = [len(each.ranks) * turn * (n % 7) + first for n in range(100)]
                assert hvd.synchronize(handles[each.process_set_id]).tolist() == wanted
                gathered = hvd.synchronize(handles[-1 - each.process_set_id]).tolist()
                assert gathered == [float(turn * n + rank + 1) for rank in each.ranks for n in range(rank + 1)]
        hvd.barrier()  # a rank that leaves would end what the other two still do

    on(job, device, 3, check, sets=[[0, 1], [1, 2], [0, 2]])


@NEEDS_STAND_IN
def test_a_process_set_is_split_from_all_ranks_where_their_devices_are_idle(job: Job) -> None:
    def check(sets: list[Any]) -> list[str]:
        hvd.allreduce(made(LATE, (1,)))
        torch.late.synchronize()  # type: ignore[attr-defined]  # the stand-in's
        hvd.barrier()
        if sets[0].included():
            assert hvd.allreduce(made(LATE, (1,)), op=hvd.Sum, process_set=sets[0]).tolist() == [4.0]
        hvd.barrier()
        return calls()

    for names in on(job, "late", 3, check, sets=[[0, 2]]):
        assert names.count("split") == names.count("init") == 1


@pytest.mark.parametrize("device", EVERYWHERE)
def test_process_sets_that_come_and_go_leave_no_communicator_behind(job: Job, device: str) -> None:
    def check() -> int:
        for _ in range(2):
            pair = hvd.add_process_set([0, 2])
            if pair.included():
                assert hvd.allreduce(made(where(device), (1,)), op=hvd.Sum, process_set=pair).tolist() == [4.0]
                assert hvd.broadcast(made(where(device), (1,)), 2, process_set=pair).tolist() == [3.0]
            if hvd.rank() == 2:  # the other member does not submit it
                pending = hvd.allreduce_async(made(where(device), (1,)), name="alone", process_set=pair)
                linger_before_dropping()
            hvd.remove_process_set(pair)
            if hvd.rank() == 2:
                with pytest.raises(HorovodInternalError, match="the process set was removed"):
                    hvd.synchronize(pending)
        return calls().count("destroy") if device == "late" else -1

    found = on(job, device, 3, check, idle=True, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
    assert found in ([2, 0, 2], [-1, -1, -1])


@pytest.mark.parametrize("device", EVERYWHERE)
def test_what_cannot_work_is_an_error_and_the_job_goes_on(job: Job, device: str) -> None:
    def check(sets: list[Any]) -> None:
        here = where(device)

        def still_works() -> bool:
            return bool(hvd.allreduce(made(here, (3,)), op=hvd.Sum).tolist() == [3.0, 5.0, 7.0])

        with pytest.raises(ValueError, match="same device"):
            hvd.grouped_allreduce([made(here, (2,)), torch.ones(2)])
        with pytest.raises(ValueError, match="contiguous"):
            hvd.allreduce(made(here, (4, 4)).t())
        with pytest.raises(ValueError, match="share memory"):
            x = made(here, (4,))
            hvd.grouped_allreduce_([x, x])
        if hvd.rank() == 1:
            with pytest.raises(ValueError, match="not a member"):
                hvd.allreduce(made(here, (2,)), process_set=sets[0])
        assert still_works()
        with pytest.raises(HorovodInternalError, match=r"(?s)Mismatched ALLREDUCE tensor shapes.*rank 0: .*on gpu"):
            hvd.allreduce(made(here, (2 + hvd.rank(),)), name="shapes")
        mine = made(here, (2,)) if hvd.rank() else torch.ones(2)
        with pytest.raises(HorovodInternalError, match=r"CPU/GPU device selection: One rank's tensor is on cpu"):
            hvd.allreduce(mine, name="devices")
        with pytest.raises(HorovodInternalError, match=r"(?s)Mismatched data types.*test_nccl"):
            hvd.allreduce(made(here, (2,), torch.int16 if hvd.rank() else torch.float32), name="route", op=hvd.Sum)
        assert still_works()

    on(job, device, 2, check, sets=[[0]])


@NEEDS_STAND_IN
def test_a_second_device_of_a_process_is_refused_with_what_to_do(job: Job) -> None:
    def check() -> None:
        hvd.allreduce(made("late:0", (2,)))
        with pytest.raises(ValueError, match=r"late:1.*HOROVOD_GPU_OPERATIONS=HOST"):
            hvd.allreduce(made("late:1", (2,)))

    on(job, "late", 2, check)


@NEEDS_STAND_IN
def test_a_communicator_that_cannot_be_made_is_an_error_on_all_ranks_and_host_memory_goes_on(job: Job) -> None:
    def check() -> str:
        from horovod.comm.nccl import library

        if hvd.rank() == 1:
            library.loaded().functions.ncclCommInitRankConfig = lambda *_: 5
        else:  # else it would wait for rank 1 until the limit
            real = library.loaded().functions.ncclCommGetAsyncError

            def late(comm: int, state: Any) -> int:
                real(comm, state)
                state._obj.value = 6
                return 0

            library.loaded().functions.ncclCommGetAsyncError = late
        with pytest.raises(HorovodInternalError) as error:
            hvd.allreduce(made(LATE, (2,)))
        with pytest.raises(HorovodInternalError, match="could not be set up"):
            hvd.allreduce(made(LATE, (2,)))
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [2.0, 2.0]
        return str(error.value)

    one, other = on(job, "late", 2, check)
    assert one == other
    assert "nccl could not be set up for the memory of GPUs: rank 0: " in one and "HOROVOD_GPU_OPERATIONS=HOST" in one


@NEEDS_STAND_IN
def test_an_error_of_nccl_ends_the_job_with_its_words(job: Job) -> None:
    def check() -> str:
        from horovod.comm.nccl import library

        functions = library.loaded().functions
        x = hvd.allreduce(made(LATE, (2,)))
        torch.late.synchronize()  # type: ignore[attr-defined]  # what is held from now on holds up the whole device
        hvd.barrier()
        if hvd.rank() == 1:
            functions.hold.clear()
        handle = hvd.allreduce_async(x, name="x")
        with pytest.raises(HorovodInternalError) as error:
            hvd.synchronize(handle)  # it is queued; rank 0 may learn of rank 1's failure before it comes here
            if hvd.rank() == 1:
                functions.comms[1].state = 6
            for _ in range(300):
                hvd.allreduce(torch.ones(1), name="y")
                threading.Event().wait(0.02)
        functions.hold.set()
        return str(error.value)

    for text in on(job, "late", 2, check):
        assert "rank 1" in text and "remote process exited" in text, text


@NEEDS_STAND_IN
def test_a_rank_that_dies_ends_what_the_others_have_queued(job: Job) -> None:
    def check() -> str:
        x = hvd.allreduce(made(LATE, (2,)))
        hvd.barrier()
        if hvd.rank() == 1:
            os._exit(7)
        with pytest.raises(HorovodInternalError) as error:
            for turn in range(300):
                hvd.synchronize(hvd.allreduce_async(x, name=f"x{turn}"))
                threading.Event().wait(0.01)
        deadline = threading.Event()
        while "abort" not in calls():
            deadline.wait(0.01)
        torch.late.synchronize()  # type: ignore[attr-defined]  # the abort lets the device end
        return str(error.value)

    found = on(job, "late", 3, check, dies=[1])
    for text in (found[0], found[2]):
        assert "rank 1" in text.lower() or "Rank 1" in text, text


@NEEDS_STAND_IN
def test_a_second_init_changes_nothing(job: Job) -> None:
    def check() -> None:
        handle = hvd.allreduce_async(made(LATE, (2,)), name="before", op=hvd.Sum)
        runtime = importlib.import_module("horovod.torch.device.runtime").torch_devices.runtime()
        hvd.init()
        assert hvd.synchronize(handle).tolist() == [3.0, 5.0]
        rows = hvd.allgather(made(LATE, (2,)))
        assert rows.tolist() == [1.0, 2.0, 2.0, 3.0]
        assert importlib.import_module("horovod.torch.device.runtime").torch_devices.runtime() is runtime

    on(job, "late", 2, check)


@NEEDS_STAND_IN
def test_host_is_forced_and_what_is_forced_must_exist(job: Job) -> None:
    def check() -> None:
        x = made(LATE, (3,))
        assert hvd.allreduce(x, op=hvd.Sum).tolist() == [3.0, 5.0, 7.0]
        assert calls() == []
        hvd.shutdown()
        os.environ["HOROVOD_GPU_OPERATIONS"] = "NCCL"
        hvd.init()
        assert hvd.allreduce(x, op=hvd.Sum).tolist() == [3.0, 5.0, 7.0] and "allreduce" in calls()
        hvd.shutdown()
        os.environ["HOROVOD_GPU_OPERATIONS"] = "pigeon"
        with pytest.raises(RuntimeError, match=r"HOROVOD_GPU_OPERATIONS=pigeon: there is no such engine.*nccl.*host"):
            hvd.init()

    on(job, "late", 2, check, env={"HOROVOD_GPU_OPERATIONS": "Host"})


def test_forced_without_a_gpu_is_an_error_that_says_what_to_do(job: Job) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")

    def check() -> None:
        hvd.shutdown()
        os.environ["HOROVOD_GPU_OPERATIONS"] = "NCCL"
        if torch.version.cuda or torch.version.hip:
            why = r"finds no GPU \(it was built for (CUDA|ROCm) \d.*nvidia-smi or rocm-smi"
        else:
            why = r"without CUDA.*install"
        with pytest.raises(
            RuntimeError, match=rf"HOROVOD_GPU_OPERATIONS=nccl cannot serve this group: rank 0: .*{why}"
        ):
            hvd.init()

    job(2, check, env={"HOROVOD_GPU_OPERATIONS": "HOST"})


@NEEDS_STAND_IN
def test_more_ranks_than_devices_travel_through_host_memory(job: Job) -> None:
    def check() -> None:
        hvd.shutdown()
        del os.environ["NCCL_MULTI_RANK_GPU_ENABLE"]
        try:
            hvd.init()
            assert hvd.allreduce(made(LATE, (2,)), op=hvd.Sum).tolist() == [6.0, 9.0] and calls() == []
            hvd.shutdown()
            os.environ["HOROVOD_GPU_OPERATIONS"] = "nccl"
            with pytest.raises(RuntimeError, match=r"3 ranks of host .* share 2 GPUs.*NCCL needs one GPU for each"):
                hvd.init()
        finally:
            os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"

    on(job, "late", 3, check, env={"HOROVOD_GPU_OPERATIONS": ""})


@NEEDS_STAND_IN
def test_an_optimizer_trains_as_in_host_memory_while_memory_is_used_again(job: Job) -> None:
    def train(device: str) -> Found:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 2)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), 0)
        for turn in range(6):
            optimizer.zero_grad(set_to_none=True)
            (model(made(device, (8, 20), factor=turn) * 0.1) ** 2).sum().backward()
            optimizer.step()
        return host(list(model.parameters()))

    found, wanted = on(job, "late", 2, train, LATE), job(2, train, "cpu")
    for one, other in zip(found, wanted, strict=True):
        for (_, a), (_, b) in zip(one, other, strict=True):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-7)
