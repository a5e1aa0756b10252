"""DDP's reducer for groups of this back end: after its first pass it reduces gradients in place.

PyTorch's reducer multiplies each gradient into a bucket, reduces the bucket, and copies the results back. On CPUs these copies
take longer than the reduction. :class:`InPlaceReducer` is this reducer, and leaves everything else to it: the first pass, the
agreement of the ranks on the buckets, and all that follows if DDP is used in a way that needs buckets. DDP's own Python code
does not change: it broadcasts buffers, moves inputs, and decides in forward whether a pass is reduced.

:func:`install` makes DDP use it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import update_wrapper
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.weak import WeakTensorKeyDictionary

from horovod.core.lifecycle.context import running
from horovod.torch.distributed.base import BackendGroup
from horovod.torch.distributed.ddp_gradients import GradientsInPlace, Hooks
from horovod.torch.distributed.on_loss import refusals
from horovod.torch.distributed.submission import calling_frame
from horovod.torch.storage_references import ALONE_IN_HOOKS
from horovod.torch.tensors import DATA_TYPES
from horovod.torch.uncompiled import uncompiled

_torch_distributed: Any = dist  # its stubs lack names
_Reducer: Any = _torch_distributed.Reducer
_register: Any = _torch_distributed._register_comm_hook
_ARGUMENTS = (
    "params",
    "bucket_indices",
    "per_bucket_size_limits",
    "process_group",
    "expect_sparse_gradients",
    "bucket_bytes_cap",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "param_to_name_mapping",
    "first_bucket_bytes_cap",
    "skip_all_reduce_unused_params",
    "use_python_reducer",
    "bucket_bytes_cap_list",
    "batched_grad_copy",
)
_NEED_BUCKETS = ("find_unused_parameters", "use_python_reducer", "batched_grad_copy")
_NEEDED = ("_rebuild_buckets", "_get_zeros_like_grad_buckets", "_autograd_hook", "prepare_for_backward")
_SUPPORTED = ALONE_IN_HOOKS and all(hasattr(_Reducer, name) for name in _NEEDED)
"""Whether this PyTorch has what a reduction in place needs."""
_made: weakref.WeakSet[InPlaceReducer] = weakref.WeakSet()
_in_buckets = WeakTensorKeyDictionary()
"""The parameters that a reducer has reduced, or will reduce, in buckets only. The same on all ranks."""


@uncompiled
class InPlaceReducer(_Reducer):  # type: ignore[misc]  # C++, without types
    """A reducer of DDP. Its arguments are those of PyTorch's reducer, which are not documented."""

    def __init__(self, *args: Any, **options: Any) -> None:
        given = {**dict(zip(_ARGUMENTS, args, strict=False)), **options}
        self._module = weakref.ref(_calling_module())
        self._group = given["process_group"]
        self._parameters: list[torch.Tensor] = list(given["params"])
        self._names: dict[int, str] = given.get("param_to_name_mapping") or {}
        self._views: bool = given.get("gradient_as_bucket_view", False)
        self._gradients: GradientsInPlace | None = None
        if self.goes_on:
            _check_continuing(self._module(), given)
        self._permitted = (
            _SUPPORTED
            and len(args) <= len(_ARGUMENTS)
            and not any(given.get(each) for each in _NEED_BUCKETS)
            and not any(given.get("expect_sparse_gradients", ()))
            and isinstance(self._group, BackendGroup)
            and running().config.ddp_in_place
            and all(_is_plain(parameter) for parameter in self._parameters)
            and not any(parameter in _in_buckets for parameter in self._parameters)
        )
        # PyTorch's reducer registers its hooks later. So it gets a gradient after this reducer has told it to expect one.
        self._hooks = Hooks(self._parameters if self._permitted else (), weakref.WeakMethod(self._arrived))
        weakref.finalize(self, self._hooks.remove).atexit = False
        super().__init__(*args, **options)
        self._others = self._found_others()
        _made.add(self)
        if not self._permitted:
            self._use_buckets()
        if self.goes_on:
            _register(self, self._group, _average)

    @property
    def in_place(self) -> bool:
        """Whether the next pass will be reduced in place."""
        return self._permitted and self._gradients is not None

    @property
    def goes_on(self) -> bool:
        """Whether the group goes on after a loss. Then averages are those of the ranks that have carried them out."""
        return isinstance(self._group, BackendGroup) and self._group.goes_on

    def _arrived(self, index: int, added: torch.Tensor | None) -> None:
        if self._gradients is not None:
            self._gradients.arrived(index, added)

    def prepare_for_backward(self, outputs: Sequence[torch.Tensor]) -> None:
        """DDP's forward announces a pass."""
        if self._gradients is not None and (not self._permitted or self._needs_buckets()):
            self._use_buckets()
        for other in self._others:
            reducer = other()
            if reducer is not None and reducer._gradients is not None and reducer._gradients.armed:
                reducer._use_buckets()  # one backward for both; each would reduce what the other has reduced
                self._use_buckets()
        if self._gradients is None:
            super().prepare_for_backward(outputs)
        else:
            self._gradients.announce()

    def _rebuild_buckets(self) -> bool:
        """DDP's forward begins. After the first pass the ranks agree on buckets; then gradients are reduced in place."""
        self._check_ended()
        rebuilt: bool = super()._rebuild_buckets()
        if rebuilt and self._permitted:
            if self._needs_buckets():
                self._use_buckets()
            else:
                self._begin()
        return rebuilt

    def _begin(self) -> None:
        numbers = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        buckets = [
            [numbers[id(each)] for each in bucket.parameters()] for bucket in self._get_zeros_like_grad_buckets()
        ]
        present = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        own = {gradient.untyped_storage().data_ptr() for gradient in present} if self._views else set()
        reducer = weakref.ref(self)
        self._gradients = GradientsInPlace(
            self._group,
            self._parameters,
            buckets,
            self._names,
            self._views,
            own,
            give_up=lambda: _Reducer.prepare_for_backward(reducer(), []),
        )

    def _needs_buckets(self) -> bool:
        """Whether DDP is used now in a way that needs buckets. The same on all ranks."""
        module = self._module()
        size = self._group.size()
        return (
            module is None
            or module._join_config.enable
            or (dist.rpc.is_available() and _torch_distributed.rpc.api._is_current_rpc_agent_set())
            # PyTorch divides gradients in buckets, and multiplies others: the results are the same for powers of 2 only.
            or (self._views and size & (size - 1) > 0)
        )

    def _use_buckets(self) -> None:
        """Reduce in buckets, from this pass on if it has not begun, otherwise from the next one on."""
        self._permitted = False
        for parameter in self._parameters:
            _in_buckets[parameter] = True
        gradients = self._gradients
        if gradients is None:
            self._hooks.remove()
            return
        if gradients.begun:
            return
        self._gradients = None
        if gradients.armed:
            super().prepare_for_backward([])
        self._hooks.remove()

    def _check_ended(self) -> None:
        gradients = self._gradients
        if gradients is None:
            return
        gradients.check_ended()
        if not self._permitted:
            self._use_buckets()

    def _found_others(self) -> list[weakref.ref[InPlaceReducer]]:
        """The other reducers of some of the parameters. They learn of this one."""
        mine = set(map(id, self._parameters))
        found = []
        for other in _made:
            if not mine.isdisjoint(map(id, other._parameters)):
                found.append(weakref.ref(other))
                other._others.append(weakref.ref(self))
        return found

    # What needs buckets.

    def _set_static_graph(self) -> None:
        super()._set_static_graph()
        self._use_buckets()

    def _set_optimizer_in_backward(self) -> None:
        super()._set_optimizer_in_backward()
        self._use_buckets()

    def _set_mixed_precision_param_dtype(self, data_type: Any) -> None:
        super()._set_mixed_precision_param_dtype(data_type)
        self._use_buckets()

    def _install_post_backward_futures(self, futures: Any) -> None:
        super()._install_post_backward_futures(futures)
        self._use_buckets()

    # What ends with the buckets of the first pass.

    def _reset_state(self) -> None:
        super()._reset_state()
        self._gradients = None

    def _update_process_group(self, group: Any) -> None:
        super()._update_process_group(group)
        self._gradients = None
        self._group = group
        if not isinstance(group, BackendGroup):
            self._use_buckets()

    def _remove_autograd_hooks(self) -> None:
        super()._remove_autograd_hooks()
        self._hooks.remove()

    def _check_reducer_finalized(self) -> None:
        self._check_ended()
        super()._check_reducer_finalized()


