"""Train a small convolutional network on handwritten digits, with one process or with several.

    python examples/pytorch_mnist.py                     # one process
    horovodrun -np 2 python examples/pytorch_mnist.py    # two, faster, to the same result

It is an ordinary PyTorch script with five changed lines, marked ``hvd 1`` to ``hvd 5`` below. Under ``torchrun
--nproc-per-node 2`` and ``mpirun -np 2 python`` it runs unchanged.

Images come from ``--data``: ``digits`` (1,797 images that ship with scikit-learn, the default, no network needed),
``mnist`` (70,000 images, downloaded once per host), or the path of an ``.npz`` file with arrays ``x`` (images, height,
width) and ``y`` (labels from 0).

``--batch-size`` counts images per rank, so more ranks mean a larger global batch; the learning rate grows with it, after
a warm-up. With ``--fixed-global-batch`` it counts the images of the whole batch, which is divided among the ranks. Then every
step computes the same gradient for any number of ranks, and the losses of two runs can be compared.

Needs the extras ``torch`` and ``examples``. Takes less than a minute on two cores.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

import horovod.torch as hvd


def main() -> None:
    options = parse_arguments()
    # hvd 1: connect the processes; afterwards hvd.rank() and hvd.size() are known
    hvd.init()
    share_cores()
    torch.manual_seed(options.seed)
    # with GPUs, each rank of a host uses its own
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", hvd.local_rank() % gpus) if gpus else torch.device("cpu")

    train_images, train_labels, test_images, test_labels = (each.to(device) for each in load_data(options.data))
    global_batch = options.batch_size * (1 if options.fixed_global_batch else hvd.size())
    # hvd 2: each rank sees its own part of every batch
    batches = GlobalBatches(len(train_images), global_batch, hvd.rank(), hvd.size(), options.seed)
    loader = DataLoader(TensorDataset(train_images, train_labels), sampler=batches, batch_size=None)

    model = build_model(train_images.shape[-2:], classes=int(train_labels.max()) + 1).to(device)
    # hvd 3: the global batch grows with the number of ranks, and the learning rate with it
    growth = 1 if options.fixed_global_batch else hvd.size()
    schedule = Schedule(options.learning_rate, growth, len(batches), options.warmup_epochs, options.epochs)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=options.learning_rate, momentum=0.9)
    # hvd 4: step() applies the gradients' average over the ranks
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    # Only rank 0 looks for a checkpoint, so ranks cannot disagree about it.
    epochs_done = load_checkpoint(options.checkpoint_dir, model, optimizer) if hvd.rank() == 0 else 0
    epochs_done = hvd.broadcast_object(epochs_done, root_rank=0, name="epochs_done")
    # hvd 5: every rank starts from rank 0's weights (and, after a checkpoint, its momentum)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    say(f"{len(train_images):,} images to train, {len(test_images):,} to test")
    say(
        f"{hvd.size()} rank(s) of {torch.get_num_threads()} thread(s); {global_batch} images a step, {len(batches)} steps"
    )
    test_loss, test_accuracy = evaluate(model, test_images, test_labels)
    origin = f"resumed from {options.checkpoint_dir} after epoch {epochs_done}" if epochs_done else "untrained"
    say(f"{origin}: test loss {test_loss:.4f}, test accuracy {test_accuracy:.2%}")

    losses: list[float] = []
    started = time.perf_counter()
    for epoch in range(epochs_done, options.epochs):
        steps = min(len(batches), options.steps - len(losses)) if options.steps else len(batches)
        if steps == 0:
            break
        batches.epoch = epoch
        epoch_started = time.perf_counter()
        with progress_bar(f"epoch {epoch + 1}/{options.epochs}", steps) as advance:
            epoch_losses = train(model, optimizer, islice(loader, steps), schedule, epoch * len(batches), advance)
        seconds = time.perf_counter() - epoch_started

        losses.extend(epoch_losses.tolist())
        test_loss, test_accuracy = evaluate(model, test_images, test_labels)
        say(
            f"epoch {epoch + 1}/{options.epochs}: loss {epoch_losses.mean():.4f}, test loss {test_loss:.4f}, "
            f"test accuracy {test_accuracy:.2%}, {steps * global_batch / seconds:,.0f} images/s, {seconds:.1f} s"
        )
        if options.checkpoint_dir and hvd.rank() == 0 and steps == len(batches):
            save_checkpoint(options.checkpoint_dir, epoch + 1, model, optimizer)

    seconds = time.perf_counter() - started
    say(f"{len(losses)} steps on {hvd.size()} rank(s) in {seconds:.1f} s: test accuracy {test_accuracy:.2%}")
    if options.losses and hvd.rank() == 0:
        record = {"ranks": hvd.size(), "losses": losses, "test_accuracy": test_accuracy, "seconds": seconds}
        options.losses.write_text(json.dumps(record))
    hvd.shutdown()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[tuple[Tensor, Tensor]],
    schedule: Schedule,
    step: int,
    advance: Callable[[], None],
) -> Tensor:
    """One pass over this rank's part of ``batches``, from ``step`` of the schedule on; the loss of every step, (steps,).

    Nothing here depends on other ranks, except that the losses are averaged over them: once, at the end of the pass, so it
    costs one exchange. The average over equal parts is the loss of the global batch.
    """
    model.train()
    losses = []
    for images, labels in batches:
        for group in optimizer.param_groups:
            group["lr"] = schedule.learning_rate(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        step += 1
        advance()
    return hvd.allreduce(torch.stack(losses), name="losses")


class GlobalBatches(Sampler[Tensor]):
    """Divides a data set into global batches, and yields this rank's part of each, as a tensor of indices.

    The k-th global batch is the same set of images for any number of ranks: a consecutive slice of one permutation that all
    ranks draw from the same seed. Each rank takes an equal, consecutive part of that slice, so that the average of the ranks'
    gradients is the gradient of the whole. The images left over after the last full global batch are left out; the next epoch's
    permutation leaves out others.
    """

    def __init__(self, images: int, global_batch: int, rank: int, size: int, seed: int) -> None:
        if global_batch % size:
            sys.exit(f"a global batch of {global_batch} images cannot be shared equally by {size} ranks")
        if images < global_batch:
            sys.exit(f"{images} training images are fewer than one global batch of {global_batch}; lower --batch-size")
        self.images = images
        self.global_batch = global_batch
        self.share = global_batch // size
        self.rank = rank
        self.seed = seed
        self.epoch = 0

    def __len__(self) -> int:
        return self.images // self.global_batch

    def __iter__(self) -> Iterator[Tensor]:
        order = torch.randperm(self.images, generator=torch.Generator().manual_seed(self.seed + self.epoch))
        for batch in range(len(self)):
            first = batch * self.global_batch + self.rank * self.share
            yield order[first : first + self.share]


@dataclass(frozen=True)
class Schedule:
    """The learning rate of every step: a linear warm-up from ``base`` to ``base * growth``, then half a cosine down to 0.

    A scaled learning rate must avoid large steps at the start, where the loss is steepest; see Goyal et al., "Accurate, Large
    Minibatch SGD" (2017), section 2.2.
    """

    base: float
    growth: int
    steps_per_epoch: int
    warmup_epochs: float
    epochs: int

    def learning_rate(self, step: int) -> float:
        warmup_steps = self.warmup_epochs * self.steps_per_epoch
        if step < warmup_steps:
            return self.base * (1 + (self.growth - 1) * step / warmup_steps)
        fraction = (step - warmup_steps) / max(1.0, self.epochs * self.steps_per_epoch - warmup_steps)
        return self.base * self.growth * (1 + float(np.cos(np.pi * min(1.0, fraction)))) / 2


def build_model(image_shape: tuple[int, int] | torch.Size, classes: int) -> nn.Module:
    """Two convolutions and two dense layers, 0.1 to 0.5 million parameters. Input: (images, 1, height, width).

    Neither dropout nor batch normalisation: both would make a step depend on how the batch is split over the ranks.
    """
    height, width = image_shape
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * (height // 4) * (width // 4), 128),
        nn.ReLU(),
        nn.Linear(128, classes),
    )


@torch.no_grad()
def evaluate(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """The mean loss and the fraction of correct answers on the test set. Each rank evaluates its own part."""
    model.eval()
    loss = correct = 0.0
    mine = slice(hvd.rank(), None, hvd.size())
    for some_images, some_labels in zip(images[mine].split(512), labels[mine].split(512), strict=True):
        scores = model(some_images)
        loss += F.cross_entropy(scores, some_labels, reduction="sum").item()
        correct += (scores.argmax(dim=1) == some_labels).sum().item()
    # Sums, not means: the parts differ in length by one if the test set cannot be divided evenly.
    totals = hvd.allreduce(torch.tensor([loss, correct], dtype=torch.float64), op=hvd.Sum, name="test_totals")
    return totals[0].item() / len(images), totals[1].item() / len(images)


def load_data(source: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, test images and labels; images as float32 (images, 1, height, width), standardised."""
    if source == "mnist" and hvd.local_rank() != 0:
        hvd.barrier()  # until this host's rank 0 has downloaded
    images, labels, training = read_data(source)
    if source == "mnist" and hvd.local_rank() == 0:
        hvd.barrier()
    x = torch.from_numpy(np.ascontiguousarray(images, dtype=np.float32)).unsqueeze(1)
    y = torch.from_numpy(np.ascontiguousarray(labels, dtype=np.int64))
    x = (x - x[:training].mean()) / x[:training].std()
    return x[:training], y[:training], x[training:], y[training:]


