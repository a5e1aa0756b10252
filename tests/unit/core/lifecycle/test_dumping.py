"""Ranks write their flight recorders, and say where."""

from __future__ import annotations

import logging
import re
import shlex
from pathlib import Path

import pytest

from horovod._base.config import Config
from horovod.control.failure import Cause
from horovod.core.lifecycle.dumping import Dumper, Members
from horovod.observe.dump import read

MEMBERS = Members("job", "job", 1, 0, ["here", "here"], {}, launched=False, lost=[])


@pytest.mark.parametrize("name", ["plain", "two words", "it's", "$HOME; ls"])
def test_the_command_that_is_shown_reads_the_folder(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config(flight_recorder_dir=str(tmp_path / name))
    dumper = Dumper(config, MEMBERS, {}, lambda rank: "", lambda why, reason: None, dict)
    dumper.start()
    with caplog.at_level(logging.WARNING, "horovod"):
        dumper.failed(1, "it was lost", Cause())
        dumper.close()
    command = re.search(r"python -m horovod\.diagnose (.+)$", caplog.text, re.MULTILINE)
    assert command is not None, caplog.text
    (folder,) = shlex.split(command[1])
    assert read([Path(folder)]).ranks[0].failed_rank == 1
