"""How a script ends when nobody catches anything: what its own exit code is, and what the other ranks are told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

import horovod
from horovod.control.rendezvous.server import RendezvousServer
from horovod.control.secret import encode_secret, make_secret

SCRIPT = """
import os, sys, time
from horovod.core.submission import collectives
from horovod.common import basics
from horovod.core.lifecycle import context
from horovod.core.errors import HorovodInternalError

basics.init()
try:
    collectives.barrier().wait()  # a rank may learn here already that another has failed behind it
    if context.current().identity.rank == 1:
        {ending}
    collectives.barrier().wait(20)
    print("nothing happened")
except HorovodInternalError as error:
    print(error)
"""


@contextmanager
def environment(size: int) -> Iterator[Mapping[str, str]]:
    """A rendezvous server, and the variables that all ranks share."""
    secret = make_secret()
    server = RendezvousServer(secret)
    server.start()
    host, port = server.address
    env = {name: value for name, value in os.environ.items() if "HOROVOD" not in name}
    try:
        yield {
            **env,
            "PYTHONPATH": str(Path(horovod.__file__).resolve().parents[1]),
            "HOROVOD_SIZE": str(size),
            "HOROVOD_LOCAL_SIZE": str(size),
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": host,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
            "_HOROVOD_SECRET_KEY": encode_secret(secret),
        }
    finally:
        server.stop()


ENDINGS = {
    "exception": ("raise LookupError('no such batch')", 1, "it raised LookupError: no such batch (at {script}:12)"),
    "end of script": ("sys.exit(0)", 0, "This was caused by rank 1: it left the job"),
    "exit code": ("sys.exit(5)", 5, "This was caused by rank 1: it left the job"),
    "hard exit": ("os._exit(6)", 6, "its process ended without hvd.shutdown()"),
    "signal": ("os.kill(os.getpid(), 15); time.sleep(5)", -signal.SIGTERM, "its process ended without hvd.shutdown()"),
}


@pytest.mark.parametrize("kind", ENDINGS)
def test_the_end_of_one_rank(tmp_path: Path, kind: str) -> None:
    ending, status, text = ENDINGS[kind]
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(ending=ending))
    with environment(3) as env:
        processes = [
            subprocess.Popen(
                [sys.executable, str(script)],
                env={**env, "HOROVOD_RANK": str(rank), "HOROVOD_LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(3)
        ]
        try:
            outputs = [process.communicate(timeout=30) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    assert [process.returncode for process in processes] == [0, status, 0], outputs
    for rank in (0, 2):
        assert "rank 1" in outputs[rank][0] and text.format(script=script) in outputs[rank][0], outputs
        assert outputs[rank][1] == ""
    assert ("LookupError" in outputs[1][1]) == (kind == "exception")
