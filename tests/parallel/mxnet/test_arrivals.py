"""What a process remembers from an earlier generation does not decide what it sends: a new process remembers nothing."""

from __future__ import annotations

from typing import Any

import mxnet as mx

import horovod.mxnet as hvd

KEPT = "_horovod_test_kept"


class Program:
    """A net whose shapes are not known yet, and an optimizer."""

    def __init__(self) -> None:
        self.net = mx.gluon.nn.Dense(2, prefix="late_")
        self.net.initialize(mx.init.One())
        hvd.broadcast_parameters({"first": mx.nd.ones((1,))})
        self.optimizer = hvd.DistributedOptimizer(mx.optimizer.SGD(learning_rate=0.1))
        self.weights = [mx.nd.ones((2,)) for _ in range(2)]

    def update(self, *indices: int) -> None:
        for index in indices:
            self.optimizer.update(index, self.weights[index], mx.nd.ones((2,)), None)


def first() -> None:
    import builtins

    program = Program()
    hvd.broadcast_parameters(program.net.collect_params())  # when the shapes are known, which is not in this generation
    program.update(1, 1)
    mx.nd.waitall()
    setattr(builtins, KEPT, program)


def second() -> list[str]:
    """The collectives of this rank, by name: MXNet's threads may submit those of one step in any order."""
    import builtins

    from horovod.core.lifecycle.context import running

    program = vars(builtins).pop(KEPT, None)
    if program is None:
        program = Program()
    else:
        hvd.broadcast_parameters({"first": mx.nd.ones((1,))})
    program.net(mx.nd.ones((1, 3))).wait_to_read()
    for _ in range(3):
        program.update(0, 1)
        mx.nd.waitall()
    hvd.allreduce(mx.nd.ones((1,)), name="end").wait_to_read()
    recorder = running().workers[0].recorder
    assert recorder is not None
    return sorted(f"{each.request.operation.name} {each.request.name}" for each in recorder.ring)


def test_a_rank_that_arrives_makes_the_collectives_of_the_others(job: Any) -> None:
    env = {"HOROVOD_FLIGHT_RECORDER_SIZE": "10000", "HOROVOD_STALL_CHECK_DISABLE": "1"}
    job(2, first, env=env)
    results = job(3, second, env=env)
    assert results[0] == results[1] == results[2] and len(results[0]) > 8
