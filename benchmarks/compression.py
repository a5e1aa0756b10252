"""Compressed allreduces between two hosts, over links of given rates: times, errors and bias. Needs root, and the virtual hosts
of the tests:

    PYTHONPATH=$PWD/tests python benchmarks/compression.py [--rates 1gbit 10gbit none] [--ranks 1 2] [--rounds 5] [--json PATH]

The hosts are namespaces on this machine, joined by virtual cables that a token bucket filter limits. Each job reduces a tensor
of 64 MB in float32 as it is, and compressed to 8 and 4 bits without and with error feedback, in turns; best of rounds. The
hosts share the cores of this machine, so at high rates the computing time of both counts.

``factor`` is the time divided by that of float32 as it is; ``bits`` says whether all ranks got the same ones. The errors are
those of a tensor of 4 million elements, normal numbers whose magnitude differs from row to row, against sums in float64:

    error       mean error of one step, in parts of the mean magnitude of the sum
    kept        mean error of the sum of 50 steps with the same gradients, in parts of one step's sum, without error feedback
    fed back    the same with error feedback
    bias        mean of the signed error of one step, in the same parts
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import machine

from cluster.hosts import Hosts, obstacle
from launcher.harness import Launcher

PAIR = ("hostA", "hostB")
GOAL = 0.32
"""The most time that int8 may take on a link of 1 Gbit/s, in parts of float32's."""


def measure(hosts: Hosts, each: int, size: int, rounds: int) -> dict[str, Any]:
    """One job of ``each`` ranks on both hosts."""
    worker = Path(__file__).with_name("compression_worker.py")
    words = ["-np", str(2 * each), "-H", ",".join(f"{name}:{each}" for name in PAIR), "python", str(worker)]
    environment = Launcher(hosts.folder).environment(
        HOROVOD_SSH_COMMAND=f"ssh -F {hosts.folder / 'ssh_config'}", OMP_NUM_THREADS="1"
    )
    command = hosts.on(
        PAIR[0], sys.executable, "-m", "horovod.runner.launch", *words, str(size), str(rounds), folder=hosts.folder
    )
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    if done.returncode:
        raise SystemExit(done.stderr)
    (line,) = [line for line in done.stdout.splitlines() if "{" in line]
    found: dict[str, Any] = json.loads(line[line.index("{") :])
    return found


def main() -> None:
    options = parse_arguments()
    reason = obstacle()
    if reason:
        raise SystemExit(reason)
    description = machine.describe(())
    print(machine.in_words(description), flush=True)
    size = options.megabytes << 20
    results: list[dict[str, Any]] = []
    errors: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="hvd-") as folder:
        hosts = Hosts(Path(folder))
        try:
            hosts.start()
            print(f"{'rate':>8} {'ranks':>5} {'sent as':>16} {'ms':>8} {'factor':>6} {'bits':>6}")
            for rate in options.rates:
                hosts.shape("" if rate == "none" else rate)
                for ranks in options.ranks:
                    found = measure(hosts, ranks, size, options.rounds)
                    errors = found["errors"]
                    plain = min(found["seconds"]["float32"])
                    for name, seconds in found["seconds"].items():
                        factor = min(seconds) / plain
                        goal = ""
                        if (rate, name) == ("1gbit", "int8"):
                            goal = f" (goal {GOAL:g}: {'reached' if factor <= GOAL else 'missed'})"
                        same = "same" if found["same"][name] else "DIFFER"
                        print(
                            f"{rate:>8} {ranks:>5} {name:>16} {min(seconds) * 1e3:8.0f} {factor:6.2f} {same:>6}{goal}",
                            flush=True,
                        )
                        results.append(
                            {
                                "rate": rate,
                                "ranks": ranks,
                                "sent_as": name,
                                "seconds": min(seconds),
                                "factor": factor,
                                "same": found["same"][name],
                            }
                        )
        finally:
            hosts.close()
    print(f"{'sent as':>16} {'error':>9} {'kept':>9} {'fed back':>9} {'bias':>9}")
    for name, row in errors.items():
        print(f"{name:>16} {row['error']:9.1e} {row['kept']:9.1e} {row['fed_back']:9.1e} {row['bias']:9.1e}")
    if options.json:
        record = {"machine": description, "bytes": size, "results": results, "errors": errors}
        options.json.write_text(json.dumps(record, indent=1))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", default=["1gbit", "10gbit", "none"], help="of the links; none: no limit")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2], help="on each host")
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write a record for benchmarks/publish.py")
    return parser.parse_args()


if __name__ == "__main__":
    main()
