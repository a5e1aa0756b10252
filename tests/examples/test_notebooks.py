"""The program of docs/notebooks.md, run as a cell of a notebook."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUN = """
import sys, nbclient, nbformat
notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(sys.stdin.read())])
nbclient.NotebookClient(notebook, timeout=120).execute()
nbformat.write(notebook, "done.ipynb")
"""


def test_a_cell_starts_a_job_and_shows_its_output(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    text = (ROOT / "docs" / "notebooks.md").read_text()
    (program,) = re.findall(r"^```py\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    environment = {name: value for name, value in os.environ.items() if "HOROVOD" not in name}
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        input=program,
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (cell,) = json.loads((tmp_path / "done.ipynb").read_text())["cells"]
    shown = "".join("".join(output.get("text", "")) for output in cell["outputs"])
    assert sorted(shown.splitlines()) == ["[0]<stdout>:trained", "[1]<stdout>:trained"]
