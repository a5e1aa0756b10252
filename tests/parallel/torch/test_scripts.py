"""A script as people have it: written for one device, five lines changed; imports by every path in use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import horovod
from launcher.harness import EAGER
from time_limits import SOON

SCRIPT = """
import argparse
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset, DataLoader
from torch.utils.data.distributed import DistributedSampler
import horovod.torch as hvd
from horovod.torch.mpi_ops import allreduce_async_, synchronize
from horovod.torch.compression import Compression
from horovod.common.exceptions import HorovodInternalError
from horovod.common.util import env

parser = argparse.ArgumentParser()
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--use-adasum", action="store_true")
args = parser.parse_args()

hvd.init()
torch.manual_seed(42)
torch.set_num_threads(1)
x = torch.randn(64, 5)
y = (x @ torch.arange(5.0)).unsqueeze(1)
data = TensorDataset(x, y)
sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(data, batch_size=8, sampler=sampler)
model = torch.nn.Linear(5, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * hvd.size(), momentum=0.9)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
compression = hvd.Compression.fp16 if args.fp16_allreduce else Compression.none
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=compression,
    op=hvd.Adasum if args.use_adasum else hvd.Average,
    gradient_predivide_factor=1.0,
)

def metric_average(value, name):
    return hvd.allreduce(torch.tensor(value), name=name).item()

for epoch in range(6):
    model.train()
    sampler.set_epoch(epoch)
    for features, target in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(features), target)
        loss.backward()
        optimizer.step()
with torch.no_grad():
    final = metric_average(F.mse_loss(model(x), y).item(), "avg_loss")
total = torch.ones(3)
synchronize(allreduce_async_(total, name="total", op=hvd.Sum))
if hvd.rank() == 0:
    print(f"of {hvd.size()}: loss {'small' if final < 5 else final} total {int(total[0])}", flush=True)
"""


def test_an_existing_script_runs_unchanged(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    source = str(Path(horovod.__file__).resolve().parents[1])
    env = {name: value for name, value in os.environ.items() if "HOROVOD" not in name}
    env |= {"PYTHONPATH": os.pathsep.join([source, EAGER]), "OMP_NUM_THREADS": "1"}
    for size, flags in ((None, []), (2, ["--fp16-allreduce"])):
        launcher = ["-m", "horovod.runner.launch", "-np", str(size), sys.executable] if size else []
        run = subprocess.run(
            [sys.executable, *launcher, str(script), *flags], env=env, capture_output=True, text=True, timeout=SOON
        )
        assert run.returncode == 0, run.stdout + run.stderr
        assert f"of {size or 1}: loss small total {size or 1}" in run.stdout
        assert "Traceback" not in run.stderr and "Warning" not in run.stderr, run.stderr
