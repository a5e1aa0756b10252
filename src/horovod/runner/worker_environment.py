"""The environment variables a rank starts with.

A rank on the launcher's host inherits the launcher's whole environment. A rank on another host has the environment of a login
there, and those of the launcher's variables that do not belong to the launcher's host alone. The user's flags override both.
Last come the rank's own numbers and the address of the rendezvous server. No setting of the runtime is exported unless the
user has asked for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from horovod._base import config
from horovod.runner.errors import LaunchError, UsageError
from horovod.runner.hosts.slots import SlotInfo
from horovod.runner.options import Options
from horovod.runner.tunables import exported

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_TENSORFLOW_THREAD_VARIABLES = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")

# glibc's allocator hands freed memory back to the kernel and fetches it again: for a convolutional network page by page in
# every training step, a tenth of its time. The first limit is the one at which its own adaptation ends; the second is so high
# that it hardly ever gives memory back. Threads other than the first, such as the one that makes the results of asynchronous
# allgathers, keep as much as the pad.
_MEMORY = {
    config.MALLOC_MMAP_THRESHOLD: str(config.MALLOC_MMAP_THRESHOLD_BYTES),
    "MALLOC_TRIM_THRESHOLD_": str((1 << 31) - 1),
    "MALLOC_TOP_PAD_": str(64 << 20),
}

# PyTorch asks the kernel for huge pages for tensors of 2 MiB or more: there are fewer page faults and address translations, and
# other ranks read this rank's memory at a lower cost.
_HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}


# By the interface that scripts rely on, variables whose names begin so are not forwarded:
NOT_FORWARDED = r"BASH_FUNC_.*|OLDPWD|.*CUDA_VISIBLE_DEVICES|" + config.SECRET_KEY
# Nor are the variables of a login session: a login on the other host sets its own.
_OF_A_LOGIN = (
    r"HOME|USER|LOGNAME|SHELL|MAIL|PWD|SHLVL|_|HOSTNAME|TTY|SSH_.*|XDG_.*|DBUS_SESSION_BUS_ADDRESS|DISPLAY|XAUTHORITY"
)
# Nor are a batch system's variables about a node, or about the step that the launcher runs in.
_OF_A_NODE = r"SLURMD_.*|SLURM_(?!CONF|SUBMIT|CLUSTER|ARRAY|JOB).*|SLURM_JOB_GPUS"
_STAYS = re.compile(f"(?:{NOT_FORWARDED})|(?:{_OF_A_LOGIN}|{_OF_A_NODE})$")


def forwarded(environment: Mapping[str, str]) -> dict[str, str]:
    """The part of the launcher's environment that ranks on other hosts get."""
    return {name: value for name, value in environment.items() if _STAYS.match(name) is None}


def from_options(options: Options) -> dict[str, str]:
    """The variables for the user's flags and configuration file."""
    variables = exported(dict(options.tunables))
    if options.start_timeout is not None:
        variables[config.START_TIMEOUT] = str(options.start_timeout)
    if options.tcp_flag:
        variables[config.NCCL_IB_DISABLE] = "1"
    return variables | interfaces(options.nics)


def start_timeout(options: Options, environment: Mapping[str, str]) -> float:
    """Seconds that hosts, and then ranks, may take to start.

    Raises:
        ValueError: the environment variable does not parse.
    """
    if options.start_timeout is not None:
        return float(options.start_timeout)
    try:
        return config.Config.from_env(
            {config.START_TIMEOUT: environment.get(config.START_TIMEOUT, "")}
        ).start_timeout.total_seconds()
    except ValueError as error:
        raise UsageError(str(error)) from None


def interfaces_of_host(asked: Sequence[str], available: Sequence[str], host: str) -> dict[str, str]:
    """As :func:`interfaces`, for those of the interfaces ``asked`` that the host has; names may differ from host to host.

    Raises:
        LaunchError: the host has none of them.
    """
    found = [name for name in asked if name in available]
    if asked and not found:
        raise LaunchError(
            f"host {host} has none of the network interfaces {', '.join(asked)}; it has {', '.join(available)}"
        )
    return interfaces(found)


def interfaces(names: Sequence[str]) -> dict[str, str]:
    """The variables that name the network interfaces to use; empty if ``names`` is."""
    if not names:
        return {}
    every = ",".join(names)
    return {config.NETWORK_INTERFACE: names[0], config.NETWORK_INTERFACES: every, config.NCCL_SOCKET_INTERFACE: every}


def threads(environment: Mapping[str, str], cores: int, ranks: int) -> dict[str, str]:
    """Each rank's fair share of the machine's cores, for the libraries that would otherwise take all of them.

    Empty if the user has set one of the general variables: for the other one, the library's own rules then apply. TensorFlow's
    variables stay as the user has set them, each separately.
    """
    if any(environment.get(name) for name in _THREAD_VARIABLES):
        return {}
    tensorflow = [name for name in _TENSORFLOW_THREAD_VARIABLES if not environment.get(name)]
    return dict.fromkeys([*_THREAD_VARIABLES, *tensorflow], str(max(1, cores // ranks)))


def memory(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that let the C library keep a step's memory for the next one, and PyTorch use huge pages.

    The first are left out if the user has tuned the allocator, or preloads a library, which may be another allocator; the
    second if the user has set it.
    """
    pages = {name: value for name, value in _HUGE_PAGES.items() if not environment.get(name)}
    tuned = [name for name in environment if name.startswith("MALLOC_") or name == "LD_PRELOAD"]
    if tuned or "glibc.malloc" in environment.get("GLIBC_TUNABLES", ""):
        return pages
    return _MEMORY | pages


def rendezvous_point(address: tuple[str, int], secret: str) -> dict[str, str]:
    """The address of the rendezvous server, and the job's secret."""
    return {
        config.RENDEZVOUS_ADDRESS: address[0],
        config.RENDEZVOUS_PORT: str(address[1]),
        config.SECRET_KEY: secret,
        "PYTHONUNBUFFERED": "1",
    }


_MASTER_ADDRESS, _MASTER_PORT = "MASTER_ADDR", "MASTER_PORT"


def torch_store(environment: Mapping[str, str], address: str, port: str) -> dict[str, str]:
    """Variables with the address of the store of ``torch.distributed``, which rank 0 serves; the user's own, if set.

    Args:
        address: the address of rank 0's host.
        port: a free port there.
    """
    if environment.get(_MASTER_ADDRESS) or environment.get(_MASTER_PORT):
        return {}
    return {_MASTER_ADDRESS: address, _MASTER_PORT: port}


def torch_rank(slot: SlotInfo) -> dict[str, str]:
    """The rank's numbers under the names by which torchrun passes them."""
    own = of_rank(slot)
    return {theirs: own[name] for name, theirs in config.OF_TORCHRUN.items()}


def of_rank(slot: SlotInfo) -> dict[str, str]:
    """The rank's numbers, and the name of its host."""
    return {
        config.HOSTNAME: slot.hostname,
        config.RANK: str(slot.rank),
        config.SIZE: str(slot.size),
        config.LOCAL_RANK: str(slot.local_rank),
        config.LOCAL_SIZE: str(slot.local_size),
        config.CROSS_RANK: str(slot.cross_rank),
        config.CROSS_SIZE: str(slot.cross_size),
    }
