"""Lists of what must not be freed while this process lives, since a library may still use it.

The interpreter frees what its modules hold when it ends, and the threads of a library end later. So memory would be freed that
the library still reads or writes, or a destructor would wait for an operation that never ends.
"""

from __future__ import annotations

import ctypes
from typing import Any


def lasting_list() -> list[Any]:
    """A list that is not freed when the interpreter ends, and neither is what is in it then."""
    made: list[Any] = []
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))
    return made
