"""The launcher pod of a Kubeflow MPIJob: which pods may run ranks, and how they are reached. Starts nothing.

The MPI Operator writes a host file. Its older versions (API v1) reach the pods by a script of theirs, ``kubexec.sh POD
COMMAND``, which runs ``kubectl exec``; newer ones (v2beta1) by ssh, and then nothing here is needed but the host file.
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
    """The script that runs a command in a pod, if the pods of this job are reached by it."""
    path = environment.get(_AGENT, "").strip()
    return path if Path(path).name == "kubexec.sh" else None


def host_file(environment: Mapping[str, str]) -> str | None:
    """The operator's host file, or None where this is no launcher pod."""
    for name in _HOST_FILES:
        path = environment.get(name, "").strip()
        if path and (str(Path(path).parent) == _FOLDER or kubexec(environment)) and Path(path).is_file():
            return path
    return None


def command_line(script: str, pod: str, command: str) -> list[str]:
    """The command that runs a shell command in a pod, and passes our standard input to it.

    The operator's script calls ``kubectl exec`` without ``-i``, so the command would find its standard input closed. The agent
    gets the job's secret there, which must be on no command line; so the same script is run with ``-i`` added, and without the
    trace that it writes to standard error.
    """
    try:
        text = Path(script).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return [script, pod, command]
    changed = re.sub(r"(kubectl\s+exec)(?=\s)(?!\s+(?:-i|--stdin)\b)", r"\1 -i", text)
    changed = re.sub(r"^set -x$", "", changed, flags=re.MULTILINE)
    return [script, pod, command] if changed == text else ["/bin/sh", "-c", changed, script, pod, command]
