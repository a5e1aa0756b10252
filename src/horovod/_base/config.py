"""The names of all environment variables of the project, and the settings that one generation of the runtime reads from them.

No other module knows a variable's name or parses its value. The launcher imports the names to pass settings to the ranks. The
core calls :func:`Config.from_env` once in ``init()``. This module imports nothing of the project. Source of names and
defaults: the public interface that existing scripts rely on.
"""

# ruff: noqa: RUF009 (_setting() makes the field of a dataclass, as field() does)

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

# Which rank this process is, and where the rendezvous server listens. Set by the launcher.
RANK = "HOROVOD_RANK"
SIZE = "HOROVOD_SIZE"
LOCAL_RANK = "HOROVOD_LOCAL_RANK"
LOCAL_SIZE = "HOROVOD_LOCAL_SIZE"
CROSS_RANK = "HOROVOD_CROSS_RANK"
CROSS_SIZE = "HOROVOD_CROSS_SIZE"
HOSTNAME = "HOROVOD_HOSTNAME"
OF_TORCHRUN = {
    RANK: "RANK",
    SIZE: "WORLD_SIZE",
    LOCAL_RANK: "LOCAL_RANK",
    LOCAL_SIZE: "LOCAL_WORLD_SIZE",
    CROSS_RANK: "GROUP_RANK",
    CROSS_SIZE: "GROUP_WORLD_SIZE",
}
"""The names by which torchrun passes the same numbers, for scripts that are written for it."""
RENDEZVOUS_ADDRESS = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
RENDEZVOUS_PORT = "HOROVOD_GLOO_RENDEZVOUS_PORT"
NETWORK_INTERFACE = "HOROVOD_GLOO_IFACE"
"""The network interface to use. ``horovodrun`` sets it to the first of NETWORK_INTERFACES that the host has."""
NETWORK_INTERFACES = "_HOROVOD_NETWORK_INTERFACES"
"""All network interfaces to use, separated by commas. Ignored if NETWORK_INTERFACE is set to one that is not in the list."""
SECRET_KEY = "_HOROVOD_SECRET_KEY"
USER_SECRET = "HOROVOD_SECRET_KEY"
"""The secret with which ranks authenticate each other if ``horovodrun`` did not start them. The user sets it, the same on
all ranks."""
SSH_COMMAND = "HOROVOD_SSH_COMMAND"
"""The command that the launcher runs instead of ``ssh``."""
ELASTIC = "HOROVOD_ELASTIC"
ELASTIC_TIMEOUT = "HOROVOD_ELASTIC_TIMEOUT"
ELASTIC_PROCESS = "HOROVOD_ELASTIC_PROCESS"
"""The number of this process in an elastic job, which it keeps while ranks change. Set by the launcher."""
ELASTIC_ROUND = "HOROVOD_ELASTIC_ROUND"
"""The round of an elastic job that this process is a rank of. Set by the runtime."""

# Which engine moves which memory.
CONTROLLER = "HOROVOD_CONTROLLER"
CPU_OPERATIONS = "HOROVOD_CPU_OPERATIONS"
GPU_OPERATIONS = "HOROVOD_GPU_OPERATIONS"
HIERARCHICAL_ALLREDUCE = "HOROVOD_HIERARCHICAL_ALLREDUCE"
HIERARCHICAL_ALLGATHER = "HOROVOD_HIERARCHICAL_ALLGATHER"
COMPRESSION = "HOROVOD_COMPRESSION"
TORUS_ALLREDUCE = "HOROVOD_TORUS_ALLREDUCE"
NUM_NCCL_STREAMS = "HOROVOD_NUM_NCCL_STREAMS"
NCCL_IB_DISABLE = "NCCL_IB_DISABLE"
NCCL_SOCKET_INTERFACE = "NCCL_SOCKET_IFNAME"
MPI_THREADS_DISABLE = "HOROVOD_MPI_THREADS_DISABLE"

TORCH_BACKEND = "HOROVOD_TORCH_BACKEND"
"""The back end of torch.distributed that replaces Gloo; "" leaves the script what it asks for."""
DDP_IN_PLACE = "HOROVOD_DDP_IN_PLACE"
ON_LOSS = "HOROVOD_ON_LOSS"
"""What a job of the back end of ``torch.distributed`` does when a rank is lost: ``end``, ``continue`` unless it is rank 0, or
``continue-any``."""
GOES_ON, GOES_ON_WITHOUT_RANK_0 = "continue", "continue-any"


