"""tools/install.py, which installs what ``make`` needs: with uv if that does the same as pip."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import install
from time_limits import SOON

ROOT = Path(__file__).parents[2]

LISTED = """:env:.cert='/ours.pem'
:env:.default-timeout='180'
:env:.find-links='/first /second'
global.cert='/theirs.pem'
global.disable-pip-version-check='true'
global.extra-index-url='https://one/simple\\nhttps://two/simple'
install.index-url="https://internal/it's/simple"
global.index-url='https://other/simple'
freeze.all='true'
"""


@pytest.fixture
def python(tmp_path: Path) -> str:
    """The interpreter of an environment without uv, which pip does not install into: it fails, and prints its arguments."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/python"
    program.write_text(
        f'#!/bin/sh\n[ "$4 $5" = "config list" ] && exec {sys.executable} "$@"\necho "asked: $@"\nexit 7\n'
    )
    program.chmod(0o755)
    return str(program)


def test_settings_that_say_where_packages_come_from_are_passed_on() -> None:
    assert install.for_uv(LISTED) == (
        {
            "SSL_CERT_FILE": "/ours.pem",
            "UV_HTTP_TIMEOUT": "180",
            "UV_FIND_LINKS": "/first,/second",
            "UV_INDEX": "https://one/simple\nhttps://two/simple",
            "UV_DEFAULT_INDEX": "https://internal/it's/simple",
            "UV_INDEX_STRATEGY": "unsafe-best-match",
        },
        [],
    )


def test_other_settings_are_named() -> None:
    listed = LISTED + "global.only-binary=':all:'\n:env:.constraint='limits.txt'\n"
    assert install.for_uv(listed).others == ["constraint", "only-binary"]


def tried(python: str, uv: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The tool with a program in place of uv."""
    folder = Path(python).parent / "modules"
    folder.mkdir()
    (folder / "uv.py").write_text(uv)
    environment = {**os.environ, "PYTHONPATH": str(folder), "PIP_CONFIG_FILE": os.devnull, **variables}
    return subprocess.run(
        [sys.executable, "-P", str(ROOT / "tools/install.py"), python, "a thing", "-e", "."],
        env=environment,
        capture_output=True,
        text=True,
        timeout=SOON,
    )


def test_uv_gets_the_settings_and_the_interpreter(python: str) -> None:
    uv = "import os, sys; print(*sys.argv[1:], os.environ['UV_DEFAULT_INDEX'])"
    done = tried(python, uv, PIP_INDEX_URL="https://internal/simple")
    assert (done.returncode, done.stdout, done.stderr) == (0, "Installing a thing  done\n", "")
    log = Path(python).parents[1] / "install.log"
    assert log.read_text() == f"pip install --python {python} -e . https://internal/simple\n"


@pytest.mark.parametrize(
    ("uv", "variables", "why"),
    [
        ("import sys; sys.exit(2)", {}, "uv failed, see {log}"),
        ("print('not asked')", {"PIP_ONLY_BINARY": ":all:"}, "pip's only-binary cannot be passed on to uv"),
    ],
)
def test_pip_installs_where_uv_cannot_and_the_last_lines_are_shown(
    python: str, uv: str, variables: dict[str, str], why: str
) -> None:
    done = tried(python, uv, **variables)
    log = Path(python).parents[1] / "install.log"
    shown = f"Installing a thing  ({why.format(log=log)}: with pip)  failed:\n"
    asked = "asked: -m pip --disable-pip-version-check install --no-compile -e .\n"
    assert (done.returncode, done.stdout) == (1, f"{shown}{asked}All that it said: {log}\n")
