"""Odd but plausible arguments of ``horovod.keras`` on every backend: each works or is refused, and the job goes on."""

from __future__ import annotations

from typing import Any

from jobs import Job


def test_an_odd_argument_works_or_is_an_error_of_that_call(job: Job) -> None:
    def check() -> None:
        import keras
        import numpy as np
        import pytest

        import horovod.keras as hvd

        refused = (TypeError, ValueError)
        x, rank = np.ones(2, np.float32), hvd.rank()

        def same(found: Any, wanted: float) -> None:
            np.testing.assert_allclose(keras.ops.convert_to_numpy(found), np.full(2, wanted))

        numbers = [
            np.int64(1),
            np.array(1),
            keras.ops.convert_to_tensor(1),
            keras.Variable(1, dtype="int32", trainable=False),
        ]
        for number in numbers:
            same(hvd.broadcast(x * rank, number), 1)
            same(hvd.allreduce(x, prescale_factor=number, postscale_factor=np.float32(3)), 3)
            hvd.DistributedOptimizer(
                keras.optimizers.SGD(), backward_passes_per_step=number, gradient_predivide_factor=number, groups=number
            )
            hvd.callbacks.BroadcastGlobalVariablesCallback(number)
        same(hvd.allreduce(x, 5), 1)  # a name
        same(hvd.allreduce(x, name=np.int64(5), average=np.bool_(False)), 2)
        with pytest.warns(UserWarning, match="average='loss' counts as True and is not a name; write name='loss'"):
            same(hvd.allreduce(x, None, "loss"), 1)
        odd = hvd.DistributedOptimizer(keras.optimizers.SGD(), op=None, compression=None, num_groups=None)
        odd.apply([keras.ops.convert_to_tensor(x * rank)], [keras.Variable(x)])
        for wrong in (None, True, "1", 1j, [1], np.array([1]), float("nan"), "n" * 5000):
            calls = [
                lambda wrong=wrong: hvd.broadcast(x, wrong),
                lambda wrong=wrong: hvd.allreduce(x, prescale_factor=wrong),
                lambda wrong=wrong: hvd.allreduce(x, postscale_factor=wrong),
            ]
            calls += [
                lambda name=name, wrong=wrong: hvd.DistributedOptimizer(keras.optimizers.SGD(), **{name: wrong})
                for name in ("backward_passes_per_step", "gradient_predivide_factor", "num_groups", "process_set")
                if (name, wrong) != ("num_groups", None)
            ]
            for call in calls:
                with pytest.raises(refused):
                    print("not refused:", wrong, call())
            same(hvd.allreduce(x), 1)
        for wrong in (None, 1, "SGD", keras.optimizers.SGD):
            with pytest.raises(refused):
                hvd.DistributedOptimizer(wrong)
        same(hvd.allreduce(x), 1)

    job(2, check)
