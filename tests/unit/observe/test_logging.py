"""The form of a log line, the levels, and where each goes."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator

import pytest

from horovod.observe import logging as observe

LINE = re.compile(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}: ([A-Z]) (test_logging\.py):(\d+)\] \[(\d+)\]: (.*)$")


@pytest.fixture(autouse=True)
def logger() -> Iterator[logging.Logger]:
    """The package's logger, as new; as it was afterwards."""
    found = logging.getLogger("horovod")
    kept = found.handlers[:], found.level, found.propagate
    found.handlers, found.propagate = [], True
    yield found
    found.handlers, found.propagate = kept[0], kept[2]
    found.setLevel(kept[1])


def configure(rank: int = 0, level: str = "warning", *, hide_time: bool = False) -> logging.Logger:
    observe.configure(rank, level, hide_time=hide_time)
    return logging.getLogger("horovod.core")


def test_a_line_tells_time_level_place_and_rank(capsys: pytest.CaptureFixture[str]) -> None:
    configure(rank=3).warning("disk %s is full", "sda")
    captured = capsys.readouterr()
    assert captured.out == ""
    match = LINE.match(captured.err.rstrip("\n"))
    assert match is not None
    assert match.groups()[0] == "W"
    assert match.groups()[3:] == ("3", "disk sda is full")


@pytest.mark.parametrize(
    ("level", "letter", "stream"),
    [
        (logging.DEBUG, "D", "out"),
        (logging.INFO, "I", "out"),
        (logging.WARNING, "W", "err"),
        (logging.ERROR, "E", "err"),
        (logging.CRITICAL, "F", "err"),
    ],
)
def test_levels_have_their_letter_and_their_stream(
    capsys: pytest.CaptureFixture[str], level: int, letter: str, stream: str
) -> None:
    configure(level="trace").log(level, "x")
    captured = capsys.readouterr()
    match = LINE.match(getattr(captured, stream).rstrip("\n"))
    assert match is not None
    assert match.group(1) == letter
    assert getattr(captured, "err" if stream == "out" else "out") == ""


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("trace", 5),
        ("debug", logging.DEBUG),
        ("INFO", logging.INFO),
        ("Warning", logging.WARNING),
        ("error", logging.ERROR),
        ("fatal", logging.CRITICAL),
        ("verbose", logging.WARNING),
        ("", logging.WARNING),
    ],
)
def test_the_level_is_the_one_asked_for(name: str, level: int) -> None:
    assert configure(level=name).getEffectiveLevel() == level


@pytest.mark.parametrize("hidden", [True, False])
def test_the_time_can_be_left_out(capsys: pytest.CaptureFixture[str], hidden: bool) -> None:
    configure(hide_time=hidden).warning("x")
    text = capsys.readouterr().err
    assert text.startswith("[W test_logging.py:") == hidden
    assert bool(LINE.match(text.rstrip("\n"))) != hidden


def test_an_exceptions_traceback_follows_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        configure().exception("it failed")
    text = capsys.readouterr().err
    assert "]: it failed\nTraceback (most recent call last):" in text
    assert text.endswith("ValueError: broken\n")


def test_init_after_init_neither_doubles_lines_nor_keeps_the_old_rank(capsys: pytest.CaptureFixture[str]) -> None:
    configure(rank=0)
    configure(rank=5).warning("x")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "[5]: x" in lines[0]


def test_an_application_that_set_the_logger_up_itself_is_left_alone(logger: logging.Logger) -> None:
    own = logging.NullHandler()
    logger.addHandler(own)
    logger.setLevel(logging.ERROR)
    configure(level="debug")
    assert logger.handlers == [own]
    assert logger.level == logging.ERROR


def test_lines_go_to_whatever_the_streams_are_at_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    log = configure()
    lines: list[str] = []

    class Notebook:
        write = staticmethod(lines.append)

        @staticmethod
        def flush() -> None:
            pass

    monkeypatch.setattr(sys, "stderr", Notebook())
    log.warning("x")
    assert len(lines) == 1


def test_a_stream_that_is_closed_does_not_fail_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    log = configure()
    monkeypatch.setattr(sys, "stderr", None)
    log.warning("x")


def test_nothing_else_in_the_process_is_set_up() -> None:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    configure(level="trace")
    assert (root.handlers, root.level) == before


def test_trace_lines_have_a_t(capsys):
    logger = logging.getLogger("horovod")
    kept = logger.handlers[:], logger.level, logger.propagate
    logger.handlers = []
    try:
        observe.configure(0, "trace", hide_time=True)
        logger.log(5, "x")
        assert capsys.readouterr().out.startswith("[T ")
    finally:
        logger.handlers, logger.propagate = kept[0], kept[2]
        logger.setLevel(kept[1])
