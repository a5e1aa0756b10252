"""Several engines for one group of ranks. One of them moves the data; all ranks switch between the same two collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from horovod.comm.base import Communicator
from horovod.comm.forwarding import ForwardingCommunicator
from horovod.comm.spans import Vectors
from horovod.comm.tuned import TunedSettings


class SwitchingCommunicator(ForwardingCommunicator):
    """Forwards every collective to one of several engines. An abort interrupts all of them, since a failure ends the whole job.

    Args:
        engines: at least one; the first is used until :meth:`tune` switches. This object owns them from now on.
    """

    def __init__(self, engines: Sequence[Communicator]) -> None:
        super().__init__(engines[0])
        self.built = list(engines)
        self.chosen_because = engines[0].chosen_because
        self._use(engines[0])

    def _use(self, engine: Communicator) -> None:
        self.target = engine
        self.name = engine.name  # type: ignore[misc]  # a class attribute elsewhere
        self.any_thread = engine.any_thread
        self.compresses = engine.compresses

    def tune(self, settings: TunedSettings) -> None:
        for engine in self.built:
            engine.tune(settings)
            if engine.name == settings.engine:
                self._use(engine)

    def alternatives(self) -> list[str]:
        return [self.name, *(engine.name for engine in self.built if engine is not self.target)]

    def allocate(self, dtype: np.dtype[Any], length: int, value: Any = None) -> Vectors:
        return self.target.allocate(dtype, length, value)

    def abort(self) -> None:
        for engine in self.built:
            engine.abort()

    def may_still_read(self) -> bool:
        return any(engine.may_still_read() for engine in self.built)

    def may_still_write(self) -> bool:
        return any(engine.may_still_write() for engine in self.built)

    def engines(self) -> list[str]:
        return [*dict.fromkeys(name for engine in self.built for name in engine.engines())]

    def descriptors(self) -> list[int]:
        return [descriptor for engine in self.built for descriptor in engine.descriptors()]

    def close(self) -> None:
        for engine in self.built:
            engine.close()
