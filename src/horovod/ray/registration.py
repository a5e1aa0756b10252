"""Numbers the ranks of a job by node, and starts the server where they meet."""

from __future__ import annotations

from collections.abc import Callable

import ray

from horovod._base import config
from horovod.control.rendezvous.server import RendezvousServer
from horovod.control.secret import encode_secret, make_secret
from horovod.ray.ray_logger import KEY
from horovod.ray.settings import MiniSettings
from horovod.ray.utils import nics_to_env_var
from horovod.runner.hosts.slots import number_ranks
from horovod.runner.machine import port_below_ephemeral
from horovod.runner.worker_environment import of_rank, torch_rank


def address_for_store() -> tuple[str, int]:
    """An address of this process's node, and a free port there, for the store of ``torch.distributed``. Rank 0 is asked."""
    return ray.util.get_node_ip_address(), port_below_ephemeral()


class Coordinator:
    """Registers the ranks of one job and gives them their environment.

    Args:
        settings: with an attribute ``nics``.
        logged: called with each value that rank 0 logs, pickled, on a thread of the server.
    """

    def __init__(self, settings: MiniSettings, logged: Callable[[bytes], None] = lambda _: None) -> None:
        self.settings = settings
        self._logged = logged
        self._ranks: dict[int, tuple[str, str]] = {}
        self._server: RendezvousServer | None = None

    @property
    def world_size(self) -> int:
        return len(self._ranks)

    @property
    def hostnames(self) -> set[str]:
        return {hostname for hostname, _ in self._ranks.values()}

    @property
    def node_id_string(self) -> str:
        """``node:ranks``, with commas between."""
        nodes = [node for _, (_, node) in sorted(self._ranks.items())]
        return ",".join(f"{node}:{nodes.count(node)}" for node in dict.fromkeys(nodes))

    def register(self, hostname: str, node_id: str, world_rank: int) -> None:
        """Add a rank.

        Raises:
            ValueError: it has been added already.
        """
        if world_rank in self._ranks:
            raise ValueError(f"rank {world_rank} has been registered already, on node {self._ranks[world_rank][1]}")
        self._ranks[world_rank] = (hostname, node_id)

    def finalize_registration(self) -> dict[int, dict[str, str]]:
        """The variables of each rank: its numbers, also under torchrun's names, and the node as its host.

        Raises:
            ValueError: ranks are missing.
        """
        missing = [rank for rank in range(self.world_size) if rank not in self._ranks]
        if missing:
            raise ValueError(f"{self.world_size} ranks are registered, but not rank {missing[0]}: ranks count from 0")
        slots = number_ranks([self._ranks[rank][1] for rank in range(self.world_size)])
        return {slot.rank: {**of_rank(slot), **torch_rank(slot)} for slot in slots}

    def establish_rendezvous(self) -> dict[str, str]:
        """Start the rendezvous server in this process. Returns the variables that all ranks need to find it."""
        secret = make_secret()
        self._server = RendezvousServer(secret, "0.0.0.0", expected=max(1, self.world_size))
        self._server.pass_on(KEY, lambda _, value: self._logged(value))
        self._server.start()
        return {
            config.RENDEZVOUS_ADDRESS: ray.util.get_node_ip_address(),
            config.RENDEZVOUS_PORT: str(self._server.address[1]),
            config.SECRET_KEY: encode_secret(secret),
            **nics_to_env_var(self.settings.nics or ()),
        }

    def close(self) -> None:
        """End the server. Idempotent."""
        if self._server is not None:
            self._server.stop()
