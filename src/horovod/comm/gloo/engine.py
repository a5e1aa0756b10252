"""How Gloo is chosen and built: only where it is forced, and PyTorch brings it."""

from __future__ import annotations

import importlib.util
from typing import ClassVar

from horovod.comm.bytewise.communicator import BytewiseCommunicator
from horovod.comm.engine import Bootstrap, Engine, Group, version_of


class GlooCommunicator(BytewiseCommunicator):
    """One rank of a group over Gloo."""

    name: ClassVar[str] = "gloo"


class GlooEngine(Engine):
    """Ranks of any hosts that can reach one another, where PyTorch is installed."""

    name: ClassVar[str] = "gloo"
    automatic: ClassVar[bool] = False

    def installed(self) -> str:
        return f"torch {version_of('torch')}" if importlib.util.find_spec("torch") is not None else ""

    def obstacle(self, group: Group) -> str:
        if importlib.util.find_spec("torch") is None:
            return "PyTorch, which brings Gloo, is not installed: pip install torch"
        try:
            from torch.distributed import ProcessGroupGloo
        except ImportError as error:
            return f"this PyTorch was built without Gloo ({error}): install one from pytorch.org or PyPI"
        if not hasattr(ProcessGroupGloo, "_set_default_timeout"):
            return f"Gloo of PyTorch {version_of('torch')} keeps the time limit it begins with: install PyTorch 2.3 or newer"
        return ""

    def build(self, group: Group, bootstrap: Bootstrap, deadline: float) -> GlooCommunicator:
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
        return GlooCommunicator(group.rank, group.size, collectives)
