"""The runtime's settings that ``horovodrun`` can pass to a job: one row each.

A row says the flag, the key in the YAML file, the limits and the environment variable. The parser, the file reader,
the validation and the export all read this table, so a new setting is one new row.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from horovod._base import config
from horovod.runner.errors import UsageError

_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
Value = bool | int | float | str
LOG_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")


def _text(value: Value) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _negated(value: Value) -> str:
    return str(int(not value))


def _mebibytes(value: Value) -> str:
    return str(int(value) * config.MEBIBYTE)


@dataclass(frozen=True)
class Tunable:
    """One setting.

    Attributes:
        name: the flag's name with underscores.
        variable: the environment variable that carries the setting to the ranks.
        yaml_key: its section and key in the YAML file.
        minimum, maximum: the limits of a number.
        pattern: a regular expression that a text must match.
        off: for booleans, the flag that says the opposite.
        off_help: the help of ``off``.
        off_hidden, on_hidden: whether the help leaves out that flag.
        inverted: whether the file's boolean means the opposite of the flag's.
        when: the setting without which this one is not exported.
        without_effect: why the setting, switched on, changes nothing in this version.
        effect_between_hosts: whether it does change something if several machines take part.
        export: turns the value into the text of the environment variable.
    """

    name: str
    kind: type[bool] | type[int] | type[float] | type[str]
    variable: str
    yaml_key: tuple[str, str]
    help: str
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    pattern: str = ""
    off: str = ""
    off_help: str = ""
    off_hidden: bool = False
    on_hidden: bool = False
    inverted: bool = False
    when: str = ""
    without_effect: str = ""
    effect_between_hosts: bool = False
    export: Callable[[Value], str] = _text

    def check(self, value: Value, said: str) -> Value:
        """``value`` in this setting's own type.

        Args:
            said: where the user gave the value, for the message: a flag, or a key in a file.

        Raises:
            ValueError: the value has another type, or is outside the limits.
        """
        if self.kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if self.pattern and isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if type(value) is not self.kind:
            raise UsageError(f"{said}: expected {_KINDS[self.kind]}, not {value!r}")
        if isinstance(value, str):
            if self.choices and value.upper() not in self.choices:
                raise UsageError(f"{said}={value} must be one of {', '.join(self.choices)}")
            if self.pattern and re.fullmatch(self.pattern, value) is None:
                raise UsageError(f"{said}={value} must be a core number >= 0, or several as in 0,1")
            return value.upper() if self.choices else value
        if self.maximum is not None and not (self.minimum or 0) <= value <= self.maximum:
            raise UsageError(f"{said}={value} must be in [{self.minimum:g}, {self.maximum:g}]")
        if self.minimum is not None and not value >= self.minimum:
            raise UsageError(f"{said}={value} must be >= {self.minimum:g}")
        return value

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def _engine(name: str, variable: str, what: str) -> Tunable:
    off = f"--no-{name.replace('_', '-')}"
    return Tunable(
        name, bool, variable, ("params", name), f"{what}, if several hosts have several ranks", off=off,
        without_effect="all ranks run on this machine",
        effect_between_hosts=True,
    )  # fmt: skip


TUNABLES: tuple[Tunable, ...] = (
    Tunable(
        "fusion_threshold_mb", int, config.FUSION_THRESHOLD, ("params", "fusion_threshold_mb"),
        "largest batch of tensors, in MiB; 0 turns batching off", minimum=0, export=_mebibytes,
    ),
    Tunable(
        "cycle_time_ms", float, config.CYCLE_TIME, ("params", "cycle_time_ms"),
        "how long to gather tensors before they are sent, in milliseconds", minimum=0,
    ),
    Tunable(
        "cache_capacity", int, config.CACHE_CAPACITY, ("params", "cache_capacity"),
        "number of tensor names that are sent as small integers after their first use; 0 sends every name in full", minimum=0,
    ),
    _engine("hierarchical_allreduce", config.HIERARCHICAL_ALLREDUCE, "allreduce inside each host, then between hosts"),
    _engine("hierarchical_allgather", config.HIERARCHICAL_ALLGATHER, "allgather inside each host, then between hosts"),
    _engine("torus_allreduce", config.TORUS_ALLREDUCE, "the same as --hierarchical-allreduce"),
    Tunable(
        "autotune", bool, config.AUTOTUNE, ("autotune", "enabled"),
        "search for the fastest settings while the job runs", off="--no-autotune", off_hidden=True, when="autotune",
    ),
    Tunable(
        "autotune_log_file", str, config.AUTOTUNE_LOG, ("autotune", "log_file"),
        "write a line for each trial to this CSV file", when="autotune",
    ),
    Tunable(
        "autotune_warmup_samples", int, config.AUTOTUNE_WARMUP_SAMPLES, ("autotune", "warmup_samples"),
        "number of warm-up trials, which are not counted", minimum=0, when="autotune",
    ),
    Tunable(
        "autotune_steps_per_sample", int, config.AUTOTUNE_STEPS_PER_SAMPLE, ("autotune", "steps_per_sample"),
        "steps per measurement; a trial has five measurements", minimum=0, when="autotune",
    ),
    Tunable(
        "autotune_bayes_opt_max_samples", int, config.AUTOTUNE_MAX_SAMPLES, ("autotune", "bayes_opt_max_samples"),
        "maximum number of trials", minimum=0, when="autotune",
    ),
    Tunable(
        "autotune_gaussian_process_noise", float, config.AUTOTUNE_NOISE, ("autotune", "gaussian_process_noise"),
        "how noisy one trial is, from 0 to 1", minimum=0, maximum=1, when="autotune",
    ),
    Tunable(
        "timeline_filename", str, config.TIMELINE, ("timeline", "filename"),
        "write a timeline of the job to this file",
    ),
    Tunable(
        "timeline_mark_cycles", bool, config.TIMELINE_MARK_CYCLES, ("timeline", "mark_cycles"),
        "also mark in the timeline when the coordinator sends orders", off="--no-timeline-mark-cycles",
        off_hidden=True, when="timeline_filename",
    ),
    Tunable(
        "metrics", str, config.METRICS, ("metrics", "address"),
        "have rank 0 serve metrics for Prometheus: at this port of its loopback interface, at HOST:PORT, or at unix:PATH",
    ),
    Tunable(
        "no_stall_check", bool, config.STALL_CHECK_DISABLE, ("stall_check", "enabled"),
        "do not report tensors that only some ranks have submitted", off="--stall-check", off_hidden=True, inverted=True,
    ),
    Tunable(
        "stall_check_warning_time_seconds", int, config.STALL_CHECK_TIME, ("stall_check", "warning_time_seconds"),
        "seconds until a stalled tensor is reported", minimum=0,
    ),
    Tunable(
        "stall_check_shutdown_time_seconds", int, config.STALL_SHUTDOWN_TIME, ("stall_check", "shutdown_time_seconds"),
        "seconds until a stalled tensor ends the job; 0: never", minimum=0,
    ),
    Tunable(
        "deadlock_seconds", int, config.DEADLOCK_TIME, ("stall_check", "deadlock_seconds"),
        "seconds until a job ends in which all ranks wait for each other; 0: never", minimum=0,
    ),
    Tunable(
        "mpi_threads_disable", bool, config.MPI_THREADS_DISABLE, ("library_options", "mpi_threads_disable"),
        "initialize MPI with MPI_THREAD_SERIALIZED: MPI calls never overlap", off="--no-mpi-threads-disable", off_hidden=True,
    ),
    Tunable(
        "num_nccl_streams", int, config.NUM_NCCL_STREAMS, ("library_options", "num_nccl_streams"),
        "accepted, no effect: one stream of each GPU carries all collectives", minimum=0,
        without_effect="one stream of each GPU carries all collectives",
    ),
    Tunable(
        "thread_affinity", str, config.THREAD_AFFINITY, ("library_options", "thread_affinity"),
        "core for the communication threads, or one core for each local rank, as in 0,1", pattern=r"\d+(,\d+)*",
    ),
    Tunable(
        "gloo_timeout_seconds", int, config.TIMEOUT_SECONDS, ("library_options", "gloo_timeout_seconds"),
        "seconds that a rank may make no progress in a collective, or be stopped or lost", minimum=1,
    ),
    Tunable(
        "torch_backend", str, config.TORCH_BACKEND, ("library_options", "torch_backend"),
        'have init_process_group("gloo") in PyTorch scripts use the engines of Horovod', choices=("HOROVOD",),
        export=lambda value: str(value).lower(),
    ),
    Tunable(
        "on_loss", str, config.ON_LOSS, ("library_options", "on_loss"),
        "continue: with --min-np, PyTorch scripts over the default process group go on with the ranks that are left when "
        "others are lost, except rank 0. continue-any: without rank 0, too; a script that keeps its rank from the start in a "
        "variable then saves and prints nothing more", choices=("END", "CONTINUE", "CONTINUE-ANY"),
        export=lambda value: str(value).lower(),
    ),
    Tunable(
        "log_level", str, config.LOG_LEVEL, ("logging", "level"),
        "least severe messages to show", choices=LOG_LEVELS,
    ),
    Tunable(
        "log_with_timestamp", bool, config.LOG_HIDE_TIME, ("logging", "with_timestamp"),
        "show the time in log messages", off="--log-without-timestamp", off_help="leave the time out of log messages",
        on_hidden=True, export=_negated,
    ),
)  # fmt: skip
"""In the order in which the help shows the settings of each group."""


def exported(values: dict[str, Value | None]) -> dict[str, str]:
    """The environment variables that pass ``values`` (by :attr:`Tunable.name`; None: not given) to the ranks."""
    variables: dict[str, str] = {}
    for tunable in TUNABLES:
        value = values.get(tunable.name)
        if value is not None and (not tunable.when or values.get(tunable.when)):
            variables[tunable.variable] = tunable.export(value)
    return variables
