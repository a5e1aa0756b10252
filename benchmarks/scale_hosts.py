"""What many hosts cost one rank: connecting in ``init()``, and allreduces; beside another commit, in turns.

    python benchmarks/scale_hosts.py --beside ../earlier --json benchmarks/results/scale_hosts.json

``--beside`` names a working tree of another commit (``git worktree add ../earlier COMMIT``). Every connection is a real one,
with real handshakes, whose answers come late by ``--delays``: on loopback nothing else takes time.

What is measured
    allreduce     processor time of one rank's thread, and bytes that it sends. It is real; its peers send back what they get
    rendezvous    until all ranks know all others: a real server, and a real client on a thread for each rank
    all hosts     until so many real ranks, one on a host, are connected with one another. On one machine the work grows with
                  the square of their number; on hosts of their own each has its share
    one of        until one real rank is connected with all others, which are simulated and accept at any time: the slowest of
                  the first, the middle and the last. In ``init()`` this follows the rendezvous
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import machine

ROOT = Path(__file__).resolve().parents[1]
WORKER = Path(__file__).with_name("scale_hosts_worker.py")
HEAD = "| what | ranks | bytes or delay | this | beside |\n| --- | ---: | ---: | ---: | ---: |"
SMALL, LARGE = 4 << 10, 64 << 20


def main() -> None:
    options = parse_arguments()
    trees = {"this": ROOT, **({"beside": options.beside} if options.beside else {})}
    record: dict[str, Any] = {"machine": machine.describe(()), "measured": []}
    print(machine.in_words(record["machine"]))
    print(HEAD)
    for what, hosts, unit, tasks in rows(options):
        if options.only and what not in options.only:
            continue
        found = {name: slowest(tree, tasks, options.limit) for name, tree in trees.items()}
        record["measured"].append({"what": what, "ranks": hosts, "of": unit, **found})
        cells = [what, f"{hosts:,}", unit, *(in_words(each) for each in found.values())]
        print(f"| {' | '.join(cells)} |", flush=True)
    if options.json:
        Path(options.json).write_text(json.dumps(record, indent=1) + "\n")


def rows(options: argparse.Namespace) -> Iterator[tuple[str, int, str, list[list[Any]]]]:
    """What to measure: name, ranks, bytes or delay, and the tasks of the worker, of which the slowest counts."""
    for nbytes, calls in ((SMALL, 20), (LARGE, 1)):
        for hosts in options.allreduce:
            yield "allreduce", hosts, f"{nbytes:,} bytes", [["allreduce", hosts, nbytes, calls]]
    for delay in options.delays:
        unit = f"{delay:g} ms"
        for ranks in options.ranks:
            yield "rendezvous", ranks, unit, [["rendezvous", ranks, delay / 1000]]
        for hosts in options.all_hosts:
            yield "all hosts", hosts, unit, [["mesh", hosts, delay / 1000]]
        for hosts in options.hosts:
            places = (0, hosts // 2, hosts - 1)
            yield "one of", hosts, unit, [["one of", hosts, place, delay / 1000] for place in places]


def slowest(tree: Path, tasks: list[list[Any]], limit: float) -> dict[str, float]:
    """The figures of the slowest task with the code of ``tree``; only the limit if one takes longer than that."""
    found = []
    for task in tasks:
        environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
        command = [sys.executable, str(WORKER), json.dumps(task)]
        try:
            done = subprocess.run(command, env=environment, timeout=limit, capture_output=True, text=True)
        except subprocess.TimeoutExpired:
            return {"more_than_seconds": limit}
        if done.returncode:
            sys.exit(f"{task} with the code of {tree}:\n{done.stderr}")
        found.append(json.loads(done.stdout.splitlines()[-1]))
    return max(found, key=lambda each: max(each.values()))


def in_words(found: dict[str, float]) -> str:
    if "more_than_seconds" in found:
        return f"not in {found['more_than_seconds']:g} s"
    if "seconds" in found:
        return f"{found['seconds']:.2f} s"
    return f"{found['milliseconds']:.2f} ms, {found['bytes']:,.0f} bytes sent"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=Path, help="a working tree of another commit, to measure in the same run")
    parser.add_argument("--delays", type=float, nargs="+", default=[10, 100], help="milliseconds of an answer")
    parser.add_argument("--allreduce", type=int, nargs="+", default=[64, 256, 1024], help="hosts; powers of two")
    parser.add_argument("--ranks", type=int, nargs="+", default=[256, 512, 1024, 1250], help="of a rendezvous")
    parser.add_argument("--all-hosts", type=int, nargs="+", default=[16, 32, 64], help="all of which are real")
    parser.add_argument("--hosts", type=int, nargs="+", default=[128, 312, 625, 1250], help="of which one is real")
    parser.add_argument("--limit", type=float, default=120, help="seconds, after which a measurement is given up")
    parser.add_argument("--only", nargs="+", help="the rows to measure, as the table names them")
    parser.add_argument("--json", help="write the figures to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
