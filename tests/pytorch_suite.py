"""Runs PyTorch's own tests of process groups on the back end ``horovod`` beside Gloo: by hand, some minutes.

    python tests/pytorch_suite.py                 # all tests that need no GPU
    python tests/pytorch_suite.py -k all_reduce   # those whose names match

The tests are those of ``torch/testing/_internal/distributed/distributed_test.py``, which PyTorch's wheel has; they need the
package ``expecttest``. ``HOROVOD_TORCH_BACKEND=horovod`` puts the back end in the place of Gloo. What is skipped on Gloo is not
listed. The exit status is 1 if a test passes on Gloo and fails on ``horovod``.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

SIZE = 3
GLOO, OWN = "gloo", "horovod"
_CASE = """
import unittest
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

class TestSuite(TestDistBackend, DistributedTest._DistTestBase):
    def setUp(self):
        super().setUp()
        self._spawn_processes()
"""


def names() -> list[str]:
    """The names of all tests."""
    source = f"{_CASE}\nprint(*[name for name in dir(TestSuite) if name.startswith('test_')])"
    done = subprocess.run(
        [sys.executable, "-c", source], env=environment(GLOO), capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def environment(backend: str) -> dict[str, str]:
    own = {"HOROVOD_TORCH_BACKEND": OWN} if backend == OWN else {}
    common = {
        "BACKEND": GLOO,
        "WORLD_SIZE": str(SIZE),
        "INIT_METHOD": "file://",
        "OMP_NUM_THREADS": "1",
        "TEMP_DIR": tempfile.gettempdir(),
    }
    return {**os.environ, **common, **own}


def outcome(name: str, backend: str, seconds: float) -> str:
    """What became of one test: ``passes``, ``skipped``, ``too slow``, or the last line of its error."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "suite.py")
        path.write_text(f"{_CASE}\nif __name__ == '__main__':\n    unittest.main()\n")
        command = [sys.executable, str(path), f"TestSuite.{name}"]
        process = subprocess.Popen(
            command,
            env={**environment(backend), "TEMP_DIR": folder},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.communicate()
            return "too slow"
    if process.returncode == 0:
        return "skipped" if "skipped" in said else "passes"
    errors = re.findall(r"^(?:E +)?(\w+(?:Error|Exception).*)$", said, re.MULTILINE)
    return (errors or said.splitlines() or ["failed"])[-1][:160]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-k", default="", metavar="TEXT", help="only tests whose names match this regular expression")
    parser.add_argument("--seconds", type=float, default=120.0, help="the time limit of a test")
    options = parser.parse_args()
    passed, failed = 0, []
    for name in [name for name in names() if re.search(options.k, name)]:
        on_gloo = outcome(name, GLOO, options.seconds)
        if on_gloo == "skipped":
            continue
        on_own = outcome(name, OWN, options.seconds)
        passed += on_gloo == on_own == "passes"
        if on_gloo == "passes" != on_own:
            failed.append(name)
        print(f"{name}: gloo {on_gloo}; horovod {on_own}", flush=True)
    print(f"{passed} tests pass on both; {len(failed)} pass on Gloo alone: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
