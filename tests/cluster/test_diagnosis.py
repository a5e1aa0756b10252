"""What ``python -m horovod.diagnose`` says of a job on two hosts whose link breaks."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from cluster.conftest import Cluster
from horovod._base import config
from horovod.diagnose.dumped_job import DumpedJob
from horovod.diagnose.findings import findings
from horovod.diagnose.report import text
from horovod.observe.dump import read

LARGE = """
import numpy, plain
plain.init()
plain.allreduce(numpy.ones(1, numpy.float32), "first")
print("ready", flush=True)
for step in range(10**6):
    plain.allreduce(numpy.ones(4 << 20, numpy.float32), "gradient")
"""


@pytest.fixture
def job(cluster: Cluster, tmp_path: Path) -> DumpedJob:
    """A job of two ranks on each host, in the middle of which hostB's cable was pulled out."""
    env = {config.TIMEOUT_SECONDS: "6", config.FLIGHT_RECORDER_DIR: str(tmp_path / "recorders")}
    process = cluster.start("-np", "4", "-H", "hostA:2,hostB:2", "python", cluster.script(LARGE), **env)
    cluster.await_line(process, "ready", times=4)
    cluster.hosts.link("hostB", up=False)
    try:
        done = cluster.finish(process, 60)
        cluster.hosts.await_nothing(40)
    finally:
        cluster.hosts.mend()
    assert done.returncode != 0
    assert f"python -m horovod.diagnose {shlex.quote(str(tmp_path / 'recorders'))}" in done.stderr, done.stderr
    return DumpedJob(read([tmp_path / "recorders"]))


def test_a_link_that_is_down(job: DumpedJob) -> None:
    found = findings(job)
    print(text(job, found))
    assert sorted(job.dumps) == [0, 1, 2, 3], "the ranks on both sides of the broken link write"
    assert found[0].kind == "link"
    assert "The link between host hostA and host hostB is broken" in found[0].text
    assert "Ranks 0-3 have been waiting" in found[0].text and "'allreduce.gradient'" in found[0].text
