"""An elastic job of PyTorch through one loss after another, wherever it strikes: the result is that of an undisturbed job.

To the bit: each sample's gradient is rounded to a multiple of a power of two, so that sums are exact in any order, and
a step has the same samples whatever the number of ranks.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from launcher import elastic_faults
from launcher.elastic_faults import FIRST, LAST, Fault
from launcher.harness import LIMIT_SECONDS, Launcher

pytest.importorskip("torch")

EPOCHS = 4
STEPS = 6  # of an epoch
SCRIPT = """
import contextlib, hashlib, json, os, sys
from pathlib import Path
import torch
import horovod.torch as hvd
from horovod.torch.elastic.handlers import OptimizerStateHandler
import elastic_faults

folder, rollback, epochs = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
process = os.getpid()
hvd.init()
torch.manual_seed(1)
samples = torch.randn(96, 8, generator=torch.Generator().manual_seed(2)).double()
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4)).double()
plain = torch.optim.SGD(model.parameters(), lr=0.01 / 16, momentum=0.9)
optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters(), op=hvd.Sum)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
sampler = hvd.elastic.GlobalBatchSampler(samples, global_batch=16, micro_batch=1)
loader = torch.utils.data.DataLoader(samples, batch_sampler=sampler)
state = hvd.elastic.TorchState(
    model, optimizer, sampler=sampler, scheduler=scheduler, rollback=rollback, epoch=0, step=0
)
training = False

def place(name, always=False):
    if training or always:
        elastic_faults.strike(name, hvd.rank(), hvd.size(), state.step)

for parameter in model.parameters():
    parameter.register_hook(lambda gradient: torch.round(gradient * 2**20) / 2**20)
model[1].register_forward_hook(lambda *_: place("forward"))
model[1].register_full_backward_hook(lambda *_: place("backward"))
for name in ("save", "mark"):  # when the model is saved, and the optimizer is not
    elastic_faults.before(OptimizerStateHandler, name, lambda _: place("commit"))
elastic_faults.before(hvd.elastic.TorchState, "check_host_updates", lambda _: place("check"))
elastic_faults.before(hvd.elastic.TorchState, "sync", lambda _: state.step and place("sync", always=True))
elastic_faults.where_ranks_meet(lambda: state.step)
seen = []

@hvd.elastic.run
def train(state):
    global training
    training = True
    try:
        while state.epoch < epochs:
            for step in sampler.steps(loader):
                optimizer.zero_grad()
                for x, _, last in step:
                    with contextlib.nullcontext() if last else optimizer.no_sync():
                        model(x).square().sum().backward()
                optimizer.step()
                sampler.record_step()
                state.step += 1
                seen.append(state.step)
                state.commit()
            scheduler.step()
            state.epoch += 1
            sampler.set_epoch(state.epoch)
    finally:
        training = False

train(state)
assert os.getpid() == process and seen == sorted(seen)
digest = hashlib.sha256()
for tensor in [*model.state_dict().values(), *(optimizer.state[p]["momentum_buffer"] for p in model.parameters())]:
    digest.update(tensor.numpy().tobytes())
result = [digest.hexdigest(), hvd.rank(), hvd.size(), state.step, len(seen), scheduler.get_last_lr()]
(folder / f"result.{process}").write_text(json.dumps(result))
"""


def run(launcher: Launcher, folder: Path, ranks: int, faults: list[Fault], rollback: str, **extra: str) -> str:
    """Run the training with these faults. The digest of its parameters and momenta, on which all ranks agree."""
    folder.mkdir()
    shutil.copy(elastic_faults.__file__, folder)
    elastic_faults.plan(folder, faults)
    (folder / "train.py").write_text(SCRIPT)
    command = ("python", folder / "train.py", folder, rollback, EPOCHS)
    process = launcher.start(
        "-H", f"localhost:{ranks}", "--min-np", "2", *command, FAULTS_FOLDER=str(folder), **extra
    )  # fmt: skip
    _, errors = process.communicate(timeout=4 * LIMIT_SECONDS)
    assert process.returncode == 0, errors
    assert elastic_faults.struck(folder) == len(faults), errors
    results = [json.loads(path.read_text()) for path in folder.glob("result.*")]
    left = ranks - len(faults)
    assert sorted(rank for _, rank, *_ in results) == list(range(left))
    assert {size for _, _, size, *_ in results} == {left}
    assert {step for _, _, _, step, *_ in results} == {EPOCHS * STEPS}
    assert all(done >= EPOCHS * STEPS - len(faults) for *_, done, _ in results), (
        "survivors have taken part in all steps"
    )
    (digest,) = {digest for digest, *_ in results}
    return str(digest)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("undisturbed")
    launcher = Launcher(folder)
    return run(launcher, folder / "job", 2, [], "step")


RANK_0 = [Fault("forward", FIRST, 3), Fault("reinit", FIRST), Fault("allreduce", FIRST, 9), Fault("commit", FIRST, 14)]
OTHERS = [Fault("allreduce", LAST, 4), Fault("reinit", LAST), Fault("commit", LAST, 11), Fault("forward", LAST, 18)]
ANYBODY = [Fault("backward", FIRST, 2), Fault("sync", FIRST), Fault("check", FIRST, 8), Fault("backward", LAST, 16)]


@pytest.mark.parametrize(
    ("faults", "engine", "rollback"),
    [
        (RANK_0, "shm", "step"),
        (RANK_0, "tcp", "commit"),
        (OTHERS, "shm", "commit"),
        (OTHERS, "tcp", "step"),
        (ANYBODY, "shm", "step"),
        (ANYBODY, "tcp", "step"),
    ],
    ids=["rank 0, shm", "rank 0, tcp", "the last rank, shm", "the last rank, tcp", "both, shm", "both, tcp"],
)
def test_after_losses_at_any_place_the_result_is_that_of_an_undisturbed_job(
    launcher: Launcher, tmp_path: Path, undisturbed: str, faults: list[Fault], engine: str, rollback: str
) -> None:
    found = run(launcher, tmp_path / "job", 6, faults, rollback, HOROVOD_CPU_OPERATIONS=engine)
    assert found == undisturbed


@pytest.mark.parametrize(("engine", "who"), [("shm", LAST), ("tcp", FIRST)])
def test_a_rank_that_stops_answering_in_an_allreduce_is_left_behind(
    launcher: Launcher, tmp_path: Path, undisturbed: str, engine: str, who: str
) -> None:
    faults = [Fault("allreduce", who, 5, "STOP")]
    settings = {"HOROVOD_CPU_OPERATIONS": engine, "HOROVOD_GLOO_TIMEOUT_SECONDS": "3"}
    assert run(launcher, tmp_path / "job", 3, faults, "step", **settings) == undisturbed
