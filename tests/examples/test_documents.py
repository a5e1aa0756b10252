"""Are the documents true? Their links lead somewhere, the files and targets they name exist, their code runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import horovod

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
SOURCE = Path(horovod.__file__).resolve().parents[1]

FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
PATH = re.compile(r"`((?:src|docs|tests|examples|benchmarks)/[\w./-]*)`")
TARGET = re.compile(r"(?:^ {4}|`)make ([a-z]+)", re.MULTILINE)


def anchors(document: Path) -> set[str]:
    """What GitHub makes of the document's headings."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", document.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_names_lead_somewhere(document: Path) -> None:
    text = document.read_text()
    for link in LINK.findall(text):
        if re.match(r"\w+:", link):
            continue  # elsewhere on the network, which tests do not ask
        path, _, anchor = link.partition("#")
        target = (document.parent / path) if path else document
        assert target.exists(), f"{document.name} links to {link}"
        assert not anchor or anchor in anchors(target), f"{document.name} links to {link}: no such heading"
    for path in PATH.findall(text):
        assert (ROOT / path).exists(), f"{document.name} names {path}"
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in TARGET.findall(text):
        assert target in targets, f"{document.name} says 'make {target}'"


def test_the_readme_program_trains_on_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (program,) = [code for language, code in FENCED.findall((ROOT / "README.md").read_text()) if language == "python"]
    (tmp_path / "train.py").write_text(program)
    environment = {name: value for name, value in os.environ.items() if "HOROVOD" not in name}
    done = subprocess.run(
        [sys.executable, "-m", "horovod.runner.launch", "-np", "2", sys.executable, "train.py"],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[0]<stdout>:done"]
