"""A state of variables whose contents are arrays of host memory: what the states of TensorFlow and Keras have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from horovod._bindings.objects import broadcast_object
from horovod.comm.datatypes import Array, data_type_of
from horovod.common.basics import rank
from horovod.core.requests.tensor import Tensor
from horovod.core.submission import collectives
from horovod.elastic.newest_state import CommitProgress
from horovod.elastic.state import ObjectState


class Variables(NamedTuple):
    """The variables of a state.

    Attributes:
        shared: variables that are equal on all ranks, in the same order on each.
        own: variables that are saved and restored, but differ from rank to rank, such as states of random generators.
    """

    shared: Sequence[Any]
    own: Sequence[Any] = ()


class VariablesState(ObjectState):
    """Variables and plain objects. In a new round all ranks take over those of a rank that is furthest ahead.

    Args:
        kwargs: plain objects, as for :class:`~horovod.elastic.state.ObjectState`.
    """

    def __init__(self, **kwargs: Any) -> None:
        self._progress = CommitProgress()
        self._saved_variables: list[Any] = []
        self._saved_arrays: list[Array] = []
        super().__init__(broadcast_object, rank, **kwargs)

    @abstractmethod
    def _variables(self) -> Variables:
        """The present variables."""

    @abstractmethod
    def _read(self, variables: Sequence[Any]) -> list[Array]:
        """The values of variables; may be views of them."""

    @abstractmethod
    def _write(self, variables: Sequence[Any], arrays: Sequence[Array]) -> None:
        """Assign copies of ``arrays`` to variables."""

    def _before_writing(self) -> None:
        """Called before variables are set from outside of the framework's training loop."""

    def commit(self) -> None:
        """Save, then check for host updates. Every rank must call it.

        Raises:
            HostsUpdatedInterrupt: hosts were added or removed; ``hvd.elastic.run`` catches it.
        """
        self._progress.step += 1
        super().commit()

    def save(self) -> None:
        """Copy the variables' values into memory that is reused by the next save."""
        shared, own = self._variables()
        self._saved_variables = [*shared, *own]
        arrays = self._read(self._saved_variables)
        kept = self._saved_arrays
        if [(each.shape, each.dtype) for each in kept] == [(each.shape, each.dtype) for each in arrays]:
            for target, source in zip(kept, arrays, strict=True):
                np.copyto(target, source)
        else:
            self._saved_arrays = [np.array(each, order="C") for each in arrays]
        super().save()
        self._progress.saved = self._progress.step

    def restore(self) -> None:
        self._before_writing()
        self._write(self._saved_variables, self._saved_arrays)
        super().restore()

    def sync(self) -> None:
        """Give all ranks the state of the rank that is furthest ahead, and save it. Every rank must call it.

        Raises:
            HorovodInternalError: a rank was lost meanwhile, or the ranks have different variables.
        """
        root = self._progress.gather(self._progress.saved).rank
        variables = list(self._variables().shared)
        if variables:
            arrays = [np.array(each, order="C") for each in self._read(variables)]
            tensors = [Tensor(each.reshape(-1), data_type_of(each), each.shape) for each in arrays]
            collectives.broadcast("broadcast", "elastic.variables", tensors, root, awaited=True).wait()
            self._before_writing()
            self._write(variables, arrays)
        self._saved_state, step = broadcast_object((self._saved_state, self._progress.step), root, "elastic.objects")
        self._set_attributes()
        self.save()
        self._progress.adopt(step)
