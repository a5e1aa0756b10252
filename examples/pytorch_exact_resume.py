"""Stop a job at any step and continue it later, to the same bits as if it had not been stopped.

    horovodrun -np 2 python examples/pytorch_exact_resume.py --checkpoint run.pt
    # Ctrl-C, kill, scancel: it saves after the step; start it again, also with another -np
    horovodrun -np 2 python examples/pytorch_exact_resume.py --checkpoint run.pt

The numbered lines are what a checkpoint for an exact resume needs beyond parameters and the epoch. With the same number of
ranks the result is the same to the bit. With another number each step still has the same images, but sums are rounded in
another order, and random numbers are drawn by other ranks.

The data are the 1,797 handwritten digits that come with scikit-learn; no network is needed.

Needs the extras ``torch`` and ``examples``. Takes less than a minute on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import signal
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import horovod.torch as hvd

TRAINING = 1437
"""The number of digits for training, from the start; the other 360 are for testing."""
SEED = 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, help="the file to save to, and to continue from if it exists")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--stop-after", type=int, default=0, metavar="STEPS", help="save and end after so many steps")
    options = parser.parse_args()

    hvd.init()
    # 1: a signal only sets a flag; the step that is running ends first
    stop = torch.zeros(1)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.fill_(1))

    torch.manual_seed(SEED)
    images, labels = load_data()
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=50)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    # 2: a sampler with a position, which gives the same global batches to any number of ranks
    data = torch.utils.data.TensorDataset(images[:TRAINING], labels[:TRAINING])
    sampler = hvd.elastic.GlobalBatchSampler(data, global_batch=64)
    # without a generator of its own, a new loader would draw a number from the one that the model uses
    loader = torch.utils.data.DataLoader(data, batch_sampler=sampler, generator=torch.Generator())

    parts: dict[str, Any] = {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "sampler": sampler}
    step = load(options.checkpoint, model, parts)
    while sampler.epoch < options.epochs and not stop:
        for passes in sampler.steps(loader):
            optimizer.zero_grad()
            for (x, y), weight, last in passes:
                with contextlib.nullcontext() if last else optimizer.no_sync():
                    noisy = x + 0.1 * torch.randn_like(x)  # random numbers of this rank
                    scaler.scale(F.cross_entropy(model(noisy), y) * weight).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            sampler.record_step()
            step += 1
            # 3: all ranks stop after the same step, if any of them got a signal
            if hvd.allreduce(stop, op=hvd.Max, name="stop") or step == options.stop_after:
                stop.fill_(1)
                break
        else:
            sampler.set_epoch(sampler.epoch + 1)
    save(options.checkpoint, step, model, parts)
    model.eval()
    if hvd.rank() == 0:
        with torch.no_grad():
            right = (model(images).argmax(dim=1) == labels)[TRAINING:].float().mean()
        digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
        print(f"step {step}: reads {right:.1%}, parameters {digest[:16]}", flush=True)


def save(path: Path | None, step: int, model: torch.nn.Module, parts: dict[str, Any]) -> None:
    """Every rank calls it; rank 0 writes a new file, then replaces the old one, so that a killed job leaves a complete file."""
    # 4: every rank's generator; others (NumPy's, random's, a GPU's) likewise, if the script uses them
    generators = hvd.allgather_object(torch.get_rng_state(), name="generators")
    if path is None or hvd.rank() != 0:
        return
    # 5: everything that changes from step to step has a state_dict
    state = {"step": step, "generators": generators, "model": model.state_dict()}
    state |= {name: part.state_dict() for name, part in parts.items()}
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def load(path: Path | None, model: torch.nn.Module, parts: dict[str, Any]) -> int:
    """Every rank calls it; the number of steps that the job has made before. Only rank 0 needs the file."""
    state = torch.load(path, weights_only=True) if hvd.rank() == 0 and path and path.exists() else None
    state = hvd.broadcast_object(state, root_rank=0, name="checkpoint")
    generators = state["generators"] if state else []
    if len(generators) == hvd.size():
        torch.set_rng_state(generators[hvd.rank()])
    else:  # a new job, or another number of ranks: each has random numbers of its own
        torch.manual_seed(hash((SEED, state["step"] if state else 0, hvd.rank())))
    if state is None:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        return 0
    model.load_state_dict(state["model"])
    for name, part in parts.items():
        part.load_state_dict(state[name])
    return int(state["step"])


def load_data() -> tuple[torch.Tensor, torch.Tensor]:
    """1,797 handwritten digits: images, float32 (1797, 64), from -1 (paper) to 1 (ink), and labels, int64 (1797,)."""
    images, labels = load_digits(return_X_y=True)
    return torch.from_numpy(images).float() / 8 - 1, torch.from_numpy(labels)


if __name__ == "__main__":
    main()
