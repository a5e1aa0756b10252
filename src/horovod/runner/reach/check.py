"""Tells which hosts ssh cannot reach, when another program, such as ``mpirun``, has failed to start ranks on them."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from horovod.runner.reach import ssh

_EXIT_SECONDS = 1.0


def unreachable(command: Sequence[str], hosts: Sequence[str], seconds: float) -> dict[str, str]:
    """The hosts where ssh cannot run a command, and why. Tries all of them at once.

    Args:
        command: ssh and its options, up to the name of a host.
        seconds: how long all of it may take.
    """
    deadline = time.monotonic() + seconds
    found: dict[str, str] = {}
    tried = []
    with ExitStack() as cleanup:
        for host in hosts:
            try:
                errors = cleanup.enter_context(tempfile.TemporaryFile())
                # In the launcher's session, so that Ctrl-C ends it, too.
                process = subprocess.Popen(
                    [*command, host, "true"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors
                )
            except OSError:
                return {}  # no ssh can be run here, or not so many: nothing is known
            cleanup.callback(_end, process)
            tried.append((host, process, errors))
        for host, process, errors in tried:
            try:
                status = process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                found[host] = f"it does not answer within {seconds:g} seconds"
                continue
            if status > 0:  # not where Ctrl-C has ended it
                errors.seek(0)
                found[host] = ssh.explain(status, errors.read().decode(errors="replace"))
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with suppress(subprocess.TimeoutExpired):  # it waits inside the kernel; the launcher does not wait with it
        process.wait(_EXIT_SECONDS)
