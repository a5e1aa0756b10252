"""Everything that a user can ask of the launcher, on ``horovodrun``'s command line or through ``horovod.run``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from horovod.runner.tunables import Value


@dataclass(frozen=True)
class Options:
    """One request. Defaults are "not given"."""

    command: tuple[str, ...] = ()
    """The program and its arguments, for each rank."""
    num_proc: int | None = None
    hosts: str | None = None
    """``h1:2,h2:4``"""
    hostfile: str | None = None
    start_timeout: int | None = None
    """Seconds until all ranks must have joined the rendezvous in ``init()``."""
    nics: tuple[str, ...] = ()
    """Network interfaces the job may use."""
    output_filename: str | None = None
    """Folder for each rank's output."""
    stdin: int | None = None
    """The rank that reads the launcher's standard input, or ``standard_input.NO_RANK``."""
    prefix_output_with_timestamp: bool = False
    verbose: bool = False
    check_build: bool = False
    check_gpu: bool = False
    dry_run: bool = False
    dump: str | None = None
    """The job whose ranks must write their flight recorders: a process id, or the number of a batch job."""
    top: str | None = None
    """The job to show: a process id, or the number of a batch job."""
    config_file: str | None = None
    disable_cache: bool = False
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    use_gloo: bool = False
    use_mpi: bool = False
    use_jsrun: bool = False
    mpi_args: str | None = None
    tcp_flag: bool = False
    binding_args: str | None = None
    min_num_proc: int | None = None
    max_num_proc: int | None = None
    slots: int | None = None
    elastic_timeout: int | None = None
    reset_limit: int | None = None
    cooldown_range: tuple[int, int] | None = None
    host_discovery_script: str | None = None
    tunables: Mapping[str, Value | None] = field(default_factory=dict)
    """Settings of the runtime, by :attr:`horovod.runner.tunables.Tunable.name`."""
