"""Lists of objects that must not be freed while this process lives, since a library may still use them.

At exit the interpreter frees the objects that modules hold, while the threads of a library end later. So memory would be freed
while the library still uses it, or a destructor would wait for an operation that never ends.
"""

from __future__ import annotations

import ctypes
from typing import Any


def lasting_list() -> list[Any]:
    """A new list that the interpreter never frees, nor its contents."""
    made: list[Any] = []
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))
    return made
