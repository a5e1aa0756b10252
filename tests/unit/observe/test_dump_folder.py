"""The default folder of dumps is this user's alone, or nothing is written there."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from horovod.observe import dump


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path / f"horovod-{os.getuid()}"


def test_both_folders_are_made_for_this_user_alone(root: Path) -> None:
    before = os.umask(0o000)
    try:
        for _ in range(2):  # the second job finds the first folder
            dump.make_folder(dump.default_folder("job"))
    finally:
        os.umask(before)
    assert [stat.S_IMODE(each.stat().st_mode) for each in (root, root / "job")] == [0o700, 0o700]


def _open(root: Path) -> None:
    root.mkdir()
    root.chmod(0o750)


def _link(root: Path) -> None:
    elsewhere = root.with_name("elsewhere")
    elsewhere.mkdir(mode=0o700)
    root.symlink_to(elsewhere)


def _of_another_user(root: Path) -> None:
    if os.getuid():
        pytest.skip("only root gives a folder to another user")
    root.mkdir(mode=0o700)
    os.chown(root, 12345, 12345)


@pytest.mark.parametrize(
    ("make", "reason"),
    [(_open, "open to other users"), (_link, "not a folder of this user"), (_of_another_user, "not a folder of this user"),
     (Path.touch, "not a folder of this user")],
)  # fmt: skip
def test_a_folder_that_is_not_this_users_alone_is_refused(
    root: Path, make: Callable[[Path], None], reason: str
) -> None:
    make(root)
    with pytest.raises(dump.DumpError, match=reason):
        dump.make_folder(dump.default_folder("job"))
    assert not (root / "job").exists()
