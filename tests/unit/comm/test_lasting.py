"""What a library may still use is not freed when the interpreter ends."""

from __future__ import annotations

import subprocess
import sys

from time_limits import SOON

PROGRAM = """
import os
from functools import partial
from horovod.comm.lasting import lasting_list

def memory(name):  # of a class that refers to no module
    return type("Memory", (), {"__del__": partial(os.write, 1, f"{name} freed\\n".encode())})()

lasting, list_of_a_module = lasting_list(), []
lasting.append(memory("in a lasting list"))
list_of_a_module.append(memory("in a module's list"))
lasting.append(memory("taken out of a lasting list"))
lasting.pop()
"""


def test_the_end_of_the_interpreter_frees_what_other_lists_hold() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=SOON, check=True)
    assert sorted(ended.stdout.splitlines()) == ["in a module's list freed", "taken out of a lasting list freed"]
