"""The callback for local training, without its base class; see :mod:`horovod._keras.callbacks`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from horovod._bindings.compression import NoneCompressor
from horovod._bindings.optimizer_name import OptimizerName
from horovod._bindings.reductions import ReductionArguments
from horovod._keras.values import array_of, tensor_of
from horovod._models import contents
from horovod._models.contents import described
from horovod.comm.datatypes import Array
from horovod.comm.reduction import ReduceOp
from horovod.comparison.alike import Value
from horovod.comparison.precision import Elements, precision_of
from horovod.core.lifecycle.context import running
from horovod.core.negotiation.messages import Operation
from horovod.core.submission.collectives import make_request, submit
from horovod.local_training.local_schedule import LocalSchedule
from horovod.local_training.outer_rounds import OuterRounds, Wait
from horovod.local_training.outer_sgd import OuterSGD
from horovod.observe.call_site import caller

_COMPARED = 8
"""How many elements of a variable are compared."""
_DILOCO = OuterSGD()


class ArrayRounds(OuterRounds):
    """The outer parameters of one model, in host memory. A variable's name is its position: Keras's own differ between ranks.

    Args:
        compression: one of the choices of ``hvd.Compression`` for single tensors.
        line: the line of the script.
    """

    def __init__(self, schedule: LocalSchedule, compression: Any, line: str) -> None:
        super().__init__(schedule, line)
        self.model: Any = None
        self._compression = compression
        self._named = OptimizerName()

    @property
    def name(self) -> str:
        return self._named.of(("local training", tuple(self.sizes().items())))

    def sizes(self) -> dict[str, int]:
        """The number of elements of each trainable variable."""
        return {str(place): int(np.prod(each.shape)) for place, each in enumerate(self.model.trainable_variables)}

    def local(self, names: Sequence[str]) -> list[Array]:
        if hasattr(self.model, "jax_state_sync"):
            self.model.jax_state_sync()  # inside fit, Keras on JAX keeps the values outside of the variables
        return [_widened(each) for each in contents.views(self._variables(names))]

    def continue_with(self, names: Sequence[str], values: Sequence[Array]) -> None:
        contents.write(self._variables(names), [value.copy() for value in values])

    def copied(self, value: Array) -> Array:
        return np.array(value, order="C")

    def start(self, label: str, names: Sequence[str], changes: Sequence[Array]) -> Wait:
        compression = self._compression
        if compression is NoneCompressor:
            pairs: list[tuple[Any, Any]] = [(np.ascontiguousarray(each), None) for each in changes]
            sent = [each for each, _ in pairs]
        else:
            pairs = [compression.compress(tensor_of(each)) for each in changes]
            sent = [array_of(each) for each, _ in pairs]
        tensors = [described(each) for each in sent]
        labels = [f"trainable variable {name}" for name in names]
        form = ReductionArguments().compressed_by(compression).form
        request = make_request(
            Operation.ALLREDUCE, "", label, tensors, ReduceOp.AVERAGE, labels=labels, compression=form
        )
        handle = submit(0, request, tensors, tensors)

        def wait() -> Sequence[Array]:
            handle.wait()
            if compression is NoneCompressor:
                return sent
            return [
                array_of(compression.decompress(tensor_of(each), pair[1]))
                for each, pair in zip(sent, pairs, strict=True)
            ]

        return wait

    def elements(self, value: Array) -> Value:
        flat = value.reshape(-1)
        chosen = flat[:: max(1, flat.size // _COMPARED)][:_COMPARED].tolist()
        return (
            repr(chosen)
            if precision_of(value.dtype.name) is None
            else Elements(value.dtype.name, tuple(chosen), exact=False)
        )

    def _variables(self, names: Sequence[str]) -> list[Any]:
        variables = self.model.trainable_variables
        return [variables[int(name)] for name in names]


class LocalTraining:
    """Train each host on its own, and average the hosts every ``every`` batches: ``hvd.LocalOptimizer`` of PyTorch for ``fit``.

    Compile the model with an optimizer that reduces gradients inside of the host, and pass the callback after those that
    broadcast variables::

        hvd.init()
        model.compile(hvd.DistributedOptimizer(optimizer, process_set=hvd.host_process_set()), loss=...)
        local = hvd.callbacks.LocalTrainingCallback(every=50, compression=hvd.Compression.fp16)
        model.fit(..., callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), local])

    Every rank must pass it, and train the same number of batches. At the end of ``fit`` all ranks have the average of the
    hosts' trainable variables. Between averages hosts differ, and so do other variables, such as running statistics. In each
    round of an elastic job it starts again, with the variables of the job's state and without outer momentum.

    Args:
        every: the number of batches between two averages of a variable.
        outer: the outer optimizer, an ``hvd.OuterSGD``.
        fragments: how many parts of the model are averaged at different batches; at most ``every`` and at most the number of
            trainable variables.
        delay: how many batches training goes on while a fragment travels; less than ``every``. 0: ranks wait for it.
        compression: of the changes between hosts: one of ``hvd.Compression``. None: they are not compressed.
        mixing: the share of the local value in what a rank continues with when a fragment arrives, at least 0 and below 1.
            None: 0 without a delay, otherwise 0.5.

    Raises:
        ValueError: an argument is wrong; or, in ``fit``, the model is not built, its ``steps_per_execution`` is not 1, or it
            has fewer trainable variables than fragments.
    """

    model: Any

    def __init__(
        self,
        every: int = 50,
        outer: OuterSGD = _DILOCO,
        fragments: int = 4,
        delay: int = 0,
        compression: Any = None,
        mixing: float | None = None,
    ) -> None:
        super().__init__()
        schedule = LocalSchedule.checked(every, outer, fragments, delay, mixing)
        compression = NoneCompressor if compression is None else compression
        if not (
            callable(getattr(compression, "compress", None)) and callable(getattr(compression, "decompress", None))
        ):
            raise ValueError(f"compression={compression!r}: pass one of hvd.Compression, or a compressor of your own")
        self._rounds = ArrayRounds(schedule, compression, caller())
        self._generation = -1
        self._loaded: tuple[Mapping[str, Any] | None] | None = None

    def state_dict(self) -> dict[str, Any] | None:
        """The outer state as nested dictionaries of arrays, the same on all ranks; None before the first batch."""
        return self._rounds.state()

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Load an outer state before ``fit``, on all ranks. None: start again.

        Raises:
            ValueError: the model has other variables. It is raised when ``fit`` begins.
        """
        self._loaded = (state,)

    def on_train_begin(self, logs: Any = None) -> None:
        model = self._rounds.model = self.model
        if not getattr(model, "built", False):
            raise ValueError("LocalTrainingCallback: build the model before fit(), with model.build(input_shape)")
        executed = getattr(model, "steps_per_execution", None) or 1
        executed = int(executed if isinstance(executed, int) else np.asarray(executed))
        if executed != 1:
            raise ValueError(
                f"LocalTrainingCallback counts batches, and steps_per_execution is {executed}: compile with 1"
            )
        fragments, sizes = self._rounds.schedule.fragments, self._rounds.sizes()
        if fragments > max(len(sizes), 1):
            raise ValueError(
                f"fragments={fragments}: the model has {len(sizes)} trainable variables; use at most that many fragments"
            )
        generation = running().generation
        if self._loaded is not None:
            self._rounds.load(self._loaded[0], sizes)
        elif generation != self._generation:
            self._rounds.load(None, sizes)
        self._loaded, self._generation = None, generation

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._rounds.begin(self._rounds.sizes())

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        self._rounds.after_step()

    def on_train_end(self, logs: Any = None) -> None:
        self._rounds.finish()


def _widened(value: Array) -> Array:
    return value.astype(np.float32) if value.dtype.itemsize == 2 else value
