"""The hosts that LSF has given to a job. Read from the job's environment, and from a file that it names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def lsf_hosts(environment: Mapping[str, str]) -> dict[str, int] | None:
    """LSF's hosts and their slots, in LSF's order; None outside of an LSF job.

    On a cluster with IBM's CSM, the first host only runs the job's script, and is left out.

    Raises:
        ValueError: the variables do not parse, the file cannot be read, or no host is left; the message says which.
    """
    if not environment.get("LSB_JOBID"):
        return None
    found: dict[str, int] = {}
    counted, file = environment.get("LSB_MCPU_HOSTS", "").split(), environment.get("LSB_DJOB_HOSTFILE", "")
    if counted:
        names, numbers = counted[::2], counted[1::2]
        if len(names) != len(numbers) or not all(number.isdecimal() and int(number) for number in numbers):
            raise ValueError(f"LSB_MCPU_HOSTS={' '.join(counted)!r} is not of the form `hostA 4 hostB 4`")
        for name, number in zip(names, numbers, strict=True):
            found[name] = found.get(name, 0) + int(number)
    else:
        for name in _lines(file) if file else environment.get("LSB_HOSTS", "").split():
            found[name] = found.get(name, 0) + 1
    if environment.get("CSM_ALLOCATION_ID") and len(found) > 1:
        del found[next(iter(found))]
    if not found:
        raise ValueError("LSF names no host: LSB_MCPU_HOSTS, LSB_DJOB_HOSTFILE and LSB_HOSTS are empty")
    return found


def _lines(file: str) -> list[str]:
    try:
        return Path(file).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ValueError(f"the file {file} that LSB_DJOB_HOSTFILE names cannot be read: {reason}") from None
