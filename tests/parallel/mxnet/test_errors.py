"""What goes wrong: which error it is, where it surfaces, and that everything else goes on."""

from __future__ import annotations

import os
import pickle
import queue
import signal
import threading
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
import pytest

import horovod.mxnet as hvd
from horovod.common import exceptions
from ranks import Death
from time_limits import SOON, await_file


def test_ranks_that_disagree_get_an_error_that_names_them_wherever_they_wait(job: Any) -> None:
    def check() -> None:
        def line(offset: int) -> str:
            return f"{__file__}:{check.__code__.co_firstlineno + offset}"

        x = mx.nd.ones((hvd.rank() + 1,))
        calls = {
            "wait_to_read": lambda: hvd.allreduce(x, name="x").wait_to_read(),
            "asnumpy": lambda: hvd.allreduce(x, name="x").asnumpy(),
            "in place": lambda: hvd.allreduce_(x.copy(), name="x").wait_to_read(),
            "what is computed from it": lambda: (hvd.allreduce(x, name="x") + 1).asnumpy(),
            "a group": lambda: hvd.grouped_allreduce([mx.nd.ones((2,)), x], name="x")[0].wait_to_read(),
            "waitall": lambda: (hvd.allreduce(x, name="x"), mx.nd.waitall()),
        }
        for what, call in calls.items():
            for _ in range(2):
                with pytest.raises(mx.MXNetError, match=r"Mismatched ALLREDUCE tensor shapes") as found:
                    call()
                assert isinstance(found.value, exceptions.MismatchError), what
                assert found.value.ranks == (0, 1) and __file__ in found.value.call_sites[1], what
        text = str(found.value)
        assert text.startswith("Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape [1]"), text
        assert f"\n  rank 0: allreduce(Average) float32 [1] at {__file__}:" in text, text
        assert f"\n  rank 1: allreduce(Average) float32 [2] at {__file__}:" in text, text
        again = pickle.loads(pickle.dumps(found.value))
        assert str(again) == text and type(again) is type(found.value)
        assert x.asnumpy().tolist() == [1.0] * (hvd.rank() + 1)
        assert hvd.allreduce(mx.nd.ones((1,)), op=hvd.Sum, name="x").asscalar() == 2.0

    job(2, check)


def test_blocking_operations_raise_in_the_call(job: Any) -> None:
    def check() -> None:
        me = hvd.rank()
        for call, text in (
            (lambda: hvd.allgather(mx.nd.ones((2,), dtype="float32" if me else "int32")), "Mismatched data types"),
            (lambda: hvd.grouped_allgather([mx.nd.ones((2, me + 1))]), "Mismatched ALLGATHER tensor shapes"),
            (lambda: hvd.allgather(mx.np.array(1.0)), "rank-zero tensor"),
            (lambda: hvd.alltoall(mx.nd.ones((2, me + 1))), "Mismatched ALLTOALL tensor shapes"),
            (lambda: hvd.reducescatter(mx.nd.ones((2 + me,))), "Mismatched REDUCESCATTER tensor shapes"),
            (lambda: hvd.grouped_reducescatter([mx.nd.ones((2,))], prescale_factor=me + 1), "prescale"),
        ):
            with mx.util.np_shape(True), pytest.raises(mx.MXNetError, match=text) as found:
                call()
            assert isinstance(found.value, exceptions.HorovodInternalError)
        with pytest.raises(mx.MXNetError, match="root ranks"):
            hvd.broadcast(mx.nd.ones((2,)), me).wait_to_read()

    job(2, check)


def test_a_name_that_is_in_flight_is_refused_and_named(job: Any) -> None:
    def check() -> None:
        if hvd.rank() == 0:
            first = hvd.allreduce(mx.nd.ones((2,)), name="twice")
            second = hvd.allreduce(mx.nd.ones((2,)), name="twice")
            found = queue.SimpleQueue[BaseException]()
            refused = threading.Thread(target=lambda: _note(found, second.wait_to_read))
            other = threading.Thread(target=lambda: _note(found, first.wait_to_read))
            refused.start(), other.start()
            error = found.get(timeout=SOON)  # of one of the two, whichever the engine started later
            hvd.broadcast_object("now", 0)
            refused.join(), other.join()
            assert found.empty() and isinstance(error, (mx.MXNetError, RuntimeError)), error
            assert isinstance(error, ValueError) and "same name as another tensor" in str(error)
            assert "'horovod_allreduce.twice'" in str(error)
        else:
            hvd.broadcast_object(None, 0)
            hvd.allreduce(mx.nd.ones((2,)), name="twice").wait_to_read()

    job(2, check)


