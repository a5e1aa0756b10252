"""Finds out which rank this process is, from its launcher's variables, as a
:class:`~horovod._base.process_identity.ProcessIdentity`.

The core calls :func:`identity` once in ``init()``. A new launcher is one file in this folder and one line in ``ENVIRONMENTS``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from horovod._base.process_identity import HostList, ProcessIdentity
from horovod.environments.base import Environment
from horovod.environments.horovodrun import HorovodRun
from horovod.environments.jsrun import JSRun
from horovod.environments.kubeflow_trainer import KubeflowTrainer
from horovod.environments.mpich import MPICH
from horovod.environments.open_mpi import OpenMPI
from horovod.environments.pals import PALS
from horovod.environments.single import Single
from horovod.environments.slurm import Slurm
from horovod.environments.torch_distributed import TorchDistributed
from horovod.environments.torchrun import TorchRun
from horovod.environments.unclear import Unclear

# Batch systems start other launchers, so a launcher that starts ranks itself comes before the batch systems.
ENVIRONMENTS: tuple[Environment, ...] = (
    HorovodRun(),
    TorchRun(),
    JSRun(),
    OpenMPI(),
    PALS(),
    MPICH(),
    Slurm(),
    TorchDistributed(),
    KubeflowTrainer(),
    Unclear(),
    Single(),
)


def detect(env: Mapping[str, str] | None = None) -> Environment:
    """The launcher that started the process with the variables ``env`` (default: this process)."""
    env = os.environ if env is None else env
    return next(environment for environment in ENVIRONMENTS if environment.detect(env))


def identity(env: Mapping[str, str] | None = None) -> ProcessIdentity:
    """The identity of the process with the variables ``env`` (default: this process).

    Raises:
        ValueError: the launcher's variables do not parse or contradict one another.
    """
    env = os.environ if env is None else env
    environment = detect(env)
    found = environment.identity(env)
    several = found.local_size < found.size
    return replace(found, hosts=environment.host_list(env) if several else None, over_mpi=environment.over_mpi)


def host_list(env: Mapping[str, str] | None = None) -> HostList | None:
    """The hosts of the job that the process with the variables ``env`` (default: this process) belongs to, if known.

    Raises:
        ValueError: the launcher's variables do not parse.
    """
    env = os.environ if env is None else env
    return detect(env).host_list(env)
