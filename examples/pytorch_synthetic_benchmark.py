"""Measure the training speed of a job in images per second. The images are random, so no data are read.

    horovodrun -np 2 python examples/pytorch_synthetic_benchmark.py --model small        # seconds on a CPU
    horovodrun -np 2 python examples/pytorch_synthetic_benchmark.py --batch-size 8       # ResNet-50: minutes on a CPU
    python examples/pytorch_synthetic_benchmark.py --model small                         # one rank, to compare

The scaling efficiency is the speed of all ranks together, divided by their number and by the speed of one rank alone.
Processes on one machine share its cores and its memory. Ranks without cores of their own slow each other down even without
communication. ``benchmarks/training.py`` measures the two effects separately.

Needs the extra ``torch``. With ``--model small`` it takes less than a minute on two cores, with ResNet-50 some minutes.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import horovod.torch as hvd


def main() -> None:
    options = parse_arguments()
    hvd.init()
    device = torch.device("cpu")
    if torch.cuda.is_available() and not options.no_cuda:
        device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    torch.manual_seed(hvd.rank())  # every rank has other random images

    model = (resnet50() if options.model == "resnet50" else small()).to(device)
    # An average over more ranks allows a higher learning rate. Adasum needs that of one rank.
    longer = 1 if options.use_adasum else hvd.size()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.001 * longer, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if options.fp16_allreduce else hvd.Compression.none,
        op=hvd.Adasum if options.use_adasum else hvd.Average,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    images = torch.randn(options.batch_size, 3, options.image_size, options.image_size, device=device)
    labels = torch.randint(1000, (options.batch_size,), device=device)

    def train(batches: int) -> float:
        """Train on a number of batches. Returns the seconds that this takes on this rank."""
        started = time.perf_counter()
        for _ in range(batches):
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # wait until the kernels are done
        return time.perf_counter() - started

    parameters = sum(p.numel() for p in model.parameters())
    say(f"Model: {options.model}, {parameters:,} parameters; batch size {options.batch_size} per rank")
    say(f"{hvd.size()} rank(s) on {device.type}, {torch.get_num_threads()} CPU thread(s) each")
    train(options.num_warmup_batches)

    rates = []
    for iteration in range(1, options.num_iters + 1):
        mine = options.num_batches_per_iter * options.batch_size / train(options.num_batches_per_iter)
        # The rates differ little, because ranks wait for each other's gradients. Print their mean.
        rates.append(hvd.allreduce(torch.tensor(mine, dtype=torch.float64), name="rate").item())
        say(f"iteration {iteration}: {rates[-1]:.1f} img/sec per rank")

    mean, error = statistics.mean(rates), margin(rates)
    say(f"Img/sec per rank: {mean:.1f} +- {error:.1f}")
    say(f"Total img/sec on {hvd.size()} rank(s): {hvd.size() * mean:.1f} +- {hvd.size() * error:.1f}")


def margin(rates: list[float]) -> float:
    """Half the width of the 95 % confidence interval of the mean, by the normal approximation. Infinite for one rate."""
    return 1.96 * statistics.stdev(rates) / math.sqrt(len(rates)) if len(rates) > 1 else math.inf


def small() -> nn.Module:
    """A convolutional network that a CPU trains in milliseconds. Input: (images, 3, height, width); output: 1000 scores."""
    return nn.Sequential(
        nn.Conv2d(3, 16, kernel_size=7, stride=4, padding=3),
        nn.ReLU(),
        nn.Conv2d(16, 64, kernel_size=3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(1024, 1000),
    )


class Bottleneck(nn.Module):
    """Three convolutions with a residual connection. The middle one has a quarter of the output's channels."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.Conv2d(channels, width, kernel_size=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, kernel_size=3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, 4 * width, kernel_size=1, bias=False),
            nn.BatchNorm2d(4 * width),
        )
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, 4 * width, kernel_size=1, stride=stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.residual(x) + self.shortcut(x), inplace=True)


def resnet50() -> nn.Module:
    """ResNet-50: 25,557,032 parameters in 161 tensors. Input: (images, 3, height, width); output: 1000 scores.

    Source: He et al., "Deep Residual Learning for Image Recognition" (2015), table 1; the stride is in the 3x3 convolution, as
    is common today.
    """
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, kernel_size=7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
    ]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            layers.append(Bottleneck(channels, width, stride=2 if block == 0 and width > 64 else 1))
            channels = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


def say(text: str) -> None:
    """Print on rank 0."""
    if hvd.rank() == 0:
        print(text, flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=["resnet50", "small"], default="resnet50", help="default: resnet50")
    parser.add_argument("--batch-size", type=int, default=32, help="images per rank and step (default: 32)")
    parser.add_argument("--image-size", type=int, default=224, help="height and width of the images (default: 224)")
    parser.add_argument("--num-warmup-batches", type=int, default=10, help="batches not measured (default: 10)")
    parser.add_argument("--num-batches-per-iter", type=int, default=10, help="batches per measurement (default: 10)")
    parser.add_argument("--num-iters", type=int, default=10, help="measurements (default: 10)")
    parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients as float16")
    parser.add_argument("--use-adasum", action="store_true", help="combine the ranks' steps with Adasum")
    parser.add_argument("--no-cuda", action="store_true", help="train on the CPU even if there are GPUs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
