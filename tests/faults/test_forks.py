"""Children of a rank: DataLoader workers and other forks. They never touch the rank's connections, nor keep them alive."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ranks import Death, RankPool
from time_limits import SOON

Ranks = Callable[..., RankPool]


@pytest.mark.parametrize("engine", ["shm", "tcp"])
def test_training_with_data_workers(ranks: Ranks, engine: str) -> None:
    def train() -> list[float]:
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        import horovod.torch as hvd

        os.environ["HOROVOD_CPU_OPERATIONS"] = engine
        try:
            hvd.init()
            torch.manual_seed(0)
            data = TensorDataset(torch.randn(32, 3))
            model = torch.nn.Linear(3, 1)
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
            for persistent in (False, True):
                loader = DataLoader(
                    data, batch_size=4, num_workers=2, multiprocessing_context="fork", persistent_workers=persistent
                )
                for _ in range(2):
                    under_way = hvd.allreduce_async(torch.ones(1_000_000), op=hvd.Sum)  # while workers are forked
                    for (x,) in loader:
                        optimizer.zero_grad()
                        (model(x) * (hvd.rank() + 1)).sum().backward()
                        optimizer.step()
                    assert hvd.synchronize(under_way)[-1].item() == 2.0
                del loader
            return model.weight.flatten().tolist()
        finally:
            hvd.shutdown()
            del os.environ["HOROVOD_CPU_OPERATIONS"]

    pool = ranks(2, framework="torch")
    with pool.leaves_nothing():
        first, second = pool.run(train)
    assert first == second


def test_what_a_forked_child_can_do(ranks: Ranks) -> None:
    """Ask who it is, and leave; not communicate."""

    def check() -> None:
        import gc

        import torch

        import horovod.torch as hvd

        hvd.init()
        under_way = hvd.allreduce_async(torch.ones(10), name="before", op=hvd.Sum)
        hvd.synchronize(hvd.allreduce_async(torch.ones(10)))
        gc.collect()  # a child must not destroy what another test has left: TensorFlow's functions crash there
        child = os.fork()
        if child == 0:
            status = 1
            try:
                mine = [os.open("/etc/hostname", os.O_RDONLY) for _ in range(40)]  # over the numbers of what was closed
                refused = 0
                for call in (
                    lambda: hvd.allreduce(torch.ones(1)),
                    lambda: hvd.allgather(torch.ones(1), name="x"),
                    lambda: hvd.barrier(),
                    lambda: hvd.broadcast_object(1),
                ):
                    try:
                        call()
                    except hvd.HorovodInternalError as error:
                        refused += "forked from rank" in str(error)
                assert refused == 4
                assert hvd.rank() == int(os.environ["HOROVOD_RANK"]) and hvd.size() == 2
                assert hvd.is_initialized()
                hvd.shutdown()
                assert not hvd.is_initialized()
                gc.collect()
                assert all(os.fstat(descriptor).st_size for descriptor in mine)  # nobody closes them but the child
                status = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(status)
        _, ended = os.waitpid(child, 0)
        assert ended == 0
        assert hvd.synchronize(under_way).tolist() == [2.0] * 10
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2.0
        hvd.shutdown()

    pool = ranks(2, framework="torch")
    with pool.leaves_nothing():
        pool.run(check)


def test_a_fork_of_a_fork(ranks: Ranks) -> None:
    def check() -> None:
        import torch

        import horovod.torch as hvd

        hvd.init()
        child = os.fork()
        if child == 0:
            grandchild = os.fork()
            if grandchild == 0:
                os._exit(hvd.rank())
            _, status = os.waitpid(grandchild, 0)
            os._exit(os.waitstatus_to_exitcode(status))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == hvd.rank()
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2.0
        hvd.shutdown()

    ranks(2, framework="torch").run(check)


@pytest.mark.parametrize("kind", ["fork", "subprocess"])
@pytest.mark.parametrize("engine", ["shm", "tcp"])
def test_a_killed_rank_whose_child_lives_on(ranks: Ranks, tmp_path: Path, kind: str, engine: str) -> None:
    """It is noticed at once, not after the timeout, although the child has inherited every descriptor."""
    alive = tmp_path / "alive"
    alive.touch()

    def work(alive: str) -> str:
        import subprocess

        from horovod.common import basics
        from horovod.core.errors import HorovodInternalError
        from horovod.core.lifecycle import context
        from horovod.core.submission import collectives

        basics.init()
        try:
            collectives.barrier().wait()  # rank 1 may come out of it first, and end before the others do
            if context.current().identity.rank == 1:
                if kind == "subprocess":
                    subprocess.Popen(["sh", "-c", f"for i in $(seq 300); do [ -e {alive} ] && sleep 0.1; done"])
                elif os.fork() == 0:
                    deadline = time.monotonic() + SOON
                    while os.path.exists(alive) and time.monotonic() < deadline:  # noqa: PTH110  nothing is imported here
                        time.sleep(0.05)
                    os._exit(0)
                signal.raise_signal(signal.SIGKILL)
            collectives.barrier().wait(SOON)
        except HorovodInternalError as error:
            return str(error)
        finally:
            context.shutdown()
        return "nothing happened"

    pool = ranks(3, {"HOROVOD_CPU_OPERATIONS": engine, "HOROVOD_GLOO_TIMEOUT_SECONDS": "60"})
    try:
        results = pool.run(work, str(alive), dies={1})
    finally:
        alive.unlink()
    assert results[1] == Death(-signal.SIGKILL)
    for rank in (0, 2):
        assert "rank 1 (host localhost" in results[rank] and "its process ended" in results[rank], results[rank]
