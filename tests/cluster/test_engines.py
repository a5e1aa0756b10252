"""Engines between two hosts: which one is chosen, what carries between the hosts, and that all ranks end with the same bits."""

from __future__ import annotations

import pytest

from cluster.conftest import Cluster
from cluster.test_jobs import results

PROGRAM = """
import hashlib, torch, horovod.torch as hvd
from horovod.core.lifecycle import context
hvd.init()
torch.manual_seed(hvd.rank())
found = []
for length in (1, 1000, 3_000_000):
    x = torch.randn(length)
    everybody = hvd.allgather(x, name=f"g{length}").reshape(hvd.size(), -1)
    y = hvd.allreduce(x, op=hvd.Sum, name=f"r{length}")
    assert torch.allclose(y, everybody.sum(0), atol=1e-4)
    found += [y, hvd.broadcast(x, hvd.size() - 1), everybody]
text = b"".join(each.numpy().tobytes() for each in found)
print(*context.current().workers[0].communicator.engines(), hashlib.sha256(text).hexdigest(), flush=True)
"""

IN_STEPS = {"HOROVOD_HIERARCHICAL_ALLREDUCE": "1"}


@pytest.mark.parametrize(
    ("places", "settings", "engines"),
    [
        ("hostA:2,hostB:2", {}, "hierarchical shm tcp"),
        ("hostA:2,hostB:1", {}, "hierarchical shm tcp"),
        ("hostA:1,hostB:1", {}, "tcp"),
        ("hostA:2,hostB:1", {"HOROVOD_CPU_OPERATIONS": "gloo"}, "gloo"),
        ("hostA:2,hostB:2", {"HOROVOD_CPU_OPERATIONS": "Gloo"} | IN_STEPS, "hierarchical shm gloo"),
    ],
)
def test_between_two_hosts(cluster: Cluster, places: str, settings: dict[str, str], engines: str) -> None:
    script = cluster.folder / "collectives.py"
    script.write_text(PROGRAM)
    ranks = sum(int(each.partition(":")[2]) for each in places.split(","))
    done = cluster.run("-np", str(ranks), "-H", places, "python", script, **settings)
    assert done.returncode == 0, done.stderr
    found = [line.rpartition(" ") for line in results(done.stdout)]
    used = {" ".join(dict.fromkeys(line[0].split())) for line in found}
    assert len(found) == ranks and len({line[2] for line in found}) == 1
    # A host's only rank has no engine of its own within the host.
    assert used <= {engines, engines.replace(" shm", " single")} and engines in used
