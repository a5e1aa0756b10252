"""What callbacks remember from an earlier generation does not decide what they send: a process that has just arrived remembers
nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

KEPT = "_horovod_test_kept"


class Program:
    """A model and callbacks that are kept from one generation to the next. ``built``: the model has its variables before."""

    def __init__(self, built: bool, rate: float, seed: int) -> None:
        import keras

        import horovod.keras as hvd

        keras.utils.set_random_seed(seed)
        begin = [keras.layers.Input((1,))] if built else []
        self.model = keras.Sequential([*begin, keras.layers.Dense(1)])
        self.model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(rate)), loss="mse")
        self.broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        self.schedule = hvd.callbacks.LearningRateScheduleCallback(multiplier=lambda epoch: 0.1**epoch)

    def fit(self) -> None:
        x = np.ones((4, 1), np.float32)
        callbacks = [self.broadcast, self.schedule]
        self.model.fit(x, x, batch_size=2, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)


def first() -> Any:
    """The weights of a model whose variables are made in ``fit``."""
    import builtins

    import horovod.keras as hvd

    kept, late = (Program(built, 0.1, hvd.rank()) for built in (True, False))
    kept.fit()
    late.fit()
    setattr(builtins, KEPT, kept)
    return [each.tolist() for each in late.model.get_weights()]


def second() -> Any:
    """The collectives of this rank, and what its callbacks have come to."""
    import builtins

    import horovod.keras as hvd
    from horovod.core.lifecycle.context import running

    program = vars(builtins).pop(KEPT, None)
    if program is None:  # the rate is the present one of the others, which an elastic state has given to this rank
        program = Program(True, 0.01, hvd.rank())
    program.fit()
    weights = [each.tolist() for each in program.model.get_weights()]
    hvd.allreduce(0.0, name="end")
    recorder = running().workers[0].recorder
    assert recorder is not None
    names = [f"{each.request.operation.name} {each.request.name}" for each in recorder.ring]
    return weights, program.schedule.initial_lr, program.broadcast.broadcast_done, names


def test_a_rank_that_arrives_makes_the_collectives_of_the_others(job: Any) -> None:
    env = {"HOROVOD_FLIGHT_RECORDER_SIZE": "10000", "HOROVOD_STALL_CHECK_DISABLE": "1"}
    late = job(2, first, env=env)
    assert late[0] == late[1]
    results = job(3, second, env=env)
    assert results[0] == results[1] == results[2]
    _, rate, done, names = results[0]
    assert abs(rate - 0.1) < 1e-6 and done and len(names) > 5
