"""What horovodrun finds in the launcher pod of an MPIJob."""

from __future__ import annotations

import subprocess
from pathlib import Path
from shlex import quote

import pytest

from horovod.runner.hosts import mpi_operator
from horovod.runner.hosts.host_sources import HostFile, ThisHost, choose
from horovod.runner.hosts.slots import HostInfo
from horovod.runner.options import Options

# As the operator writes it, but for kubectl's folder.
KUBEXEC = """#!/bin/sh
set -x
POD_NAME=$1
shift
{folder}/kubectl exec ${{POD_NAME}} --container main -- /bin/sh -c "$*"
"""
# As kubectl does, it hands standard input on only if it is asked to.
KUBECTL = """#!/bin/sh
shift
if [ "$1" = -i ]; then shift; else exec </dev/null; fi
echo "pod $1" >&2
shift; while [ "$1" != -- ]; do shift; done; shift
exec "$@"
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "kubexec.sh").write_text(KUBEXEC.format(folder=quote(str(tmp_path))))
    (tmp_path / "kubectl").write_text(KUBECTL)
    for name in ("kubexec.sh", "kubectl"):
        (tmp_path / name).chmod(0o755)
    return tmp_path / "kubexec.sh"


def test_a_command_in_a_pod_gets_our_standard_input(script: Path) -> None:
    words = mpi_operator.command_line(str(script), "worker-0", "cat; echo 'two  words'")
    done = subprocess.run(words, input="a secret\n", capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("a secret\ntwo  words\n", "pod worker-0\n")


@pytest.mark.parametrize("text", ['#!/bin/sh\nkubectl exec -i $1 -- sh -c "$2"\n', '#!/bin/sh\nexec myexec "$@"\n'])
def test_another_script_is_left_as_it_is(text: str, tmp_path: Path) -> None:
    script = tmp_path / "kubexec.sh"
    script.write_text(text)
    assert mpi_operator.command_line(str(script), "pod", "true") == [str(script), "pod", "true"]


def test_the_operators_host_file_is_taken_unless_the_user_names_hosts(script: Path, tmp_path: Path) -> None:
    hosts = tmp_path / "hostfile"
    hosts.write_text("job-worker-0 slots=2\njob-worker-1:2\n")
    pod = {"OMPI_MCA_plm_rsh_agent": str(script), "OMPI_MCA_orte_default_hostfile": str(hosts)}
    found = choose(Options(), pod)
    assert isinstance(found, HostFile)
    assert found.hosts(4) == [HostInfo("job-worker-0", 2), HostInfo("job-worker-1", 2)]
    assert choose(Options(hosts="a:1"), pod).hosts(1) == [HostInfo("a", 1)]


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OMPI_MCA_orte_default_hostfile": "/home/me/my-hosts"},  # for mpirun, on this user's own machine
        {"OMPI_MCA_plm_rsh_agent": "/usr/bin/ssh"},
        {"OMPI_MCA_plm_rsh_agent": "/etc/mpi/kubexec.sh", "OMPI_MCA_orte_default_hostfile": "/nowhere/hostfile"},
    ],
)  # fmt: skip
def test_elsewhere_ranks_run_here(environment: dict[str, str]) -> None:
    assert isinstance(choose(Options(), environment), ThisHost)
