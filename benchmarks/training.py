"""How much of a training step is left when ranks work together: step times, scaling efficiency, and a peer beside it.

    python benchmarks/training.py                     # 2 ranks, three models, PyTorch
    python benchmarks/training.py --peer ddp --plot training.png
    python benchmarks/training.py --framework tensorflow --peer mwms
    python benchmarks/training.py --framework keras --peer mwms

The arrangements, each with one thread per rank and the same batch per rank
    alone         one process, the plain framework: no Horovod in it
    hvd, 1 rank   the same under ``horovodrun -np 1`` with Horovod: against the line above, what the wrapper costs
    side by side  as many plain processes as ranks, at once, that know nothing of each other: they share the machine's
                  caches, memory and power; against *alone*, what that costs
    hvd           the ranks train one model with Horovod
    ddp           PyTorch's DistributedDataParallel on Gloo (``--peer ddp``), without its broadcast of buffers
    ddp, views    the same with ``gradient_as_bucket_view=True``, by which gradients are not copied into buckets and back
    ddp, horovod  the same on Horovod's back end (``--peer on-loss``)
    ddp, on loss  the same with ``--on-loss continue``
    mwms          TensorFlow's MultiWorkerMirroredStrategy (``--peer mwms``)

All of them have the memory settings that horovodrun gives its ranks, by which the allocator keeps a step's memory for the next
one and PyTorch uses huge pages. The settings help every arrangement, so a comparison with and without them would show their
effect, not that of communication.

What is trained
    torch         a loop with ``horovod.torch``'s ``DistributedOptimizer``
    tensorflow    a ``tf.function`` with ``horovod.tensorflow``'s ``DistributedGradientTape`` around a model of Keras 3
    keras         ``fit`` of Keras 3 on TensorFlow, with ``horovod.keras``'s ``DistributedOptimizer``. The peer is ``fit`` of
                  Keras 2, for Keras 3's does not work under the strategy; *alone, keras 2* is what to hold it against

What is measured, and how
    All arrangements of a model stay in memory and take turns of about a second; those that wait, sleep. The order
    changes from round to round, and the first step of a turn is not counted. A turn's *step time* is the time its
    slowest rank takes for the counted steps, divided by their number; the table has the best and the median of the
    rounds. Ratios are those of the best rounds, since other work on the machine can only lengthen a step. *Efficiency* is
    alone / this: the share of one plain process's speed that is left to each rank. Keras's *mwms* is held against
    *alone, keras 2*. Where a process happens to get its memory can make it faster or slower by several percent for as long
    as it lives; with ``--restarts`` all are started anew, and the rounds are pooled.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

import machine
import training_report as report
from training_arrangements import ALONE, COMMON, FRAMEWORKS
from training_processes import started
from training_report import Result
from workloads import MODELS

from horovod.runner import worker_environment

TURN_SECONDS = 1.0


def main() -> None:
    options = parse_arguments()
    framework = FRAMEWORKS[options.framework]
    arrangements = [*COMMON, *framework.peers.get(options.peer, ())]
    description = machine.describe(framework.packages)
    results = []
    for model in options.models:
        print(f"{model}: starting {len(arrangements)} arrangements", flush=True)
        results.append(measure(model, arrangements, options))
    report.print_table(results, options.np, description)
    if options.json:
        record = {
            "machine": description,
            "framework": options.framework,
            "ranks": options.np,
            "memory": worker_environment.memory(os.environ),
            "models": [result.to_dict() for result in results],
        }
        options.json.write_text(json.dumps(record, indent=1))
    if options.plot:
        report.plot(results, options.np, description, options.plot)


def measure(model: str, arrangements: Sequence[str], options: argparse.Namespace) -> Result:
    """Let the arrangements take turns at one model: ``--rounds`` rounds with each of ``--restarts`` sets of processes."""
    seconds: dict[str, list[float]] = {arrangement: [] for arrangement in arrangements}
    for _ in range(options.restarts):
        with started(options.framework, model, arrangements, options.np) as teams:
            for team in teams.values():
                team.turn(1)  # the first step of all allocates memory, makes connections and graphs
            steps = min(20, math.ceil(TURN_SECONDS / teams[ALONE].turn(1)))
            for number in range(options.rounds):
                first = number % len(arrangements)
                for arrangement in [*arrangements[first:], *arrangements[:first]]:
                    seconds[arrangement].append(teams[arrangement].turn(steps))
    return Result(model, teams[ALONE].parameters, teams[ALONE].tensors, seconds)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    peers = sorted({peer for framework in FRAMEWORKS.values() for peer in framework.peers})
    parser.add_argument(
        "--framework", choices=list(FRAMEWORKS), default="torch", help="what to train with (default: torch)"
    )
    parser.add_argument("--np", type=int, default=2, metavar="RANKS")
    parser.add_argument("--models", type=models, default=list(MODELS), metavar="NAME,...")
    parser.add_argument("--peer", choices=peers, help="measure this in the same run")
    parser.add_argument("--restarts", type=int, default=2, help="sets of processes to measure with (default: 2)")
    parser.add_argument("--rounds", type=int, default=6, help="turns of every arrangement in each (default: 6)")
    parser.add_argument("--json", type=Path, metavar="PATH")
    parser.add_argument("--plot", type=Path, metavar="PATH.png")
    options = parser.parse_args()
    if min(options.np, options.restarts, options.rounds) < 1:
        parser.error("--np, --restarts and --rounds must be at least 1")
    framework = FRAMEWORKS[options.framework]
    if options.peer and options.peer not in framework.peers:
        of = [name for name, each in FRAMEWORKS.items() if options.peer in each.peers]
        parser.error(
            f"--peer {options.peer} goes with --framework {' or '.join(of)}; "
            f"beside --framework {options.framework} there is --peer {', '.join(framework.peers)}"
        )
    needed = [*framework.packages, *(framework.peer_packages if options.peer else ())]
    if missing := [package for package in needed if importlib.util.find_spec(package) is None]:
        parser.error(f"--framework {options.framework} needs {', '.join(missing)}, which this Python does not have")
    return options


def models(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(MODELS):
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(MODELS)}")
    return names


if __name__ == "__main__":
    main()
