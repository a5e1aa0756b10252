"""``init``, ``shutdown`` and ``join`` as TensorFlow needs them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from horovod.common import basics
from horovod.core.lifecycle.context import running
from horovod.core.submission import collectives
from horovod.tensorflow.graph import completions
from horovod.tensorflow.graph.decorators import unconverted
from horovod.tensorflow.graph.names import collective_name
from horovod.tensorflow.graph.operation import Outputs, Submission
from horovod.tensorflow.graph.run import run


def init(*args: Any, **kwargs: Any) -> None:
    """Start Horovod; every rank calls it first. Arguments as :func:`horovod.common.basics.init`.

    Where OMP_NUM_THREADS says how many threads this rank is to compute with, as under horovodrun, and nothing else says so,
    TensorFlow is told the same, unless it has started its threads already.
    """
    basics.init(*args, **kwargs)
    _share_cores(os.environ.get("OMP_NUM_THREADS", ""))


def _share_cores(threads: str) -> None:
    if not threads.isdecimal() or int(threads) < 1:
        return
    threading = tf.config.threading
    try:
        if not threading.get_intra_op_parallelism_threads() and "TF_NUM_INTRAOP_THREADS" not in os.environ:
            threading.set_intra_op_parallelism_threads(int(threads))
        if not threading.get_inter_op_parallelism_threads() and "TF_NUM_INTEROP_THREADS" not in os.environ:
            threading.set_inter_op_parallelism_threads(int(threads))
    except RuntimeError:
        pass  # TensorFlow has its threads


def shutdown() -> None:
    """Stop Horovod on this rank, which ends it on all ranks."""
    basics.shutdown()
    completions.stop()


@unconverted
def join() -> Any:
    """Say that this rank has no more data; wait until all ranks have said so.

    Until then it takes part in what the others do as one who has nothing: see :func:`horovod.torch.join`, which tells what
    that means for each operation.

    Returns:
        int32 scalar: the global rank that joined last.
    """

    def start(_: Sequence[Any], awaited: bool) -> tuple[Any, Outputs]:
        handle = collectives.join()

        def outputs() -> list[Any]:
            running().everybody_joined()
            return [tf.constant(handle.result, tf.int32)]

        return handle, outputs

    names = collective_name("HorovodJoin", "HorovodJoin", [])
    return run(names.node, [Submission([], start, [tf.TensorSpec([], tf.int32)])])[0][0]
