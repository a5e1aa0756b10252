"""Every operation of c10d as a collective of the core, under the names by which PyTorch calls a group.

The methods take their arguments in the forms and by the names that PyTorch's own groups accept (:mod:`~.arguments`).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from horovod.core.negotiation.messages import Operation
from horovod.torch.distributed.arguments import c10d, options_of
from horovod.torch.distributed.group_reductions import Reductions
from horovod.torch.distributed.movements import Movements
from horovod.torch.distributed.work import HorovodWork
from horovod.torch.uncompiled import uncompiled


@uncompiled
class Operations(Reductions, Movements):
    """The operations of a group. The subclass makes ``_submitter``.

    Every rank of the group must call the same operations in the same order, with tensors of the same types. Each operation
    returns a work; the results are in the output tensors once its ``wait()`` has returned. Arguments that do not fit together
    raise ArgumentError, a ValueError and a RuntimeError, on the rank that passes them, before anything is sent.

    If one call passes several tensors, they are combined as PyTorch's own group on Gloo combines them.
    """

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> HorovodWork:
        opts = options_of(c10d.BarrierOptions, opts, timeout)
        return self._submitter.start("barrier", Operation.BARRIER, (), (), [], opts)
