"""Collectives as operations of MXNet's engine: the script runs on, the engine keeps the order, nothing is lost on the way."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
import pytest

import horovod
import horovod.mxnet as hvd
from jobs import make_job
from ranks import RankPool
from time_limits import SOON

SOURCE = Path(horovod.__file__).resolve().parents[1]


def test_the_script_runs_on_while_a_peer_is_late(job: Any) -> None:
    def check() -> None:
        x = mx.nd.ones((4,)) * (hvd.rank() + 1)
        if hvd.rank() == 0:
            many = [hvd.allreduce(x * i, op=hvd.Sum, name=str(i)) for i in range(20)]
            copy = hvd.broadcast(x, 1, name="b")
            assert (x * 5).asnumpy().tolist() == [
                5.0
            ] * 4  # neither the script waits, nor the engine for lack of threads
            hvd.broadcast_object("now", 0)
        else:
            hvd.broadcast_object(None, 0)
            copy = hvd.broadcast(x, 1, name="b")
            many = [hvd.allreduce(x * i, op=hvd.Sum, name=str(i)) for i in reversed(range(20))][::-1]
        assert [int(y.asnumpy()[0]) for y in many] == [3 * i for i in range(20)]
        assert copy.asnumpy().tolist() == [2.0] * 4

    job(2, check)


def test_one_array_is_read_by_several_operations_at_once(job: Any) -> None:
    """So ranks may start them in different orders."""

    def check() -> None:
        x = mx.nd.ones((4,))
        names = [str(i) for i in range(10)]
        results = [hvd.allreduce(x, op=hvd.Sum, name=name) for name in (names if hvd.rank() else reversed(names))]
        assert (x + 1).asnumpy().tolist() == [2.0] * 4
        if hvd.rank() == 0:
            last = hvd.allreduce(x, op=hvd.Sum, name="last")
            assert hvd.allgather(x).shape == (8,)
        else:
            assert hvd.allgather(x).shape == (8,)
            last = hvd.allreduce(x, op=hvd.Sum, name="last")
        assert all(each.asnumpy().tolist() == [2.0] * 4 for each in [*results, last])

    job(2, check)


def test_an_operation_waits_for_writes_and_later_reads_wait_for_it(job: Any) -> None:
    def check() -> None:
        x = mx.nd.ones((1000,)) * (hvd.rank() + 1)
        seen = []
        for _ in range(30):  # of one name, without waiting: each comes after the one before
            x += 1
            seen.append(hvd.allreduce(x, name="x"))
            hvd.allreduce_(x, name="y", priority=-1)
            hvd.broadcast_(x, 1, name="z", priority=np.int64(3))
            seen.append(x.copy())
        value, wanted = float(np.mean([1, 2, 3])), []
        for _ in range(30):
            value += 1
            wanted += [value, value]
        assert [float(each.asnumpy()[0]) for each in seen] == wanted

    job(3, check)


def test_what_is_computed_from_a_result_waits_for_it_in_the_engine(job: Any) -> None:
    def check() -> None:
        weight = mx.nd.ones((64, 64)) * (hvd.rank() + 1)
        weight.attach_grad()
        for _ in range(5):
            with mx.autograd.record():
                loss = mx.nd.dot(weight, mx.nd.ones((64, 64)) * 1e-3).sum()
            loss.backward()
            hvd.allreduce_(weight.grad, op=hvd.Sum, name="grad")
            weight -= 0.5 * weight.grad
            hvd.allreduce_(weight, name="weight")
        wanted = 1.5 - 5 * 0.5 * 2 * 64 * 1e-3
        np.testing.assert_allclose(weight.asnumpy(), wanted, rtol=1e-5)

    job(2, check)


def test_views_of_one_array_can_be_reduced_in_a_group(job: Any) -> None:
    def check() -> None:
        x = mx.nd.arange(12) * (hvd.rank() + 1)
        hvd.grouped_allreduce_([x[0:4], x[4:6], x[6:12].reshape((2, 3))], op=hvd.Sum)
        assert x.asnumpy().tolist() == [3.0 * i for i in range(12)]
        first, second = hvd.grouped_allreduce([x[0:3], x[0:3]])
        assert first.asnumpy().tolist() == second.asnumpy().tolist() == [0.0, 3.0, 6.0]
        assert hvd.allgather(x[2:4]).asnumpy().tolist() == [6.0, 9.0] * 2

    job(2, check)


def test_arrays_in_a_layout_of_onednn_have_the_right_results(job: Any) -> None:
    """Convolutions leave their results, and in inference their weights, in blocks of channels."""

    def check() -> None:
        def convolved(rank: int) -> tuple[Any, Any]:
            mx.random.seed(rank)
            net = mx.gluon.nn.Conv2D(32, 3, in_channels=16, use_bias=False)
            net.initialize(mx.init.Uniform(1.0))
            return net(mx.nd.random.uniform(shape=(2, 16, 8, 8))), net.weight.data()

        results, weights = zip(*[[each.asnumpy() for each in convolved(rank)] for rank in range(2)], strict=True)
        mean = np.mean(results, axis=0)
        np.testing.assert_allclose(hvd.allreduce(convolved(hvd.rank())[0]).asnumpy(), mean, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(hvd.allreduce_(convolved(hvd.rank())[0]).asnumpy(), mean, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(hvd.broadcast(convolved(hvd.rank())[0], 1).asnumpy(), results[1])
        np.testing.assert_array_equal(hvd.broadcast_(convolved(hvd.rank())[1], 1).asnumpy(), weights[1])
        np.testing.assert_array_equal(hvd.allgather(convolved(hvd.rank())[0]).asnumpy(), np.concatenate(results))
        found = hvd.reducescatter(convolved(hvd.rank())[1])
        np.testing.assert_allclose(
            found.asnumpy(), np.split(np.mean(weights, axis=0), 2)[hvd.rank()], rtol=1e-5, atol=1e-6
        )

    job(2, check)


def test_an_array_of_another_device_goes_through_host_memory(job: Any) -> None:
    def check() -> None:
        from horovod.mxnet.ops import arrays, submission

        def is_host(array: Any) -> bool:  # what lies on cpu(1) is to be on a device
            return bool(array.context.device_id == 0)

        before = arrays.is_host
        arrays.is_host = submission.is_host = is_host
        try:
            device = mx.cpu(1)
            x = mx.nd.array([1.0, 2.0], ctx=device) * (hvd.rank() + 1)
            for result in (
                hvd.allreduce(x, op=hvd.Sum),
                hvd.grouped_allreduce([x, x], op=hvd.Sum)[1],
                hvd.allreduce_(x.copy(), op=hvd.Sum),
                hvd.broadcast(x * 3 if hvd.rank() == 0 else x, 0),
            ):
                assert result.context == device and result.asnumpy().tolist() == [3.0, 6.0]
            assert hvd.allgather(x).context == hvd.alltoall(x).context == hvd.reducescatter(x).context == device
            assert hvd.allgather(x).asnumpy().tolist() == [1.0, 2.0, 2.0, 4.0]
            wrong = mx.nd.ones((hvd.rank() + 1,), ctx=device)
            hvd.allreduce_(wrong, name="wrong")
            with pytest.raises(hvd.HorovodInternalError, match="Mismatched"):
                wrong.wait_to_read()
        finally:
            arrays.is_host = submission.is_host = before

    job(2, check)


def test_a_process_can_fork_while_a_collective_is_under_way(job: Any) -> None:
    """As a Gluon DataLoader with workers does after ``broadcast_parameters``."""

    def check() -> None:
        x = mx.nd.ones((1 << 20,)) * (hvd.rank() + 1)
        for _ in range(3):
            hvd.allreduce_(x, op=hvd.Sum, name="x")
            child = os.fork()
            if child == 0:
                os._exit(int((mx.nd.ones((2,)) * 3).asnumpy()[0]))
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        assert x.asnumpy()[-1] == 12.0
        hvd.broadcast_(x, 0)
        data = mx.gluon.data.ArrayDataset(np.arange(8, dtype=np.float32))
        with_workers = mx.gluon.data.DataLoader(data, batch_size=4, num_workers=1)
        assert [batch.asnumpy().tolist() for batch in with_workers] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        del with_workers
        assert hvd.allreduce(x).asnumpy()[0] == 12.0

    job(2, check)


def test_the_naive_engine_gives_the_same_results_and_raises_in_the_call(ranks: Callable[..., RankPool]) -> None:
    """``MXNET_ENGINE_TYPE=NaiveEngine``, for debugging: errors come in the call."""

    def check() -> None:
        x = mx.nd.ones((4,)) * (hvd.rank() + 1)
        assert hvd.allreduce(x, op=hvd.Sum).asnumpy().tolist() == [3.0] * 4
        hvd.allreduce_(x)
        assert hvd.broadcast(x, 1).asnumpy().tolist() == hvd.allgather(x).asnumpy().tolist()[:4] == [1.5] * 4
        with pytest.raises(hvd.HorovodInternalError, match="Mismatched ALLREDUCE tensor shapes"):
            hvd.allreduce(mx.nd.ones((hvd.rank() + 1,)), name="wrong")
        assert hvd.allreduce(x).asnumpy().tolist() == [1.5] * 4

    make_job(lambda size: ranks(2, {"MXNET_ENGINE_TYPE": "NaiveEngine"}, "mxnet"), "horovod.mxnet")(2, check)


@pytest.mark.parametrize(
    ("ending", "status"),
    [("", 0), ("hvd.shutdown()", 0), ("hvd.allreduce(x, name='alone' + str(hvd.rank()))", 0), ("sys.exit(3)", 3)],
)
def test_a_script_that_ends_without_waiting_keeps_its_exit_code_and_does_not_crash(
    tmp_path: Path, ending: str, status: int
) -> None:
    (tmp_path / "script.py").write_text(
        textwrap.dedent("""
        import sys
        import mxnet as mx
        import horovod.mxnet as hvd
        hvd.init()
        x = mx.nd.ones((1 << 20,))
        for _ in range(5):
            hvd.allreduce_(x, name="x")
        """)
        + ending
    )
    environment = {name: value for name, value in os.environ.items() if "HOROVOD" not in name}
    done = subprocess.run(
        [sys.executable, "-m", "horovod.runner.launch", "-np", "2", sys.executable, "script.py"],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=SOON,
    )
    assert done.returncode == status, done.stderr
    assert "Segmentation" not in done.stderr and "Fatal" not in done.stderr, done.stderr
