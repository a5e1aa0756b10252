"""``horovod.runner.http.http_server``: a rendezvous for ranks that a program starts by itself."""

from horovod.runner.rendezvous_server import RendezvousServer

__all__ = ["RendezvousServer"]
