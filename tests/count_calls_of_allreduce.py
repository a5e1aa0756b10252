"""Counts the files and functions of ``src/horovod`` that a blocking ``hvd.allreduce`` of a
PyTorch tensor enters on rank 0 of two on one host, in all threads of that rank, once the same call has been made often before.

    python tests/count_calls_of_allreduce.py           # the numbers, for tensors of 4 KB and of 40 MB, without and with a name
    python tests/count_calls_of_allreduce.py --names   # and what is counted

A function counts once a call, however often it is entered. So does a lambda, a generator or a comprehension that Python runs
in a frame. A call for which a rank is late enters others, so the one of many calls that enters the fewest counts.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ranks import RankPool

SMALL, LARGE = 4 << 10, 40 << 20
"""Bytes of a tensor that fits into shared memory beside a proposal, and of one that the worker thread carries out."""


class Function(NamedTuple):
    """One function: its file below ``src/horovod``, its name, and the line where it begins."""

    file: str
    name: str
    line: int


def count(pool: RankPool, nbytes: int, named: bool, calls: int = 100) -> list[Function]:
    """The functions that one call enters on rank 0, in the order in which they are entered first."""
    found: list[Function] = pool.run(_measure, nbytes, named, calls)[0]
    return found


def files(functions: Sequence[Function]) -> list[str]:
    """Their files, in the order in which they are entered."""
    return list(dict.fromkeys(function.file for function in functions))


def _measure(nbytes: int, named: bool, calls: int) -> list[Function]:
    """Runs on every rank: the fewest functions that one of the later half of the calls has entered."""
    import torch

    import horovod
    import horovod.torch as hvd

    entered: dict[Any, None] = {}

    def note(frame: Any, event: str, _: object) -> None:
        if event == "call":
            entered[frame.f_code] = None

    root = str(Path(horovod.__file__).parent) + "/"
    name = f"calls.of.{nbytes}" if named else None
    threading.setprofile(note)  # for the threads that init() starts
    sys.setprofile(note)
    try:
        hvd.init()
        tensor = torch.ones(nbytes // 4)
        seen = []
        for _ in range(calls):
            hvd.barrier()
            entered.clear()
            hvd.allreduce(tensor, name=name)
            seen.append([code for code in list(entered) if code.co_filename.startswith(root)])
    finally:
        hvd.shutdown()
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # as documented
    fewest = min(seen[calls // 2 :], key=len)
    return [
        Function(code.co_filename.removeprefix(root), getattr(code, "co_qualname", code.co_name), code.co_firstlineno)
        for code in fewest
    ]


def main(arguments: Sequence[str]) -> None:
    pool = RankPool(2, framework="torch")
    try:
        for nbytes in (SMALL, LARGE):
            for named in (False, True):
                found = count(pool, nbytes, named)
                print(
                    f"{nbytes} bytes, {'with' if named else 'without'} a name: "
                    f"{len(files(found))} files, {len(found)} functions"
                )
                for file in files(found) if "--names" in arguments else ():
                    print(f"    {file}: {', '.join(function.name for function in found if function.file == file)}")
    finally:
        pool.close()


if __name__ == "__main__":
    main(sys.argv[1:])
