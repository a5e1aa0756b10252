"""The command line of an ``mpirun``, for each kind of MPI. Pure.

The command line has only the names of variables. Their values, the job's secret among them, are in the environment of
``mpirun``, which passes them to other hosts over its own connections.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from horovod.runner.errors import UsageError
from horovod.runner.external.extra_arguments import split_arguments
from horovod.runner.external.mpi.kinds import Mpi, MpiKind

_MANY_HOSTS = 64
"""From this number of hosts on, Open MPI starts its daemons from one host, all at once, instead of in a tree."""
_OPEN_MPI = (MpiKind.OPEN_MPI_4, MpiKind.OPEN_MPI_5, MpiKind.SPECTRUM)


@dataclass(frozen=True)
class Launch:
    """The parameters of one start by ``mpirun``."""

    command: tuple[str, ...]
    hosts: tuple[tuple[str, int], ...]
    """Each host and the number of its ranks, in the order of the ranks."""
    elsewhere: bool
    """Whether some of the hosts are not this one."""
    variables: tuple[str, ...] = ()
    """Names of the variables that ranks on other hosts get. Ranks on this host have the whole environment."""
    shell: tuple[str, ...] = ()
    """The command that reaches other hosts, and its options. Empty: ``mpirun`` chooses."""
    interfaces: tuple[str, ...] = ()
    """The network interfaces that MPI may use."""
    output: str = ""
    """The folder for each rank's output, or ""."""
    binding: str | None = None
    """``--binding-args``"""
    more: str | None = None
    """``--mpi-args``"""
    tcp: bool = False
    reader: int | None = None
    """The rank that reads standard input."""


def command_line(mpi: Mpi, launch: Launch) -> list[str]:
    """The command that starts the job.

    Raises:
        ValueError: this kind of MPI cannot do what is asked.
    """
    arguments = _of_open_mpi(mpi.kind, launch) if mpi.kind in _OPEN_MPI else _of_hydra(mpi.kind, launch)
    return [mpi.path, *arguments, *split_arguments("--mpi-args", launch.more), *launch.command]


def variables(mpi: Mpi, launch: Launch) -> dict[str, str]:
    """Variables for ``mpirun`` itself, for settings without an option."""
    if mpi.kind is MpiKind.MPICH and launch.elsewhere and launch.shell[1:]:
        return {"HYDRA_LAUNCHER_EXTRA_ARGS": _joined(launch.shell[1:])}
    return {}


def without_effect(mpi: Mpi, launch: Launch) -> list[str]:
    """One line for each flag that was given and has no effect with this kind of MPI."""
    if mpi.kind in _OPEN_MPI:
        return []
    found = []
    if launch.binding is not None:
        found.append(f"--binding-args has no effect: {mpi.kind.value} has other options; give them in --mpi-args")
    if len(launch.interfaces) > 1 and launch.elsewhere:
        found.append(
            f"{mpi.kind.value} itself can be restricted to one network interface, not to {', '.join(launch.interfaces)}; "
            "Horovod's connections use these"
        )
    return found


def _of_open_mpi(kind: MpiKind, launch: Launch) -> list[str]:
    size, mca = sum(ranks for _, ranks in launch.hosts), "--mca"
    arguments = ["--allow-run-as-root", "--tag-output", "-np", str(size)]
    arguments += ["-H", ",".join(f"{host}:{ranks}" for host, ranks in launch.hosts)]
    if launch.binding is not None:
        arguments += split_arguments("--binding-args", launch.binding)
    elif kind is MpiKind.SPECTRUM:
        arguments += ["-bind-to", "socket", "-map-by", "socket", "-rank-by", "core"]
    else:
        arguments += ["--bind-to", "none", "--map-by", "slot"]
    if kind is MpiKind.SPECTRUM and launch.tcp:
        arguments += ["-tcp"]
    if launch.elsewhere:
        # Version 5 starts daemons with another runtime, PRRTE, in which the component rsh is called ssh.
        runtime, plm = ("--prtemca", "plm_ssh") if kind is MpiKind.OPEN_MPI_5 else (mca, "plm_rsh")
        if launch.shell:
            arguments += [runtime, f"{plm}_agent", _joined(launch.shell)]
        if len(launch.hosts) >= _MANY_HOSTS:
            arguments += [runtime, f"{plm}_no_tree_spawn", "true"]
            arguments += [runtime, f"{plm}_num_concurrent", str(len(launch.hosts))]
        if launch.interfaces:
            arguments += [mca, "btl_tcp_if_include", ",".join(launch.interfaces)]
    if launch.reader is not None:
        arguments += ["--stdin", str(launch.reader)]
    if launch.output:
        # Version 5.0 writes nothing if the folder is given with the old option.
        if kind is MpiKind.OPEN_MPI_5:
            arguments += ["--output", f"tag,file={launch.output}/rank"]
        else:
            arguments += ["--output-filename", launch.output]
    if launch.elsewhere:
        for name in launch.variables:
            arguments += ["-x", name]
    return arguments


def _of_hydra(kind: MpiKind, launch: Launch) -> list[str]:
    counts = {ranks for _, ranks in launch.hosts}
    size = sum(ranks for _, ranks in launch.hosts)
    arguments = ["-l", "-np", str(size)]
    if kind is MpiKind.MPICH:
        arguments += ["-hosts", ",".join(f"{host}:{ranks}" for host, ranks in launch.hosts)]
        arguments += ["-bind-to", "none"]
    elif len(counts) == 1:
        arguments += ["-ppn", str(counts.pop()), "-hosts", ",".join(host for host, _ in launch.hosts)]
    else:
        parts = ", ".join(f"{host}:{ranks}" for host, ranks in launch.hosts)
        raise UsageError(
            f"{kind.value} starts the same number of ranks on every host, not {parts}: choose -np and -H accordingly"
        )
    if launch.elsewhere:
        if launch.shell and kind is MpiKind.MPICH:
            arguments += ["-launcher", "ssh", "-launcher-exec", launch.shell[0]]
        elif launch.shell:
            arguments += ["-bootstrap", "ssh", "-bootstrap-exec", launch.shell[0]]
            if launch.shell[1:]:
                arguments += ["-bootstrap-exec-args", _joined(launch.shell[1:])]
        if len(launch.interfaces) == 1:
            arguments += ["-iface", launch.interfaces[0]]
        arguments += ["-genvlist", ",".join(launch.variables)]
    if launch.reader not in (None, 0):
        raise UsageError(f"--stdin {launch.reader}: under {kind.value} only rank 0 can read standard input")
    if launch.output:
        arguments += [
            "-outfile-pattern",
            f"{launch.output}/rank.%r.out",
            "-errfile-pattern",
            f"{launch.output}/rank.%r.err",
        ]
    return arguments


def _joined(arguments: Sequence[str]) -> str:
    """The arguments joined by spaces, at which ``mpirun`` splits them again."""
    for argument in arguments:
        if argument.split() != [argument]:
            raise UsageError(
                f"mpirun splits the command that reaches other hosts at spaces, so it cannot contain {argument!r}; write this "
                "option into a configuration file, and name the file with ssh -F"
            )
    return " ".join(arguments)
