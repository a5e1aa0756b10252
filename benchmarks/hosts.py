"""Allreduces between two hosts beside one plain socket, over links of given speeds. Needs root, and the tests' virtual hosts:

    PYTHONPATH=tests python benchmarks/hosts.py [--rates 200mbit 1gbit none] [--ranks 1 2] [--networks 1 2] [--rounds 3]

The hosts are namespaces on this machine, joined by virtual cables that a token bucket filter limits. The plain socket sends and
receives as much as is reduced, in both directions at once, in turn with the allreduces and in the same job. Best of rounds.

``link`` is what the allreduce carries between the hosts in each direction, in sizes of the tensor. ``share`` is its speed there
divided by that of the plain socket, which uses one network.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import machine

from cluster.hosts import ADDRESSES, Hosts, obstacle
from launcher.harness import Launcher

PAIR = ("hostA", "hostB")


def measure(hosts: Hosts, each: int, size: int, rounds: int) -> tuple[float, float]:
    """Seconds of the plain socket, and of an allreduce between two hosts with ``each`` ranks."""
    worker = Path(__file__).with_name("hosts_worker.py")
    ranks = ",".join(f"{name}:{each}" for name in PAIR)
    words = ["-np", str(2 * each), "-H", ranks, "python", str(worker), str(size), str(rounds), str(each)]
    environment = Launcher(hosts.folder).environment(
        HOROVOD_SSH_COMMAND=f"ssh -F {hosts.folder / 'ssh_config'}", RAW_ADDRESS=ADDRESSES[PAIR[0]]
    )
    command = hosts.on(PAIR[0], sys.executable, "-m", "horovod.runner.launch", *words, folder=hosts.folder)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise SystemExit(done.stderr)
    found = json.loads(done.stdout.partition(":")[2])
    return min(found["raw"]), min(found["ours"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rates", nargs="+", default=["200mbit", "1gbit", "none"], help="of each cable, as tc writes it"
    )
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2], help="on each host")
    parser.add_argument("--networks", nargs="+", type=int, default=[1, 2], help="between the hosts")
    options = parser.parse_args()
    reason = obstacle()
    if reason:
        raise SystemExit(reason)
    print(machine.in_words(machine.describe(())), flush=True)
    size = options.megabytes << 20
    print(f"{options.megabytes} MB between two hosts; times in ms, the plain socket's speed in MB/s")
    print(
        f"{'rate':>8} {'networks':>8} {'ranks':>5} {'socket':>8} {'MB/s':>6} {'allreduce':>9} {'link':>5} {'share':>6}"
    )
    with tempfile.TemporaryDirectory(prefix="hvd-") as folder:
        hosts = Hosts(Path(folder))
        try:
            hosts.start()
            for networks in options.networks:
                hosts.second_network(*PAIR, up=networks == 2)
                for rate in options.rates:
                    hosts.shape("" if rate == "none" else rate)
                    for each in options.ranks:
                        raw, ours = measure(hosts, each, size, options.rounds)
                        print(
                            f"{rate:>8} {networks:>8} {each:>5} {raw * 1e3:8.0f} {size / raw / 1e6:6.0f} {ours * 1e3:9.0f} "
                            f"{each:>5} {each * raw / ours:6.2f}",
                            flush=True,
                        )
        finally:
            hosts.close()


if __name__ == "__main__":
    main()
