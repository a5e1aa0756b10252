"""Engines between two hosts: which one is chosen, what carries between the hosts, and that all ranks end with the same bits."""

from __future__ import annotations

import json

import pytest

from cluster.conftest import Cluster
from cluster.test_jobs import results
from torch_versions import needs_gloo

PROGRAM = """
import hashlib, json, os, sys, numpy, plain
from horovod.core.lifecycle import context
for number, settings in enumerate(sys.argv[1:]):
    os.environ.update(json.loads(settings))
    plain.init()
    numbers = numpy.random.default_rng(plain.rank())
    found = []
    for length in (1, 1000, 3_000_000):
        x = numbers.standard_normal(length, numpy.float32)
        everybody = plain.allgather(x, f"g{length}").reshape(plain.size(), -1)
        y = plain.allreduce(x, f"r{length}")
        assert numpy.allclose(y, everybody.sum(0), atol=1e-4)
        found += [y, plain.broadcast(x, plain.size() - 1, f"b{length}"), everybody]
    text = b"".join(each.tobytes() for each in found)
    print(number, *context.current().workers[0].communicator.engines(), hashlib.sha256(text).hexdigest(), flush=True)
    plain.shutdown()
"""

GLOO = {"HOROVOD_CPU_OPERATIONS": "gloo"}
GLOO_IN_STEPS = {"HOROVOD_CPU_OPERATIONS": "Gloo", "HOROVOD_HIERARCHICAL_ALLREDUCE": "1"}


@pytest.mark.parametrize(
    ("slots", "engines"),
    [
        ("hostA:2,hostB:2", [({}, "hierarchical shm tcp")]),
        pytest.param(
            "hostA:2,hostB:1",
            [({}, "hierarchical shm tcp"), (GLOO, "gloo"), (GLOO_IN_STEPS, "hierarchical shm gloo")],
            marks=needs_gloo,
        ),
        ("hostA:1,hostB:1", [({}, "tcp")]),
    ],
)
def test_between_two_hosts(cluster: Cluster, slots: str, engines: list[tuple[dict[str, str], str]]) -> None:
    """The engines that settings lead to, one after another in the same job."""
    script = cluster.script(PROGRAM)
    ranks = sum(int(each.partition(":")[2]) for each in slots.split(","))
    settings = [json.dumps(each) for each, _ in engines]
    done = cluster.run("-np", str(ranks), "-H", slots, "python", script, *settings)
    assert done.returncode == 0, done.stderr
    for number, (_, expected) in enumerate(engines):
        said = [line.removeprefix(f"{number} ") for line in results(done.stdout) if line.startswith(f"{number} ")]
        found = [line.rpartition(" ") for line in said]
        used = {" ".join(dict.fromkeys(line[0].split())) for line in found}
        assert len(found) == ranks and len({line[2] for line in found}) == 1
        # A host's only rank has no engine of its own within the host.
        assert used <= {expected, expected.replace(" shm", " single")} and expected in used
