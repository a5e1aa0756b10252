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
from time_limits import SOON

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
    "exit code": ("sys.exit(5)", 5, "it ended with status 5 (sys.exit at {script}:12)"),
    "caught exit": (
        "exec('try: sys.exit(5)\\nexcept SystemExit as end: sys.exit(end.code - 5)')",
        0,
        "This was caused by rank 1: it left the job",
    ),
    "hard exit": ("os._exit(6)", 6, "its process ended without hvd.shutdown()"),
    "signal": ("os.kill(os.getpid(), 15); time.sleep(5)", -signal.SIGTERM, "its process ended without hvd.shutdown()"),
}


def start(script: Path, env: Mapping[str, str], size: int) -> list[subprocess.Popen[str]]:
    return [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**env, "HOROVOD_RANK": str(rank), "HOROVOD_LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]


@pytest.mark.parametrize("kind", ENDINGS)
def test_the_end_of_one_rank(tmp_path: Path, kind: str) -> None:
    ending, status, text = ENDINGS[kind]
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(ending=ending))
    with environment(3) as env:
        processes = start(script, env, 3)
        try:
            outputs = [process.communicate(timeout=SOON) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    assert [process.returncode for process in processes] == [0, status, 0], outputs
    for rank in (0, 2):
        assert "rank 1" in outputs[rank][0] and text.format(script=script) in outputs[rank][0], outputs
        assert outputs[rank][1] == ""
    assert ("LookupError" in outputs[1][1]) == (kind == "exception")


LINGERING = """
import atexit, concurrent.futures, os, sys, threading, time
from horovod.core.submission import collectives
from horovod.common import basics
from horovod.core.lifecycle import context
from horovod.core.errors import HorovodInternalError

basics.init()

def end():
    {ending}

def linger():
    print("lingers", flush=True)
    while True:
        time.sleep(1)

if basics.rank() == 1:
    {lingers}
    end()
    sys.exit({status})
try:
    collectives.barrier().wait()
    print("nothing happened")
except HorovodInternalError as error:
    print(error)
"""
RAISES = "raise LookupError('no such batch')"
LINGERS = {
    "thread": (RAISES, "threading.Thread(target=linger).start()", "it raised LookupError: no such batch"),
    "executor": (RAISES, "concurrent.futures.ThreadPoolExecutor().submit(linger)", "it raised LookupError"),
    "atexit": (RAISES, "atexit.register(linger)", "it raised LookupError: no such batch"),
    "hook": (
        RAISES,
        "sys.excepthook = lambda *args: print('the script heard of it', flush=True); atexit.register(linger)",
        "it raised LookupError: no such batch",
    ),
    "status": ("sys.exit(5)", "atexit.register(linger)", "it ended with status 5 (sys.exit at "),
    "thread that raises": (
        "threading.Thread(target=lambda: (time.sleep(0.5), {}['no such batch']), name='trainer').start()",
        "threading.excepthook = lambda args: print('the script heard of it', flush=True); atexit.register(linger)",
        "it raised KeyError: 'no such batch'",
    ),
}


@pytest.mark.parametrize("kind", LINGERS)
def test_a_rank_that_has_failed_says_so_before_it_ends(tmp_path: Path, kind: str) -> None:
    """Its interpreter waits for a thread, or for an atexit function, that never ends."""
    ending, lingers, text = LINGERS[kind]
    script = tmp_path / "train.py"
    script.write_text(LINGERING.format(ending=ending, lingers=lingers, status=0))
    with environment(2) as env:
        processes = start(script, env, 2)
        try:
            told, errors = processes[0].communicate(timeout=SOON)
            assert processes[1].poll() is None, processes[1].communicate()
            assert text in told, told + errors
        finally:
            for process in processes:
                process.kill()
            outputs = [process.communicate() for process in processes]
    assert "lingers" in outputs[1][0], outputs
    assert ("the script heard of it" in outputs[1][0]) == ("the script" in lingers)


GOES_ON = """
import threading, time
from horovod.core.submission import collectives
from horovod.common import basics

basics.init()

def train():
    time.sleep(0.5)
    collectives.barrier().wait()
    print("trained", flush=True)

threading.Thread(target=train).start()
"""


def test_a_thread_may_train_after_the_main_thread_has_ended_well(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(GOES_ON)
    with environment(2) as env:
        processes = start(script, env, 2)
        try:
            outputs = [process.communicate(timeout=SOON) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    assert outputs == [("trained\n", "")] * 2
    assert [process.returncode for process in processes] == [0, 0]
