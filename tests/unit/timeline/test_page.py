"""The page and the picture of a timeline, as a person opens them."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from horovod.observe.timeline import TensorLabel, Timeline
from horovod.timeline.collectives import RecordedCollective
from horovod.timeline.page import MOST_BATCHES, page
from horovod.timeline.summary import Summary, summarize

OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
HOSTILE = "</script><script>document.title = 'taken'</script><b>@data@ & \"quoted\""


def a_summary(count: int = 40, name: str = HOSTILE) -> Summary:
    return summarize(
        [
            RecordedCollective(
                name,
                "ALLREDUCE",
                "shm",
                {0: turn, 1: turn + 0.2},
                turn + 0.3,
                turn + 0.3,
                turn + 0.5,
                "float32",
                "[2]",
                8,
            )
            for turn in range(count)
        ]
    )


def test_the_page_needs_nothing_else_and_shows_names_as_they_are() -> None:
    written = page(a_summary(), "a<b>.json")
    assert HOSTILE not in written
    assert "<title>a&lt;b&gt;.json</title>" in written
    assert not re.search(r"@(title|facts|tables)@", written)
    assert not re.search(r"(src|href)\s*=|https?:|@import|url\(", written), "the page asks for something else"
    assert "Rank 1 holds up the others" in written


def test_a_long_recording_says_what_its_picture_leaves_out() -> None:
    assert "leaves out the first 7 batches" in page(a_summary(MOST_BATCHES + 7, "x"), "x")


def test_a_browser_draws_the_page(tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs Chromium")
    path = tmp_path / "timeline.html"
    path.write_text(page(a_summary(), "timeline.json"))
    shown = subprocess.run(
        [browser, *OPTIONS, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", path.as_uri()],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    ).stdout
    assert 'data-drawn="80"' in shown, "40 batches and 40 waits of rank 0 are drawn"
    assert "<title>timeline.json</title>" in shown, "no tensor's name is run as a script"
    assert "<b>@data@" not in shown.replace("\\u003c", "<").split('id="data">')[0]


def test_the_program_writes_the_page_and_the_picture(tmp_path: Path) -> None:
    """In a process of its own, for matplotlib keeps its fonts' files open."""
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("needs matplotlib")
    recording = tmp_path / "timeline.json"
    timeline = Timeline(str(recording))
    label = [TensorLabel(HOSTILE, "float32", [2])]
    for _ in range(5):
        for rank in range(2):
            timeline.ready("ALLREDUCE", label, rank)
        timeline.decided(label)
        timeline.begin("ALLREDUCE", "GLOO_ALLREDUCE", "shm", label)
        timeline.end(label)
    timeline.close()

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        program = [sys.executable, "-m", "horovod.timeline", str(recording), *options]
        return subprocess.run(program, capture_output=True, text=True, timeout=240, check=False)

    picture, written = tmp_path / "timeline.png", tmp_path / "timeline.html"
    done = run("--plot", str(picture), "--html", str(written))
    assert done.returncode == 0, done.stderr
    assert "5 tensors in 5 batches" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "5 tensors in 5 batches" in written.read_text()
    for option in ("--plot", "--html"):
        failed = run(option, str(tmp_path / "missing" / "timeline.png"))
        assert failed.returncode == 2
        assert "timeline.png cannot be written" in failed.stderr
