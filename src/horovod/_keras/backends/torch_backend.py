"""Keras on PyTorch: gradients are reduced in place, through ``horovod.torch``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from horovod._keras.distribution import Reducer
from horovod._keras.settings import Settings
from horovod.comm.reduction import ReduceOp
from horovod.common.optimizer_name import OptimizerName
from horovod.core.requests.handle import all_of
from horovod.torch.compression import Compression
from horovod.torch.ops.allreduce import grouped_allreduce_async_
from horovod.torch.ops.handles import synchronize
from horovod.torch.uncompiled import is_compiling

__all__ = ["Compression", "TorchReducer"]


class TorchReducer(Reducer):
    """Reduces one optimizer's gradients each time they are applied."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._name = OptimizerName()

    def __call__(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        cut: Sequence[Sequence[int]] | None,
        op: ReduceOp,
        factor: float,
    ) -> list[Any]:
        if is_compiling():
            torch._dynamo.graph_break()  # a collective cannot be part of a compiled graph
        settings = self._settings
        result: list[Any] = list(gradients)
        with torch.no_grad():
            sent = [settings.compression.compress(each.detach().contiguous()) for each in gradients]
            signature = tuple((str(each.dtype), tuple(each.shape)) for each, _ in sent)
            name = self._name.of(signature)
            prescale, postscale = settings.scales(op, factor)
            handles = [
                grouped_allreduce_async_(
                    [sent[i][0] for i in members],
                    name=f"{name}.{op.label}.{number}",
                    op=op,
                    prescale_factor=prescale,
                    postscale_factor=postscale,
                    process_set=settings.process_set,
                )
                for number, members in enumerate([range(len(sent))] if cut is None else cut)
            ]
            all_of(functools.partial(synchronize, handle) for handle in handles)
            for number, (tensor, context) in enumerate(sent):
                result[number] = settings.compression.decompress(tensor, context)
        return result
