"""What goes wrong: which error it is, eagerly and in functions, and that everything else goes on."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from typing import Any

import pytest
import tensorflow as tf

import horovod.tensorflow as hvd
from horovod.common.exceptions import HorovodInternalError, MismatchError
from ranks import Death
from time_limits import SOON


def test_ranks_that_disagree_get_an_error_that_names_them(job: Any) -> None:
    def check() -> None:
        mine = tf.ones([hvd.rank() + 1])
        with pytest.raises(tf.errors.FailedPreconditionError, match=r"Mismatched ALLREDUCE tensor shapes") as eager:
            hvd.allreduce(mine, name="mine")
        assert isinstance(eager.value, HorovodInternalError) and isinstance(eager.value, MismatchError)
        assert eager.value.ranks == (0, 1) and "test_errors.py" in eager.value.call_sites[1]
        assert "rank 0: allreduce(Average) float32 [1] at " in str(eager.value) and "test_errors.py" in str(eager.value)
        again = pickle.loads(pickle.dumps(eager.value))
        assert str(again) == str(eager.value) and type(again) is type(eager.value)

        @tf.function
        def reduce(x: Any) -> Any:
            return hvd.allreduce(x, name="mine")

        for _ in range(2):
            with pytest.raises(tf.errors.UnknownError, match=r"Mismatched ALLREDUCE tensor shapes") as found:
                reduce(mine)
            assert "test_errors.py" in str(found.value) and "rank 1: allreduce(Average) float32 [2]" in str(found.value)
        assert float(reduce(tf.constant(1.0))) == 1.0
        with pytest.raises(tf.errors.FailedPreconditionError, match="Mismatched data types"):
            hvd.allgather(tf.zeros([2], tf.float32 if hvd.rank() else tf.int32))
        with pytest.raises(tf.errors.FailedPreconditionError, match="root ranks"):
            hvd.broadcast(tf.zeros([2]), hvd.rank())
        with pytest.raises(tf.errors.FailedPreconditionError, match="rank-zero tensor"):
            hvd.allgather(tf.constant(1.0))
        assert float(hvd.allreduce(tf.constant(1.0))) == 1.0

    job(2, check)


def test_types_that_cannot_be_communicated_are_refused_in_the_call(job: Any) -> None:
    def check() -> None:
        for wrong in (tf.constant("text"), tf.constant([[b"a"]])):
            for call in (hvd.allreduce, hvd.allgather, lambda x: hvd.broadcast(x, 0), hvd.alltoall):
                with pytest.raises(TypeError, match="cannot be communicated"):
                    call(wrong)
                with pytest.raises(TypeError, match="cannot be communicated"):
                    tf.function(call)(wrong)
        with pytest.raises(tf.errors.InvalidArgumentError, match="cannot be averaged"):
            hvd.allreduce(tf.constant([True]))
        with pytest.raises(ValueError, match="is not a reduction"):
            hvd.allreduce(tf.constant([1.0]), op="mean")

    job(1, check)


def test_xla_is_refused_with_advice(job: Any) -> None:
    def check() -> None:
        compiled = tf.function(lambda x: hvd.allreduce(x), jit_compile=True)
        with pytest.raises(NotImplementedError, match="jit_compile=False"):
            compiled(tf.constant(1.0))
        inside = tf.function(lambda x: tf.function(lambda y: hvd.allreduce(y))(x), jit_compile=True)
        with pytest.raises(NotImplementedError, match="jit_compile=False"):
            inside(tf.constant(1.0))
        between = tf.function(lambda x: x * 2, jit_compile=True)
        assert float(tf.function(lambda x: hvd.allreduce(between(x)))(tf.constant(1.0))) == 2.0

    job(2, check)


def test_operations_after_shutdown_say_so(job: Any) -> None:
    def check() -> None:
        reduce = tf.function(lambda: hvd.allreduce(tf.constant(1.0), name="x"))
        assert float(reduce()) == 1.0
        hvd.shutdown()
        with pytest.raises(tf.errors.FailedPreconditionError, match="has not been initialized") as found:
            hvd.allreduce(tf.constant(1.0))
        assert isinstance(found.value, HorovodInternalError)
        with pytest.raises(tf.errors.UnknownError, match="has not been initialized"):
            reduce()
        assert int(hvd.process_set_included_op()) == -1
        hvd.init()
        assert float(reduce()) == 1.0  # a function outlives a generation

    job(2, check)


def test_shutdown_ends_a_function_that_waits(job: Any) -> None:
    def check() -> None:
        reduce = tf.function(lambda: hvd.allreduce(tf.constant(1.0), name="never"))
        if hvd.rank() == 0:
            found: list[BaseException] = []

            def wait() -> None:
                try:
                    reduce()
                except BaseException as error:
                    found.append(error)

            thread = threading.Thread(target=wait)
            thread.start()
            hvd.broadcast_object("now", 0, name="sign")
            thread.join(SOON)
            assert len(found) == 1 and isinstance(found[0], tf.errors.UnknownError), found
            assert "has been shut down" in str(found[0])
        else:
            hvd.broadcast_object(None, 0, name="sign")
            hvd.shutdown()

    job(2, check)


def test_a_rank_that_dies_ends_a_function_everywhere(job: Any) -> None:
    def check() -> str:
        @tf.function
        def reduce(x: Any) -> Any:
            return tf.while_loop(lambda _: True, lambda x: [hvd.allreduce(x, name="endless")], [x])

        if hvd.rank() == 1:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
        with pytest.raises(tf.errors.UnknownError) as found:
            reduce(tf.constant(1.0))
        with pytest.raises(tf.errors.UnknownError) as eager:
            hvd.allreduce(tf.constant(1.0))
        assert isinstance(eager.value, HorovodInternalError)
        return str(found.value)

    texts = job(3, check, dies={1})
    assert isinstance(texts[1], Death)
    for text in (texts[0], texts[2]):
        assert "rank 1" in text and "failed" in text, text
