"""A process whose call of MPI has not returned ends without the destructors of its libraries."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from textwrap import dedent

import pytest

from ranks import SOURCE
from time_limits import SOON

# Such processes end there as all others do, by the docstring of the function.
pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "on_exit"), reason="the C library has no on_exit")


@pytest.mark.parametrize(("end", "status"), [("", 0), ("sys.exit(7)", 7), ("raise ValueError", 1)])
@pytest.mark.parametrize("times", [1, 2])
def test_the_status_and_all_output_stay_and_no_destructor_runs(end: str, status: int, times: int) -> None:
    program = dedent("""
        import ctypes, sys
        from horovod.comm.mpi.process_end import leave_libraries_alone
        libc = ctypes.CDLL(None)
        libc["__cxa_atexit"](libc["abort"], None, None)  # in place of a destructor that crashes
        libc.printf(b"of C, ")
        for _ in range(int(sys.argv[1])):
            leave_libraries_alone()
        print("of Python")
    """)
    done = subprocess.run(
        [sys.executable, "-c", program + end, str(times)],
        env={"PYTHONPATH": str(SOURCE)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SOON,
    )
    assert done.returncode == status, done.stderr
    assert done.stdout in ("of C, of Python\n", "of Python\nof C, ")
