"""One rank of ``tests/on_loss_kills.py``: a DDP script that knows of no loss, and writes down what it has seen.

    on_loss_rank.py FOLDER STEPS

Each rank of each step has data of its own, so the result depends on which ranks have made each step, and which have reduced
each bucket. The program writes to the folder

    pid.FIRST       at the beginning: the process id, by the rank that the process has first
    progress        by rank 0: the steps made
    result.FIRST    at the end: see :class:`Seen`

and looks for

    raise.FIRST     the process raises an exception
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from elastic_ddp_rank import loss_of, made, values_of

BUCKET_MEBIBYTES = 0.002


class Seen(NamedTuple):
    """What one process has seen.

    Attributes:
        ranks: by step, the ranks at its beginning; all ranks by the numbers that they had first.
        losses: by step, the sum of the ranks' losses.
        sums: by step, the ranks whose losses are in it.
        buckets: by step, of each bucket its number of elements and the ranks that have reduced it.
        values: parameters and buffers at the end.
        seconds: the time from one step to the next, by step.
    """

    ranks: Sequence[Sequence[int]]
    losses: Sequence[float]
    sums: Sequence[Sequence[int]]
    buckets: Sequence[Sequence[tuple[int, Sequence[int]]]]
    values: Sequence[float]
    seconds: Sequence[float]


def reference(seen: Seen) -> tuple[list[float], list[float]]:
    """The losses, and the parameters and buffers at the end, of the same steps in one process."""
    model, optimizer = made()
    losses = []
    for step, ranks in enumerate(seen.ranks):
        gradients: dict[int, list[torch.Tensor]] = {}
        loss: dict[int, float] = {}
        for rank, first in enumerate(ranks):
            model.train(rank == 0)
            optimizer.zero_grad()
            value = loss_of(model, step, rank)
            value.backward()
            loss[first] = value.item()
            gradients[first] = [each.grad.clone() for each in model.parameters() if each.grad is not None]
        parameters = [*model.parameters()]
        last = len(parameters)
        for elements, members in seen.buckets[step]:
            while elements:
                last -= 1
                parameters[last].grad = sum(gradients[each][last] / len(members) for each in members)  # type: ignore[assignment]  # not 0
                elements -= parameters[last].numel()
        optimizer.step()
        losses.append(sum(loss[each] for each in seen.sums[step]))
    return losses, values_of(model)


def judge(results: Sequence[Seen], tolerance: float = 1e-12) -> str:
    """What is wrong with the survivors' results; "" if they are right."""
    for field in ("ranks", "losses", "sums", "buckets", "values"):
        if len({json.dumps(getattr(each, field)) for each in results}) != 1:
            return f"the survivors differ in {field}: {[getattr(each, field) for each in results]}"
    losses, values = reference(results[0])
    worst = max(abs(one - other) / max(1.0, abs(other)) for one, other in zip(results[0].losses, losses, strict=True))
    if not worst < tolerance:
        return f"the losses differ from the reference by {worst}"
    worst = max(abs(one - other) for one, other in zip(results[0].values, values, strict=True))
    return "" if worst < tolerance else f"the values differ from the reference by {worst}"


def main() -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    first = dist.get_rank()
    calls = watched_calls()
    model, optimizer = made()
    ddp = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MEBIBYTES)
    group = dist.group.WORLD
    ranks, losses, sums, buckets, seconds = [], [], [], [], []
    write(folder / f"pid.{first}", str(os.getpid()))
    before = time.monotonic()
    for step in range(steps):
        if (folder / f"raise.{first}").exists():
            raise ArithmeticError(f"rank {first}, step {step}")
        ranks.append(list(group.origins))
        assert (dist.get_rank(), dist.get_world_size()) == (ranks[-1].index(first), len(ranks[-1]))
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == (str(dist.get_rank()), str(dist.get_world_size()))
        calls.clear()
        optimizer.zero_grad()
        loss = loss_of(ddp, step, dist.get_rank())
        loss.backward()
        buckets.append([each[1:] for each in calls if each[0]])
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item())
        sums.append(calls[-1][2])
        if dist.get_rank() == 0:  # whichever process that is
            write(folder / "progress", str(step + 1))
        now = time.monotonic()
        seconds.append(now - before)
        before = now
    ddp._sync_module_buffers(0)  # as the next forward pass does
    dist.barrier()
    write(folder / f"result.{first}", json.dumps(Seen(ranks, losses, sums, buckets, values_of(model), seconds)))
    dist.destroy_process_group()


def watched_calls() -> list[tuple[bool, int, list[int]]]:
    """A list that gets every call that is handed out: whether it averages gradients, its elements, the ranks that made it."""
    from horovod.torch.distributed.on_loss.repeatable_call import RepeatableCall

    found: list[tuple[bool, int, list[int]]] = []
    hand_out = RepeatableCall.hand_out

    def watching(call: RepeatableCall) -> None:
        assert call.carrier is not None
        elements = sum(each.array.size for each in call.inputs or call.outputs)
        found.append((call.averages, elements, list(call.carrier.origins)))
        hand_out(call)

    RepeatableCall.hand_out = watching  # type: ignore[method-assign]  # to watch it
    return found


def write(path: Path, text: str) -> None:
    new = path.with_name(f".{path.name}")
    new.write_text(text)
    new.replace(path)


if __name__ == "__main__":
    main()
