"""A process with a low limit on open files. The limit is of the whole process, so each test runs in one of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from time_limits import SOON

TESTS = Path(__file__).resolve().parents[2]


def run(script: str) -> Any:
    """What the script prints last, as JSON. It starts with ``limit(soft, hard)``."""
    before = """
import json, resource, socket, sys, time
from functools import partial
from horovod.control.fd_limit import DescriptorLimitError, make_room, open_descriptors
def limit(soft, hard):
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
def soft():
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
"""
    done = subprocess.run(
        [sys.executable, "-c", before + script], capture_output=True, text=True, timeout=SOON, cwd=TESTS
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_soft_limit_is_raised_as_far_as_needed_and_leaves_room_for_the_script() -> None:
    used, after_few, after_many, again = run("""
limit(256, 2048)
make_room(10, "rank 0"); few = soft()
make_room(500, "rank 0"); many = soft()
sockets = [socket.socket() for _ in range(500)]
used = open_descriptors()
for each in sockets:
    each.close()
make_room(500, "rank 0")
print(json.dumps([used, few, many, soft()]))
""")
    assert after_few == 256
    assert used + 128 <= after_many < 2048
    assert again < 2048


def test_a_hard_limit_that_is_too_low_is_an_error_with_numbers_and_the_command() -> None:
    text, soft = run("""
limit(128, 1024)
try:
    make_room(2046, "rank 0")
except DescriptorLimitError as error:
    print(json.dumps([str(error), soft()]))
""")
    assert "rank 0 needs 2,046 connections" in text and "may open 1,024" in text and "ulimit -Hn 2" in text
    assert soft == 128


def test_a_mesh_connects_more_ranks_than_the_soft_limit_has_descriptors() -> None:
    connected, soft = run("""
sys.path.insert(0, ".")
from horovod.control.mesh import ConnectionKey, Mesh
from unit.control.concurrent_ranks import run_concurrently
limit(64, 1024)
meshes = [Mesh(rank, "host", True) for rank in range(2)]
endpoints = [each.endpoint for each in meshes]
def connect(rank):
    keys = [ConnectionKey(1 - rank, "data", group) for group in range(60)]
    return meshes[rank].connect(endpoints, keys, "1", b"s" * 32, time.monotonic() + 60)
made = run_concurrently(partial(connect, 0), partial(connect, 1))
print(json.dumps([[len(each) for each in made], soft()]))
""")
    assert connected == [60, 60]
    assert soft > 120


def test_a_mesh_says_before_it_connects_that_the_limit_is_too_low() -> None:
    text = run("""
from horovod.control.mesh import ConnectionKey, Mesh, MeshError
limit(64, 64)
mesh = Mesh(0, "host", True)
try:
    keys = [ConnectionKey(peer, "data", 0) for peer in range(1, 200)]
    mesh.connect([mesh.endpoint] * 200, keys, "1", b"", time.monotonic() + 60)
except MeshError as error:
    print(json.dumps(str(error)))
""")
    assert "rank 0 needs 199 connections" in text and "/etc/security/limits.conf" in text


def test_a_rendezvous_says_to_a_rank_that_its_process_may_not_open_so_many_files() -> None:
    text = run("""
from horovod.control.rendezvous.client import RendezvousClient
from horovod.control.rendezvous.messages import RendezvousError
from horovod.control.rendezvous.server import RendezvousServer
limit(64, 64)
server = RendezvousServer(b"s" * 32)
server.start()
with RendezvousClient(server.address, b"s" * 32, 60.0) as client:
    try:
        client.exchange("init", 0, 500, b"", 60.0)
    except RendezvousError as error:
        print(json.dumps(str(error)))
server.stop()
""")
    assert "a rendezvous of 500 ranks needs" in text and "may open 64" in text
