"""Chooses and builds the engine ``ccl``: only if it is forced."""

from __future__ import annotations

from functools import cache
from typing import ClassVar

from horovod.comm.bytewise.communicator import BytewiseCommunicator
from horovod.comm.ccl.library import NAME, Library, OneCclError, path
from horovod.comm.engine import Bootstrap, Engine, EngineError, EngineGroup, version_of


class OneCclCommunicator(BytewiseCommunicator):
    """One rank of a group over oneCCL."""

    name: ClassVar[str] = "ccl"


@cache
def _library() -> Library:
    return Library()


class OneCclEngine(Engine):
    """Serves ranks of any hosts, if oneCCL is installed."""

    name: ClassVar[str] = "ccl"
    automatic: ClassVar[bool] = False

    def installed(self) -> str:
        if path() is None:
            return ""
        version = version_of("oneccl")
        return f"oneccl {version}" if version else "oneCCL"

    def obstacle(self, group: EngineGroup) -> str:
        if path() is None:
            return f"oneCCL ({NAME}) is not installed: pip install oneccl, or set CCL_ROOT to the folder of an installation"
        try:
            _library()
        except (OSError, AttributeError, OneCclError) as error:
            return f"oneCCL cannot be loaded ({error})"
        return ""

    def bootstrap(self, group: EngineGroup) -> Bootstrap:
        try:
            return Bootstrap(_library().unique_id())
        except OneCclError as error:
            raise EngineError(str(error)) from error

    def build(self, group: EngineGroup, bootstrap: Bootstrap, deadline: float) -> OneCclCommunicator:
        from horovod.comm.ccl.collectives import OneCclCollectives

        collectives = OneCclCollectives(
            _library(),
            bootstrap.data,
            group.rank,
            group.size,
            group.connect(),
            group.settings.stall_timeout,
            group.on_stall,
            deadline,
        )
        return OneCclCommunicator(group.rank, group.size, collectives, between_hosts=len(set(group.hosts)) > 1)
