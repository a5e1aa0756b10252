"""How an optimizer or a gradient tape reduces gradients: the arguments that all bindings have in common, once they are checked.

A binding's own settings extend :class:`ReductionSettings` with what only its framework has. The checks of single arguments are
in :mod:`horovod._bindings.reductions`, :mod:`horovod._bindings.bucket_division` and :mod:`horovod._bindings.scalars`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from horovod._base.config import Config
from horovod._bindings.compression import NoneCompressor, form_of
from horovod.comm.reduction import ReduceOp
from horovod.common.basics import is_initialized
from horovod.core.lifecycle.context import running
from horovod.core.lifecycle.process_set import ProcessSet, global_process_set
from horovod.observe.call_site import warn


@dataclass(frozen=True, kw_only=True)
class ReductionSettings:
    """Checked arguments of ``DistributedOptimizer``, ``DistributedGradientTape`` and the like.

    Attributes:
        op: the reduction, for example ``hvd.Average``.
        predivide: ``gradient_predivide_factor``: an Average divides by it before the sum, and by size / predivide afterwards.
        compression: what makes gradients smaller; a class with ``compress`` and ``decompress``.
        sparse_as_dense: sparse gradients are made dense first; otherwise the values of all ranks are gathered.
        groups: which gradients form one request: a number of requests, lists of variables, or None to cut by size.
        process_set: the ranks that reduce; other ranks keep their own gradients.
        passes: ``backward_passes_per_step``: how many backward passes each rank adds up before gradients are reduced.
        line: ``file:line`` of the script that made the optimizer, for errors.
    """

    op: ReduceOp = ReduceOp.AVERAGE
    predivide: float = 1.0
    compression: Any = NoneCompressor
    sparse_as_dense: bool = False
    groups: int | list[list[Any]] | None = None
    process_set: ProcessSet = global_process_set
    passes: int = 1
    line: str = ""

    def __post_init__(self) -> None:
        form_of(self.compression, self.op)  # raises if it does not suit the reduction

    @property
    def chosen_form(self) -> str | None:
        """As of :class:`~horovod._bindings.reductions.ReductionArguments`."""
        return form_of(self.compression, self.op)

    @property
    def form(self) -> str:
        """The format of compression between hosts; "" for none."""
        chosen = self.chosen_form
        if chosen is None:
            chosen = (running().config if is_initialized() else Config.from_env()).compression
        return chosen if self.op in (ReduceOp.SUM, ReduceOp.AVERAGE) else ""

    def scales(self, op: ReduceOp | None = None, factor: float = 1.0) -> tuple[float, float]:
        """The prescale and postscale factors of a request whose result is multiplied by ``factor``.

        Args:
            op: the request's reduction; None: that of these settings. Only an Average is predivided.
        """
        predivide = self.predivide if (self.op if op is None else op) == ReduceOp.AVERAGE else 1.0
        return 1.0 / predivide, predivide * factor

    def reduces_as(self, other: ReductionSettings) -> bool:
        """Whether gradients come out the same with other settings."""
        mine, theirs = ((each.op, each.predivide, each.compression, each.sparse_as_dense) for each in (self, other))
        return mine == theirs and self.process_set.process_set_id == other.process_set.process_set_id

    def serve_here(self, kind: str) -> bool:
        """Whether an optimizer that was pickled with these settings can be distributed in this process. Warns if not.

        Args:
            kind: the name of the class that it has wrapped.

        Raises:
            ValueError: the process set does not exist here.
        """
        if not is_initialized():
            warn(
                f"A distributed optimizer is loaded as {kind}, which trains alone, because Horovod is not initialised. To "
                "train with other ranks, call hvd.init() first, or hvd.DistributedOptimizer(optimizer, ...) afterwards.",
            )
            return False
        if self.process_set.process_set_id is None:
            raise ValueError(
                f"the loaded distributed optimizer was made for the ranks {self.process_set.ranks}; register this "
                "process set first (hvd.add_process_set), or save the state of the optimizer instead"
            )
        return True

    def active(self) -> bool:
        """Whether this rank reduces gradients: it is a member of the set, and not alone, or the job may grow.

        Raises:
            HorovodInternalError: not initialised.
        """
        if not self.process_set.included():
            return False
        return self.process_set.size() != 1 or running().config.elastic
