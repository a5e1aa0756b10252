"""horovodrun as in the launcher pod of an MPIJob: its host file, and its kubexec.sh, over a stand-in for kubectl."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.conftest import Cluster
from cluster.test_jobs import results
from cluster.training import TRAINING

KUBEXEC = """#!/bin/sh
set -x
POD_NAME=$1
shift
{folder}/kubectl exec ${{POD_NAME}} -- /bin/sh -c "$*"
"""
# Hosts are its pods. Like the real one it hands standard input on only if it is asked to.
KUBECTL = """#!/bin/sh
shift
case "$1" in -i) shift;; *) exec </dev/null;; esac
pod=$1; shift 4
case "$pod" in
    host?) exec ssh -F {ssh_config} -o LogLevel=ERROR $pod "$1";;
    *) echo "Error from server (NotFound): pods \\"$pod\\" not found" >&2; exit 1;;
esac
"""


@pytest.fixture
def pod(cluster: Cluster) -> dict[str, str]:
    """The variables of the launcher pod."""
    folder = cluster.hosts.folder  # the operator's own has no blanks, as its script has no quotes
    for name, text in (("kubexec.sh", KUBEXEC), ("kubectl", KUBECTL)):
        path = folder / name
        path.write_text(text.format(folder=folder, ssh_config=folder / "ssh_config"))
        path.chmod(0o755)
    hosts = cluster.folder / "hostfile"
    hosts.write_text("hostA slots=1\nhostB slots=1\n")
    return {
        "OMPI_MCA_plm_rsh_agent": str(folder / "kubexec.sh"),
        "OMPI_MCA_orte_default_hostfile": str(hosts),
    }


def run(cluster: Cluster, pod: dict[str, str], *words: str | Path) -> tuple[int, str, str]:
    done = cluster.run(*words, **pod)
    return done.returncode, done.stdout, done.stderr


def test_ranks_train_in_the_pods_of_the_host_file(cluster: Cluster, pod: dict[str, str]) -> None:
    script = cluster.script(TRAINING + "train(steps=3)\n")
    status, out, err = run(cluster, pod, "-np", "2", "python", script)
    assert status == 0, err
    assert [line.split()[:2] for line in results(out)] == [["2", "2"]] * 2
    assert len(set(results(out))) == 1


def test_a_rank_that_fails_ends_the_job_in_all_pods(cluster: Cluster, pod: dict[str, str]) -> None:
    status, _, err = run(cluster, pod, "-np", "2", "sh", "-c", "[ $HOROVOD_RANK = 0 ] && sleep 1000; exit 3")
    assert status == 3
    assert "Rank 1 failed first (hostB, local rank 0)" in err


def test_a_pod_that_is_not_there_is_named(cluster: Cluster, pod: dict[str, str]) -> None:
    (cluster.folder / "hostfile").write_text("hostA slots=1\njob-worker-7 slots=1\n")
    status, _, err = run(cluster, pod, "-np", "2", "true")
    assert status == 1
    assert "job-worker-7  the pod does not exist, or no longer exists (Error from server (NotFound)" in err
