"""An elastic job through one loss after another, wherever it strikes: the result is that of an undisturbed job.

To the bit: each sample's gradient is rounded to a multiple of a power of two, so that sums are exact in any order, and
a step has the same samples whatever the number of ranks. Jobs of PyTorch lose a rank at every point. Jobs of NumPy, whose
ranks start in a fraction of the time, lose the first and the last one there, with each engine.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher import elastic_faults
from launcher.elastic_faults import FIRST, LAST, Fault
from launcher.harness import RUN_SECONDS, Launcher
from part import some

pytest.importorskip("torch")

EPOCHS = 4
STEPS = 6  # of an epoch
PYTORCH = """
import contextlib, hashlib, json, os, sys
from pathlib import Path
import torch
import horovod.torch as hvd
from horovod.torch.elastic.handlers import OptimizerStateHandler
import elastic_faults

folder, kind, rollback, epochs = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
process = os.getpid()
hvd.init()
torch.manual_seed(1)
samples = torch.randn(96, 8, generator=torch.Generator().manual_seed(2)).double()
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4)).double()
if kind == "SGD":
    plain = torch.optim.SGD(model.parameters(), lr=0.01 / 16, momentum=0.9)
else:
    plain = torch.optim.Adam(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(plain, named_parameters=model.named_parameters(), op=hvd.Sum)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
sampler = hvd.elastic.GlobalBatchSampler(samples, global_batch=16, micro_batch=1)
loader = torch.utils.data.DataLoader(samples, batch_sampler=sampler)
state = hvd.elastic.TorchState(
    model, optimizer, sampler=sampler, scheduler=scheduler, rollback=rollback, epoch=0, step=0
)
training = False

def fault_point(name, always=False):
    if training or always:
        elastic_faults.strike(name, hvd.rank(), hvd.size(), state.step)

for parameter in model.parameters():
    parameter.register_hook(lambda gradient: torch.round(gradient * 2**20) / 2**20)
model[1].register_forward_hook(lambda *_: fault_point("forward"))
model[1].register_full_backward_hook(lambda *_: fault_point("backward"))
for name in ("save", "mark"):  # when the model is saved, and the optimizer is not
    elastic_faults.before(OptimizerStateHandler, name, lambda _: fault_point("commit"))
elastic_faults.before(hvd.elastic.TorchState, "check_host_updates", lambda _: fault_point("check"))
elastic_faults.before(hvd.elastic.TorchState, "sync", lambda _: state.step and fault_point("sync", always=True))
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
digest = hashlib.sha256(repr(scheduler.get_last_lr()).encode())
states = [value for p in model.parameters() for _, value in sorted(optimizer.state[p].items())]
for tensor in [*model.state_dict().values(), *states]:
    digest.update(tensor.numpy().tobytes())
result = [digest.hexdigest(), hvd.rank(), hvd.size(), state.step, len(seen)]
(folder / f"result.{process}").write_text(json.dumps(result))
"""


NUMPY = """
import hashlib, json, os, sys
from pathlib import Path
import numpy as np
from horovod.comm.datatypes import DataType
from horovod.comm.reduction import ReduceOp
from horovod.common import basics
from horovod.common.elastic import ObjectState, Reset, run_fn
from horovod._bindings.objects import broadcast_object
from horovod.core.submission import collectives
from horovod.core.requests.tensor import Tensor
import elastic_faults

folder, steps, process = Path(sys.argv[1]), 6 * int(sys.argv[4]), os.getpid()
basics.init()
samples = np.random.default_rng(2).normal(size=(steps, 16, 8))
weights = np.random.default_rng(1).normal(size=(8, 400))
state = ObjectState(broadcast_object, basics.rank, step=0, weights=weights, momenta=np.zeros_like(weights))
training = False

def fault_point(name, always=False):
    if training or always:
        elastic_faults.strike(name, basics.rank(), basics.size(), state.step)

def gradient(x, weights):
    y = np.tanh((x[:, None] * weights).sum(0))
    return np.round(x[:, None] * 2 * y * (1 - y**2) * 2**20) / 2**20

elastic_faults.before(ObjectState, "save", lambda _: fault_point("commit"))
elastic_faults.before(ObjectState, "check_host_updates", lambda _: fault_point("check"))
elastic_faults.before(ObjectState, "sync", lambda _: state.step and fault_point("sync", always=True))
elastic_faults.where_ranks_meet(lambda: state.step)
seen = []

def train(state):
    global training
    training = True
    try:
        while state.step < steps:
            fault_point("forward")
            mine = samples[state.step, basics.rank() :: basics.size()]
            total = sum((gradient(x, state.weights) for x in mine), np.zeros_like(weights))
            fault_point("backward")
            tensor = Tensor(total.reshape(-1), DataType.FLOAT64, total.shape)
            collectives.allreduce("allreduce", "gradient", [tensor], [tensor], ReduceOp.SUM, awaited=True).wait()
            state.momenta = 0.9 * state.momenta + total
            state.weights = state.weights - 0.01 / 16 * state.momenta
            state.step += 1
            seen.append(state.step)
            state.commit()
    finally:
        training = False

run_fn(train, Reset(basics.shutdown, basics.init))(state)
assert os.getpid() == process and seen == sorted(seen)
digest = hashlib.sha256(state.weights.tobytes() + state.momenta.tobytes()).hexdigest()
result = [digest, basics.rank(), basics.size(), state.step, len(seen)]
(folder / f"result.{process}").write_text(json.dumps(result))
"""


def run(
    launcher: Launcher, folder: Path, ranks: int, kind: str, faults: list[Fault], rollback: str, **extra: str
) -> str:
    """Run the training with these faults. The digest of its parameters and momenta, on which all ranks agree.

    Args:
        kind: which one: "SGD" and "Adam" are PyTorch's, "NumPy" has no framework.
        rollback: of PyTorch's state.
    """
    folder.mkdir()
    shutil.copy(elastic_faults.__file__, folder)
    elastic_faults.plan(folder, faults)
    (folder / "train.py").write_text(NUMPY if kind == "NumPy" else PYTORCH)
    left = ranks - len(faults)
    command = ("python", folder / "train.py", folder, kind, rollback, EPOCHS)
    process = launcher.start(
        "-H", f"localhost:{ranks}", "--min-np", left, *command, FAULTS_FOLDER=str(folder), **extra
    )  # fmt: skip
    _, errors = process.communicate(timeout=RUN_SECONDS)
    assert process.returncode == 0, errors
    assert elastic_faults.struck(folder) == len(faults), errors
    results = [json.loads(path.read_text()) for path in folder.glob("result.*")]
    assert sorted(rank for _, rank, *_ in results) == list(range(left))
    assert {size for _, _, size, *_ in results} == {left}
    assert {step for _, _, _, step, *_ in results} == {EPOCHS * STEPS}
    assert all(done >= EPOCHS * STEPS - len(faults) for *_, done in results), "survivors have taken part in all steps"
    (digest,) = {digest for digest, *_ in results}
    return str(digest)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """``undisturbed(kind)``: what a training comes to in one process."""

    @functools.cache
    def found(kind: str) -> str:
        folder = tmp_path_factory.mktemp("undisturbed")
        return run(Launcher(folder), folder / "job", 1, kind, [], "step")

    return found


RANK_0 = [Fault("forward", FIRST, 3), Fault("reinit", FIRST), Fault("allreduce", FIRST, 9), Fault("commit", FIRST, 14)]
OTHERS = [Fault("allreduce", LAST, 4), Fault("reinit", LAST), Fault("commit", LAST, 11), Fault("forward", LAST, 18)]
ANYBODY = [Fault("backward", FIRST, 2), Fault("sync", FIRST), Fault("check", FIRST, 8), Fault("backward", LAST, 16)]

# Every point once, with one of the ways to roll back.
STEPS_AGAIN = [
    Fault("forward", FIRST, 3),
    Fault("sync", FIRST),
    Fault("allreduce", LAST, 9),
    Fault("commit", FIRST, 14),
]
COMMITS = [Fault("backward", LAST, 2), Fault("reinit", FIRST), Fault("allreduce", FIRST, 8), Fault("check", LAST, 16)]


JOBS = [
    pytest.param("SGD", STEPS_AGAIN, "shm", "step", id="SGD, shm"),
    pytest.param("NumPy", RANK_0, "tcp", "commit", id="NumPy, tcp, rank 0"),
    pytest.param("NumPy", OTHERS, "shm", "commit", id="NumPy, shm, the last rank"),
    pytest.param("NumPy", ANYBODY, "tcp", "commit", id="NumPy, tcp, both"),
]
FURTHER = [
    pytest.param("Adam", COMMITS, "tcp", "commit", id="Adam, tcp"),
    pytest.param("NumPy", RANK_0, "shm", "commit", id="NumPy, shm, rank 0"),
    pytest.param("NumPy", OTHERS, "tcp", "commit", id="NumPy, tcp, the last rank"),
    pytest.param("NumPy", ANYBODY, "shm", "commit", id="NumPy, shm, both"),
]


@pytest.mark.parametrize(("kind", "faults", "engine", "rollback"), some([*JOBS, *FURTHER], JOBS))
def test_after_losses_at_any_place_the_result_is_that_of_an_undisturbed_job(
    launcher: Launcher,
    tmp_path: Path,
    undisturbed: Callable[[str], str],
    kind: str,
    faults: list[Fault],
    engine: str,
    rollback: str,
) -> None:
    found = run(launcher, tmp_path / "job", 6, kind, faults, rollback, HOROVOD_CPU_OPERATIONS=engine)
    assert found == undisturbed(kind)


@pytest.mark.parametrize(("engine", "who"), [("shm", LAST), ("tcp", FIRST)])
def test_a_rank_that_stops_answering_in_an_allreduce_is_left_behind(
    launcher: Launcher, tmp_path: Path, undisturbed: Callable[[str], str], engine: str, who: str
) -> None:
    faults = [Fault("allreduce", who, 5, "STOP")]
    settings = {"HOROVOD_CPU_OPERATIONS": engine, "HOROVOD_GLOO_TIMEOUT_SECONDS": "3"}
    assert run(launcher, tmp_path / "job", 3, "NumPy", faults, "commit", **settings) == undisturbed("NumPy")
