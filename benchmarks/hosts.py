"""Allreduces between two hosts by each engine, over links of given speeds. Needs root, and the tests' virtual hosts:

    PYTHONPATH=$PWD/tests python benchmarks/hosts.py [--rates 1gbit none] [--ranks 2] [--networks 1] [--rounds 3] [--json PATH]

The hosts are namespaces on this machine, joined by virtual cables that a token bucket filter limits. Each job reduces a tensor
of 64 MB, and the 161 gradients of ResNet-50 (102 MB) submitted at once, in turn with one plain socket over each network, which
send and receive as much as the tensor in both directions at once. Best of rounds. *Gloo directly* is torch.distributed in the
job of ``gloo``.

``link`` is what hostA received during the allreduce of the tensor, in sizes of the tensor. ``share`` is its speed there divided
by that of the plain sockets.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import machine

from cluster.hosts import ADDRESSES, Hosts, obstacle
from launcher.harness import Launcher

PAIR = ("hostA", "hostB")
TCP, GLOO, DIRECTLY = "flat tcp", "flat gloo", "Gloo directly"
HIERARCHICAL = {
    "hierarchical over tcp": {"HOROVOD_CPU_OPERATIONS": "hierarchical"},
    "hierarchical over gloo": {"HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_HIERARCHICAL_ALLREDUCE": "1"},
}
ENGINES = {
    TCP: {"HOROVOD_CPU_OPERATIONS": "tcp"},
    GLOO: {"HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_HIERARCHICAL_ALLREDUCE": "0"},
    **HIERARCHICAL,
}
GOALS = {"1gbit": {TCP: 1.8, GLOO: 1.4}, "none": {TCP: 1.0, GLOO: 1.0}}
"""By rate: how many times as fast the hierarchical engine is to be as a flat one."""


@dataclass
class Result:
    """Seconds of the plain socket, of the tensor and of the gradients; and bytes that hostA received for the tensor."""

    rate: str
    networks: int
    ranks: int
    engine: str
    socket: float
    whole: float
    resnet: float
    received: int


def measure(hosts: Hosts, rate: str, networks: int, each: int, size: int, rounds: int, engine: str) -> list[Result]:
    """One job of ``each`` ranks on both hosts."""
    worker = Path(__file__).with_name("hosts_worker.py")
    ranks = ",".join(f"{name}:{each}" for name in PAIR)
    words = ["-np", str(2 * each), "-H", ranks, "python", str(worker), str(size), str(rounds), str(each)]
    first = ADDRESSES[PAIR[0]]
    environment = Launcher(hosts.folder).environment(
        HOROVOD_SSH_COMMAND=f"ssh -F {hosts.folder / 'ssh_config'}",
        RAW_ADDRESSES=",".join([first, first.replace("10.77.", "10.78.")][:networks]),
        OMP_NUM_THREADS="1",
        **ENGINES[engine],
    )
    words += ["directly"] * (engine == GLOO)
    command = hosts.on(PAIR[0], sys.executable, "-m", "horovod.runner.launch", *words, folder=hosts.folder)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise SystemExit(done.stderr)
    (line,) = [line for line in done.stdout.splitlines() if "{" in line]
    found: dict[str, list[tuple[float, int]]] = json.loads(line[line.index("{") :])
    raw = min(found["socket"])[0]
    results = []
    for name, suffix in ((engine, ""), (DIRECTLY, " directly")):
        if f"whole{suffix}" in found:
            whole, received = min(found[f"whole{suffix}"])
            resnet = min(found[f"resnet{suffix}"])[0]
            results.append(Result(rate, networks, each, name, raw, whole, resnet, received))
    return results


def comparison(results: Sequence[Result]) -> Iterator[str]:
    """How the hierarchical engine compares with the flat ones, of one rate and number of networks."""
    by_engine = {each.engine: each for each in results}
    for name in HIERARCHICAL:
        ours = by_engine.get(name)
        for other in (TCP, GLOO, DIRECTLY):
            flat = by_engine.get(other)
            if ours is not None and flat is not None:
                goal = GOALS.get(ours.rate, {}).get(other)
                factors = flat.whole / ours.whole, flat.resnet / ours.resnet
                outcome = "" if goal is None else f" (goal {goal:g}: {'reached' if min(factors) >= goal else 'missed'})"
                yield f"{name} beside {other}: tensor {factors[0]:.2f}, gradients {factors[1]:.2f} times as fast{outcome}"


def main() -> None:
    options = parse_arguments()
    reason = obstacle()
    if reason:
        raise SystemExit(reason)
    description = machine.describe(())
    print(machine.in_words(description), flush=True)
    size = options.megabytes << 20
    print(f"{options.megabytes} MB between two hosts; times in ms, the plain socket's speed in MB/s")
    print(
        f"{'rate':>8} {'networks':>8} {'ranks':>5} {'engine':>22} {'socket':>8} {'MB/s':>6} {'tensor':>8} {'link':>5} "
        f"{'share':>6} {'gradients':>9}"
    )
    everything: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="hvd-") as folder:
        hosts = Hosts(Path(folder))
        try:
            hosts.start()
            for networks in options.networks:
                hosts.second_network(*PAIR, up=networks == 2)
                for rate in options.rates:
                    hosts.shape("" if rate == "none" else rate)
                    for ranks in options.ranks:
                        results: list[Result] = []
                        for engine in options.engines:
                            if ranks > 1 or engine not in HIERARCHICAL:
                                found = measure(hosts, rate, networks, ranks, size, options.rounds, engine)
                                for each in found:
                                    print_row(each, size)
                                results += found
                        for line in comparison(results):
                            print(line, flush=True)
                        everything += results
        finally:
            hosts.close()
    if options.json:
        record = {"machine": description, "bytes": size, "results": [asdict(each) for each in everything]}
        options.json.write_text(json.dumps(record, indent=1))


def print_row(result: Result, size: int) -> None:
    link = result.received / size
    print(
        f"{result.rate:>8} {result.networks:>8} {result.ranks:>5} {result.engine:>22} {result.socket * 1e3:8.0f} "
        f"{size / result.socket / 1e6:6.0f} {result.whole * 1e3:8.0f} {link:5.2f} "
        f"{link * result.socket / result.whole:6.2f} {result.resnet * 1e3:9.0f}",
        flush=True,
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", default=["1gbit", "none"], help="of each cable, as tc writes it, or none")
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES), metavar="NAME")
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2], help="on each host")
    parser.add_argument("--networks", nargs="+", type=int, default=[1], help="between the hosts")
    parser.add_argument("--json", type=Path, metavar="PATH")
    return parser.parse_args()


if __name__ == "__main__":
    main()
