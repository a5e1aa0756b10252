"""``DistributedOptimizer``: an optimizer whose ``step()`` uses gradients reduced over all ranks.

The wrapped optimizer gets a new class, derived from its own, with the methods below in front. A hook on every parameter
marks its gradient ready while backward goes on; a full bucket is submitted at once and reduced in place, in the memory of
the gradients. ``step()`` submits what backward did not reach, waits, and steps.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from horovod.comm.reduction import ReduceOp
from horovod.common.basics import size
from horovod.core.collectives import allreduce_request, submit
from horovod.core.context import running
from horovod.core.process_set import ProcessSet, global_process_set
from horovod.core.tensor import Tensor
from horovod.observe.whereabouts import caller
from horovod.torch.adasum_optimizer import AdasumOptimizer, AdasumState
from horovod.torch.allreduce import sparse_allreduce_async
from horovod.torch.arguments import reduction
from horovod.torch.bucket_collectives import BucketCollectives
from horovod.torch.bucket_compression import BucketCompressor, Reduction
from horovod.torch.buckets import ZERO_GRAD_TOO_EARLY, Bucket, Slot, bucket_bytes, by_groups, by_size, identity, listen
from horovod.torch.compression import Compression, Compressor, NoneCompressor
from horovod.torch.tensors import check, flat_array


class _Sending:
    """What must be done when a bucket's collective is over."""

    __slots__ = ("after", "bucket")

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.after: list[Callable[[], None]] = []


class _DistributedOptimizer(torch.optim.Optimizer):
    """The methods in front of the wrapped optimizer's own. Never instantiated under this name."""

    _horovod: _State

    @property
    def op(self) -> ReduceOp:
        return self._horovod.op

    @property
    def gradient_predivide_factor(self) -> float:
        return self._horovod.predivide

    @property
    def sparse_as_dense(self) -> bool:
        return self._horovod.sparse_as_dense

    @property
    def process_set(self) -> ProcessSet:
        return self._horovod.process_set

    @property
    def backward_passes_per_step(self) -> int:
        return self._horovod.passes

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        return {slot.parameter: slot.name for slot in self._horovod.slots.values()}

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Accumulate gradients locally over this many backward passes before each reduction."""
        if passes <= 0:
            raise ValueError("backward_passes_per_step must be > 0")
        self._horovod.passes = passes
        self._horovod.rewind()

    def synchronize(self) -> None:
        """Reduce what is not under way yet, and wait until every gradient is reduced.

        Call it before looking at gradients, for example to clip them, and then step inside :meth:`skip_synchronize`.

        Raises:
            HorovodInternalError: the reduction failed; the text names ranks, tensors and lines.
        """
        self._horovod.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A block in which ``step()`` does not synchronise, because ``synchronize()`` was called already."""
        self._horovod.should_synchronize = False
        try:
            yield
        finally:
            self._horovod.should_synchronize = True

    def step(self, closure: Any = None) -> Any:
        """Wait for the reduced gradients, then step. With a closure, gradients are reduced after each call of it."""
        state = self._horovod
        state.original._opt_called = True  # type: ignore[attr-defined]  # a scheduler made for the original looks there
        base: Any = super()
        if not state.should_synchronize:
            state.synchronized = False
            return base.step(closure) if closure is not None else base.step()
        if state.synchronized:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
                "This can cause training slowdown. Use `with optimizer.skip_synchronize():` around step().",
                stacklevel=2,
            )
        if closure is None:
            if not state.synchronized:
                state.synchronize()
            state.synchronized = False
            return base.step()
        if state.under_way:
            state.synchronize()

        def reduced_closure() -> Any:
            with torch.enable_grad():
                loss = closure()
            state.synchronize()
            return loss

        state.synchronized = False
        result = base.step(reduced_closure)
        state.synchronized = False
        return result

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As the wrapped optimizer's.

        Raises:
            AssertionError: gradients are being reduced; call ``step()`` or ``synchronize()`` first.
        """
        if self._horovod.under_way:
            raise AssertionError(ZERO_GRAD_TOO_EARLY)
        super().zero_grad(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """As the wrapped optimizer's; what was accumulated locally does not count any more."""
        self._horovod.rewind()
        super().load_state_dict(*args, **kwargs)


