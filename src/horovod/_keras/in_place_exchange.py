"""Reduces gradients in place, in host memory or in the memory of a GPU. The graphs of the JAX backend call it.

The name of a request contains the name of the optimizer, so the gradients of two optimizers never mix.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from horovod._bindings.optimizer_name import OptimizerName
from horovod._bindings.reductions import ReductionArguments
from horovod._keras.settings import KerasSettings
from horovod.comm.reduction import ReduceOp
from horovod.core.negotiation.messages import Operation
from horovod.core.requests.handle import Handle, all_of
from horovod.core.requests.tensor import Tensor
from horovod.core.submission.collectives import prepared_call, submit
from horovod.core.submission.prepared import device_of


class InPlaceExchange:
    """Reduces one optimizer's gradients, which are tensors of the core."""

    def __init__(self, settings: KerasSettings) -> None:
        self._settings = settings
        self._name = OptimizerName()

    def reduction(self, op: ReduceOp, factor: float) -> ReductionArguments:
        """The arguments of a reduction by :meth:`reduce`."""
        settings = self._settings
        return ReductionArguments(op, *settings.scales(op, factor), settings.process_set, settings.chosen_form)

    def reduce(
        self,
        tensors: Sequence[Tensor],
        names: Sequence[str],
        cut: Sequence[Sequence[int]] | None,
        op: ReduceOp,
        factor: float,
        variables: Hashable,
        alike: str,
    ) -> None:
        """Reduce every tensor in place. All members of the process set must call it with tensors of the same types and shapes.

        On a device, work that is queued on the calling thread's current stream afterwards runs after the reduction.

        Args:
            tensors: all in host memory, or all of one submission on a device.
            names: the names of the tensors, for errors.
            cut: the indices of the tensors of each request. None: one request for all tensors.
            op: the reduction.
            factor: multiplies the result.
            variables: the types and shapes of the optimizer's variables, the same on all ranks.
            alike: further properties that must agree on all ranks, as in :class:`horovod.core.negotiation.messages.Request`.

        Raises:
            HorovodInternalError: the job failed, or ranks disagree. The text names ranks, variables and lines.
        """
        settings = self._settings
        cut = [range(len(tensors))] if cut is None else cut
        name, device = self._name.of(variables), device_of(tensors)
        arguments = self.reduction(op, factor)
        handles: list[Handle] = []
        try:
            for number, chosen in enumerate(cut):
                own = [tensors[i] for i in chosen]
                called = f"{name}.{op.label}.{number}"
                call = prepared_call(
                    Operation.ALLREDUCE,
                    "",
                    called,
                    own,
                    op,
                    arguments.prescale,
                    arguments.postscale,
                    device=device,
                    line=settings.line,
                    labels=[names[i] for i in chosen],
                    alike=alike,
                    compression=arguments.form,
                )
                members = settings.process_set.process_set_id
                handles.append(submit(members, call.request, own, own, errors=call.errors(members)))
        finally:
            try:
                all_of(handle.wait for handle in handles)
            finally:  # also after an error, because the memory is then reused
                for handle in handles:
                    if handle.event is not None:
                        handle.event.wait()