def goes_on(environment: Mapping[str, str], values: Sequence[str] = (GOES_ON, GOES_ON_WITHOUT_RANK_0)) -> bool:
    """Whether an environment asks for ``--on-loss continue`` or ``continue-any``, or for one of these ``values``; for
    callers that come before the settings are read."""
    return environment.get(ON_LOSS, "").strip().lower() in values


# How requests become batches.
FUSION_THRESHOLD = "HOROVOD_FUSION_THRESHOLD"
CYCLE_TIME = "HOROVOD_CYCLE_TIME"
CACHE_CAPACITY = "HOROVOD_CACHE_CAPACITY"
RELAY_THRESHOLD = "HOROVOD_RELAY_THRESHOLD"
DISABLE_GROUP_FUSION = "HOROVOD_DISABLE_GROUP_FUSION"
DYNAMIC_PROCESS_SETS = "HOROVOD_DYNAMIC_PROCESS_SETS"
SHM_PIECE_BYTES = "HOROVOD_SHM_PIECE_BYTES"
SHM_DIRECT = "HOROVOD_SHM_DIRECT"
BUCKET_BYTES = "HOROVOD_BUCKET_BYTES"
THREAD_AFFINITY = "HOROVOD_THREAD_AFFINITY"

CHECK = "HOROVOD_CHECK"
DEBUG = "HOROVOD_DEBUG"
DEBUG_STEPS = "HOROVOD_DEBUG_STEPS"

# How long anything may take.
START_TIMEOUT = "HOROVOD_START_TIMEOUT"
SPARK_START_TIMEOUT = "HOROVOD_SPARK_START_TIMEOUT"
TIMEOUT_SECONDS = "HOROVOD_GLOO_TIMEOUT_SECONDS"
NCCL_TIMEOUT = "HOROVOD_NCCL_TIMEOUT_SECONDS"
NCCL_START_TIMEOUT = "HOROVOD_NCCL_START_TIMEOUT"
STALL_CHECK_DISABLE = "HOROVOD_STALL_CHECK_DISABLE"
STALL_CHECK_TIME = "HOROVOD_STALL_CHECK_TIME_SECONDS"
STALL_SHUTDOWN_TIME = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
DEADLOCK_TIME = "HOROVOD_DEADLOCK_SECONDS"

# Logs, the timeline, tuning.
THREADS = "OMP_NUM_THREADS"
"""How many threads a rank computes with; horovodrun gives each rank an equal share of the cores."""
MALLOC_MMAP_THRESHOLD = "MALLOC_MMAP_THRESHOLD_"
MALLOC_MMAP_THRESHOLD_BYTES = 32 << 20
"""The value that the launcher sets: the highest that every version of glibc accepts."""
TIMELINE = "HOROVOD_TIMELINE"
TIMELINE_MARK_CYCLES = "HOROVOD_TIMELINE_MARK_CYCLES"
TIMELINE_ALL_RANKS = "HOROVOD_TIMELINE_ALL_RANKS"
LOG_LEVEL = "HOROVOD_LOG_LEVEL"
LOG_HIDE_TIME = "HOROVOD_LOG_HIDE_TIME"
FLIGHT_RECORDER_SIZE = "HOROVOD_FLIGHT_RECORDER_SIZE"
FLIGHT_RECORDER_DIR = "HOROVOD_FLIGHT_RECORDER_DIR"
STRAGGLER_PERCENT = "HOROVOD_STRAGGLER_PERCENT"
METRICS = "HOROVOD_METRICS"
CHECK_GPU_QUICK = "HOROVOD_CHECK_GPU_QUICK"
"""If it is set, ``horovodrun --check-gpu`` measures fewer sizes."""
AUTOTUNE = "HOROVOD_AUTOTUNE"
AUTOTUNE_LOG = "HOROVOD_AUTOTUNE_LOG"
AUTOTUNE_WARMUP_SAMPLES = "HOROVOD_AUTOTUNE_WARMUP_SAMPLES"
AUTOTUNE_STEPS_PER_SAMPLE = "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE"
AUTOTUNE_MAX_SAMPLES = "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES"
AUTOTUNE_NOISE = "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE"
AUTOTUNE_FILE = "HOROVOD_AUTOTUNE_FILE"
"""The file in which autotuning keeps its choice for the next run."""

DYNAMIC = "DYNAMIC"
"""The value of TIMELINE with which the script starts the timeline."""

