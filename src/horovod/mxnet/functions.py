"""Broadcasts of parameters and of picklable objects, and all-gathers of objects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mxnet as mx
from mxnet.gluon.parameter import DeferredInitializationError

from horovod._bindings import objects
from horovod.common.basics import size
from horovod.comparison.samples import parameters_are_replaced
from horovod.core.lifecycle.context import keeps_own, running
from horovod.mxnet.ops.arguments import whole
from horovod.mxnet.ops.broadcast import broadcast_
from horovod.mxnet.ops.errors import of_both_kinds

__all__ = ["allgather_object", "broadcast_object", "broadcast_parameters"]


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None) -> Any:
    """As :func:`horovod._bindings.objects.broadcast_object`, over all ranks. Every rank must call it.

    There is no argument ``process_set``.
    """
    with of_both_kinds():
        return objects.broadcast_object(obj, whole(root_rank, "root_rank"), name)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """As :func:`horovod._bindings.objects.allgather_object`, over all ranks. Every rank must call it.

    There is no argument ``process_set``.
    """
    with of_both_kinds():
        return objects.allgather_object(obj, name)


def broadcast_parameters(params: Any, root_rank: int = 0, prefix: str | None = None) -> None:
    """Overwrite parameters on every rank with those of rank ``root_rank``, in place. Every rank must call it.

    It returns immediately. MXNet's engine makes later operations on a parameter wait for the broadcast. A Gluon parameter of
    unknown shape is broadcast when the first forward pass has initialised it. Other ranks may know its shape earlier. A pass
    in a later generation does not broadcast it, as ranks that have arrived since have not called this.

    Args:
        params: a dict of NDArrays, such as each of the two that ``Module.get_params()`` returns, or of Gluon parameters,
            such as ``Block.collect_params()``.
        root_rank: the rank whose values are used.
        prefix: a prefix of the names. It is needed if two models have parameters of the same name.

    Raises:
        ValueError: ``params`` is something else. Otherwise as :func:`horovod.mxnet.ops.broadcast.broadcast_`.
    """
    if not isinstance(params, Mapping | mx.gluon.ParameterDict):
        raise ValueError(f"invalid params of type: {type(params)}; pass a dict or a gluon.ParameterDict")
    with of_both_kinds():
        if keeps_own("hvd.broadcast_parameters()") or size() == 1:
            return
        parameters_are_replaced()
        for key, value in sorted(params.items()):
            name = f"{prefix or ''}{key}"
            if not isinstance(value, mx.gluon.Parameter):
                broadcast_(value, root_rank, name)
                continue
            try:
                value.list_data()
            except DeferredInitializationError:
                _broadcast_when_initialised(value, root_rank, name)
            else:
                _broadcast_parameter(value, root_rank, name)


def _broadcast_parameter(parameter: Any, root_rank: int, name: str) -> None:
    first, *others = parameter.list_data()
    broadcast_(first, root_rank, name)
    for other in others:  # on other devices
        first.copyto(other)


def _broadcast_when_initialised(parameter: Any, root_rank: int, name: str) -> None:
    """Broadcast the parameter as soon as Gluon has initialised it, if that is in this generation."""
    called_in = running().generation

    def initialise(*args: Any, **kwargs: Any) -> None:
        del parameter._init_impl  # restores the method of the class
        parameter._init_impl(*args, **kwargs)
        if running().generation == called_in:
            _broadcast_parameter(parameter, root_rank, name)

    parameter._init_impl = initialise
