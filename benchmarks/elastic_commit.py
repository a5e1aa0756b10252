"""What a commit of an elastic state costs: steps of a model of 100 MB with a commit after each, in four ways.

    python benchmarks/elastic_commit.py
    horovodrun -np 2 python benchmarks/elastic_commit.py --optimizer adam

The ways take turns, step by step; what counts is the fastest step of each. Beside ``TorchState`` with either kind of rollback
stands the plain ``copy.deepcopy`` of both state dictionaries, and a step without a commit.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from machine import describe, in_words

import horovod.torch as hvd

WIDTH = 1445
"""Of twelve square layers: 25 million parameters, 100 MB."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--optimizer", choices=["sgd", "adam"], default="sgd", help="adam has twice the model as state")
    parser.add_argument("--batch-size", type=int, default=64, help="rows a rank and step: how long a step computes")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, metavar="PATH")
    options = parser.parse_args()
    hvd.init()
    machine = describe() if hvd.rank() == 0 else {}
    hvd.barrier()  # the others sleep while rank 0 looks how busy the machine is
    device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(12)]).to(device)
    plain = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[options.optimizer](model.parameters(), lr=1e-6)
    optimizer = hvd.DistributedOptimizer(plain)
    x = torch.randn(options.batch_size, WIDTH, device=device)
    kept = []

    def copied() -> None:
        kept[:] = [copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())]

    ways: dict[str, Callable[[], None]] = {
        "no commit": lambda: None,
        "copy.deepcopy": copied,
        "commit": hvd.elastic.TorchState(model, optimizer, batch=0).commit,
        'commit, rollback="step"': hvd.elastic.TorchState(model, optimizer, rollback="step", batch=0).commit,
    }
    best = dict.fromkeys(ways, float("inf"))
    alone = dict.fromkeys(ways, float("inf"))
    for _ in range(options.rounds):
        for name, commit in ways.items():
            finish(device)
            started = time.perf_counter()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            committed = time.perf_counter()
            commit()
            alone[name] = min(alone[name], time.perf_counter() - committed)
            finish(device)
            best[name] = min(best[name], time.perf_counter() - started)
    if hvd.rank() == 0:
        print(in_words(machine))
        print(
            f"{hvd.size()} ranks, {device.type}, {options.optimizer}; a step without a commit: {best['no commit'] * 1e3:.1f} ms"
        )
        for name in list(ways)[1:]:
            share = alone[name] / best["no commit"]
            print(
                f"{name:26} {alone[name] * 1e3:8.2f} ms, {share:6.1%} of a step; step with it {best[name] * 1e3:.1f} ms"
            )
        if options.json:
            record = {"machine": machine, "ranks": hvd.size(), "step_seconds": best, "commit_seconds": alone}
            options.json.write_text(json.dumps(record, indent=1))


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
