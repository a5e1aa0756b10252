"""A network of a test's own, whose only wire can be cut: neither end is told."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from time_limits import SOON

_PROGRAM = """
import fcntl, select, socket, struct, time
from datetime import timedelta

from horovod.comm.base import PeerFailure
from horovod.comm.exchange.base import CollectiveKind
from horovod.comm.tcp.transport import TcpExchange
from horovod.control.channel import Channel, ChannelClosed
from horovod.control.connection import Connection

def interface(flags):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any:
        fcntl.ioctl(any, 0x8914, struct.pack("16sh14x", b"lo", flags))  # SIOCSIFFLAGS

def cut():
    interface(0)

interface(1)
with socket.create_server(("127.0.0.1", 0)) as listener:
    other = socket.create_connection(listener.getsockname(), source_address=("127.0.0.2", 0))
    own, _ = listener.accept()
"""


def in_a_cut_network(program: str) -> str:
    """What a program prints that has a connection, ``own`` to ``other``, and ``cut()``, which cuts it."""
    text = _PROGRAM + textwrap.dedent(program)
    command = ["unshare", "--user", "--map-root-user", "--net", sys.executable, "-c", text]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SOON)
    if done.stderr.startswith("unshare:"):
        pytest.skip(f"no network can be made here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout
