"""Agents on the nodes of a Ray cluster: an actor on each starts one, and the launcher connects to it.

The actor reserves what the ranks of its node need, and waits for one connection, which must begin with a token that Ray has
brought to it. The connection is then the agent's standard input and output.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from horovod.runner.reach import awaiting_agent
from horovod.runner.reach.remote import AgentConnection

_ACCEPT_SECONDS = 60.0
_END_SECONDS = 1.0
_CHUNK = 1 << 16


class NodeActor:
    """On a node of the cluster: starts its agent."""

    def listen(self, token: bytes) -> tuple[str, int]:
        """Wait for one connection that begins with ``token``, and start an agent on it. Returns the address to connect to."""
        server = socket.create_server(("", 0))
        address = ray.util.get_node_ip_address(), server.getsockname()[1]
        threading.Thread(target=self._serve, args=(server, token), daemon=True).start()
        return address

    @staticmethod
    def _serve(server: socket.socket, token: bytes) -> None:
        agent = awaiting_agent.serve(server, token, _ACCEPT_SECONDS)
        if agent is not None:
            agent.wait()  # it ends with the connection; this thread ends with the actor


class RayConnection(AgentConnection):
    """A connection to the agent of a node, made on a thread of its own, since Ray may take long to start the actor.

    Args:
        node: Ray's number of the node.
        resources: ``num_cpus`` and ``num_gpus`` to reserve there.
        seconds: how long it may take.
    """

    def __init__(self, node: str, resources: dict[str, float], seconds: float) -> None:
        near, far = socket.socketpair()
        self.reader, self.writer = os.dup(near.fileno()), near.detach()
        self.errors, say = os.pipe()
        self._resources = resources
        place = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        self._actor = ray.remote(NodeActor).options(scheduling_strategy=place, **resources).remote()
        self._ends = [far]  # of the sockets that the thread reads
        self._closed = False
        self._thread = threading.Thread(target=self._carry, args=(far, say, seconds), name="horovod-ray", daemon=True)
        self._thread.start()

    def explain(self, errors: str, preamble: str) -> str:
        lines = errors.strip().splitlines()
        return lines[-1] if lines else ""

    def close(self, *, orderly: bool) -> None:
        self._closed = True
        ray.kill(self._actor)
        for each in self._ends:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._thread.join(_END_SECONDS)  # the launcher waits for no node that is lost
        os.close(self.errors)

    def _carry(self, far: socket.socket, say: int, seconds: float) -> None:
        try:
            token = secrets.token_bytes(awaiting_agent.TOKEN_BYTES)
            address = ray.get(self._actor.listen.remote(token), timeout=seconds)
            with awaiting_agent.connect([address], token, seconds) as agent:
                self._ends.append(agent)
                if self._closed:
                    return
                back = threading.Thread(target=_copy, args=(agent, far), name="horovod-ray-back", daemon=True)
                back.start()
                _copy(far, agent)
                back.join(_END_SECONDS)
        except ray.exceptions.GetTimeoutError:
            _write(say, f"Ray has not started an actor with {self._resources} there within {seconds:g} seconds")
        except (OSError, ray.exceptions.RayError) as error:
            _write(say, f"Ray's actor there is lost: {' '.join(str(error).split())[:300]}")
        finally:
            os.close(say)
            far.close()


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Copy bytes until one end is closed."""
    with contextlib.suppress(OSError):
        while data := source.recv(_CHUNK):
            target.sendall(data)
    for each, end in ((target, socket.SHUT_WR), (source, socket.SHUT_RD)):
        with contextlib.suppress(OSError):
            each.shutdown(end)


def _write(descriptor: int, text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(descriptor, text.encode())