def read_data(source: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], int]:
    """Images (n, height, width), labels (n,), and the number of them, from the start, for training."""
    if source == "digits":
        from sklearn.datasets import load_digits

        digits = load_digits()
        return digits.images, digits.target, len(digits.target) * 4 // 5
    if source == "mnist":
        from sklearn.datasets import fetch_openml

        try:
            mnist = fetch_openml("mnist_784", version=1, as_frame=False, parser="liac-arff")
        except OSError as error:
            sys.exit(
                f"MNIST could not be downloaded ({error}). Without a network, leave out --data to train on the digits "
                "that come with scikit-learn, or give the path of an .npz file."
            )
        return mnist.data.reshape(-1, 28, 28), mnist.target.astype(np.int64), 60_000
    try:
        with np.load(source) as file:
            images, labels = file["x"], file["y"]
    except (OSError, KeyError, ValueError) as error:
        sys.exit(f"--data {source}: {error}. Give 'digits', 'mnist', or an .npz file with arrays 'x' and 'y'.")
    return images, labels, len(labels) * 4 // 5


def load_checkpoint(directory: Path | None, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Fill model and optimizer from the newest checkpoint; return its number of epochs, 0 if there is none."""
    newest = max(directory.glob("epoch-*.pt"), default=None) if directory else None
    if newest is None:
        return 0
    checkpoint = torch.load(newest, map_location="cpu", weights_only=True)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    return int(checkpoint["epoch"])


def save_checkpoint(directory: Path, epoch: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write one epoch's state. A file with its final name is always complete, even if the job is killed while it writes."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"epoch-{epoch:04}.pt"
    partial = path.with_suffix(".partial")
    torch.save({"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, partial)
    partial.replace(path)


def say(text: str) -> None:
    """Print on rank 0 only."""
    if hvd.rank() == 0:
        print(text, flush=True)


@contextmanager
def progress_bar(label: str, total: int) -> Iterator[Callable[[], None]]:
    """A moving bar on rank 0's terminal; nothing on other ranks, or if the output goes to a file or a launcher."""
    shown = hvd.rank() == 0 and sys.stdout.isatty()
    if not shown or importlib.util.find_spec("rich") is None:  # it comes with the extra "examples"
        yield lambda: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True) as progress:
        task = progress.add_task(label, total=total)
        yield lambda: progress.advance(task)


def share_cores() -> None:
    """Let the ranks of this host share its cores, unless the user or the launcher has decided already."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // hvd.local_size()))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Teach a small convolutional network to read handwritten digits.")
    parser.add_argument("--data", default="digits", help="'digits' (default), 'mnist', or an .npz file with x and y")
    parser.add_argument("--epochs", type=positive, default=5)
    parser.add_argument("--batch-size", type=positive, default=32, help="images per rank and step (default: 32)")
    parser.add_argument(
        "--fixed-global-batch",
        action="store_true",
        help="--batch-size counts the images of all ranks together, and the learning rate stays as it is",
    )
    parser.add_argument("--learning-rate", type=float, default=0.05, help="for one rank (default: 0.05)")
    parser.add_argument("--warmup-epochs", type=float, default=1.0, help="until the full learning rate (default: 1)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--checkpoint-dir", type=Path, help="write a checkpoint here each epoch; resume from the newest"
    )
    parser.add_argument("--steps", type=positive, help="stop after this many steps")
    parser.add_argument(
        "--losses", type=Path, metavar="PATH.json", help="write the loss of every step, averaged over ranks"
    )
    return parser.parse_args()


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


if __name__ == "__main__":
    main()
