"""Reduces the gradients of one DDP module where they are, from one backward pass to the next.

A pass begins when DDP's forward announces it, and ends when all parameters have got a gradient, which may take several calls of
``backward()``. Passes that are not announced, as inside ``no_sync()``, only add to gradients. All of this is as in PyTorch's
reducer, whose buckets are used, too: the ranks have agreed on them, and send them in one order.

A gradient may be reduced in place only if nothing else uses its memory (:mod:`horovod.torch.storage_references`). If there are
others, a copy is reduced, and copied back at the end of the
pass. While the hook of a parameter runs, backward itself refers to a new gradient. So these are counted when the bucket is
sent, which is when the next gradient comes, or at the end of the pass.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import torch

from horovod.comm.compression.block_reduction import Errors, new_errors
from horovod.core.errors import HorovodInternalError
from horovod.torch.distributed.ddp_errors import refuse_another, refuse_gradient, refuse_unfinished
from horovod.torch.distributed.submission import DDP_BUCKET
from horovod.torch.distributed.work import HorovodWork
from horovod.torch.storage_references import is_alone
from horovod.torch.tensors import DATA_TYPES
from horovod.torch.uncompiled import uncompiled

_SCALED_BY_CORE = frozenset({torch.float32, torch.float64})
"""The types whose elements the core multiplies as PyTorch does. It rounds 16-bit floats once, and PyTorch's reducer twice."""
_LATER, _AWAITED = SimpleNamespace(asyncOp=True), SimpleNamespace(asyncOp=False)


def _address(tensor: torch.Tensor) -> int:
    """The address of the tensor's memory, the same for all tensors that share it."""
    return tensor.untyped_storage().data_ptr()


def _shares(added: torch.Tensor, gradient: torch.Tensor) -> bool:
    """Whether backward has made the tensor that it has added to a gradient this gradient."""
    return added.layout is torch.strided and _address(added) == _address(gradient)


_KNOWN_REFERENCES = 3
"""The references to a gradient in :meth:`GradientsInPlace._settle` if no other code has one."""


class Slot:
    """One parameter.

    Attributes:
        sent: the gradient, if it is being reduced in place.
        copy: the memory that is being reduced instead of it.
        result: the memory that gets the average if the group goes on after a loss. The gradient stays until all ranks have it.
        new: whether backward has made the gradient in this pass.
    """

    __slots__ = ("copy", "dtype", "new", "parameter", "result", "sent", "shape", "stride")

    def __init__(self, parameter: torch.Tensor) -> None:
        like = torch.empty_like(parameter, device="meta")  # of the layout that backward gives gradients
        self.parameter = parameter
        self.dtype, self.shape, self.stride = parameter.dtype, parameter.shape, like.stride()
        self.sent: torch.Tensor | None = None
        self.copy: torch.Tensor | None = None
        self.result: torch.Tensor | None = None
        self.new = False

    def flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the parameter's layout as the core takes it."""
        return tensor if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