MEBIBYTE = 1 << 20

_T = TypeVar("_T")


def _read(env: Mapping[str, str], name: str, default: _T, parse: Callable[[str], _T]) -> _T:
    text = env.get(name, "").strip()
    if not text:
        return default
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"environment variable {name}={text!r}: {error}. Correct it or unset it.") from None


def _flag(text: str) -> bool:
    if text.lower() in {"true", "yes", "on"}:
        return True
    if text.lower() in {"false", "no", "off"}:
        return False
    try:
        return int(text) != 0
    except ValueError:
        raise ValueError("expected 0 or 1") from None


def _at_least(minimum: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError("expected a number") from None
        if not minimum <= value < float("inf"):
            raise ValueError(f"expected a number of at least {minimum:g}")
        return value

    return parse


def _share(text: str) -> float:
    value = _at_least(0)(text)
    if value > 1:
        raise ValueError("expected a number from 0 to 1")
    return value


def _integer(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError("expected a whole number") from None
        if value < minimum:
            raise ValueError(f"expected a whole number of at least {minimum}")
        return value

    return parse


def _cores(text: str) -> tuple[int, ...]:
    return tuple(map(_integer(0), text.split(",")))


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in choices:
            raise ValueError(f"expected {', '.join(choices[:-1])} or {choices[-1]}")
        return text.lower()

    return parse


def _controller(text: str) -> None:
    if text.lower() != "gloo":
        raise ValueError(
            "there is no such controller in this version: use gloo, which needs no MPI and also works under mpirun"
        )


def _compression(text: str) -> str:
    chosen: str = _one_of("none", "int8", "int4")(text)
    return "" if chosen == "none" else chosen


LONGEST = timedelta(days=20)
"""The longest duration; longer ones are cut to it. The kernel counts the milliseconds of a sleep in 31 bits."""


def _seconds(minimum: float, unit: float = 1.0) -> Callable[[str], timedelta]:
    parse = _at_least(minimum)
    return lambda text: timedelta(seconds=min(parse(text) * unit, LONGEST.total_seconds()))


def network_interfaces(env: Mapping[str, str]) -> str:
    """The network interfaces to use, separated by commas; "" for all. A script may have chosen another than its launcher."""
    chosen = env.get(NETWORK_INTERFACE, "").strip()
    every = env.get(NETWORK_INTERFACES, "").strip()
    return every if not chosen or chosen in every.split(",") else chosen


def user_cache() -> tuple[str, str]:
    """The user's home folder and cache folder; "" for one that is not set."""
    return str(Path.home()), os.environ.get("XDG_CACHE_HOME", "").strip()


def _setting(variable: str, default: Any, parse: Callable[[str], Any], common: bool = False) -> Any:
    """A field of :class:`Config`: its variable, its value if that is not set, and the parser of its text.

    Args:
        common: whether the setting must be the same on all ranks.
    """
    return field(default=default, metadata={"variable": variable, "parse": parse, "common": common})


def _text(value: Any) -> str:
    """A setting as it is compared and shown: flags as numbers, durations in milliseconds."""
    if isinstance(value, timedelta):
        return f"{value / timedelta(milliseconds=1):g}"
    return str(int(value) if isinstance(value, bool) else value)


@dataclass(frozen=True)
class Config:
    """The settings of one generation."""

    fusion_threshold: int = _setting(FUSION_THRESHOLD, 128 * MEBIBYTE, _integer(0), common=True)
    """The size of a batch in bytes; 0 turns fusion off."""
    cycle_time: timedelta = _setting(CYCLE_TIME, timedelta(0), _seconds(0, unit=1e-3), common=True)
    """How long the coordinator waits for more requests after the first that is ready; 0: not at all."""
    cache_capacity: int = _setting(CACHE_CAPACITY, 1024, _integer(0), common=True)
    """How many requests the announcements of a rank abbreviate; 0: none."""
    relay_threshold: int = _setting(RELAY_THRESHOLD, 8, _integer(0), common=True)
    """The number of connections that relays must save the first rank of a process set; if they save fewer, there are none."""
    disable_group_fusion: bool = _setting(DISABLE_GROUP_FUSION, False, _flag, common=True)
    dynamic_process_sets: bool = _setting(DYNAMIC_PROCESS_SETS, False, _flag, common=True)
    cpu_operations: str = _setting(CPU_OPERATIONS, "", str.lower)
    """The engine forced for host memory, or "" to choose."""
    gpu_operations: str = _setting(GPU_OPERATIONS, "", str.lower)
    """The engine forced for the memory of GPUs, or "" to choose."""
    hierarchical_allreduce: bool | None = _setting(HIERARCHICAL_ALLREDUCE, None, _flag, common=True)
    """Whether allreduces between hosts go in three steps, in the host, between hosts, and in the host; None: where
    that pays."""
    hierarchical_allgather: bool | None = _setting(HIERARCHICAL_ALLGATHER, None, _flag, common=True)
    compression: str = _setting(COMPRESSION, "", _compression, common=True)
    """The compression between hosts of reductions for which the script chooses none: "int8", "int4", or "" for none."""
    mpi_threads_disable: bool = _setting(MPI_THREADS_DISABLE, False, _flag)
    """MPI is not initialised for calls from several threads at a time."""
    network_interfaces: str = ""
    """Those whose addresses a rank offers, separated by commas; "": all. :func:`network_interfaces` reads it."""
    shm_piece_bytes: int = _setting(SHM_PIECE_BYTES, 0, _integer(4096), common=True)
    """Bytes that each rank moves through shared memory at a time; 0: as many as suit the machine's caches."""
    shm_direct: str = _setting(SHM_DIRECT, "auto", _one_of("auto", "always", "never"), common=True)
    """Whether the ranks of a host read one another's memory: "auto" where it is faster, "always" where they can, or "never"."""
    bucket_bytes: int = _setting(BUCKET_BYTES, 0, _integer(1), common=True)
    """Bytes of gradients that an optimizer submits at a time; 0: the optimizer decides."""
    ddp_in_place: bool = _setting(DDP_IN_PLACE, True, _flag, common=True)
    """Whether DistributedDataParallel reduces gradients where they are, instead of in PyTorch's buckets."""
    on_loss: str = _setting(ON_LOSS, "end", _one_of("end", GOES_ON, GOES_ON_WITHOUT_RANK_0), common=True)
    """Whether a default process group ends when a rank is lost, or goes on with the ranks that are left."""
    check: str = _setting(CHECK, "warn", _one_of("warn", "error", "off"), common=True)
    """The reaction if ranks step with different hyper-parameters or start with different parameters."""
    debug: bool = _setting(DEBUG, False, _flag, common=True)
    """Check for common mistakes of scripts, which costs time."""
    debug_steps: int = _setting(DEBUG_STEPS, 100, _integer(1), common=True)
    """After how many steps the ranks' parameters are compared, with ``debug``."""
    thread_affinity: tuple[int, ...] = _setting(THREAD_AFFINITY, (), _cores)
    """The core of the worker thread, by local rank; empty: the kernel decides."""
    start_timeout: timedelta = _setting(START_TIMEOUT, timedelta(seconds=30), _seconds(1))
    timeout: timedelta = _setting(TIMEOUT_SECONDS, timedelta(seconds=30), _seconds(1))
    """How long a rank may make no progress in a collective, or not answer at all, before the job is ended."""
    nccl_timeout: timedelta = _setting(NCCL_TIMEOUT, timedelta(seconds=600), _seconds(1))
    """How long a GPU may wait for those of other ranks in a collective before the job is ended."""
    nccl_start_timeout: timedelta = _setting(NCCL_START_TIMEOUT, timedelta(seconds=300), _seconds(1))
    """How long NCCL may take to make a communicator, and to queue a collective."""
    stall_check: bool = _setting(STALL_CHECK_DISABLE, True, lambda text: not _flag(text))
    stall_warning_time: timedelta = _setting(STALL_CHECK_TIME, timedelta(seconds=60), _seconds(0))
    stall_shutdown_time: timedelta = _setting(STALL_SHUTDOWN_TIME, timedelta(0), _seconds(0))
    """When a stalled tensor ends the job; 0: never."""
    deadlock_time: timedelta = _setting(DEADLOCK_TIME, timedelta(seconds=60), _seconds(0))
    """For how long no rank may have been able to continue before the job is ended; 0: never."""
    elastic: bool = _setting(ELASTIC, False, _flag, common=True)
    timeline: str = _setting(TIMELINE, "", str)
    """The file that rank 0 writes the timeline to; ``DYNAMIC``: the script starts and stops it; "": none."""
    timeline_mark_cycles: bool = _setting(TIMELINE_MARK_CYCLES, False, _flag)
    timeline_all_ranks: bool = _setting(TIMELINE_ALL_RANKS, False, _flag, common=True)
    """The timeline shows what all ranks do, by one clock."""
    flight_recorder_size: int = _setting(FLIGHT_RECORDER_SIZE, 2000, _integer(0))
    """How many collectives of each process set a rank remembers; 0: none, and nothing is written down."""
    flight_recorder_dir: str = _setting(FLIGHT_RECORDER_DIR, "", str)
    """The folder that ranks write their flight recorders to; "": one of the job in the folder for temporary files."""
    straggler_percent: float = _setting(STRAGGLER_PERCENT, 10.0, _at_least(0))
    """The smallest share of a step by which a rank must delay the others to be named; 0: never name one."""
    metrics: str = _setting(METRICS, "", str)
    """The address at which rank 0 serves metrics: ``PORT``, ``HOST:PORT`` or ``unix:PATH``; "": none."""
    log_level: str = _setting(LOG_LEVEL, "warning", str.lower)
    """The lowest level of messages that are shown. An unknown level means "warning"."""
    log_hide_time: bool = _setting(LOG_HIDE_TIME, False, _flag)
    autotune: bool = _setting(AUTOTUNE, False, _flag, common=True)
    """Whether to search for the fastest settings while the job runs."""
    autotune_log: str = _setting(AUTOTUNE_LOG, "", str)
    """The CSV file that rank 0 writes a line to for each trial; "": none."""
    autotune_warmup: int = _setting(AUTOTUNE_WARMUP_SAMPLES, 3, _integer(0))
    """How many trials are made before the first that counts."""
    autotune_steps: int = _setting(AUTOTUNE_STEPS_PER_SAMPLE, 10, _integer(0))
    """How many times each tensor is reduced in one measurement; 0 counts as 1."""
    autotune_trials: int = _setting(AUTOTUNE_MAX_SAMPLES, 20, _integer(0))
    """How many trials the search makes at most."""
    autotune_noise: float = _setting(AUTOTUNE_NOISE, 0.8, _share)
    """How noisy a single measurement is, from 0 (exact) to 1 (noisiest)."""
    autotune_file: str = _setting(AUTOTUNE_FILE, "", str)
    """The file in which the choice is kept for the next run; "": one of the job in the user's cache."""
    explicit: frozenset[str] = field(default=frozenset(), compare=False)
    """The variables that the user has set, which autotuning leaves as they are."""

    @property
    def stall_limit(self) -> timedelta:
        """How long to wait for a rank before the job is ended; 0: without limit, even if the warning is due later."""
        off = not self.stall_check or self.stall_shutdown_time < self.stall_warning_time
        return timedelta(0) if off else self.stall_shutdown_time

    def limited_to(self, time_limit: timedelta) -> Config:
        """The same; a tensor that stalls ends the job after ``time_limit``, if the user has not decided about that."""
        if not self.stall_check or self.stall_shutdown_time:
            return self
        warning = min(self.stall_warning_time, time_limit)
        return replace(self, stall_warning_time=warning, stall_shutdown_time=time_limit)

    def common(self) -> dict[str, str]:
        """The settings that must be the same on all ranks, by variable, as text."""
        return {
            each.metadata["variable"]: _text(getattr(self, each.name))
            for each in fields(self)
            if each.metadata.get("common")
        }

    @staticmethod
    def from_env(env: Mapping[str, str] | None = None) -> Config:
        """Parse the settings of ``env`` (default: this process's environment).

        Raises:
            ValueError: a variable does not parse, or names something that does not exist; the message has its name and value.
        """
        env = os.environ if env is None else env
        _read(env, CONTROLLER, None, _controller)  # there is one controller: the variable is only checked
        torus = _read(env, TORUS_ALLREDUCE, False, _flag)  # the same steps, with NCCL between the hosts
        settings: dict[str, Any] = {
            each.name: _read(env, each.metadata["variable"], each.default, each.metadata["parse"])
            for each in fields(Config)
            if each.metadata
        }
        if torus and settings["hierarchical_allreduce"] is None:
            settings["hierarchical_allreduce"] = True
        explicit = frozenset(
            each.metadata["variable"]
            for each in fields(Config)
            if each.metadata and env.get(each.metadata["variable"], "").strip()
        )
        if torus:
            explicit |= {HIERARCHICAL_ALLREDUCE}
        return Config(network_interfaces=network_interfaces(env), explicit=explicit, **settings)
