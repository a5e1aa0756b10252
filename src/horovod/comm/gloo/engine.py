"""Chooses and builds the engine ``gloo``, from PyTorch's package: only if it is forced."""

from __future__ import annotations

import importlib.util
from typing import ClassVar

from horovod.comm.bytewise.communicator import BytewiseCommunicator
from horovod.comm.engine import Bootstrap, Engine, EngineGroup, is_at_least, version_of

OLDEST = "2.3"
"""The oldest PyTorch whose Gloo can change its time limit after it has connected."""


def _too_old() -> bool:
    version = version_of("torch")
    return version != "" and not is_at_least(version, OLDEST)


class GlooCommunicator(BytewiseCommunicator):
    """One rank of a group over Gloo."""

    name: ClassVar[str] = "gloo"


class GlooEngine(Engine):
    """Serves ranks of any hosts that can reach one another, if PyTorch is installed."""

    name: ClassVar[str] = "gloo"
    automatic: ClassVar[bool] = False

    def installed(self) -> str:
        return "" if importlib.util.find_spec("torch") is None or _too_old() else f"torch {version_of('torch')}"

    def obstacle(self, group: EngineGroup) -> str:
        if importlib.util.find_spec("torch") is None:
            return "PyTorch, which brings Gloo, is not installed: pip install torch"
        if _too_old():
            installed = version_of("torch")
            return f"Gloo of PyTorch {installed} cannot change its time limit later: install PyTorch {OLDEST} or newer"
        try:
            from torch.distributed import ProcessGroupGloo  # noqa: F401  fails if PyTorch has no Gloo
        except ImportError as error:
            return f"this PyTorch was built without Gloo ({error}): install one from pytorch.org or PyPI"
        return ""

    def build(self, group: EngineGroup, bootstrap: Bootstrap, deadline: float) -> GlooCommunicator:
        from horovod.comm.gloo.collectives import GlooCollectives

        settings = group.settings
        collectives = GlooCollectives(
            group.rank,
            group.connect(),
            group.hosts,
            settings.interface,
            settings.stall_timeout,
            group.on_stall,
            deadline,
        )
        return GlooCommunicator(group.rank, group.size, collectives, between_hosts=len(set(group.hosts)) > 1)