def install() -> None:
    """Make DDP use :class:`InPlaceReducer`. Replaces three names in ``torch.distributed``; further calls do nothing.

    DDP looks these names up when it is made, and when a hook is registered. Reducers of other groups behave as before, and so
    do all where PyTorch lacks something that is needed.
    """
    place = _torch_distributed
    if place.Reducer is not _Reducer:
        return
    place.Reducer = InPlaceReducer
    for name in ("_register_comm_hook", "_register_builtin_comm_hook"):
        setattr(place, name, _using_buckets(getattr(place, name)))


def _average(group: Any, bucket: Any) -> Any:
    """The hook of a group that goes on after a loss: a bucket's average over the ranks that take part. DDP does not divide."""
    return group.average(bucket.buffer())


def _check_continuing(module: Any, given: Mapping[str, Any]) -> None:
    """Refuse what a group that goes on after a loss does not support. Raises NotImplementedError."""
    refusals.check_module(module)
    if any(given.get("expect_sparse_gradients", ())):
        raise NotImplementedError(refusals.text("sparse gradients"))
    if given.get("use_python_reducer"):
        raise NotImplementedError(refusals.text("DDP's reducer in Python (optimize_ddp)"))


def models_of(group: Any) -> list[Any]:
    """The DDP modules that reduce over a group."""
    found = [(reducer._module(), reducer) for reducer in _made if reducer._group is group]
    return [module for module, reducer in found if getattr(module, "reducer", None) is reducer]