class _State:
    """Everything the distributed part of one optimizer remembers."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: dict[torch.Tensor, str],
        compression: type[Compressor] | BucketCompressor,
        passes: int,
        op: ReduceOp,
        predivide: float,
        groups: int | Sequence[Sequence[torch.Tensor]] | None,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self.whole = compression if isinstance(compression, BucketCompressor) else None
        self.compression = NoneCompressor if isinstance(compression, BucketCompressor) else compression
        self.passes = passes
        self.op = op
        self.predivide = predivide
        self.sparse_as_dense = sparse_as_dense
        self.process_set = process_set
        self.synchronized = False
        self.should_synchronize = True
        self.line = caller()
        self.original = optimizer
        self.sending: list[_Sending] = []
        self.slots: dict[torch.Tensor, Slot] = {}
        self.buckets: list[Bucket] = []
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        self.slots = {p: Slot(p, names[p], passes) for p in parameters}
        config = running().config
        if self.slots and process_set.included() and (size() > 1 or config.elastic):
            ordered = list(self.slots.values())
            name = identity(ordered)
            cut = by_size(ordered, bucket_bytes(self.slots)) if groups is None else by_groups(ordered, groups)
            self.buckets = [Bucket(f"{name}.{number}", members) for number, members in enumerate(cut)]
            listen(self, ordered)

    @property
    def under_way(self) -> bool:
        """Whether collectives work on gradients right now."""
        return bool(self.sending)

    def rewind(self) -> None:
        """Start counting backward passes anew."""
        for sending in self.sending:
            if sending.bucket.handle is not None:
                sending.bucket.handle.wait()
        self.sending.clear()
        for bucket in self.buckets:
            bucket.reset(self.passes)

    def synchronize(self) -> None:
        for bucket in self.buckets:
            if bucket.handle is None:
                self.send(bucket)
        if self.whole is not None:
            under_way = [sending.bucket.handle for sending in self.sending]
            while under_way:
                under_way = [each for each in under_way if isinstance(each, Reduction) and each.advance()]
        error: BaseException | None = None
        for sending in self.sending:
            handle = sending.bucket.handle
            try:
                assert handle is not None
                handle.wait()
                for finish in sending.after:
                    finish()
            except BaseException as failure:
                error = error or failure
        self.sending.clear()
        for bucket in self.buckets:
            bucket.reset(self.passes)
        if error is not None:
            raise error
        self.synchronized = True

    def send(self, bucket: Bucket) -> None:
        """Submit a bucket's gradients; those that backward did not reach count as zeros."""
        self.synchronized = False
        sending = _Sending(bucket)
        tensors: list[torch.Tensor] = []
        slots: list[Slot] = []
        for slot in bucket.slots:
            gradient = self._gradient(slot)
            if gradient.layout is not torch.strided:
                slot.sparse = True
                self._send_sparse(slot, gradient, sending)
            else:
                tensors.append(self._prepared(slot, gradient, sending))
                slots.append(slot)
        if self.whole is None:
            bucket.handle = self._submit(bucket, slots, tensors)
        else:
            gradients = {slot.name: tensor.detach() for slot, tensor in zip(slots, tensors, strict=True)}
            collectives = BucketCollectives(bucket.name, self.op, self.process_set)
            bucket.handle = Reduction(self.whole.reduce(gradients, bucket.memory, collectives))
        self.sending.append(sending)

    def _gradient(self, slot: Slot) -> torch.Tensor:
        parameter = slot.parameter
        gradient = parameter.grad
        if gradient is None:
            if slot.sparse and not self.sparse_as_dense:
                gradient = torch.sparse_coo_tensor(
                    torch.empty((1, 0), dtype=torch.int64),
                    torch.empty((0, *parameter.shape[1:]), dtype=parameter.dtype),
                    parameter.shape,
                )
            else:
                gradient = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
            if parameter.requires_grad:  # a parameter that was frozen since stays without a gradient
                parameter.grad = gradient
        elif gradient.layout is not torch.strided and self.sparse_as_dense:
            gradient = gradient.to_dense()
            parameter.grad = gradient
        return gradient

    def _prepared(self, slot: Slot, gradient: torch.Tensor, sending: _Sending) -> torch.Tensor:
        """The contiguous, compressed tensor that travels for a gradient; notes what undoes it."""
        if self.compression is NoneCompressor and gradient.is_contiguous():
            return gradient
        travels, context = self.compression.compress(gradient.detach())
        if not travels.is_contiguous():
            travels = travels.contiguous()
        if travels is not gradient:
            sending.after.append(lambda: _copy_back(gradient, self.compression.decompress(travels, context)))
        return travels

    def _send_sparse(self, slot: Slot, gradient: torch.Tensor, sending: _Sending) -> None:
        name = f"{slot.bucket.name}.{slot.name}"
        result = sparse_allreduce_async(gradient.detach(), name, self.op, self.process_set)

        def finish() -> None:
            slot.parameter.grad = result()

        sending.after.append(finish)

    def _submit(self, bucket: Bucket, slots: Sequence[Slot], tensors: Sequence[torch.Tensor]) -> Any:
        key = [(id(slot), tensor.dtype, tensor.shape) for slot, tensor in zip(slots, tensors, strict=True)]
        if bucket.request is None or bucket.key != key:
            bucket.key = key
            bucket.request = allreduce_request(
                bucket.name,
                [
                    (f"allreduce.{slot.name}", check(tensor), tuple(tensor.shape))
                    for slot, tensor in zip(slots, tensors, strict=True)
                ],
                self.op,
                1.0 / self.predivide,
                self.predivide,
                self.line,
            )
        views = [
            Tensor(flat_array(tensor), spec.data_type, spec.shape)
            for tensor, spec in zip(tensors, bucket.request.tensors, strict=True)
        ]
        return submit(self.process_set.process_set_id, bucket.request, views, views)


