"""Finds the hosts that ssh cannot reach, when another program, such as ``mpirun``, has failed to start ranks on them."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from horovod.runner import children
from horovod.runner.reach import ssh


def unreachable(command: Sequence[str], hosts: Sequence[str], seconds: float) -> dict[str, str]:
    """The hosts where ssh cannot run a command, and why. Tries all hosts at once. A signal ends this, and is handled then.

    Args:
        command: ssh and its options, up to the name of a host.
        hosts: the names, as ssh takes them.
        seconds: how long the trial of each host may take.
    """

    def ask(interrupted: int) -> list[str]:
        with ThreadPoolExecutor(len(hosts)) as pool:
            return list(pool.map(lambda host: _why_not([*command, host, "true"], seconds, interrupted), hosts))

    if not hosts:
        return {}
    try:
        return {host: why for host, why in zip(hosts, children.interruptible(ask), strict=True) if why}
    except (OSError, RuntimeError):
        return {}  # not enough threads or ssh processes can be started here, so nothing is known


def _why_not(command: Sequence[str], seconds: float, interrupted: int) -> str:
    try:
        done = children.run(command, seconds, cancel=interrupted)
    except TimeoutError:
        return f"it does not answer within {seconds:g} seconds"
    except (children.Cancelled, children.TooMuchOutput):
        return ""
    # If a signal has ended ssh, nothing is known about the host.
    return ssh.explain(done.status, done.errors.decode(errors="replace")) if done.status > 0 else ""
