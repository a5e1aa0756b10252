"""Notices about flags that are accepted and have no effect. Pure."""

from __future__ import annotations

from horovod.runner.options import Options
from horovod.runner.tunables import TUNABLES

_NO_PROGRAM = "horovodrun starts the ranks itself; with --mpi, mpirun starts them"
_JSRUN = "jsrun starts the ranks, not ssh"
_ONE_MACHINE = "all ranks run on this machine"


def without_effect(options: Options, *, several_hosts: bool = False) -> list[str]:
    """One line for each flag that has been given and has no effect, with the reason.

    Args:
        options: the request.
        several_hosts: whether some ranks run on other machines.
    """
    no_program = not (options.use_mpi or options.use_jsrun)
    no_ssh = _JSRUN if options.use_jsrun else "" if several_hosts else _ONE_MACHINE
    idle = {
        "--disable-cache": (options.disable_cache, "nothing is cached"),
        "--ssh-port": (options.ssh_port is not None and bool(no_ssh), no_ssh),
        "--ssh-identity-file": (options.ssh_identity_file is not None and bool(no_ssh), no_ssh),
        "--network-interfaces": (
            bool(options.nics) and not several_hosts,
            f"{_ONE_MACHINE}; only a data compute job offers their addresses",
        ),
        "--tcp": (options.tcp_flag and no_program and not several_hosts, _ONE_MACHINE),
        "--mpi-args": (options.mpi_args is not None and no_program, _NO_PROGRAM),
        "--binding-args": (options.binding_args is not None and no_program, _NO_PROGRAM),
    }
    found = {flag: reason for flag, (given, reason) in idle.items() if given}
    settings = options.tunables
    for tunable in TUNABLES:
        value = settings.get(tunable.name)
        if value is None or value is False:
            continue
        if tunable.without_effect:
            if not (several_hosts and tunable.effect_between_hosts):
                found[tunable.flag] = tunable.without_effect
        elif tunable.when and tunable.when != tunable.name and not settings.get(tunable.when):
            found[tunable.flag] = f"it needs --{tunable.when.replace('_', '-')}"
    if settings.get("no_stall_check"):
        for name in ("stall_check_warning_time_seconds", "stall_check_shutdown_time_seconds"):
            if settings.get(name) is not None:
                found["--" + name.replace("_", "-")] = "--no-stall-check switches the check off"
    return [f"{flag} has no effect: {reason}" for flag, reason in found.items()]
