"""What is said where a rank cannot be forked: an error of the pool that has the reason, at once."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rank_template import Template

Templates = Callable[[str], Template]

NO_SECOND_FORK = """
import os

template, fork = os.getpid(), os.fork

def fork_once():
    if os.getpid() != template:
        raise BlockingIOError("no more processes for this user")
    return fork()

os.fork = fork_once
"""

NO_SESSION = """
import os

def refuse():
    raise PermissionError("no session for this user")

os.setsid = refuse
"""


@pytest.fixture
def templates(tmp_path: Path) -> Iterator[Templates]:
    """Makes a template that imports a module of this text."""
    made: list[Template] = []

    def make(text: str) -> Template:
        (tmp_path / "odd_module.py").write_text(text)
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
        made.append(Template("odd_module", env, tmp_path))
        return made[-1]

    yield make
    for template in made:
        template.close()


@pytest.mark.parametrize(
    ("text", "reason"),
    [(NO_SECOND_FORK, "no more processes for this user"), ("raise ImportError('half installed')", "half installed")],
    ids=["fork", "import"],
)
def test_a_template_that_cannot_fork_says_why(templates: Templates, text: str, reason: str) -> None:
    template = templates(text)
    ours, other = socket.socketpair()
    with ours, other, tempfile.TemporaryFile() as log, pytest.raises(OSError, match=reason):
        template.fork(os.environ, other, log.fileno())
    assert not template.alive()


def test_a_template_that_has_ended_says_why(templates: Templates) -> None:
    template = templates("raise ImportError('half installed')")
    template.process.wait()
    ours, other = socket.socketpair()
    with ours, other, tempfile.TemporaryFile() as log, pytest.raises(OSError, match="half installed"):
        template.fork(os.environ, other, log.fileno())


def test_a_process_that_cannot_become_a_rank_prints_why_where_a_rank_prints(templates: Templates) -> None:
    template = templates(NO_SESSION)
    ours, other = socket.socketpair()
    with ours, tempfile.TemporaryFile() as log:
        with other:
            forked = template.fork(os.environ, other, log.fileno())
        assert forked.wait() == 1
        assert b"no session for this user" in os.pread(log.fileno(), 10_000, 0)
        assert ours.recv(1) == b"", "the pool sees that the process has closed its socket"
