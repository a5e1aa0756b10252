"""Four hosts on slow links against one: the time to a validation loss, for Horovod and for PyTorch's own ways. Needs root.

    python benchmarks/slow_links.py --mnist FILE.npz [--tasks digits characters] [--links 100mbit 1gbit] [--share 0.4]
        [--seeds 3] [--counted PATH] [--confirm CONTENDER] [--quick] [--json PATH]

Hosts are network namespaces on this machine, and each has the same fixed part of a core (``--share``), the single one too. A
host with a part of a core stands for one with a whole core, so rates are multiplied by the part, latencies and measured times
divided by it: the table is of hosts with a core each.

1. *Steps.* Each contender trains without limits, once for each seed, until the validation loss of the average of the hosts'
   models is at most the target, which is fixed in ``slow_links_tasks.py``. This takes most of the time, and other work on the
   machine does not change it: ``--links`` without a name makes a record of the steps alone, for ``--counted``.
2. *Seconds a step.* It makes some steps on the limited link, with its part of a core.
3. *Projection.* The product of both. ``--confirm`` trains one contender to the target on the link. Its time should be within
   a tenth of the product.

Where the kernel has no ``netem``, a switch of this benchmark delays the packets; where it has no quotas, hosts share the cores,
and ``share`` in the record is what each process got. Both are said. torchft's DiLoCo is compared if torchft is installed.
``--quick`` only shows that everything runs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import machine
from slow_links_contenders import CONTENDERS, EVERY, ONE, installed
from slow_links_hosts import DEVICE, LinkedHosts, address_of
from slow_links_tasks import TASKS

HOSTS = 4
LINKS = {"100mbit": (100e6, 0.020), "1gbit": (1e9, 0.0)}
"""Of a host with a whole core: bits a second, and seconds of a round trip."""
LIMIT_SECONDS = 3600
MOST_STEPS = 20_000


@dataclass
class Result:
    """One contender on one link. Times are those of hosts with a whole core.

    Attributes:
        steps: to the target, by seed; 0 where it was not reached.
        step_seconds: one step on the link.
        share: the part of a core that a host got in the timed steps.
        projected: seconds to the target; 0 where no seed reached it.
        confirmed: seconds of a whole training on the link; 0 where none was made.
    """

    task: str
    link: str
    contender: str
    steps: list[int]
    step_seconds: float
    share: float
    projected: float
    confirmed: float = 0.0


class Bench:
    """The hosts, and the jobs on them.

    Args:
        options: of the command line.
    """

    def __init__(self, options: argparse.Namespace, hosts: LinkedHosts) -> None:
        self._options, self._hosts = options, hosts
        self._port = 29_500

    def job(self, contender: str, task: str, limited: bool, *words: str) -> list[dict[str, Any]]:
        """Run one job. What each host printed.

        Raises:
            SystemExit: a host failed. The text is its errors.
        """
        self._port += 1
        size = 1 if contender == ONE else HOSTS
        count = HOSTS if limited else size  # of one host there are four side by side: all disturb each other alike
        command = [sys.executable, str(Path(__file__).with_name("slow_links_worker.py"))]
        command += ["--contender", contender, "--task", task, "--mnist", str(self._options.mnist), *words]
        processes = []
        for host in range(count):
            env = {
                **os.environ,
                "RANK": str(host % size),
                "WORLD_SIZE": str(size),
                "MASTER_ADDR": address_of(host - host % size),
                "MASTER_PORT": str(self._port),
                "OWN_ADDR": address_of(host),
                "GLOO_SOCKET_IFNAME": DEVICE,
                "OMP_NUM_THREADS": "1",
            }
            processes.append(self._hosts.run(host, command, env, limited))
        found = []
        try:
            for host, process in enumerate(processes):
                out, errors = process.communicate(timeout=LIMIT_SECONDS)
                if process.returncode:
                    raise SystemExit(f"{contender}, host {host}: {errors[-3000:]}")
                found.append(json.loads(out.splitlines()[-1]))
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.communicate()
        return found

    def steps(self, contender: str, task: str, seeds: int, target: float) -> list[int]:
        """The steps to the target, by seed, without limits."""
        self._hosts.shape(0, 0)
        made = []
        for seed in range(1, seeds + 1):
            words = ["--seed", str(seed), "--target", str(target), "--steps", str(self._options.most_steps)]
            found = self.job(contender, task, False, *words, "--look", str(self._options.look))[0]
            made.append(found["steps"] if found["losses"] and found["losses"][-1] <= target else 0)
        return made

    def timed(self, contender: str, task: str, link: str, steps: int) -> tuple[float, float]:
        """Seconds a step on a link, as measured, and the part of a core that a host used."""
        self._shape(link)
        every = CONTENDERS[contender]().every
        warmup, steps = (every * -(-each // every) for each in (self._options.warmup, steps))  # whole rounds
        words = ["--seed", "1", "--steps", str(steps), "--warmup", str(warmup)]
        found = self.job(contender, task, True, *words)
        slowest = max(found, key=lambda each: each["seconds"])
        return slowest["seconds"] / steps, statistics.mean(each["processor"] / each["seconds"] for each in found)

    def trained(self, contender: str, task: str, link: str, target: float) -> float:
        """Seconds of a training to the target on a link, as measured."""
        self._shape(link)
        words = ["--seed", "1", "--target", str(target), "--steps", str(self._options.most_steps)]
        found = self.job(contender, task, True, *words, "--look", str(self._options.look))
        return max(float(each["seconds"]) for each in found)

    def _shape(self, link: str) -> None:
        bits, latency = LINKS[link]
        self._hosts.shape(bits * self._options.share, latency / self._options.share)


def measure(bench: Bench, options: argparse.Namespace, task: str) -> list[Result]:
    """All contenders on all links."""
    target = options.target if options.target is not None else TASKS[task](options.mnist).target
    results = []
    for contender in options.contenders:
        steps = options.counted.get(f"{task}, {contender}") or bench.steps(contender, task, options.seeds, target)
        options.counted[f"{task}, {contender}"] = steps
        print(f"{task}, {contender}: {steps} steps", flush=True)
        reached = [each for each in steps if each]
        links = options.links
        for link in links:
            seconds, part = bench.timed(contender, task, link, options.steps)
            whole = seconds * options.share
            projected = whole * statistics.mean(reached) if reached else 0.0
            result = Result(task, link, contender, steps, whole, part, projected)
            if contender == options.confirm:
                result.confirmed = bench.trained(contender, task, link, target) * options.share
            results.append(result)
            print_row(result, next((each for each in results if (each.link, each.contender) == (link, ONE)), None))
    return results


def print_row(result: Result, one: Result | None) -> None:
    times = (
        f"{one.projected / result.projected:6.2f}"
        if one is not None and one.projected and result.projected
        else "     -"
    )
    confirmed = f"{result.confirmed:10.1f}" if result.confirmed else "         -"
    print(
        f"{result.task:>10} {result.link:>8} {result.contender:>22} {'/'.join(map(str, result.steps)):>18} "
        f"{result.step_seconds * 1e3:9.1f} {result.share:6.2f} {result.projected:9.1f} {times} {confirmed}",
        flush=True,
    )


def main() -> None:
    options = parse_arguments()
    if os.getuid():
        raise SystemExit("needs root, for network namespaces")
    description = machine.describe(("torch",))
    print(machine.in_words(description), flush=True)
    hosts = LinkedHosts(HOSTS)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # control groups outlive this process
    try:
        hosts.start(1 / options.share)
        how = hosts.share(options.share)
        for bits, latency in LINKS.values():
            hosts.shape(bits, latency)
        notes = [
            f"each host has {options.share:g} of a core ({how})" if how else "no quotas here: hosts share the cores",
            f"{hosts.delays} delays packets",
        ]
        print("; ".join(notes), flush=True)
        print(
            f"{'task':>10} {'link':>8} {'contender':>22} {'steps by seed':>18} {'ms a step':>9} {'share':>6} {'projected':>9} "
            f"{'times':>6} {'confirmed':>10}"
        )
        bench = Bench(options, hosts)
        results = [each for task in options.tasks for each in measure(bench, options, task)]
    finally:
        hosts.close()
    if options.json:
        record = {
            "machine": description,
            "hosts": HOSTS,
            "one": ONE,
            "every": EVERY,
            "share": options.share,
            "quota": how,
            "delays": hosts.delays,
            "quick": options.quick,
            "counted": options.counted,
            "results": [asdict(each) for each in results],
        }
        options.json.write_text(json.dumps(record, indent=1))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mnist", type=Path, required=True, help="an .npz file with x, images, and y, digits")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--links", nargs="*", default=list(LINKS), choices=list(LINKS))
    parser.add_argument("--contenders", nargs="+", default=installed(), choices=list(CONTENDERS), metavar="NAME")
    parser.add_argument("--share", type=float, default=0.4, help="the part of a core of each host")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--counted", type=Path, metavar="PATH", help="an earlier record, whose numbers of steps are taken"
    )
    parser.add_argument("--steps", type=int, default=30, help="that are timed; more for whole rounds of local steps")
    parser.add_argument("--warmup", type=int, default=12)
    parser.add_argument("--look", type=int, default=10, help="steps between two looks at the validation loss")
    parser.add_argument("--most-steps", type=int, default=MOST_STEPS)
    parser.add_argument("--target", type=float, help="another validation loss than that of the task")
    parser.add_argument("--confirm", choices=list(CONTENDERS), metavar="NAME", help="train this one on the link, too")
    parser.add_argument("--quick", action="store_true", help="few steps and one seed, which say nothing")
    parser.add_argument("--json", type=Path, metavar="PATH")
    options = parser.parse_args()
    options.counted = json.loads(options.counted.read_text())["counted"] if options.counted else {}
    if options.quick:
        options.seeds, options.steps, options.warmup, options.most_steps, options.look = 1, 10, 2, 20, 10
    return options


if __name__ == "__main__":
    main()
