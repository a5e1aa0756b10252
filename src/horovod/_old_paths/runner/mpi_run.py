"""Which MPI the ``mpirun`` on PATH belongs to, for scripts that ask. ``horovodrun --mpi`` itself asks ``external.mpi.kinds``.

Each function runs ``mpirun --version``, and takes the environment to run it in (default: this process's).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from horovod.runner.errors import LaunchError
from horovod.runner.external.mpi.kinds import MpiKind, find


def mpi_available(env: Mapping[str, str] | None = None) -> bool:
    """Whether there is an ``mpirun`` that ``horovodrun --mpi`` can use."""
    return _kind(env) is not None


def is_open_mpi(env: Mapping[str, str] | None = None) -> bool:
    """Whether it is Open MPI's."""
    return _kind(env) in (MpiKind.OPEN_MPI_4, MpiKind.OPEN_MPI_5)


def is_spectrum_mpi(env: Mapping[str, str] | None = None) -> bool:
    """Whether it is IBM Spectrum MPI's."""
    return _kind(env) is MpiKind.SPECTRUM


def is_mpich(env: Mapping[str, str] | None = None) -> bool:
    """Whether it is MPICH's."""
    return _kind(env) is MpiKind.MPICH


def is_intel_mpi(env: Mapping[str, str] | None = None) -> bool:
    """Whether it is Intel MPI's."""
    return _kind(env) is MpiKind.INTEL


def _kind(env: Mapping[str, str] | None) -> MpiKind | None:
    try:
        return find(os.environ if env is None else env).kind
    except LaunchError:
        return None
