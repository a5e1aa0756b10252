"""A rank is killed amid Gloo's transfers, again and again: the other one ends each time, whatever Gloo has left.

The two ranks are processes forked for each try, which use the engine without a job around it. So the interpreter of
the one that survives ends as that of a script does.
"""

from __future__ import annotations

import os
import subprocess
import sys

from time_limits import JOB
from torch_versions import needs_gloo

pytestmark = needs_gloo

TRIES = 12
LIMIT = JOB

PROGRAM = """
import os, random, signal, socket, sys, threading, time
from datetime import timedelta
from functools import partial

import numpy as np
import torch

from horovod.comm.base import Aborted, PeerFailure, give_up
from horovod.comm.gloo import collectives
from horovod.comm.gloo.engine import GlooCommunicator
from horovod.comm.reduction import ReduceOp

LENGTH = 6_000_000
collectives._SHUT_DOWN_SECONDS = 0.3
torch.set_num_threads(1)


def play(rank, connections, chosen, told):
    connections[1 - rank].close()
    ends = {1 - rank: connections[rank]}
    deadline = time.monotonic() + 30
    made = collectives.GlooCollectives(rank, ends, ["one"] * 2, "", timedelta(seconds=60), give_up, deadline)
    communicator = GlooCommunicator(rank, 2, made)
    own, whole = np.ones(LENGTH, np.float32), np.empty(2 * LENGTH, np.float32)
    calls = [
        partial(communicator.allreduce, [own], [own], ReduceOp.SUM, 1.0, 0.5),
        partial(communicator.allgather, [own], [whole], [[LENGTH, LENGTH]]),
        partial(communicator.broadcast, [own], 1),
    ]
    communicator.barrier()
    if rank == 0:
        threading.Thread(target=abort_later, args=(communicator,), daemon=True).start()
    os.write(told, b"r")
    try:
        while True:
            chosen.choice(calls)()
    except (PeerFailure, Aborted):
        pass
    communicator.close()
    os.write(told, b"f")


def abort_later(communicator):  # as the liveness monitor does
    time.sleep(0.6)
    communicator.abort()


def fork(rank, connections, seed, told):
    process = os.fork()
    if process == 0:
        signal.alarm(120)
        play(rank, connections, random.Random(seed), told)
        sys.exit(5)  # the interpreter ends, and its modules with it
    return process


def ended(process):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return "never"


chances = random.Random(int(sys.argv[2]))
began = time.monotonic()
for _ in range(int(sys.argv[1])):
    if time.monotonic() > began + 60:
        break  # the machine is busy
    seed, delay = chances.random(), chances.uniform(0.001, 0.06)
    connections, (heard, told) = socket.socketpair(), os.pipe()
    survivor, victim = (fork(rank, connections, seed, told) for rank in range(2))
    for each in connections:
        each.close()
    os.close(told)
    os.read(heard, 1)
    time.sleep(delay)
    os.kill(victim, signal.SIGKILL)
    os.waitpid(victim, 0)
    print(ended(survivor), flush=True)
    os.close(heard)
"""


def test_a_rank_ends_when_its_peer_was_killed_in_the_middle_of_a_transfer() -> None:
    program = [sys.executable, "-c", PROGRAM, str(TRIES), "1"]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=LIMIT, check=True, env={**os.environ})
    codes = ended.stdout.split()
    assert codes == ["5"] * len(codes) and codes, ended.stdout + ended.stderr