def _copy_back(gradient: torch.Tensor, reduced: torch.Tensor) -> None:
    with torch.no_grad():
        gradient.copy_(reduced)


_Optimizer = TypeVar("_Optimizer", bound=torch.optim.Optimizer)


def DistributedOptimizer(
    optimizer: _Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] | BucketCompressor = Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> _Optimizer:
    """Make ``optimizer`` use gradients that are reduced over the ranks. Every rank must wrap the same parameters.

    Returns an optimizer of a class derived from ``optimizer``'s, with its parameter groups and its state; use it in place of
    the original. It has in addition ``synchronize()``, ``skip_synchronize()`` and ``set_backward_passes_per_step()``.

    Args:
        optimizer: any ``torch.optim.Optimizer``.
        named_parameters: ``model.named_parameters()``: names for messages; all parameters of the optimizer, or none.
        compression: how gradients travel: one of ``hvd.Compression``, a :class:`~horovod.torch.compression.Compressor` or a
            :class:`~horovod.torch.bucket_compression.BucketCompressor` of your own.
        backward_passes_per_step: gradients accumulate locally over this many backward passes (they are summed, not
            averaged) before they are reduced.
        op: ``hvd.Average``, ``hvd.Sum``, ``hvd.Min``, ``hvd.Max`` or ``hvd.Product``. With ``hvd.Adasum`` every rank makes a
            step of its own, and what the steps change is combined (:mod:`horovod.torch.adasum_optimizer`); ``groups``
            and ``sparse_as_dense`` then mean nothing.
        gradient_predivide_factor: splits an Average: gradients are divided by it before the sum, and by size / it after.
        num_groups: deprecated; the same as an integer for ``groups``.
        groups: a number of buckets, or lists of parameters that travel together; default: buckets by size.
        sparse_as_dense: make sparse gradients dense before they are reduced.
        process_set: reduce over these ranks only; other ranks step with their own gradients.

    Raises:
        ValueError, NotImplementedError: an argument is wrong; the text says which.
    """
    if isinstance(optimizer, _DistributedOptimizer | AdasumOptimizer):
        raise ValueError("this optimizer is a DistributedOptimizer already; wrap the original")
    chosen = reduction(op)
    if gradient_predivide_factor != 1.0 and chosen != ReduceOp.AVERAGE:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if num_groups != 0:
        warnings.warn("Parameter `num_groups` has been replaced by `groups`", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    if isinstance(compression, BucketCompressor) and (
        chosen not in (ReduceOp.AVERAGE, ReduceOp.SUM) or gradient_predivide_factor != 1.0
    ):
        raise ValueError(
            f"{type(compression).__name__} reduces gradients with op=hvd.Average or hvd.Sum and no gradient_predivide_factor"
        )
    names = _names(optimizer, named_parameters)
    checked = _check_groups(groups)
    if chosen == ReduceOp.ADASUM:
        if process_set is not global_process_set:
            raise NotImplementedError("op=hvd.Adasum reduces over all ranks; leave out process_set, or use hvd.Average")
        if size() > 1:
            if isinstance(optimizer, torch.optim.LBFGS):
                raise NotImplementedError(
                    "op=hvd.Adasum steps on some parameters at a time, which LBFGS cannot do; use hvd.Average"
                )
            reducing = _derive(optimizer, AdasumOptimizer)
            assert not isinstance(compression, BucketCompressor)
            reducing._horovod = AdasumState(reducing, names, compression, backward_passes_per_step)
            return reducing  # type: ignore[no-any-return]  # it is of a class derived from the optimizer's
    state = _State(
        optimizer,
        names,
        compression,
        backward_passes_per_step,
        chosen,
        gradient_predivide_factor,
        checked,
        sparse_as_dense,
        process_set,
    )
    wrapped = _derive(optimizer, _DistributedOptimizer)
    wrapped._horovod = state
    return wrapped  # type: ignore[no-any-return]  # as above


def _derive(optimizer: torch.optim.Optimizer, front: type[torch.optim.Optimizer]) -> Any:
    """The optimizer with the methods of ``front`` before its own: of a new class, with its groups and its state."""
    kind = type(optimizer)
    derived: Any = type(kind.__name__, (front, kind), {"__module__": __name__, "__doc__": kind.__doc__})
    wrapped = derived.__new__(derived)
    # A learning-rate scheduler that was made for the original left a bound `step` there, which would hide ours.
    wrapped.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    return wrapped


def _names(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[torch.Tensor, str]:
    """A name for each of the optimizer's parameters."""
    parameters = [
        (f"noname.{i}.{j}", p) for i, group in enumerate(optimizer.param_groups) for j, p in enumerate(group["params"])
    ]
    if named_parameters is None:
        return {p: name for name, p in parameters}
    named = list(named_parameters)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in named):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by model.named_parameters()."
        )
    counts = Counter(name for name, _ in named)
    duplicates = sorted(name for name, count in counts.items() if count > 1)
    if duplicates:
        raise ValueError(
            f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(duplicates)}"
        )
    names = {p: name for name, p in named}
    missing = [p for _, p in parameters if p not in names]
    if missing:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named. "
            f"{len(missing)} parameters of the optimizer have no name, the first of shape {list(missing[0].shape)}."
        )
    return names


def _check_groups(groups: Any) -> int | list[list[torch.Tensor]] | None:
    if groups is None:
        return None
    if isinstance(groups, int) and not isinstance(groups, bool):
        if groups <= 0:
            raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor.")
        return groups
    if not isinstance(groups, list):
        raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor.")
    seen: set[torch.Tensor] = set()
    for group in groups:
        for p in group:
            if not isinstance(p, torch.Tensor):
                raise ValueError("groups must consist of torch.Tensor.")
            if p in seen:
                raise ValueError("A parameter can only appear once in groups.")
            seen.add(p)
    return [list(group) for group in groups]
