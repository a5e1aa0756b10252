"""``DistributedTrainer``: Gluon's trainer, which averages gradients over the ranks before it updates."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import mxnet as mx

from horovod.core.lifecycle.process_set import ProcessSet, global_process_set
from horovod.mxnet.compression import Compression, Compressor
from horovod.mxnet.training.gradients import Gradients
from horovod.mxnet.training.optimizer import DistributedOptimizer
from horovod.observe.call_site import warn


class DistributedTrainer(mx.gluon.Trainer):  # type: ignore[misc]  # untyped base
    """A ``gluon.Trainer`` whose ``step`` averages the gradients over the ranks of ``process_set``. Every member must call it.

    ``step(batch_size)`` takes the number of samples of this rank. ``allreduce_grads()`` turns gradients into sums over the
    ranks, and ``update(batch_size)`` divides them by the number of ranks, so code that clips gradients in between gets sums. On
    ranks that are not members of the set, this is a plain trainer. Each rank has one device.

    Args:
        params: a ``ParameterDict``, dict or list of Gluon parameters, the same on every rank. A list is sorted by name.
        optimizer: an optimizer or its name.
        optimizer_params: the arguments of an optimizer that is given by name.
        compression: compresses gradients before they are sent. ``hvd.Compression.fp16`` adds them up in 16 bits.
        gradient_predivide_factor: gradients are divided by it before they are added up, and multiplied afterwards.
        prefix: a prefix of the parameters' numbers in errors and in the timeline.
        num_groups: the number of groups into which the gradients of a step are divided; each group is one request per dtype.
            0: Horovod cuts by size.
        process_set: the ranks that train together.

    Raises:
        ValueError: an argument is wrong, the process set is not registered, or the parameters are on several devices.
        AssertionError: ``prefix`` is not a string.
    """

    def __init__(
        self,
        params: Any,
        optimizer: Any,
        optimizer_params: dict[str, Any] | None = None,
        compression: type[Compressor] = Compression.none,
        gradient_predivide_factor: float = 1.0,
        prefix: str | None = None,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        if not (prefix is None or isinstance(prefix, str)):
            raise AssertionError(f"prefix={prefix!r}: expected a str or None")
        if isinstance(optimizer, DistributedOptimizer):
            warn(
                "DistributedTrainer does not take DistributedOptimizer as its optimizer. It has been unwrapped for you.",
            )
            optimizer = optimizer.unwrap()
        if isinstance(params, dict):
            params = OrderedDict(params)
        elif isinstance(params, list | tuple):
            params = sorted(params, key=lambda parameter: str(getattr(parameter, "name", "")))
        self._prefix = prefix or ""
        self._compression = compression
        self._gradients = Gradients(
            f"DistributedTrainer.{self._prefix}", gradient_predivide_factor, num_groups, process_set, compression
        )
        super().__init__(params, optimizer, optimizer_params=optimizer_params, kvstore=None)
        if len(self._contexts or ()) > 1:
            raise ValueError(
                f"the parameters are on several devices, {', '.join(map(str, self._contexts))}; a rank trains on one device. "
                "Initialise them on one device, such as ctx=mx.gpu(hvd.local_rank())"
            )
        self._scale *= self._gradients.rescale()

    def _allreduce_grads(self) -> None:
        """Called by ``step`` and ``allreduce_grads``."""
        if not self._gradients.active():
            return
        weights = {parameter.name: parameter.data() for parameter in self._params if parameter.grad_req != "null"}
        self._gradients.compare(self._optimizer, weights)
        names, gradients = [], []
        for number, parameter in enumerate(self._params):
            if parameter.grad_req != "null":
                names.append(f"{self._prefix}{number}")
                gradients.append(parameter.list_grad()[0])
        if self._compression is Compression.none:
            self._gradients.reduce(names, gradients)
            return
        compressed, contexts = zip(*map(self._compression.compress, gradients), strict=True)
        self._gradients.reduce(names, compressed)
        for gradient, received, context in zip(gradients, compressed, contexts, strict=True):
            if received is not gradient:
                gradient[:] = self._compression.decompress(received, context)

    def _update(self, ignore_stale_grad: bool = False) -> None:
        """Called by ``step`` and ``update``."""
        if self._gradients.active():
            self._gradients.applied(
                {each.name: each.list_grad()[0] for each in self._params if each.grad_req != "null"}
            )
        super()._update(ignore_stale_grad)
