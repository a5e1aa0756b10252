"""Makes the local steps of an optimizer with Adasum, bucket by bucket, and sends what they change."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from horovod._bindings.reductions import ReductionArguments
from horovod.comm.reduction import ReduceOp
from horovod.torch.compression import Compressor
from horovod.torch.optimizer.buckets import Bucket
from horovod.torch.optimizer.parameters import OptimizerParameters


class AdasumSender:
    """Sends the buckets of one optimizer.

    Args:
        parameters: of the optimizer.
    """

    def __init__(self, parameters: OptimizerParameters) -> None:
        compression = parameters.settings.compression
        assert isinstance(compression, type), "check_arguments() refuses a BucketCompressor with Adasum"
        self._compression: type[Compressor] = compression
        self._parameters = parameters

    def send(self, bucket: Bucket) -> None:
        """Step locally on a bucket's parameters, send the changes, and restore the parameters.

        A parameter without a gradient does not change on this rank. Adasum ignores a change of zeros.
        """
        deltas: list[torch.Tensor] = []
        parameters = [slot.parameter for slot in bucket.slots]
        bucket.after.clear()
        with torch.no_grad():
            starts = [p.detach().clone(memory_format=torch.contiguous_format) for p in parameters]
            self._local_step(parameters)
            for p, start in zip(parameters, starts, strict=True):
                delta = p.detach() - start
                p.copy_(start)
                if delta.dtype.is_complex:
                    delta = torch.view_as_real(delta)
                compressed, context = self._compression.compress(delta)
                sent = compressed.contiguous()
                deltas.append(sent)
                bucket.after.append(partial(self._move, p, sent, context))
        bucket.mark_sent([slot.parameter.grad for slot in bucket.slots])
        bucket.handle = bucket.submit(
            bucket.slots, deltas, ReductionArguments(ReduceOp.ADASUM), self._parameters.settings.line
        )

    def _move(self, parameter: torch.Tensor, received: torch.Tensor, context: Any) -> None:
        delta = self._compression.decompress(received, context)
        parameter.add_(torch.view_as_complex(delta) if parameter.dtype.is_complex else delta)

    def _local_step(self, parameters: Sequence[torch.Tensor]) -> None:
        """Make one step of the wrapped optimizer with only these parameters, without its step hooks."""
        optimizer, members = self._parameters.optimizer, set(parameters)
        kind: Any = type(optimizer).__bases__[1]  # of the wrapped optimizer
        step = kind.step.__wrapped__ if getattr(kind.step, "hooked", False) else kind.step
        groups = optimizer.param_groups
        all_groups = list(groups)
        all_parameters = [group["params"] for group in groups]
        try:
            for group in groups:
                group["params"] = [p for p in group["params"] if p in members]
            groups[:] = [group for group in groups if group["params"]]
            step(optimizer)
        finally:
            groups[:] = all_groups
            for group, parameters_of_group in zip(groups, all_parameters, strict=True):
                group["params"] = parameters_of_group
