"""Runs PyTorch's own tests of process groups on the back end ``horovod`` beside Gloo: by hand, some minutes.

    python tests/pytorch_suite.py                 # all tests that need no GPU
    python tests/pytorch_suite.py -k all_reduce   # those whose names match
    python tests/pytorch_suite.py --missing       # those that the list does not have yet

The tests are those of ``torch/testing/_internal/distributed/distributed_test.py``, which PyTorch's wheel has; they need the
package ``expecttest``. ``HOROVOD_TORCH_BACKEND=horovod`` puts the back end in the place of Gloo. What is skipped on Gloo is not
listed. The exit status is 1 if a test passes on Gloo and fails on ``horovod``.

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

SIZE = 3
LIST = Path(__file__).with_suffix(".txt")
GLOO, OWN = "gloo", "horovod"
_CASE = """
import inspect, re, sys, unittest
import torch
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

class TestSuite(TestDistBackend, DistributedTest._DistTestBase):
    def setUp(self):
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)  # which imports nothing anew
"""
_NAMES = """
for name in dir(TestSuite):
    if name.startswith("test_"):
        decorated = inspect.getsource(inspect.unwrap(getattr(TestSuite, name))).partition("def test_")[0]
        if not re.search(r"_gpu|requires_nccl|BACKEND != .nccl|cuda_only", decorated):
            print(name)
"""
_RUN = r"""
for name in sys.argv[1:]:
    result = unittest.TestResult()
    TestSuite(name).run(result)
    failed = result.failures + result.errors
    found = re.findall(r"^(?:E +)?(\w+(?:Error|Exception).*)$", failed[0][1], re.MULTILINE) if failed else []
    words = (found or ["failed"])[-1][:160] if failed else "skipped" if result.skipped else "passes"
    print(f"{name}: {words}", flush=True)
"""


def environment(backend: str) -> dict[str, str]:
    own = {"HOROVOD_TORCH_BACKEND": OWN} if backend == OWN else {}
    common = {"BACKEND": GLOO, "WORLD_SIZE": str(SIZE), "INIT_METHOD": "file://", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **common, **own}


def names() -> list[str]:
    """The names of the tests whose decorators ask for no GPU."""
    command = [sys.executable, "-c", _CASE + _NAMES]
    env = {**environment(GLOO), "TEMP_DIR": tempfile.gettempdir()}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.split()


def outcomes(wanted: Sequence[str], backend: str, seconds: float) -> Iterator[tuple[str, str]]:
    """What becomes of each test: ``passes``, ``skipped``, ``too slow``, or the last line of its error."""
    left = list(wanted)
    while left:
        with tempfile.TemporaryDirectory() as folder:
            env = {**environment(backend), "TEMP_DIR": folder}
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
    options = parser.parse_args()
    found = listed()
    wanted = [name for name in names() if re.search(options.k, name) and not (options.missing and name in found)]
    on_gloo = {name: text for name, text in outcomes(wanted, GLOO, options.seconds) if text != "skipped"}
    passed, failed = 0, []
    for name, on_own in outcomes(list(on_gloo), OWN, options.seconds):
        found[name] = f"gloo {on_gloo[name]}; horovod {on_own}"
        write(found)
        passed += on_gloo[name] == on_own == "passes"
        if on_gloo[name] == "passes" != on_own:
            failed.append(name)
        print(f"{name}: {found[name]}", flush=True)
    print(f"{passed} tests pass on both; {len(failed)} pass on Gloo alone: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
