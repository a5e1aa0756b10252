"""Where lines go: labels, progress bars on a terminal, sinks that fail."""

from __future__ import annotations

import io
import os
import threading
from pathlib import Path

import pytest

from horovod.runner.output.output import (
    TAIL_LINE_CHARACTERS,
    Cursor,
    DescriptorSink,
    FileSink,
    JobOutput,
    RankStream,
    ReaderGone,
    Sink,
    StreamSink,
)
from time_limits import SOON


class Paper(Sink):
    """Remembers what is written."""

    def __init__(self, cursor: Cursor | None = None) -> None:
        super().__init__(cursor)
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text


def test_each_line_stands_behind_its_label() -> None:
    paper = Paper()
    RankStream("[3]<stdout>:", [paper], timestamps=False).feed(b"a\nb\nc")
    assert paper.text == "[3]<stdout>:a\n[3]<stdout>:b\n"


def test_the_tail_keeps_the_last_lines_without_overwritten_ones() -> None:
    stream = RankStream("", [Paper()], timestamps=False)
    stream.feed(b"".join(b"%d\n10%%\r" % number for number in range(50)))
    assert list(stream.tail) == [str(number) for number in range(30, 50)]


def test_the_tail_keeps_the_beginnings_of_long_lines() -> None:
    stream = RankStream("", [Paper()], timestamps=False)
    stream.feed(b"x" * 100_000 + b"\n")
    assert list(stream.tail) == ["x" * TAIL_LINE_CHARACTERS]


def test_a_prompt_is_completed_where_it_stands_unless_others_write_meanwhile() -> None:
    paper = Paper(Cursor())
    stream, other = (RankStream(f"[{rank}]", [paper], timestamps=False) for rank in range(2))
    stream.feed(b"name? ")
    stream.show_incomplete()
    assert paper.text == "[0]name? "
    stream.feed(b"hello\nage? ")
    stream.show_incomplete()
    other.feed(b"noise\n")
    stream.feed(b"old\n")
    assert paper.text == "[0]name? hello\n[0]age? \n[1]noise\n[0]old\n"
    assert list(stream.tail) == ["name? hello", "age? old"]


def test_a_prompt_that_is_never_answered_ends_where_others_write() -> None:
    paper = Paper(Cursor())
    stream, other = (RankStream(f"[{rank}]", [paper], timestamps=False) for rank in range(2))
    stream.feed(b"name? ")
    stream.show_incomplete()
    other.feed(b"noise\n")
    stream.finish()
    assert paper.text == "[0]name? \n[1]noise\n"


def test_the_end_of_a_progress_bar_needs_no_second_label() -> None:
    paper = Paper()
    paper.show("[0]", ["50%\r"])
    paper.show("[0]", ["\n"])
    paper.show("[0]", ["\n"])
    assert paper.text == "[0]50%\r\n[0]\n"


def test_on_a_terminal_a_line_erases_the_progress_bar_it_overwrites() -> None:
    cursor = Cursor()
    stdout, stderr = Paper(cursor), Paper(cursor)
    stderr.show("[0]", ["50%\r", "60%\r"])
    stdout.show("[1]", ["hello\n", "again\n"])
    assert stderr.text == "[0]50%\r\x1b[K[0]60%\r"
    assert stdout.text == "\x1b[K[1]hello\n[1]again\n"


def test_a_stream_that_knows_few_letters_gets_the_others_escaped() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    StreamSink(stream).write("né\n")
    assert raw.getvalue() == b"n\\xe9\n"


def test_output_to_a_closed_stream_is_dropped() -> None:
    stream = io.StringIO()
    stream.close()
    StreamSink(stream).write("x")
    StreamSink(None).write("x")  # as under pythonw


def test_a_full_pipe_in_non_blocking_mode_is_waited_for() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    arrived: list[int] = []

    def read() -> None:
        while data := os.read(reader, 1 << 16):
            arrived.append(len(data))

    thread = threading.Thread(target=read)
    thread.start()
    DescriptorSink(writer).write("x" * (1 << 20))
    os.close(writer)
    thread.join(SOON)
    os.close(reader)
    assert sum(arrived) == 1 << 20


def test_a_reader_that_left_is_reported_and_a_full_disk_is_not() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with pytest.raises(ReaderGone):
        DescriptorSink(writer).write("x")
    os.close(writer)
    full = os.open("/dev/full", os.O_WRONLY)
    DescriptorSink(full).write("x")
    os.close(full)


def test_a_file_on_a_full_disk_complains_once() -> None:
    complaints: list[str] = []
    file = FileSink(Path("/dev/full"), complaints.append)
    file.write("x")
    file.write("y")
    assert len(complaints) == 1 and "No space left" in complaints[0]


def test_the_folder_of_a_rank(tmp_path: Path) -> None:
    output = JobOutput(Paper(), Paper(), 11, str(tmp_path))
    stream = output.stream(3, "stderr")
    stream.feed(b"x")
    stream.finish()
    assert (tmp_path / "rank.03" / "stderr").read_text() == "[3]<stderr>:x\n"


def test_what_an_earlier_job_has_written_is_kept(tmp_path: Path) -> None:
    for number in range(3):
        errors = Paper()
        output = JobOutput(Paper(), errors, 2 + (number == 0), str(tmp_path))
        for rank in range(2 + (number == 0)):
            stream = output.stream(rank, "stdout")
            stream.feed(b"job %d\n" % number)
            stream.finish()
    assert (tmp_path / "rank.0" / "stdout").read_text() == "[0]<stdout>:job 2\n"
    assert (tmp_path / "rank.0" / "stdout.1").read_text() == "[0]<stdout>:job 0\n"
    assert (tmp_path / "rank.0" / "stdout.2").read_text() == "[0]<stdout>:job 1\n"
    assert sorted(path.name for path in (tmp_path / "rank.2").iterdir()) == ["stdout.1"], "the last jobs had two ranks"
    assert f"the output of an earlier job in {tmp_path} is kept as stdout.2 and stderr.2" in errors.text
