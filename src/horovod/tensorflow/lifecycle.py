"""``init``, ``shutdown`` and ``join`` for TensorFlow."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from horovod.common import basics
from horovod.comparison.debugging import order
from horovod.core.lifecycle.context import running
from horovod.core.lifecycle.process_set import ProcessSet
from horovod.core.requests.handle import Handle
from horovod.core.submission import collectives
from horovod.tensorflow.data_order import follow_datasets
from horovod.tensorflow.device import tensorflow_devices
from horovod.tensorflow.graph import completions
from horovod.tensorflow.graph.decorators import unconverted
from horovod.tensorflow.graph.names import collective_name
from horovod.tensorflow.graph.operation import Submission
from horovod.tensorflow.graph.recorded import Collective, Outputs
from horovod.tensorflow.graph.run import run


def init(comm: Any = None, process_sets: Iterable[ProcessSet] | str | None = None) -> None:
    """As :func:`horovod.common.basics.init`. Every rank must call it.

    If OMP_NUM_THREADS is set, as under horovodrun, TensorFlow uses this number of threads. A number that the script or
    TensorFlow's own variables set has precedence, and threads that TensorFlow has already started are kept.
    """
    if not basics.is_initialized():
        tensorflow_devices.forget()
    basics.init(comm, process_sets)
    order.wanted = running().config.debug and running().identity.size > 1
    order.held.clear()
    if order.wanted:
        follow_datasets()
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
        pass  # TensorFlow has started its threads


def shutdown() -> None:
    """Stop Horovod on this rank, and so on all ranks. Does nothing if Horovod does not run."""
    basics.shutdown()
    completions.stop()
    tensorflow_devices.forget()


class Join(Collective, frozen=True):
    """Waits until all ranks have joined. Output: the rank that joined last."""

    def start(self, inputs: Sequence[Any], awaited: bool) -> tuple[Handle, Outputs]:
        handle = collectives.join()

        def outputs() -> list[Any]:
            running().all_joined()
            return [tf.constant(handle.result, tf.int32)]

        return handle, outputs


@unconverted
def join() -> Any:
    """Declare that this rank has no more data, and wait until all ranks have called it.

    Until then this rank takes part in the other ranks' collectives without data. :func:`horovod.torch.join` describes what
    this means for each operation.

    Returns:
        The global rank that joined last, an int32 scalar.
    """

    names = collective_name("HorovodJoin", "HorovodJoin", [])
    return run(names.node, [Submission([], Join(), [tf.TensorSpec([], tf.int32)])])[0][0]
