"""The command line, the same for all scripts."""

from __future__ import annotations

import argparse
from pathlib import Path

import tensorflow as tf


def parse_options() -> argparse.Namespace:
    """The options. Without a GPU, the defaults are a network of 78,000 parameters and 8 epochs."""
    big = bool(tf.config.list_physical_devices("GPU"))
    parser = argparse.ArgumentParser(
        description="Teach a Wide ResNet to tell ten kinds of clothes apart.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--log-dir", type=Path, default=Path("logs"), help="folder for epochs.csv and checkpoints")
    parser.add_argument("--batch-size", type=positive, default=128, help="images per step and rank")
    parser.add_argument("--val-batch-size", type=positive, default=128, help="the same, in validation")
    parser.add_argument("--epochs", type=positive, default=40 if big else 8, help="train up to this epoch")
    parser.add_argument("--base-lr", type=float, default=0.05, help="learning rate of one rank")
    parser.add_argument("--warmup-epochs", type=natural, default=5, help="epochs until the learning rate is reached")
    parser.add_argument(
        "--drop-epochs", type=natural, nargs="+", default=[15, 25, 35], help="where it drops to a tenth"
    )
    parser.add_argument("--momentum", type=float, default=0.9, help="momentum of stochastic gradient descent")
    parser.add_argument("--wd", type=float, default=5e-4, help="weight decay: half of it times the squared weights")
    parser.add_argument("--use-checkpointing", action="store_true", help="save every epoch; go on from the newest")
    parser.add_argument("--data", type=Path, help="an .npz file with x and y instead of Fashion-MNIST")
    parser.add_argument("--images", type=positive, help="use so many images at most, a fifth of them to test")
    parser.add_argument("--depth", type=depth, default=16 if big else 10, help="layers of the network: 10, 16, 22, ...")
    parser.add_argument("--width", type=positive, default=10 if big else 1, help="times the channels of a plain ResNet")
    parser.add_argument("--target-accuracy", type=float, help="stop when validation has been this accurate (0 to 1)")
    parser.add_argument("--patience", type=natural, default=0, help="for as many further epochs in a row")
    return parser.parse_args()


def natural(text: str) -> int:
    return _at_least(0, text)


def positive(text: str) -> int:
    return _at_least(1, text)


def depth(text: str) -> int:
    layers = _at_least(10, text)
    if layers % 6 != 4:
        raise argparse.ArgumentTypeError(f"{layers} is not 6 n + 4, as in 10, 16, 22, 28")
    return layers


def _at_least(least: int, text: str) -> int:
    number = int(text)
    if number < least:
        raise argparse.ArgumentTypeError(f"{number} is less than {least}")
    return number
