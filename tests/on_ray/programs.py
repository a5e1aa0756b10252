"""Programs of the tests: ``python programs.py NAME ARGUMENTS`` on the head of a cluster. The last line is the result (JSON)."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import ray

from horovod.ray import ElasticRayExecutor, RayExecutor
from horovod.ray.ray_logger import log

Settings = dict[str, Any]


def whoami(executable: Any) -> list[Any]:
    """Runs on a rank."""
    import torch

    import horovod.torch as hvd

    hvd.init()
    total = hvd.allreduce(torch.tensor([float(hvd.rank())]), op=hvd.Sum).item()
    log({"rank": hvd.rank()})
    return [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), total, executable]


def total_by_gloo() -> float:
    """Runs on a rank: a script of ``torch.distributed``, which finds its rank and the others as under torchrun."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


class Counter:
    """An object that stays on a rank between calls."""

    def __init__(self, start: int, step: int = 1) -> None:
        self.value, self.step = start, step

    def next(self) -> int:
        self.value += self.step
        return self.value


def executor(**arguments: Any) -> RayExecutor:
    return RayExecutor(RayExecutor.create_settings(timeout_s=120), **arguments)


def static() -> Any:
    """Two hosts with two ranks each, an object that stays, values logged, single calls, references."""
    logged: list[Any] = []
    ranks = executor(num_hosts=2, num_workers_per_host=2)
    ranks.start(Counter, [10], {"step": 2}, extra_env_vars={"MINE": "yes"})
    try:
        return {
            "ranks": ranks.execute(lambda counter: whoami(counter.next()), callbacks=[logged.append]),
            "again": ranks.execute(lambda counter: counter.next()),
            "single": ranks.execute_single(lambda counter: counter.next()),
            "run": ranks.run(lambda first, second: first + second, [1], {"second": 2}),
            "by gloo": ranks.run(total_by_gloo),
            "references": ray.get(ranks.run_remote(lambda: os.environ["MINE"])),
            "logged": logged,
            "workers": ranks.num_workers,
        }
    finally:
        ranks.shutdown()


def failing(kind: str) -> Any:
    """One rank raises, or its process ends; the error of the caller, and whether the others go on afterwards."""
    ranks = executor(num_workers=3)
    ranks.start()

    def train() -> None:
        import torch

        import horovod.torch as hvd

        hvd.init()
        hvd.allreduce(torch.ones(1))
        if hvd.rank() == 1:
            if kind == "exit":
                os._exit(3)
            raise ValueError("no data on this rank")
        hvd.allreduce(torch.ones(1))

    try:
        ranks.run(train)
    except Exception as error:
        found = [[each.__name__ for each in type(error).__mro__], str(error)]
    after = ranks.execute(whoami) if kind == "raise" else []
    ranks.shutdown()
    return {"error": found, "after": after}


def inside_a_placement_group() -> Any:
    """Ranks of an executor that an actor makes in its own placement group take no more than that group has."""
    group = ray.util.placement_group([{"CPU": 1}] * 3, strategy="PACK")
    ray.get(group.ready())

    @ray.remote(num_cpus=1)
    class Caller:
        def work(self) -> list[Any]:
            ranks = executor(num_workers=2)
            ranks.start()
            try:
                return ranks.execute(whoami)
            finally:
                ranks.shutdown()

    place = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
        group, placement_group_capture_child_tasks=True
    )
    return ray.get(Caller.options(scheduling_strategy=place).remote().work.remote())


def no_room() -> Any:
    """More ranks than the cluster has CPUs."""
    ranks = RayExecutor(RayExecutor.create_settings(placement_group_timeout_s=2), num_workers=99)
    try:
        ranks.start()
    except TimeoutError as error:
        return str(error)


def elastic_training(*wanted: int) -> list[Any]:
    """Runs on a rank: trains until rounds of so many ranks have been seen, one after the other."""
    import torch

    import horovod.torch as hvd

    hvd.init()

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.left and state.step < 20_000:
            size = int(hvd.allreduce(torch.ones(1), op=hvd.Sum, name="size").item())
            if size == state.left[0]:
                state.left = state.left[1:]
                processes = hvd.allgather_object([os.uname().nodename, os.getpid()])
                log({"size": size, "processes": sorted(processes)})
            state.step += 1
            time.sleep(0.05)
            state.commit()

    state = hvd.elastic.TorchState(step=0, left=list(wanted))
    train(state)
    return [hvd.rank(), hvd.size(), state.left]


def elastic(*sizes: str) -> Any:
    """An elastic job of at least two ranks, and at most four, until there were so many. Says when that is."""
    logged: list[Any] = []

    def note(value: dict[str, Any]) -> None:
        print(f"there are {value['size']}", flush=True)
        logged.append(value)

    ranks = executor(min_workers=2, max_workers=4)
    ranks.start()
    found = ranks.run(elastic_training, list(map(int, sizes)), callbacks=[note])
    return {"ranks": found, "logged": logged}


def elastic_of_old() -> Any:
    """The interface of earlier versions. Says where the launcher is, too."""
    settings = ElasticRayExecutor.create_settings(min_np=2, max_np=3, elastic_timeout=60)
    ranks = ElasticRayExecutor(settings, env_vars={"MINE": "yes"})
    ranks.start()
    return ranks.run(lambda: [*elastic_training(), os.environ["MINE"], os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"]])


PROGRAMS: dict[str, Callable[..., Any]] = {
    each.__name__: each for each in (static, failing, inside_a_placement_group, no_room, elastic, elastic_of_old)
}


if __name__ == "__main__":
    ray.init(log_to_driver=False)
    print(f"result: {json.dumps(PROGRAMS[sys.argv[1]](*sys.argv[2:]))}", flush=True)
