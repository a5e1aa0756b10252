"""Functions for lab.ipynb: show the changes of a step, run a script on several ranks, read the files that it wrote."""

from __future__ import annotations

import csv
import difflib
import os
import shlex
import shutil
import subprocess
import sys
import threading
from pathlib import Path

from IPython.display import Markdown

HERE = Path(__file__).resolve().parent

ONE_THREAD = {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}
"""For comparing speeds on CPUs: a rank has one core, for any number of ranks."""

Rows = list[dict[str, float]]


def script(step: int) -> Path:
    """The script after a step. 0: the script before the first step."""
    return HERE / (f"fashion_mnist_after_step_{step:02}.py" if step else "fashion_mnist.py")


def code(step: int) -> Markdown:
    """The text of a script."""
    return Markdown(f"```python\n{script(step).read_text()}```")


def changes(step: int) -> Markdown:
    """The lines that a step removes (-) and adds (+). Titles are ignored."""
    before, after = (script(each).read_text().partition("from __future__")[2].splitlines() for each in (step - 1, step))
    lines = list(difflib.unified_diff(before, after, n=2, lineterm=""))[2:]
    return Markdown("\n".join(["```diff", *(line if not line.startswith("@@") else "@@" for line in lines), "```"]))


def train(
    step: int, ranks: int, options: str, logs: Path, env: dict[str, str] | None = None, keep: bool = False
) -> Rows:
    """Run a step's script under horovodrun, and show its output below the cell.

    Args:
        logs: the folder for this run.
        env: environment variables on top of this process's.
        keep: leave what an earlier run wrote to that folder.

    Returns:
        The rows of its ``epochs.csv``, one for each epoch.

    Raises:
        RuntimeError: it failed.
    """
    if not keep:
        shutil.rmtree(logs, ignore_errors=True)
    print(f"$ horovodrun -np {ranks} python {script(step).name} {options}", flush=True)
    job = [sys.executable, "-m", "horovod.runner.launch", "-np", str(ranks), sys.executable, str(script(step))]
    quiet = {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
    with subprocess.Popen(
        [*job, *shlex.split(options), "--log-dir", str(logs)],
        env={**quiet, **os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        errors: list[str] = []
        reader = threading.Thread(target=lambda: errors.extend(process.stderr or ()))
        reader.start()
        for line in process.stdout or ():
            print(line, end="", flush=True)
        reader.join()
    if process.returncode:
        raise RuntimeError(f"it ended with exit code {process.returncode}:\n{''.join(errors[-40:])}")
    with (logs / "epochs.csv").open() as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def rate(rows: Rows) -> float:
    """Images per second in the fastest epoch. TensorFlow builds its graph in the first, and other work may slow down others."""
    return max(row["images_per_second"] for row in rows)
