"""The launcher: ``horovodrun``, :func:`horovod.run`, and the supervision of the processes they start.

Importing this package must stay fast: the launcher, the guardian and every rank import it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

__path__.append(__path__[0].removesuffix("runner") + "_old_paths/runner")

__all__ = ["run"]


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: tuple[int, int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | bool | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | Sequence[str] | None = None,
    network_interfaces: str | Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Call ``func(*args, **kwargs)`` on every rank of a new job, and return what each rank returned.

    For scripts and notebooks. The function is pickled and sent to the ranks, so lambdas and closures work. Each rank is a new
    process, in which the function calls ``hvd.init()`` itself. The ranks' output appears in ``sys.stdout`` and ``sys.stderr``
    of the caller.

    Args:
        func, args, kwargs: what to call. All must be picklable by cloudpickle, as must the return value.
        num_proc: the number of ranks.
        hosts: the hosts and their slots, as ``"h1:2,h2:4"``; or
        hostfile: a file with lines ``h1 slots=2``. Default: this machine.
        start_timeout: seconds until all ranks must have joined the rendezvous in ``hvd.init()``.
        output_filename: a folder that also gets each rank's output.
        verbose: describe the job on stderr before it starts.
        executable: the Python interpreter that runs the ranks. Default: this one.
        min_num_proc, max_num_proc: the fewest and the most ranks of an elastic job, which continues when ranks are lost or
            added; the function trains with ``hvd.elastic.run``.
        host_discovery_script: a command that prints the hosts that are available now, for elastic jobs.
        slots: the number of slots of hosts that the script prints without one.
        reset_limit: how often the ranks of an elastic job may change.
        cooldown_range: the shortest and the longest time in seconds for which a host gets no new ranks after a rank has failed
            there; forever by default.
        use_mpi: have ``mpirun`` start the ranks.
        mpi_args: more arguments for ``mpirun``.
        ssh_port, ssh_identity_file, network_interfaces: how to reach other hosts, and over which of their networks. If all
            ranks run on this host, they have no effect, and a notice on stderr says so.
        disable_cache: accepted, no effect: nothing is cached.
        use_gloo: have Horovod's launcher itself start the ranks; the default.
        np, min_np, max_np, network_interface: deprecated names.

    Returns:
        The return values by rank; of an elastic job those of the first ``min_num_proc`` ranks.

    Raises:
        ValueError: the arguments are wrong or contradict one another.
        RuntimeError: a rank failed. The message holds its traceback; ``__cause__`` is its exception, if it could be sent.
    """
    if np is not None:
        _deprecated("np", "num_proc")
        num_proc = np
    if min_np is not None:
        _deprecated("min_np", "min_num_proc")
        min_num_proc = min_np
    if max_np is not None:
        _deprecated("max_np", "max_num_proc")
        max_num_proc = max_np
    if network_interface is not None:
        _deprecated("network_interface", "network_interfaces")
        network_interfaces = network_interface
    if hosts is not None and hostfile is not None:
        raise ValueError("give either hosts or hostfile, not both")
    if use_gloo and use_mpi:
        raise ValueError("give either use_gloo or use_mpi, not both")

    from horovod.runner.function import run_function
    from horovod.runner.options import Options
    from horovod.runner.output.standard_input import NO_RANK

    if min_num_proc is not None:
        num_proc = max(num_proc, min_num_proc)
    if isinstance(network_interfaces, str):
        network_interfaces = network_interfaces.split(",")
    options = Options(
        num_proc=num_proc,
        min_num_proc=min_num_proc,
        max_num_proc=max_num_proc,
        slots=slots,
        reset_limit=reset_limit,
        cooldown_range=cooldown_range,
        hosts=hosts,
        hostfile=hostfile,
        host_discovery_script=host_discovery_script,
        start_timeout=start_timeout,
        ssh_port=ssh_port,
        ssh_identity_file=ssh_identity_file,
        disable_cache=bool(disable_cache),
        output_filename=output_filename,
        verbose=bool(verbose),
        use_gloo=bool(use_gloo),
        use_mpi=bool(use_mpi),
        mpi_args=mpi_args,
        nics=tuple(network_interfaces or ()),
        stdin=NO_RANK,  # a notebook, or a script that Python reads from standard input, needs it itself
    )
    return run_function(func, args, kwargs or {}, options, executable)


class _HorovodArgs:
    """A request to the launcher, for programs that fill in its attributes and call ``horovod.runner.launch._run(args)``.

    Its attributes are those of the parsed command line, such as ``num_proc``, ``hosts``, ``command``, ``verbose``,
    ``fusion_threshold_mb``. None means "not given". ``run_func`` is a function without arguments to run instead of a command,
    and ``executable`` the Python interpreter for it.
    """

    def __init__(self) -> None:
        from dataclasses import fields

        from horovod.runner.options import Options
        from horovod.runner.tunables import TUNABLES

        names = [each.name for each in fields(Options) if each.name != "tunables"]
        for name in [*names, *(each.name for each in TUNABLES), "run_func", "executable"]:
            setattr(self, name, None)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"_HorovodArgs has no {name!r}: horovodrun has no such setting")


def _deprecated(old: str, new: str) -> None:
    from horovod.observe.call_site import warn

    warn(f"horovod.run({old}=...) is deprecated; use {new}", DeprecationWarning)
