"""Runs PyTorch's own tests of process groups on the back end ``horovod`` beside Gloo: by hand, some minutes.

    python tests/pytorch_suite.py                 # all tests that need no GPU
    python tests/pytorch_suite.py -k all_reduce   # those whose names match
    python tests/pytorch_suite.py --missing       # those that the list does not have yet
    python tests/pytorch_suite.py --source DIR    # with the tests of DIR/test/distributed/test_c10d_gloo.py, too

The tests are those of ``torch/testing/_internal/distributed/distributed_test.py``, which PyTorch's wheel has, and those of
``test_c10d_gloo.py``, which is in PyTorch's repository alone: DIR is a copy of it at the version's tag. They need the package
``expecttest``. Those of the first file run on four ranks, and those that need more on eight.

``HOROVOD_TORCH_BACKEND=horovod`` puts the back end in the place of Gloo; where a test makes a ``ProcessGroupGloo`` itself, it
gets the default group. Tests of all_to_all run on Gloo, too: they are skipped there because an earlier Gloo had no such
operation. The exit status is 1 if a test passes on Gloo and fails on ``horovod``.

What becomes of each test is written to ``pytorch_suite.txt`` beside this file. Lines of tests that do not run stay.
"""

from __future__ import annotations

import argparse
import os
import re
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

SIZES = (4, 8)
TOO_FEW = "Skipped due to small world size."
LIST = Path(__file__).with_suffix(".txt")
GLOO, OWN = "gloo", "horovod"
SOURCE = "PYTORCH_SOURCE"
_CASE = """
import inspect, os, re, sys, unittest
from datetime import timedelta
import torch
import torch.distributed as dist
from torch.testing._internal import common_distributed, common_utils

LIMIT = timedelta(seconds=50)  # of the groups in test_c10d_gloo.py
skip = common_utils.skip_but_pass_in_sandcastle_if
common_utils.skip_but_pass_in_sandcastle_if = lambda condition, why: skip(condition and "Only MPI" not in why, why)
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

class TestSuite(TestDistBackend, DistributedTest._DistTestBase):
    def setUp(self):
        super().setUp()
        self._spawn_processes()

def fork(self):
    self._start_processes(torch.multiprocessing.get_context("fork").Process)  # which imports nothing anew

def default_group(self, store, rank, world_size, options):
    dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size, timeout=LIMIT)
    return dist.group.WORLD

common_distributed.MultiProcessTestCase._spawn_processes = fork
suites = {"": TestSuite}
if "PYTORCH_SOURCE" in os.environ:
    sys.path.insert(0, os.environ["PYTORCH_SOURCE"] + "/test/distributed")
    import test_c10d_gloo
    for name, each in vars(test_c10d_gloo).items():
        if isinstance(each, type) and issubclass(each, unittest.TestCase) and each.__module__ == "test_c10d_gloo":
            suites[name + "."] = each
    suites.pop("ProcessGroupGlooLazyInitTest.", None)  # the same tests with another setting of Gloo
    if "HOROVOD_TORCH_BACKEND" in os.environ:
        from horovod.torch.distributed.process_group import HorovodProcessGroup
        test_c10d_gloo.ProcessGroupGlooTest._create_process_group_gloo = default_group
        HorovodProcessGroup.create_device = lambda self, interface: None  # a device of Gloo, which the test does not use
"""
_NAMES = """
for suite, case in suites.items():
    for name in dir(case):
        if name.startswith("test_"):
            decorated = inspect.getsource(inspect.unwrap(getattr(case, name))).partition("def test_")[0]
            if not re.search(r"_gpu|requires_nccl|BACKEND != .nccl|cuda_only", decorated):
                print(suite + name)
"""
_RUN = r"""
for name in sys.argv[1:]:
    child = os.fork()  # some tests make a group in the process that runs them
    if child:
        os.waitpid(child, 0)
        continue
    suite, _, test = name.rpartition(".")
    result = unittest.TestResult()
    suites[suite and suite + "."](test).run(result)
    failed = result.failures + result.errors
    found = re.findall(r"^(?:E +)?(\w+(?:Error|Exception).*)$", failed[0][1], re.MULTILINE) if failed else []
    words = (found or ["failed"])[-1][:160] if failed else "passes"
    if not failed and result.skipped:
        words = f"skipped ({result.skipped[0][1]})"
    print(f"{name}: {words}", flush=True)
    os._exit(0)
"""


