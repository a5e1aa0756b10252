"""What is pickled for other ranks."""

from __future__ import annotations

import io
from collections.abc import Callable
from types import CodeType
from typing import Any

import cloudpickle

from horovod._base import pickling

SOURCE = """
def outer(x):
    def inner():
        return [x + y for y in range(2)]
    return inner()
"""


def function() -> Callable[[int], list[int]]:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(SOURCE, "/the/users/script.py", "exec"), names)
    made: Callable[[int], list[int]] = names["outer"]
    return made


def test_a_function_keeps_the_name_of_its_file_and_so_do_those_inside_it() -> None:
    loaded = cloudpickle.loads(pickling.dumps(function()))
    assert loaded(3) == [3, 4]
    inner = [each for each in loaded.__code__.co_consts if isinstance(each, CodeType)]
    assert [each.co_filename for each in (loaded.__code__, *inner)] == ["/the/users/script.py"] * 2
    assert loaded.__code__.co_firstlineno == 2


def test_objects_arrive_as_they_were() -> None:
    value = {"a": [1, (2, None)], "b": {3.0}}
    buffer = io.BytesIO()
    pickling.dump(value, buffer)
    assert cloudpickle.loads(pickling.dumps(value)) == cloudpickle.loads(buffer.getvalue()) == value
