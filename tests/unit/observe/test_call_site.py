"""Which line of the user's script it is: never one of this package, of a library, or of the standard library."""

from __future__ import annotations

import _thread
import ast
import concurrent.futures
import gc
import json
import queue
import sys
import threading
import warnings
from functools import partial
from pathlib import Path
from types import FrameType

import pytest

from horovod.observe import call_site
from references import kept
from time_limits import SOON

HERE = str(Path(__file__))
PACKAGE = Path(call_site.__file__).resolve().parent.parent
LIBRARY = Path(pytest.__file__).resolve().parent


def line_of() -> int:
    frame = sys._getframe(1)
    assert isinstance(frame, FrameType)
    return frame.f_lineno


def compiled(filename: str, call: str = "function()") -> object:
    """A function whose code seems to stand in ``filename``."""
    space: dict[str, object] = {}
    source = ast.parse(f"def outer(function):\n    return {call}")
    exec(compile(source, filename, "exec"), space)
    return space["outer"]


def test_the_caller_is_the_line_that_calls() -> None:
    found, line = call_site.caller(), line_of()
    assert found == f"{HERE}:{line}"


@pytest.mark.parametrize(
    "filename",
    [
        str(PACKAGE / "torch" / "mpi_ops.py"),
        str(LIBRARY / "python.py"),
        "/usr/lib/python3/dist-packages/torch/optim.py",
        str(Path(threading.__file__).resolve().parent / "queue.py"),
        "<frozen importlib._bootstrap>",
    ],
)
def test_frames_outside_the_users_code_are_skipped(filename: str) -> None:
    outer = compiled(filename)
    found, line = outer(call_site.caller), line_of()  # type: ignore[operator]
    assert found == f"{HERE}:{line}"


def test_frames_that_are_known_are_skipped() -> None:
    found, line = compiled("/home/user/train.py", "function(1)")(call_site.caller), line_of()  # type: ignore[operator]  # a function
    assert found == f"{HERE}:{line}"


def test_more_frames_to_skip_than_there_are() -> None:
    found: queue.Queue[str] = queue.Queue()
    _thread.start_new_thread(lambda: found.put(call_site.caller(2)), ())
    assert found.get(timeout=SOON).startswith(f"{HERE}:")


@pytest.mark.parametrize("filename", ["/home/user/train.py", "<stdin>", "<ipython-input-3-abc>", "script.py"])
def test_frames_of_the_users_code_are_found(filename: str) -> None:
    assert compiled(filename)(call_site.caller) == f"{filename}:2"  # type: ignore[operator]


def test_a_deep_library_between_the_script_and_the_call() -> None:
    outer = compiled(str(LIBRARY / "deep.py"), "function() if not isinstance(function, tuple) else outer(function[0])")
    nested: object = call_site.caller
    for _ in range(300):
        nested = (nested,)
    found, line = outer(nested), line_of()  # type: ignore[operator]
    assert found == f"{HERE}:{line}"


def test_a_thread_of_nobody_has_at_least_some_line() -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert ":" in pool.submit(call_site.caller).result(SOON)


def raise_in_library() -> None:
    compiled(str(LIBRARY / "raises.py"), "function('{')")(json.loads)  # type: ignore[operator]


def test_an_exception_was_raised_at_the_users_last_line() -> None:
    with pytest.raises(ValueError) as caught:
        raise_in_library()
    found = call_site.raised_at(caught.value)
    assert found.startswith(f"{HERE}:")
    line = int(found.rsplit(":", 1)[1])
    assert "json.loads" in Path(HERE).read_text().splitlines()[line - 1]


def test_an_exception_that_was_never_raised_has_no_line() -> None:
    assert call_site.raised_at(ValueError("made, not raised")) == ""


def test_a_line_given_instead() -> None:
    with call_site.on_behalf_of("train.py:7"):
        assert call_site.caller() == "train.py:7"
        elsewhere: list[str] = []
        thread = threading.Thread(target=lambda: elsewhere.append(call_site.caller()))
        thread.start()
        thread.join()
        assert elsewhere != ["train.py:7"]
        with call_site.on_behalf_of("train.py:8"):
            assert call_site.caller() == "train.py:8"
        assert call_site.caller() == "train.py:7"
    assert "test_call_site.py" in call_site.caller()


def test_files_that_are_made_for_ever_fill_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_site, "_REMEMBERED", 8)
    files = []
    for number in range(100):
        function = compiled(f"/home/user/cell-{number}.py")
        assert function(call_site.caller) == f"/home/user/cell-{number}.py:2"
        files.append(function.__code__.co_filename)
    del function
    gc.collect()
    assert kept(files) <= 2 * 8  # files and lines


def test_a_file_whose_name_is_no_text_can_be_told_to_others() -> None:
    found = compiled("/home/user/caf\udce9.py")(call_site.caller)
    assert found == "/home/user/caf\\udce9.py:2"


def test_a_warning_stands_at_the_users_line_and_is_shown_once_for_each() -> None:
    libraries = [compiled(str(folder / "some.py")) for folder in (PACKAGE, LIBRARY, Path(threading.__file__).parent)]

    def call() -> None:
        function = partial(call_site.warn, "the text", DeprecationWarning)
        for library in libraries:
            function = partial(library, function)  # type: ignore[arg-type]  # made by exec()
        function()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            call()
    (warning,) = caught
    assert (warning.filename, warning.lineno) == (HERE, call.__code__.co_firstlineno + 4)
    assert (str(warning.message), warning.category) == ("the text", DeprecationWarning)


def test_a_warning_on_a_thread_without_the_users_code_stands_where_it_is_issued() -> None:
    issuing = compiled(str(PACKAGE / "some.py"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        thread = threading.Thread(target=issuing, args=(partial(call_site.warn, "the text"),))
        thread.start()
        thread.join(SOON)
    (warning,) = caught
    assert (warning.filename, warning.lineno) == (str(PACKAGE / "some.py"), 2)
