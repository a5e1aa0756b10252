"""Installs packages into an environment, as ``pip install`` does, with uv, which takes a quarter of the time.

    python tools/install.py [--pip] PYTHON WHAT ARGUMENT...

PYTHON is the interpreter of the environment, WHAT is shown to the person who waits, and the arguments are those that uv and pip
have in common. ``--pip``: they are pip's alone.

uv reads none of pip's settings. Those that say where packages come from are passed on. If there are others that matter, or if
uv is missing or fails, pip installs, and a line says so. What the programs print is in install.log of the environment.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

LEVELS = ("global", "install", ":env:")
"""Whose settings ``pip install`` has, the last ones first."""
COMMON = {
    "cert": "SSL_CERT_FILE",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "index-url": "UV_DEFAULT_INDEX",
    "no-index": "UV_NO_INDEX",
    "proxy": "ALL_PROXY",
    "timeout": "UV_HTTP_TIMEOUT",
    "trusted-host": "UV_INSECURE_HOST",
}
"""The variables of uv that say the same as a setting of pip."""
NO_MATTER = {
    "cache-dir",
    "config-file",
    "disable-pip-version-check",
    "no-cache-dir",
    "no-color",
    "no-compile",
    "no-input",
    "no-python-version-warning",
    "progress-bar",
    "quiet",
    "require-virtualenv",
    "retries",
    "root-user-action",
    "verbose",
}
"""Settings of pip that do not change what is installed."""
DOT_SECONDS = 3.0
MOST_DOTS = 2400
"""Two hours: then the program is ended."""
END_SECONDS = 10.0
"""How long a program that is ended may take to remove what it has not finished."""
LAST_LINES = 20


class Settings(NamedTuple):
    """Pip's settings, for uv.

    Attributes:
        variables: of the environment of uv.
        others: those that uv has no variable for.
    """

    variables: dict[str, str]
    others: list[str]


def for_uv(listed: str) -> Settings:
    """What ``pip config list`` prints, for uv."""
    found: dict[str, str] = {}
    for level in LEVELS:
        for line in listed.splitlines():
            name, _, value = line.partition("=")
            if name.rpartition(".")[0] == level:
                found[name.rpartition(".")[2]] = str(ast.literal_eval(value))
    variables = {COMMON[each]: value for each, value in found.items() if each in COMMON}
    if "UV_FIND_LINKS" in variables:
        variables["UV_FIND_LINKS"] = ",".join(variables["UV_FIND_LINKS"].split())
    variables["UV_INDEX_STRATEGY"] = "unsafe-best-match"  # as with pip: the best version, whichever index has it
    return Settings(variables, sorted(set(found) - set(COMMON) - NO_MATTER))


def run(command: Sequence[str], log: Path, variables: Mapping[str, str] | None = None) -> bool:
    """Run a command, and print a dot from time to time; whether it succeeded."""
    with log.open("ab") as output:
        program = subprocess.Popen(command, stdout=output, stderr=output, env={**(variables or {}), **os.environ})
        try:
            for _ in range(MOST_DOTS):
                try:
                    return program.wait(DOT_SECONDS) == 0
                except subprocess.TimeoutExpired:
                    print(".", end="", flush=True)
            return False
        finally:
            program.terminate()  # does nothing if it has ended
            try:
                program.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                program.kill()


def install(python: str, arguments: Sequence[str], log: Path, pip_alone: bool = False) -> bool:
    """Install with uv, or with pip; whether it succeeded."""
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    if not pip_alone:
        listed = subprocess.run([*pip, "config", "list"], capture_output=True, text=True, check=True).stdout
        variables, others = for_uv(listed)
        if others:
            why = f"pip's {', '.join(others)} cannot be passed on to uv"
        elif importlib.util.find_spec("uv") is None:
            why = "uv is not installed"
        elif run([sys.executable, "-m", "uv", "pip", "install", "--python", python, *arguments], log, variables):
            return True
        else:
            why = f"uv failed, see {log}"
        print(f" ({why}: with pip) ", end="", flush=True)
    # Python compiles modules when they are first imported, as a third of the 20,000 that the tests need are.
    return run([*pip, "install", "--no-compile", *arguments], log)


def main(arguments: Sequence[str]) -> int:
    pip_alone = arguments[0] == "--pip"
    python, what, *packages = arguments[pip_alone:]
    log = Path(python).absolute().parents[1] / "install.log"
    log.touch()
    start = log.stat().st_size
    print(f"Installing {what} ", end="", flush=True)
    if install(python, packages, log, pip_alone):
        print(" done", flush=True)
        return 0
    lines = log.read_bytes()[start:].decode(errors="replace").splitlines()[-LAST_LINES:]
    print(" failed:", *lines, f"All that it said: {log}", sep="\n", flush=True)
    return 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