@uncompiled
class GradientsInPlace:
    """The gradients of one DDP module.

    Args:
        group: the process group of this back end.
        parameters: the parameters, in host memory, in DDP's order.
        buckets: the numbers of the parameters of each bucket, in the order of sending; the same on all ranks.
        names: the names of parameters, by number, for errors.
        views: whether DDP promises gradients that are views of its buckets (``gradient_as_bucket_view``). Then a copy becomes
            the gradient.
        own: addresses of memory that only DDP itself refers to besides gradients.
        give_up: has PyTorch's reducer reduce the pass that begins now.

    Attributes:
        armed: whether a pass was announced and has not ended.
    """

    def __init__(
        self,
        group: Any,
        parameters: Sequence[torch.Tensor],
        buckets: Sequence[Sequence[int]],
        names: Mapping[int, str],
        views: bool,
        own: Collection[int],
        give_up: Callable[[], None],
    ) -> None:
        self.armed = False
        self._group = group
        self._slots = [Slot(parameter) for parameter in parameters]
        self._buckets = [list(bucket) for bucket in buckets]
        self._bucket_of = {index: number for number, bucket in enumerate(self._buckets) for index in bucket}
        self._names = names
        self._views = views
        self._own = frozenset(own)
        self._give_up = give_up
        self._errors: dict[int, Errors] = {}  # by bucket, what compression has rounded away of its gradients
        self._ready: dict[int, None] = {}
        self._left: list[int] = []
        self._next = 0
        self._works: list[HorovodWork] = []

    @property
    def begun(self) -> bool:
        """Whether a pass has reached a parameter, and has not ended."""
        return bool(self._ready)

    def announce(self) -> None:
        """Expect a pass. DDP's forward calls it."""
        self._forget()
        self.armed = True

    def check_ended(self) -> None:
        """Raise the error of PyTorch's reducer if the last pass has begun and not ended."""
        if self._ready:
            refuse_unfinished([*self._ready], len(self._slots), self._names, self._group)

    def arrived(self, index: int, added: torch.Tensor | None) -> None:
        """Called when backward has added ``added`` to the gradient of parameter ``index``."""
        if not self.armed:
            return
        if not self._ready and torch.is_grad_enabled():  # create_graph=True: gradients are part of a graph
            self._forget()
            self._give_up()
            return
        if index in self._ready:
            refuse_another(index, len(self._slots), self._names, self._group)
        slot = self._slots[index]
        gradient = slot.parameter.grad
        if gradient is not None and (
            gradient.dtype is not slot.dtype
            or gradient.layout is not torch.strided
            or gradient.numel() != slot.shape.numel()
        ):
            self._ready[index] = None
            refuse_gradient(gradient, slot.dtype, self._group)
        slot.new = added is not None and gradient is not None and _shares(added, gradient)
        self._send_complete()
        self._ready[index] = None
        self._prepare(slot, gradient, added)
        self._left[self._bucket_of[index]] -= 1
        if len(self._ready) == len(self._slots):
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _forget(self) -> None:
        self.armed = False
        self._ready.clear()
        self._works.clear()
        self._next = 0
        self._left = [len(bucket) for bucket in self._buckets]

    def _send_complete(self) -> None:
        """Send the next buckets, as far as they are complete."""
        try:
            while self._next < len(self._buckets) and not self._left[self._next]:
                self._send(self._next)
                self._next += 1
        except HorovodInternalError:  # the job has failed; another may go on with this module
            self._forget()
            raise

    def _send(self, number: int) -> None:
        factor = 1.0 / self._group.size()
        slots = [self._slots[index] for index in self._buckets[number]]
        goes_on = self._group.goes_on  # the core divides, by the number of ranks that take part
        by_core = slots[0].dtype in _SCALED_BY_CORE or goes_on
        tensors = []
        for slot in slots:
            if slot.copy is None and slot.sent is None:
                self._prepare(slot, slot.parameter.grad, None)
            tensor = slot.sent if slot.copy is None else slot.copy
            assert tensor is not None
            if not by_core:
                with torch.no_grad():
                    tensor.mul_(factor)
            tensors.append(slot.flat(tensor))
        reduction = msgspec.structs.replace(DDP_BUCKET, prescale=factor if by_core else 1.0)
        options = _AWAITED if number == len(self._buckets) - 1 else _LATER
        if goes_on:
            results = []
            for slot in slots:
                slot.result = torch.empty_strided(slot.shape, slot.stride, dtype=slot.dtype)
                results.append(slot.flat(slot.result))
            self._works.append(self._group.average_into(tensors, results, options))
            return
        submitter = self._group._submitter
        errors: Errors = ()
        if submitter.compresses:
            errors = self._errors.get(number) or new_errors((DATA_TYPES[each.dtype], each.numel()) for each in tensors)
            self._errors[number] = errors
        self._works.append(submitter.reduce("all_reduce", tensors, reduction, options, errors=errors))

    def _prepare(self, slot: Slot, gradient: torch.Tensor | None, added: torch.Tensor | None) -> None:
        """Choose what to reduce for a parameter, the gradient itself or a copy. If it is too early, choose nothing.

        Args:
            added: the tensor that backward has just added to the gradient, and still refers to.
        """
        slot.sent = slot.copy = None
        if (
            gradient is not None
            and type(gradient) is torch.Tensor
            and not gradient.requires_grad
            and gradient.stride() == slot.stride
            and gradient.shape == slot.shape
        ):
            if is_alone(gradient) or (self._own and _address(gradient) in self._own):
                slot.sent = gradient
                return
            if added is not None and _shares(added, gradient):
                return
        slot.copy = torch.empty_strided(slot.shape, slot.stride, dtype=slot.dtype)
        if gradient is None:  # the script has removed it
            slot.copy.zero_()
        else:
            slot.copy.copy_(gradient.detach())

    def _finish(self) -> None:
        """Called at the end of backward: send what is left, wait for it, and copy back what was not reduced in place."""
        self.armed = False
        self._send_complete()
        works = [*self._works]
        self._forget()
        error: BaseException | None = None
        for work in works:
            try:
                work.wait()
            except Exception as failure:
                error = error or failure
        if error is not None:
            raise error
        for bucket in self._buckets:
            for index in bucket:
                self._settle(self._slots[index])

    def _settle(self, slot: Slot) -> None:
        """Put the result of a parameter where its gradient is now."""
        present = slot.parameter.grad
        if (average := slot.result) is not None:
            slot.result = None
            replaced = slot.new and present is slot.sent and sys.getrefcount(present) <= _KNOWN_REFERENCES
            slot.sent = slot.copy = None
            if present is None or self._views or replaced:
                slot.parameter.grad = average
            else:
                present.copy_(average)
            return
        sent, result = slot.sent, slot.copy
        if result is None:
            slot.sent = None
            if present is sent:
                return
            result = sent
        assert result is not None
        slot.sent = slot.copy = None
        if present is None or self._views:
            slot.parameter.grad = result
        else:
            present.copy_(result)


class Hooks:
    """Hooks that are called whenever backward has added to a gradient.

    They belong to PyTorch's nodes that add to gradients, as those of PyTorch's reducer. So they are called after all hooks of
    the script on the parameters themselves; and before those of a reducer that is made later.

    Args:
        parameters: the parameters.
        called: called with the number of the parameter, and the tensor that backward has added. Not kept alive.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], called: weakref.WeakMethod[Callable[[int, torch.Tensor | None], None]]
    ) -> None:
        self._nodes: list[Any] = []  # a parameter does not keep its node alive
        self._handles: list[Any] = []
        for index, parameter in enumerate(parameters):
            with torch.enable_grad():
                made: Any = parameter.expand_as(parameter).grad_fn
            node = made.next_functions[0][0]
            self._nodes.append(node)
            self._handles.append(node.register_hook(_calling(called, index)))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._nodes.clear()


def _calling(called: weakref.WeakMethod[Callable[[int, torch.Tensor | None], None]], index: int) -> Callable[..., None]:
    def arrived(_: Any, added: tuple[torch.Tensor | None, ...]) -> None:
        method = called()
        if method is not None:
            method(index, *added)

    return uncompiled(arrived)
