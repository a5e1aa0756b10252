"""An engine that is built at its first collective: its connections need a descriptor for each other rank, and a job may never
use it.

Every rank of a group carries out the same collectives in the same order, so all ranks build the engine together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from horovod.comm.base import Aborted, Communicator, PeerFailure
from horovod.comm.forwarding import ForwardingCommunicator
from horovod.comm.tuned import TunedSettings


class LateCommunicator(ForwardingCommunicator):
    """One rank of a group whose engine is not built yet. Only collectives build it.

    Args:
        name: of the engine.
        rank, size: this rank's index in the group, and the size of the group.
        build: builds the engine; every rank calls it at the same collective. It raises RuntimeError or OSError if it fails.
        cancel: makes ``build`` fail, now or later. Any thread may call it.
    """

    def __init__(
        self, name: str, rank: int, size: int, build: Callable[[], Communicator], cancel: Callable[[], None]
    ) -> None:
        Communicator.__init__(self, rank, size)
        self.name = name  # type: ignore[misc]  # a class attribute elsewhere
        self._build = build
        self._cancel = cancel
        self._settings: TunedSettings | None = None
        self._lock = threading.Lock()  # guards _built and _aborted between abort() and the build
        self._built: Communicator | None = None
        self._aborted = False

    @property
    def target(self) -> Communicator:  # type: ignore[override]  # read-only: nothing sets it
        """The engine. The first access builds it.

        Raises:
            PeerFailure: it cannot be built.
            Aborted: :meth:`abort` was called.
        """
        if self._built is not None:
            return self._built
        try:
            if self._aborted:
                raise RuntimeError("aborted")
            built = self._build()
        except (OSError, RuntimeError) as error:
            if self._aborted:
                raise Aborted("this communicator was aborted") from error
            raise PeerFailure(self.rank, f"it could not connect to the other ranks: {error}", suspected=True) from error
        if self._settings is not None:
            built.tune(self._settings)
        with self._lock:
            self._built = built
            if self._aborted:
                built.abort()
        return built

    def tune(self, settings: TunedSettings) -> None:
        self._settings = settings
        if self._built is not None:
            self._built.tune(settings)

    def abort(self) -> None:
        with self._lock:
            self._aborted = True
            self._cancel()
            if self._built is not None:
                self._built.abort()

    def may_still_read(self) -> bool:
        return self._built is not None and self._built.may_still_read()

    def may_still_write(self) -> bool:
        return self._built is not None and self._built.may_still_write()

    def engines(self) -> list[str]:
        return [self.name]

    def descriptors(self) -> list[int]:
        return [] if self._built is None else self._built.descriptors()

    def close(self) -> None:
        if self._built is not None:
            self._built.close()
