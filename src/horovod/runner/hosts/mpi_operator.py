"""The launcher pod of a Kubeflow MPIJob: which pods may run ranks, and how to reach them. Starts nothing.

The MPI Operator writes a host file. Older versions of the operator (API v1) reach the pods by their script ``kubexec.sh POD
COMMAND``, which runs ``kubectl exec``; newer ones (v2beta1) use ssh, and then only the host file is needed here.
Source: the operator's documentation, and the variables that it sets for Open MPI, Intel MPI and MPICH.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

_FOLDER = "/etc/mpi"
_AGENT = "OMPI_MCA_plm_rsh_agent"
_HOST_FILES = (
    "OMPI_MCA_orte_default_hostfile",
    "PRTE_MCA_prte_default_hostfile",
    "I_MPI_HYDRA_HOST_FILE",
    "HYDRA_HOST_FILE",
)


def kubexec(environment: Mapping[str, str]) -> str | None:
    """The script that runs a command in a pod; None if the pods of this job are not reached by such a script."""
    path = environment.get(_AGENT, "").strip()
    return path if Path(path).name == "kubexec.sh" else None


def host_file(environment: Mapping[str, str]) -> str | None:
    """The operator's host file; None if this is not a launcher pod."""
    for name in _HOST_FILES:
        path = environment.get(name, "").strip()
        if path and (str(Path(path).parent) == _FOLDER or kubexec(environment)) and Path(path).is_file():
            return path
    return None


def command_line(script: str, pod: str, command: str) -> list[str]:
    """The command that runs a shell command in a pod, and passes its standard input to that.

    The operator's script calls ``kubectl exec`` without ``-i``, so the shell command would find its standard input closed. The
    agent gets the job's secret there, which must not be on a command line. So the same script runs with ``-i`` added, and
    without the trace that it writes to standard error.
    """
    try:
        text = Path(script).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return [script, pod, command]
    changed = re.sub(r"(kubectl\s+exec)(?=\s)(?!\s+(?:-i|--stdin)\b)", r"\1 -i", text)
    changed = re.sub(r"^set -x$", "", changed, flags=re.MULTILINE)
    return [script, pod, command] if changed == text else ["/bin/sh", "-c", changed, script, pod, command]