def end(reducer: Any) -> None:
    """End a DDP module's reducer, so that the next one begins as in a process where the module is new."""
    if hasattr(reducer, "_remove_autograd_hooks"):  # otherwise its hooks end with it
        reducer._remove_autograd_hooks()
    if isinstance(reducer, InPlaceReducer):
        _made.discard(reducer)
        for parameter in reducer._parameters:
            if parameter in _in_buckets:
                del _in_buckets[parameter]


def _using_buckets(register: Any) -> Any:
    """PyTorch's function that registers a hook of a reducer: hooks get buckets."""

    def registering(reducer: Any, *args: Any, **options: Any) -> Any:
        if isinstance(reducer, InPlaceReducer) and reducer.goes_on:
            raise NotImplementedError(
                refusals.text("communication hooks and DDP's mixed_precision, which divide themselves")
            )
        result = register(reducer, *args, **options)
        if isinstance(reducer, InPlaceReducer):
            reducer._use_buckets()
        return result

    return update_wrapper(registering, register)


def _calling_module() -> Any:
    """The DDP module whose method makes a reducer; a new object if it is none."""
    frame = calling_frame()
    found = None if frame is None else frame.f_locals.get("self")
    return found if isinstance(found, torch.nn.parallel.DistributedDataParallel) else _Nothing()


class _Nothing:
    pass


def _is_plain(parameter: torch.Tensor) -> bool:
    """Whether a parameter is dense, in host memory, and of a class and type whose gradients the core reduces."""
    return (
        type(parameter) in (torch.nn.Parameter, torch.Tensor)
        and parameter.is_cpu
        and parameter.layout is torch.strided
        and (parameter.dtype.is_floating_point or parameter.dtype.is_complex)
        and parameter.dtype in DATA_TYPES
    )
