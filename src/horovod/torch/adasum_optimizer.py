"""``DistributedOptimizer(op=hvd.Adasum)``: ranks reduce what a step changes, not the gradients it is made from.

Every rank lets the wrapped optimizer make a step of its own; the differences that these steps make to the parameters are
combined with Adasum, and the parameters become what they were before plus the combined difference. So momentum, Adam's
moments and the like see local gradients and stay local, and the combination sees steps of comparable length.

A hook on every parameter counts it ready while backward goes on. A full bucket steps at once: the wrapped optimizer is run
on the bucket's parameters alone, the difference is taken and submitted, and the parameters are put back until ``step()``.
That is safe inside backward: whatever reads a parameter to compute a gradient has done so when its own gradient is complete.

Source: Maleki et al., "Scaling Distributed Training with Adaptive Summation", 2020 (arXiv:2006.02924), section 4.1.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from horovod.comm.reduction import ReduceOp
from horovod.core.collectives import allreduce_request, submit
from horovod.core.process_set import ProcessSet, global_process_set
from horovod.observe.whereabouts import caller
from horovod.torch.buckets import ZERO_GRAD_TOO_EARLY, Bucket, Slot, bucket_bytes, by_size, identity, listen
from horovod.torch.compression import Compressor
from horovod.torch.tensors import view


class AdasumOptimizer(torch.optim.Optimizer):
    """The methods in front of the wrapped optimizer's own. Never instantiated under this name."""

    _horovod: AdasumState

    @property
    def op(self) -> ReduceOp:
        return ReduceOp.ADASUM

    @property
    def process_set(self) -> ProcessSet:
        return global_process_set

    @property
    def backward_passes_per_step(self) -> int:
        return self._horovod.passes

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        return {slot.parameter: slot.name for slot in self._horovod.slots}

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Accumulate gradients locally over this many backward passes before each local step."""
        if passes <= 0:
            raise ValueError("backward_passes_per_step must be > 0")
        self._horovod.passes = passes
        self._horovod.rewind()

    def synchronize(self) -> None:
        """Does nothing: gradients are not reduced. Here for scripts that call it."""

    def skip_synchronize(self) -> AbstractContextManager[None]:
        """Not possible: the reduction is part of the step.

        Raises:
            AssertionError: always.
        """
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait for the combined differences and apply them. Every rank calls it after the same number of backward passes.

        Args:
            closure: called first; evaluates the model and calls backward.

        Returns:
            What the closure returned, else None.

        Raises:
            HorovodInternalError: the reduction failed; the text names ranks, tensors and lines.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._horovod.finish()
        return loss

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As the wrapped optimizer's.

        Raises:
            AssertionError: differences are being reduced; call ``step()`` first.
        """
        if self._horovod.under_way:
            raise AssertionError(ZERO_GRAD_TOO_EARLY)
        super().zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the wrapped optimizer's. Every rank adds the same parameters."""
        super().add_param_group(param_group)
        self._horovod.adopt()


class AdasumState:
    """Everything the distributed part of one Adasum optimizer remembers.

    Args:
        optimizer: the derived optimizer, complete but for this.
        names: of its parameters.
        compression: how differences travel.
        passes: backward passes before each local step.
    """

    def __init__(
        self,
        optimizer: AdasumOptimizer,
        names: dict[torch.Tensor, str],
        compression: type[Compressor],
        passes: int,
    ) -> None:
        self._reference = weakref.ref(optimizer)  # who drops the optimizer is rid of both at once
        self._names = names
        self._compression = compression
        self._line = caller()
        self._name = ""
        self._buckets: list[Bucket] = []
        self._finish: list[Callable[[], None]] = []
        self.passes = passes
        self.slots: list[Slot] = []
        self.adopt()

    @property
    def under_way(self) -> bool:
        """Whether differences are being reduced right now."""
        return bool(self._finish)

    @property
    def _optimizer(self) -> AdasumOptimizer:
        optimizer = self._reference()
        assert optimizer is not None, "whoever asks was reached through the optimizer, or its hooks are gone"
        return optimizer

    def adopt(self) -> None:
        """Take care of the optimizer's parameters that are new."""
        known = {slot.parameter for slot in self.slots}
        new = [
            Slot(p, self._names.get(p, f"noname.{i}.{j}"), self.passes)
            for i, group in enumerate(self._optimizer.param_groups)
            for j, p in enumerate(group["params"])
            if p.requires_grad and p not in known
        ]
        if not new:
            return
        self._name = self._name or identity(new)
        self.slots += new
        for members in by_size(new, bucket_bytes(slot.parameter for slot in new)):
            self._buckets.append(Bucket(f"{self._name}.{len(self._buckets)}", members))
        listen(self, new)

    def rewind(self) -> None:
        """Start counting backward passes anew; local steps under way are forgotten."""
        for bucket in self._buckets:
            if bucket.handle is not None:
                bucket.handle.wait()
            bucket.reset(self.passes)
        self._finish.clear()

    def finish(self) -> None:
        """Submit what backward has not completed, wait for everything, and move the parameters."""
        for bucket in self._buckets:
            if bucket.handle is None:
                self.send(bucket)
        error: BaseException | None = None
        for bucket in self._buckets:
            try:
                assert bucket.handle is not None
                bucket.handle.wait()
            except BaseException as failure:
                error = error or failure
        if error is None:
            with torch.no_grad():
                for move in self._finish:
                    move()
        self._finish.clear()
        for bucket in self._buckets:
            bucket.reset(self.passes)
        if error is not None:
            raise error

    def send(self, bucket: Bucket) -> None:
        """Step locally on a bucket's parameters, submit the differences, and put the parameters back.

        A parameter without a gradient stays as it is; Adasum gives such a rank no say.
        """
        travelling: list[torch.Tensor] = []
        parameters = [slot.parameter for slot in bucket.slots]
        with torch.no_grad():
            starts = [p.detach().clone(memory_format=torch.contiguous_format) for p in parameters]
            self._local_step(parameters)
            for p, start in zip(parameters, starts, strict=True):
                delta = p.detach() - start
                p.copy_(start)
                compressed, context = self._compression.compress(delta)
                travels = compressed.contiguous()
                travelling.append(travels)
                self._finish.append(partial(self._move, p, travels, context))
        views = [view(tensor) for tensor in travelling]
        key = [(id(slot), each.data_type, each.shape) for slot, each in zip(bucket.slots, views, strict=True)]
        if bucket.request is None or bucket.key != key:
            bucket.key = key
            bucket.request = allreduce_request(
                bucket.name,
                [
                    (f"allreduce.{slot.name}", each.data_type, each.shape)
                    for slot, each in zip(bucket.slots, views, strict=True)
                ],
                ReduceOp.ADASUM,
                line=self._line,
            )
        bucket.handle = submit(global_process_set.process_set_id, bucket.request, views, views)

    def _move(self, parameter: torch.Tensor, travelled: torch.Tensor, context: Any) -> None:
        parameter.add_(self._compression.decompress(travelled, context))

    def _local_step(self, parameters: Sequence[torch.Tensor]) -> None:
        """One step of the wrapped optimizer that sees only these parameters."""
        optimizer, members = self._optimizer, set(parameters)
        groups = optimizer.param_groups
        everyone = [group["params"] for group in groups]
        try:
            for group in groups:
                group["params"] = [p for p in group["params"] if p in members]
            optimizer.param_groups = [group for group in groups if group["params"]]
            super(AdasumOptimizer, optimizer).step()
        finally:
            optimizer.param_groups = groups
            for group, all_of_it in zip(groups, everyone, strict=True):
                group["params"] = all_of_it
