"""Programs on a Spark cluster of two executors on this machine, in processes of their own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from time_limits import SOON

PROGRAM = Path(__file__).parent / "programs.py"
LIMIT = 5 * SOON
"""How long a program may take: Java starts three times, and each rank imports a framework."""


def obstacle() -> str:
    """Why Spark cannot run here; "" if it can."""
    java = Path(os.environ.get("JAVA_HOME", "/nowhere")) / "bin" / "java"
    found = str(java) if java.exists() else shutil.which("java")
    if found is None:
        return "no Java is found: put a Java 17 into PATH, or its folder into JAVA_HOME"
    said = subprocess.run([found, "-version"], capture_output=True, text=True, timeout=SOON).stderr
    version = re.search(r'version "(\d+)', said)
    if version is None or int(version[1]) < 17:
        return f"Spark needs Java 17 or newer, and {found} says: {said.strip()}"
    return ""


class SparkPrograms:
    """Starts programs, each with a cluster of its own.

    Args:
        folder: for what Spark writes.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def result(self, name: str, *arguments: str, settings: Mapping[str, str] | None = None) -> Any:
        """What ``programs.py name arguments`` prints as its last line, in JSON.

        Args:
            settings: of Spark, beside those of a cluster of two executors with two cores each.
        """
        environment = {
            **os.environ,
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_LOCAL_DIRS": str(self._folder),
            "SPARK_WORKER_DIR": str(self._folder / "work"),
            "PYTHONPATH": os.pathsep.join([str(PROGRAM.parent), os.environ.get("PYTHONPATH", "")]),
            "SETTINGS": json.dumps(dict(settings or {})),
        }
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM), name, *arguments],
            cwd=self._folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            output, _ = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            process.terminate()
            output, _ = process.communicate(timeout=SOON)
            pytest.fail(f"the program did not end:\n{output}")
        assert process.returncode == 0, output
        (line,) = [line for line in output.splitlines() if line.startswith("result: ")]
        return json.loads(line.removeprefix("result: "))
