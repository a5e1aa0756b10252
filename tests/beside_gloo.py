"""Every operation of torch.distributed on a group beside the same on Gloo.

Run as a program, ``python beside_gloo.py FOLDER``, this is a rank under ``mpiexec``. It writes what it has compared as JSON to
``FOLDER/<rank>``.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

REDUCED = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.int8,
]  # fmt: skip
MOVED = [*REDUCED, torch.bool, torch.complex64, torch.complex128, torch.int16]
if torch.__version__ >= "2.3":  # which can fill such tensors
    MOVED += [torch.float8_e4m3fn, torch.float8_e5m2]
FEW = {torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e5m2}
"""One of each width and of each way of adding."""


def compare(backend: str | None = None, all_types: bool = True) -> list[str]:
    """Runs on every rank: each operation by both back ends. What was compared, and what differs.

    Args:
        backend: of the group that is compared; None: the default group.
        all_types: of tensors; else some of each kind.
    """
    own, gloo = dist.group.WORLD if backend is None else dist.new_group(backend=backend), dist.new_group(backend="gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    told: list[str] = []

    def values(dtype: Any, count: int, of: int = 0) -> Any:
        made = (torch.arange(count) * 3 + 5 * rank + 7 * of) % 23
        if dtype.itemsize == 1 and dtype.is_floating_point:  # PyTorch converts to them, but hardly computes
            return made.to(torch.float32).to(dtype)
        return (made + 1j * made).to(dtype) if dtype.is_complex else made.to(dtype)

    gloo_moves = set(REDUCED) - {torch.bfloat16}
    try:
        dist.all_gather_into_tensor(torch.zeros(size), torch.zeros(1), group=gloo)
        gathers_into = True
    except RuntimeError:  # Gloo of PyTorch 2.1
        gathers_into = False

    def bits(tensor: Any) -> Any:
        return torch.view_as_real(tensor).reshape(-1) if tensor.is_complex() else tensor.reshape(-1).view(torch.uint8)

    def check(name: str, run: Any, dtype: Any, bitwise: bool = True) -> None:
        mine = run(own, dtype)
        try:
            theirs = run(gloo, dtype)
        except (RuntimeError, ValueError) as error:
            told.append(f"{name} {dtype}: Gloo refuses ({type(error).__name__})")
            return
        same = all(
            torch.equal(bits(a), bits(b)) if bitwise else torch.allclose(a.double(), b.double(), rtol=1e-2)
            for a, b in zip(mine, theirs, strict=True)
        )
        told.append(f"{'' if same else 'differs: '}{name} {dtype}" + ("" if same else f" {mine} {theirs}"))

    def all_reduce(op: Any, count: int) -> Any:
        def run(group: Any, dtype: Any) -> list[Any]:
            tensor = values(dtype, count)
            dist.all_reduce(tensor, op, group=group)
            return [tensor]

        return run

    for dtype in [each for each in REDUCED if all_types or each in FEW]:
        exact = not dtype.is_floating_point or dtype.itemsize > 2
        for op in ("SUM", "MIN", "MAX", "PRODUCT"):
            for count in (0, 1, 5, 70_000):
                check(f"all_reduce {op} {count}", all_reduce(getattr(ReduceOp, op), count), dtype, exact)
        if not dtype.is_floating_point:
            for op in ("BAND", "BOR", "BXOR"):
                check(f"all_reduce {op}", all_reduce(getattr(ReduceOp, op), 1000), dtype)

        def reduce(group: Any, dtype: Any) -> list[Any]:
            tensor = values(dtype, 100)
            dist.reduce(tensor, size - 1, group=group)
            return [tensor] if rank == size - 1 else []

        def reduce_scatter(group: Any, dtype: Any) -> list[Any]:
            listed, single = torch.zeros(6, dtype=dtype), torch.zeros(2, 3, dtype=dtype)
            dist.reduce_scatter(listed, [values(dtype, 6, of) for of in range(size)], group=group)
            dist.reduce_scatter_tensor(single, values(dtype, 6 * size).view(-1, 3), group=group)
            return [listed, single]

        def coalesced_sums(group: Any, dtype: Any) -> list[Any]:
            listed = [values(dtype, count, of) for of, count in enumerate((5, 1, 3000))]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                dist.all_reduce_coalesced(listed, group=group)
            managed = [values(dtype, count, of) for of, count in enumerate((6, 2, 2000))]
            with dist._coalescing_manager(group):
                for tensor in managed:
                    dist.all_reduce(tensor, group=group)
            parts = [torch.zeros(count, dtype=dtype) for count in (3, 500)]
            with dist._coalescing_manager(group, async_ops=True) as manager:
                for of, part in enumerate(parts):
                    dist.reduce_scatter_tensor(part, values(dtype, len(part) * size, of), group=group)
            manager.wait()
            return [*listed, *managed, *parts]

        check("reduce", reduce, dtype, exact)
        check("reduce_scatter", reduce_scatter, dtype, exact)
        check("coalesced sums", coalesced_sums, dtype, exact)

    def broadcast(group: Any, dtype: Any) -> list[Any]:
        tensor = values(dtype, 100)
        dist.broadcast(tensor, size - 1, group=group)
        return [tensor]

    def all_gather(group: Any, dtype: Any) -> list[Any]:
        listed = [torch.zeros(7, dtype=dtype) for _ in range(size)]
        dist.all_gather(listed, values(dtype, 7), group=group)
        single = torch.zeros(4 * size, dtype=dtype)
        gather_into(single, values(dtype, 4), group)
        coalesced = [torch.zeros(count * size, dtype=dtype) for count in (2, 1000)]
        with dist._coalescing_manager(group) if group is own or gathers_into else nullcontext():
            for of, tensor in enumerate(coalesced):
                gather_into(tensor, values(dtype, len(tensor) // size, of), group)
        return [*listed, single, *coalesced]

    def gather_into(gathered: Any, tensor: Any, group: Any) -> None:
        if group is own or gathers_into:
            dist.all_gather_into_tensor(gathered, tensor, group=group)
        else:
            dist.all_gather(list(gathered.chunk(size)), tensor, group=group)

    def gather_scatter(group: Any, dtype: Any) -> list[Any]:
        root, there = size - 1, rank == size - 1
        gathered = [torch.zeros(7, dtype=dtype) for _ in range(size)] if there else None
        dist.gather(values(dtype, 7), gathered, root, group=group)
        scattered = torch.zeros(3, dtype=dtype)
        dist.scatter(scattered, [values(dtype, 3, of) for of in range(size)] if there else None, root, group=group)
        return [*(gathered or []), scattered]

    def all_to_all(group: Any, dtype: Any) -> list[Any]:
        even, uneven = (
            torch.zeros(2 * size, dtype=dtype),
            torch.zeros(sum(rank + of for of in range(size)), 2, dtype=dtype),
        )
        dist.all_to_all_single(even, values(dtype, 2 * size), group=group)
        splits = [rank + of for of in range(size)]
        dist.all_to_all_single(uneven, values(dtype, 2 * sum(splits)).view(-1, 2), splits, splits, group=group)
        listed = [torch.zeros(3, dtype=dtype) for _ in range(size)]
        if group is own or dist.get_backend(group) != "gloo":
            dist.all_to_all(listed, [values(dtype, 3, of) for of in range(size)], group=group)
        else:  # Gloo has no such operation
            whole = torch.cat([values(dtype, 3, of) for of in range(size)])
            dist.all_to_all_single(torch.empty_like(whole).copy_(whole), whole, group=group)
            out = torch.empty_like(whole)
            dist.all_to_all_single(out, whole, group=group)
            listed = list(out.chunk(size))
        return [even, uneven, *listed]

    def send_recv(group: Any, dtype: Any) -> list[Any]:
        received = [torch.zeros(count, dtype=dtype) for count in (5, 200_000)]
        works = []
        for tag, tensor in enumerate(received):
            works.append(dist.isend(values(dtype, len(tensor)), (rank + 1) % size, group=group, tag=tag))
            works.append(dist.irecv(tensor, (rank - 1) % size, group=group, tag=tag))
        batched = torch.zeros(9, dtype=dtype)
        works += dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, values(dtype, 9), (rank + 1) % size, group, tag=2),
                dist.P2POp(dist.irecv, batched, (rank - 1) % size, group, tag=2),
            ]
        )
        for work in works:
            work.wait()
        return [*received, batched]

    for dtype in [each for each in MOVED if all_types or each in FEW]:
        for name, run in {
            "broadcast": broadcast,
            "all_gather": all_gather,
            "gather, scatter": gather_scatter,
            "all_to_all": all_to_all,
            "send, recv": send_recv,
        }.items():
            mine = run(own, dtype)
            if dtype in gloo_moves:
                theirs = run(gloo, dtype)
                same = all(torch.equal(bits(a), bits(b)) for a, b in zip(mine, theirs, strict=True))
            else:  # the values are those that the same calls move as another type
                theirs = run(gloo, torch.int64)
                same = all(torch.equal(bits(a), bits(_converted(b, dtype))) for a, b in zip(mine, theirs, strict=True))
            told.append(f"{'' if same else 'differs: '}{name} {dtype}")
    return told


def _converted(numbers: Any, dtype: Any) -> Any:
    if dtype.itemsize == 1 and dtype.is_floating_point:
        return numbers.to(torch.float32).to(dtype)
    return (numbers + 1j * numbers).to(dtype) if dtype.is_complex else numbers.to(dtype)


def serve(folder: str) -> None:
    """Be a rank under ``mpiexec``."""
    import horovod.torch  # noqa: F401  it registers the back end

    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
    size = int(os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ["PMI_SIZE"])
    dist.init_process_group("horovod", store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    found = compare(all_types=False)
    dist.destroy_process_group()
    Path(folder, str(rank)).write_text(json.dumps(found))


if __name__ == "__main__":
    serve(*sys.argv[1:])
