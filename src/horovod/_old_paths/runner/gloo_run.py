"""``horovod.runner.gloo_run``: what programs need that start the ranks themselves; an import path that scripts use."""

from horovod.runner.hosts.slots import get_host_assignments, parse_hosts
from horovod.runner.rendezvous_server import RendezvousServer

__all__ = ["RendezvousServer", "get_host_assignments", "parse_hosts"]
