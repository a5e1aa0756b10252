"""Runs the host discovery script and returns its output. Time and size are bounded, and no process of it is left."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time

from horovod.runner.errors import UsageError

MOST_BYTES = 1 << 20


def capture(command: str, seconds: float, cancel: int = -1) -> str:
    """What the host discovery script writes to its standard output.

    Args:
        command: for a shell.
        seconds: how long it may take.
        cancel: a descriptor; once that is readable, the script is ended, and the output does not matter. -1 for none.

    Raises:
        ValueError: it fails, takes longer than ``seconds``, writes more than a MiB, or writes something other than UTF-8
            text. The message quotes the end of its standard error.
    """
    script = f"the host discovery script {command!r}"
    deadline = time.monotonic() + seconds
    process = subprocess.Popen(
        ["/bin/sh", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # so that all that it starts can be ended with it
        bufsize=0,
    )
    assert process.stdout is not None and process.stderr is not None
    with process.stdout, process.stderr:
        try:
            out, errors = _read(process.stdout.fileno(), process.stderr.fileno(), deadline, cancel)
            status = process.wait(max(0.0, deadline - time.monotonic()))  # it may have closed its streams, and run on
        except _EndedError as error:
            raise UsageError(f"{script} {error}") from None
        except (TimeoutError, subprocess.TimeoutExpired):
            raise UsageError(f"{script} did not end within {seconds:g} seconds") from None
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except OSError:
                pass  # it has ended, and all of its children
            process.wait()
    if status:
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
        said = errors.decode("utf-8", "replace").strip().splitlines()
        raise UsageError(f"{script} {how}" + (f": {said[-1]}" if said else "; try it by hand"))
    try:
        return out.decode("utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{script} wrote something other than UTF-8 text") from None


class _EndedError(Exception):
    """Why the script is ended."""


def _read(out: int, errors: int, deadline: float, cancel: int) -> tuple[bytes, bytes]:
    """Everything up to the end of both streams; of the second one the last 4 KiB."""
    found = {out: b"", errors: b""}
    with selectors.DefaultSelector() as selector:
        reading = set(found)
        for stream in (*found, *((cancel,) if cancel >= 0 else ())):
            selector.register(stream, selectors.EVENT_READ)
        while reading:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError
            for key, _ in selector.select(remaining):
                if key.fd == cancel:
                    raise _EndedError("was ended, because the job ends")
                data = os.read(key.fd, 1 << 16)
                if not data:
                    selector.unregister(key.fd)
                    reading.discard(key.fd)
                found[key.fd] += data
            found[errors] = found[errors][-4096:]
            if len(found[out]) > MOST_BYTES:
                raise _EndedError(f"wrote more than {MOST_BYTES} bytes")
    return found[out], found[errors]
