"""The rendezvous server for programs that start the ranks themselves.

The program starts the server, gives each process its numbers (``HOROVOD_RANK`` and so on, from ``get_host_assignments``) and
the address of the server (``HOROVOD_GLOO_RENDEZVOUS_ADDR`` and ``_PORT``), and stops the server when the processes have ended.
The server does not speak HTTP, and admits only processes that have its secret: that in ``HOROVOD_SECRET_KEY``, if the user has
set it for this program and all ranks. Otherwise :meth:`RendezvousServer.start` puts a new one into this process's environment,
and processes that do not inherit it need it as well.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from horovod._base.config import SECRET_KEY
from horovod.control.rendezvous.at_rank_0 import handshake_secret
from horovod.control.rendezvous.server import RendezvousServer as Server
from horovod.control.secret import decode_secret, encode_secret, make_secret, secret_of_user
from horovod.runner.hosts.slots import SlotInfo


class RendezvousServer:
    """One job's rendezvous server.

    Args:
        verbose: accepted for compatibility.
    """

    def __init__(self, verbose: int = 0) -> None:
        self._server: Server | None = None

    def start(self, handler_cls: object = None) -> int:
        """Start the server on all networks of this machine. Returns its port.

        The job's secret is that in the environment (``_HOROVOD_SECRET_KEY`` or ``HOROVOD_SECRET_KEY``), or a new one, which is
        put there as ``_HOROVOD_SECRET_KEY``.

        Raises:
            NotImplementedError: ``handler_cls`` is given.
            ValueError: the secret in the environment is too short.
            RuntimeError: the server runs already.
        """
        if handler_cls is not None:
            raise NotImplementedError(
                "this rendezvous server has no HTTP handlers; elastic jobs are started by horovodrun"
            )
        if self._server is not None:
            raise RuntimeError("this rendezvous server runs already; make a new one for another job")
        self._server = Server(_secret(), "0.0.0.0")
        self._server.start()
        return self._server.address[1]

    def init(self, host_alloc_plan: Sequence[SlotInfo]) -> None:
        """Accepted for compatibility: the ranks themselves report how many they are.

        Raises:
            ValueError: the plan does not have each rank once.
        """
        if sorted(slot.rank for slot in host_alloc_plan) != list(range(len(host_alloc_plan))):
            raise ValueError(f"the plan must have each rank once, and has {[slot.rank for slot in host_alloc_plan]}")

    def stop(self) -> None:
        """End the server. Idempotent."""
        if self._server is not None:
            self._server.stop()


def _secret() -> bytes:
    """The secret of the server's handshakes. A rank chooses among the variables in the same order."""
    if SECRET_KEY not in os.environ:
        given = secret_of_user(os.environ)
        if given:
            return handshake_secret(given)
        os.environ[SECRET_KEY] = encode_secret(make_secret())
    return decode_secret(os.environ[SECRET_KEY])