def _note(errors: queue.SimpleQueue[BaseException], call: Any) -> None:
    try:
        call()
    except BaseException as error:
        errors.put(error)


def test_what_cannot_be_communicated_is_refused_in_the_call(job: Any) -> None:
    def check() -> None:
        calls = [
            hvd.allreduce,
            hvd.allreduce_,
            hvd.alltoall,
            hvd.reducescatter,
            hvd.allgather,
            lambda x: hvd.broadcast(x, 0),
            lambda x: hvd.broadcast_(x, 0),
            lambda x: hvd.grouped_allreduce([x]),
            lambda x: hvd.grouped_allreduce_([x]),
        ]
        x = mx.nd.ones((2,))
        sparse = mx.nd.sparse.row_sparse_array((mx.nd.ones((1, 2)), [0]), shape=(3, 2))
        for call in calls:
            for wrong, text in ((x.astype("bool"), "type bool cannot be communicated"), (sparse, "sparse arrays")):
                with pytest.raises(ValueError, match=text) as found:
                    call(wrong)
                assert isinstance(found.value, mx.MXNetError)
            with pytest.raises((ValueError, AssertionError), match=r"mxnet\.nd\.NDArray, not ndarray"):
                call(np.ones(2))
        for wrong_arguments in (
            lambda: hvd.allreduce(x, op="mean"),
            lambda: hvd.allreduce(x, prescale_factor="a half"),
            lambda: hvd.allreduce(x, priority=0.5),
            lambda: hvd.broadcast(x, 0.5),
            lambda: hvd.broadcast_(x, None),
            lambda: hvd.broadcast(x, 7),
            lambda: hvd.allgather(x, priority="high"),
            lambda: hvd.allreduce(
                x.astype("int32"), op=None, average=True, postscale_factor=1, process_set=hvd.ProcessSet([0])
            ),
        ):
            with pytest.raises(ValueError):
                wrong_arguments()
        assert hvd.allreduce(x, op=hvd.Sum).asnumpy().tolist() == [2.0, 2.0]

    job(2, check)


def test_after_shutdown_operations_say_so_and_a_second_init_works(job: Any) -> None:
    def check() -> None:
        x = mx.nd.ones((2,))
        y = hvd.allreduce(x, name="never" + str(hvd.rank()))
        hvd.shutdown()
        with pytest.raises(hvd.HorovodInternalError, match=r"has been shut down|not been initialized"):
            y.wait_to_read()
        with pytest.raises(hvd.HorovodInternalError, match="has not been initialized"):
            hvd.allreduce(x)
        hvd.init()
        assert hvd.allreduce(x, op=hvd.Sum).asnumpy().tolist() == [2.0, 2.0]

    job(2, check)


def test_a_rank_that_dies_fails_the_others_wherever_they_wait(job: Any, tmp_path: Path) -> None:
    def check(folder: Path) -> list[str]:
        x = mx.nd.ones((2,))
        pending = hvd.allreduce(x, name="pending") if hvd.rank() != 1 else None
        hvd.allgather(x)
        (folder / str(hvd.rank())).touch()
        if hvd.rank() == 1:
            for other in (0, 2):  # they may not have their result yet
                await_file(folder / str(other))
            os.kill(os.getpid(), signal.SIGKILL)
        texts = []
        for call in (
            pending.wait_to_read,
            lambda: hvd.allreduce_(x.copy()).asnumpy(),
            lambda: hvd.allgather(x),
            lambda: hvd.broadcast(x, 0).wait_to_read(),
            lambda: hvd.broadcast_object(1),
        ):
            with pytest.raises(hvd.HorovodInternalError) as found:
                call()
            assert isinstance(found.value, mx.MXNetError)
            texts.append(str(found.value))
        return texts

    results = job(3, check, tmp_path, dies={1})
    assert isinstance(results[1], Death)
    for texts in (results[0], results[2]):
        assert all("rank 1" in text for text in texts), texts


def test_a_computation_that_fails_on_one_rank_is_told_there_and_named_to_the_others(job: Any) -> None:
    """Its operation is left out by the engine; its script is told, and when it leaves so are the others."""

    def check() -> str:
        wrong = mx.nd.random.normal(0, -1, (2,)) if hvd.rank() == 1 else mx.nd.ones((2,))
        result = hvd.allreduce(wrong, name="x")
        try:
            result.wait_to_read()
        except mx.MXNetError as error:
            return type(error).__name__ + ": " + str(error)
        return ""

    first, second, third = job(3, check)
    assert "rank 1" in first and "rank 1" in third and first.startswith("RankLostError")
    assert second.startswith("MXNetError") and "Check failed" in second
