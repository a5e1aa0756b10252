"""Runs the host discovery script and returns its output. Time and size are bounded, and no process of it is left."""

from __future__ import annotations

import signal

from horovod.runner import children
from horovod.runner.errors import UsageError


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
    try:
        status, out, errors = children.run(["/bin/sh", "-c", command], seconds, cancel=cancel)
    except children.Cancelled:
        raise UsageError(f"{script} was ended, because the job ends") from None
    except children.TooMuchOutput:
        raise UsageError(f"{script} wrote more than {children.MOST_BYTES} bytes") from None
    except TimeoutError:
        raise UsageError(f"{script} did not end within {seconds:g} seconds") from None
    if status:
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
        said = errors.decode("utf-8", "replace").strip().splitlines()
        raise UsageError(f"{script} {how}" + (f": {said[-1]}" if said else "; try it by hand"))
    try:
        return out.decode("utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"{script} wrote something other than UTF-8 text") from None
