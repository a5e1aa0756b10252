"""What is kept for the next run: the file, and whether it is for this job."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod.autotune.kept import Fit, Kept, KeptFileError, default_path, read, write
from horovod.autotune.log import HEADER, TrialLog, row
from horovod.comm.tuned import TunedSettings

FIT = Fit("1", 4, (2, 2), "a", "b")
SETTINGS = TunedSettings(1 << 20, (1 << 63) - 1, "shm", "never", False, True)


def test_a_kept_choice_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "choice.json"
    assert read(path) is None
    write(path, Kept(FIT, SETTINGS, True, 0.25))
    assert read(path) == Kept(FIT, SETTINGS, True, 0.25)
    assert [each.name for each in path.parent.iterdir()] == ["choice.json"]


@given(st.one_of(st.binary(max_size=200), st.text(max_size=200).map(str.encode), st.just(b'{"fit": 1}')))
def test_anything_else_in_the_file_is_an_error_that_names_it(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "choice.json"
        path.write_bytes(content)
        with pytest.raises(KeptFileError, match=r"choice\.json was not written by autotuning"):
            read(path)


@pytest.mark.parametrize("change", ['"engine": 3', '"fusion_threshold": "much"', '"surprise": 1'])
def test_a_file_that_was_edited_wrongly_is_an_error(tmp_path: Path, change: str) -> None:
    path = tmp_path / "choice.json"
    write(path, Kept(FIT, SETTINGS, True))
    text = path.read_text()
    if "surprise" in change:
        text = text.replace('"engine": "shm"', f'"engine": "shm", {change}')
    else:
        name = change.split('"')[1]
        old = next(line for line in text.splitlines() if f'"{name}"' in line)
        text = text.replace(old.strip().rstrip(","), change)
    path.write_text(text)
    with pytest.raises(KeptFileError):
        read(path)


def test_jobs_that_differ_keep_their_choices_apart() -> None:
    others = [Fit("2", 4, (2, 2), "a", "b"), Fit("1", 4, (4,), "a", "b"), Fit("1", 4, (2, 2), "c", "b")]
    paths = {default_path(each, "/home/me", "") for each in [FIT, *others]}
    assert len(paths) == 4
    assert default_path(FIT, "/home/me", "/cache").parent == Path("/cache/horovod/autotune")
    assert FIT.differences(FIT) == "" and FIT.differences(others[0]) == "version 2 instead of 1"


def test_the_log_has_the_columns_that_tools_read(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    log = TrialLog(str(path))
    log.add(row(SETTINGS, 2.5e6, True, 1.5))
    header, line = path.read_text().splitlines()
    assert header == HEADER
    assert header.startswith(
        "hierarchical_allreduce,hierarchical_allgather,torus_allreduce,cache_enabled,cycle_time_ms,tensor_fusion_threshold,score"
    )
    values = dict(zip(header.split(","), line.split(","), strict=True))
    assert values == {
        "hierarchical_allreduce": "0",
        "hierarchical_allgather": "1",
        "torus_allreduce": "0",
        "cache_enabled": " 1",
        "cycle_time_ms": "1.5",
        "tensor_fusion_threshold": "1",
        "score": "2.5",
        "bucket_bytes": "9223372036854775807",
        "shm_direct": "never",
        "engine": "shm",
    }