def environment(backend: str, size: int = SIZES[0]) -> dict[str, str]:
    own = {"HOROVOD_TORCH_BACKEND": OWN} if backend == OWN else {}
    common = {"BACKEND": GLOO, "WORLD_SIZE": str(size), "INIT_METHOD": "file://", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **common, **own}


def names() -> list[str]:
    """The names of the tests whose decorators ask for no GPU; before those of ``test_c10d_gloo.py`` their class."""
    command = [sys.executable, "-c", _CASE + _NAMES]
    env = {**environment(GLOO), "TEMP_DIR": tempfile.gettempdir()}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.split()


def outcomes(wanted: Sequence[str], backend: str, seconds: float, size: int = SIZES[0]) -> Iterator[tuple[str, str]]:
    """What becomes of each test: ``passes``, ``skipped`` with the reason, ``too slow``, or the last line of its error."""
    left = list(wanted)
    while left:
        with tempfile.TemporaryDirectory() as folder:
            env = {**environment(backend, size), "TEMP_DIR": folder}
            process = subprocess.Popen(
                [sys.executable, "-c", _CASE + _RUN, *left],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            assert process.stdout is not None
            try:
                for line in lines_of(process.stdout, seconds):
                    name, _, text = line.partition(": ")
                    if name in left:  # else a test has printed it
                        left.remove(name)
                        yield name, text
            finally:
                try:
                    os.killpg(process.pid, 9)
                except ProcessLookupError:
                    pass
                process.stdout.close()
                process.wait()
        if left:
            yield left.pop(0), "too slow"


def lines_of(stream: IO[bytes], seconds: float) -> Iterator[str]:
    """The lines of a stream, until it ends or a line does not come in time."""
    begun = b""
    while select.select([stream], [], [], seconds)[0]:
        part = os.read(stream.fileno(), 1 << 16)
        if not part:
            return
        *lines, begun = (begun + part).split(b"\n")
        yield from (line.decode(errors="replace") for line in lines)


def listed() -> dict[str, str]:
    """By test, what the list says of it."""
    lines = LIST.read_text().splitlines() if LIST.exists() else []
    return dict(line.split(": ", 1) for line in lines)


def write(found: dict[str, str]) -> None:
    LIST.write_text("".join(f"{name}: {text}\n" for name, text in sorted(found.items())))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-k", default="", metavar="TEXT", help="only tests whose names match this regular expression")
    parser.add_argument("--seconds", type=float, default=120.0, help="the time limit of a test")
    parser.add_argument("--missing", action="store_true", help="only tests that the list does not have")
    parser.add_argument("--source", type=Path, metavar="DIR", help="a copy of PyTorch's repository")
    options = parser.parse_args()
    if options.source is not None:
        os.environ[SOURCE] = str(options.source.resolve())
    found = listed()
    wanted = [name for name in names() if re.search(options.k, name) and not (options.missing and name in found)]
    passed, failed = 0, []
    for size in SIZES:
        on_gloo = dict(outcomes(wanted, GLOO, options.seconds, size))
        skipped = {name: f"gloo {text}" for name, text in on_gloo.items() if text.startswith("skipped")}
        found.update(skipped)
        write(found)
        for name, on_own in outcomes([name for name in on_gloo if name not in skipped], OWN, options.seconds, size):
            found[name] = f"gloo {on_gloo[name]}; horovod {on_own}"
            write(found)
            passed += on_gloo[name] == on_own == "passes"
            if on_gloo[name] == "passes" != on_own:
                failed.append(name)
            print(f"{name}: {found[name]}", flush=True)
        wanted = [name for name, text in skipped.items() if TOO_FEW in text]
    print(f"{passed} tests pass on both; {len(failed)} pass on Gloo alone: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
