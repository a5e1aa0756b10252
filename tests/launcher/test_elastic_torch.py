"""A model of PyTorch in an elastic job: after losses it is what it would have been without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.harness import LIMIT_SECONDS, Launcher

pytest.importorskip("torch")

# All ranks train on the same samples, so the average of their gradients does not depend on their number.
SCRIPT = """
import json, os, signal, sys
from pathlib import Path
import torch
import horovod.torch as hvd

folder, rollback, killed, step_of_death = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
process = os.environ["HOROVOD_ELASTIC_PROCESS"]
hvd.init()
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)).double()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
samples = torch.randn(20, 4, 8, generator=torch.Generator().manual_seed(2)).double()
state = hvd.elastic.TorchState(model, optimizer, step=0, rollback=rollback)

@hvd.elastic.run
def train(state):
    while state.step < 20:
        optimizer.zero_grad()
        loss = model(samples[state.step]).square().sum()
        if (process, state.step) == (killed, step_of_death):
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        state.step += 1
        state.commit()

train(state)
numbers = [p.flatten().tolist() for p in model.parameters()]
(folder / f"result.{process}").write_text(json.dumps([hvd.size(), numbers]))
"""


def run(launcher: Launcher, folder: Path, rollback: str, killed: int, step: int) -> dict[int, list[list[float]]]:
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    process = launcher.start(
        "-H", "localhost:3", "--min-np", "2", "python", folder / "train.py", folder, rollback, killed, step
    )
    _, errors = process.communicate(timeout=4 * LIMIT_SECONDS)
    assert process.returncode == 0, errors
    found = {int(path.suffix[1:]): json.loads(path.read_text()) for path in folder.glob("result.*")}
    assert {size for size, _ in found.values()} == {3 if killed < 0 else 2}
    return {number: numbers for number, (_, numbers) in found.items()}


@pytest.mark.parametrize("rollback", ["step", "commit"])
def test_after_a_loss_the_model_is_what_it_would_have_been_without(
    launcher: Launcher, tmp_path: Path, rollback: str
) -> None:
    undisturbed = run(launcher, tmp_path / "whole", rollback, -1, 0)[0]
    found = run(launcher, tmp_path / "disturbed", rollback, 0, 9)
    assert set(found) == {1, 2}
    assert found[1] == found[2], "all ranks have the same parameters"
    for parameter, expected in zip(found[1], undisturbed, strict=True):
        assert parameter == pytest.approx(expected, rel=1e-9)
