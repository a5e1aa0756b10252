"""Files that appear in one step: what they replace, and what they leave."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from horovod._base import whole_file


def test_it_replaces_a_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in (b"1", b"2"):
        whole_file.write(path, content)
        assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def test_a_private_file_is_for_this_user_only(tmp_path: Path) -> None:
    path = tmp_path / "file"
    whole_file.write(path, b"", private=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_link_stays_and_its_target_is_written(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"old")
    link.symlink_to("target")
    whole_file.write(link, b"new")
    assert link.is_symlink()
    assert target.read_bytes() == b"new"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["fifo", "folder"])
def test_nothing_but_a_file_is_replaced(tmp_path: Path, make: object) -> None:
    path = tmp_path / "other"
    assert callable(make)
    make(path)
    before = path.lstat()
    with pytest.raises(OSError, match=f"it is not an ordinary file: '{path}'"):
        whole_file.write(path, b"content")
    assert (path.lstat().st_ino, path.lstat().st_mode) == (before.st_ino, before.st_mode)
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_completed_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        whole_file.write(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
