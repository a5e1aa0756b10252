"""Ranks that the launcher starts keep the memory of large results: the next result takes no new pages from the kernel."""

from __future__ import annotations

import os
import platform

import pytest

from launcher.harness import Launcher

pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or tuple(map(int, platform.libc_ver()[1].split("."))) < (2, 35),
    reason="only glibc 2.35 and newer keep blocks of 32 MiB",
)

MEGABYTES = (4, 16, 32)
KINDS = ("allgather", "alltoall")
SCRIPT = """
import ctypes, os, resource, sys, time
PR_SET_THP_DISABLE = 41
ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)  # all pages are small, so that they can be counted
import torch
import horovod.torch as hvd

CALLS, WINDOWS = 10, 40
hvd.init()

def new_pages(call, part):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(CALLS):
        handle = call(part, name=call.__name__)
        while not hvd.poll(handle):  # so that the runtime's own thread makes the result
            time.sleep(0.0005)
        result = hvd.synchronize(handle)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def kept(call, part, pages):
    for window in range(WINDOWS):  # memory is taken until there is enough
        taken = torch.tensor(new_pages(call, part))
        if hvd.allreduce(taken, op=hvd.Max, name="taken") < pages / 2:
            return "kept"
    return f"{int(taken)} new pages in {CALLS} calls, {pages} a result"

for megabytes in map(int, sys.argv[1:]):
    elements, pages = megabytes * 2**18, megabytes * 2**20 // resource.getpagesize()
    gathered = kept(hvd.allgather_async, torch.ones(elements // 2), pages)
    print(megabytes, "allgather", gathered, flush=True)
    print(megabytes, "alltoall", kept(hvd.alltoall_async, torch.ones(elements), pages), flush=True)
"""


def test_results_of_4_to_32_mebibytes_are_in_memory_that_is_kept(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(os.environ):
        if name.startswith("MALLOC_") or name in ("LD_PRELOAD", "GLIBC_TUNABLES", "THP_MEM_ALLOC_ENABLE"):
            monkeypatch.delenv(name)
    words = ["-np", "2", "python", "-c", SCRIPT, *map(str, MEGABYTES)]
    done = launcher.run(*words)
    assert done.returncode == 0, done.stderr
    said = [f"[{rank}]<stdout>:{size} {kind} kept" for rank in (0, 1) for size in MEGABYTES for kind in KINDS]
    assert sorted(done.stdout.splitlines()) == sorted(said)
