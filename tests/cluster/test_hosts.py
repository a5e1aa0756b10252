"""The hosts of these tests themselves."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from cluster.hosts import LIMIT_SECONDS, obstacle, without_blanks

MAKE = """
import sys, time
from pathlib import Path
from cluster.hosts import Hosts
hosts = Hosts(Path(sys.argv[1]))
hosts.start()
print(*hosts.init.values(), *(each.pid for each in hosts._outer), flush=True)
time.sleep(1000)
"""


@pytest.mark.skipif(bool(obstacle()), reason=obstacle())
def test_hosts_end_with_the_process_that_made_them_however_it_ends(tmp_path: Path) -> None:
    tests = Path(__file__).resolve().parents[1]
    with (
        without_blanks(tmp_path) as folder,
        subprocess.Popen(
            [sys.executable, "-c", MAKE, str(folder)], cwd=tests, stdout=subprocess.PIPE, text=True
        ) as maker,
    ):
        assert maker.stdout is not None
        made = [psutil.Process(int(pid)) for pid in maker.stdout.readline().split()]
        assert len(made) == 7
        maker.kill()
    deadline = time.monotonic() + LIMIT_SECONDS
    while any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in made):
        assert time.monotonic() < deadline
        time.sleep(0.05)
