"""Averages gradients for ``DistributedOptimizer`` and ``DistributedTrainer``.

The gradients of all ranks are added up, and the optimizer's ``rescale_grad`` is divided by the number of ranks. Between
reduction and update, gradients are therefore sums, as existing scripts expect.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from horovod.comm.datatypes import DataType
from horovod.common.buckets import bucket_limit, cut, optimizer_name
from horovod.common.reductions import Average, Sum, check_members, check_predivide
from horovod.common.util import split_list
from horovod.core.coordination.messages import Request
from horovod.core.lifecycle.context import running
from horovod.core.process_set import ProcessSet
from horovod.core.submission.collectives import allreduce_request
from horovod.mxnet.ops.allreduce import PREFIX
from horovod.mxnet.ops.arguments import factor, whole
from horovod.mxnet.ops.errors import of_both_kinds
from horovod.mxnet.ops.submission import in_place, specs, submit
from horovod.observe.call_site import caller

_Named = tuple[str, DataType, tuple[int, ...]]
"""A gradient's name, type and shape."""


class Gradients:
    """Adds up the gradients of one optimizer over a process set.

    Each optimizer has its own requests, so two optimizers whose parameters have the same names do not mix. Every rank must use
    its optimizers of the same kind for the first time in the same order.

    Args:
        kind: a name for this kind of optimizer, the same on all ranks.
        predivide: gradients are divided by it before they are added up, and multiplied afterwards.

    Attributes:
        num_groups: the number of requests for the gradients of one call. 0: Horovod decides.

    Raises:
        ValueError: an argument is wrong, or the process set is not registered.
    """

    def __init__(self, kind: str, predivide: Any, num_groups: Any, process_set: ProcessSet) -> None:
        self._kind = kind
        self._predivide = factor(predivide, "gradient_predivide_factor")
        check_predivide(self._predivide, Average)
        self.num_groups = whole(num_groups, "num_groups")
        if self.num_groups < 0:
            raise ValueError(f"num_groups={num_groups}: expected 0 or a positive number")
        check_members(Average, process_set)
        self._process_set = process_set
        self._line = caller()
        self._name = ""
        self._generation = -1  # of the name and the requests
        self._requests: dict[tuple[object, ...], Request] = {}

    def active(self) -> bool:
        """Whether this rank is a member of the set, and not the only one."""
        return bool(self._process_set.included()) and (self._process_set.size() or 1) > 1

    def rescale(self) -> float:
        """The factor for ``rescale_grad`` that makes averages of the sums."""
        return self._predivide / (self._process_set.size() or 1) if self.active() else 1.0

    def reduce(self, names: Sequence[str], gradients: Sequence[Any]) -> None:
        """Add up gradients over the ranks, in place. Every member must call it with the same names, types and shapes.

        It returns immediately, and raises the errors of :func:`horovod.mxnet.ops.allreduce.allreduce_`. Gradients are sent in
        as many requests as the user asked for, each of one type. By default they are cut by size.

        Args:
            names: the names of the parameters, for errors and the timeline.
        """
        with of_both_kinds():
            tensors = [
                (f"{PREFIX}.{name}", spec.data_type, spec.shape)
                for name, gradient in zip(names, gradients, strict=True)
                for spec in specs([gradient], f"gradient of {name}")
            ]
            for number, members in enumerate(self._cut(tensors)):
                request = self._request(f"{names[0]}.{number}", [tensors[index] for index in members])
                self._submit(request, [gradients[index] for index in members], -min(members))

    def _cut(self, tensors: Sequence[_Named]) -> list[list[int]]:
        if not self.num_groups:
            sizes = [(data_type, data_type.itemsize * prod(shape)) for _, data_type, shape in tensors]
            return cut(sizes, bucket_limit(on_processor=True))
        groups: dict[object, list[int]] = {}
        for number, part in enumerate(split_list(range(len(tensors)), self.num_groups)):
            for index in part:
                groups.setdefault((number, tensors[index][1]), []).append(index)
        return list(groups.values())

    def _submit(self, request: Request, gradients: list[Any], priority: int) -> None:
        in_place(gradients, lambda hosts: submit(self._process_set, request, hosts, hosts, priority))

    def _request(self, label: str, tensors: Sequence[_Named]) -> Request:
        """The request for these tensors. It is the same object in every step, so the ranks exchange its details only once."""
        if self._generation != running().generation:
            self._generation, self._name = running().generation, optimizer_name(self._kind)
            self._requests.clear()
        key = (label, *tensors)
        request = self._requests.get(key)
        if request is None:
            request = allreduce_request(f"{self._name}.{label}", tensors, Sum, 1.0 / self._predivide, 1.0, self._line)
            self._requests[key] = request
        return request
