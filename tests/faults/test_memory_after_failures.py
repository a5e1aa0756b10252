"""A rank that has caught the error of a collective may use the tensors' memory at once: nothing is written into it any more.

Elastic training restores its state there. One rank dies while another is about to write a result.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ranks import Death, RankPool
from time_limits import SOON

SIZE = 3
ELEMENTS = {"waiting thread": 1_000_000, "own thread": 4_000_000}
"""Of an array that the thread of the script reduces, and of one that only the runtime's own thread does."""

LIMIT = SOON


def work(engine: str, elements: int, marker: str) -> str:
    """Reduce until the second rank dies inside; what became of the memory of this rank after the error was caught."""
    from horovod.comm import spans
    from horovod.comm.datatypes import DataType
    from horovod.comm.reduction import ReduceOp
    from horovod.comm.shm import direct_reads as direct
    from horovod.comm.tcp import link
    from horovod.common import basics
    from horovod.core.errors import HorovodInternalError
    from horovod.core.lifecycle import context
    from horovod.core.requests.tensor import Tensor
    from horovod.core.submission import collectives

    basics.init()
    generation = context.current()
    rank = generation.identity.rank
    caught, inside = [False], Path(marker)
    armed = [False]

    def before_writing() -> None:
        if not armed[0] or rank == 2:
            return
        armed[0] = False
        deadline = time.monotonic() + LIMIT / 2
        if rank == 1:
            while not inside.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            signal.raise_signal(signal.SIGKILL)
        inside.touch()
        while generation.stopped is None and time.monotonic() < deadline:
            time.sleep(0.01)
        deadline = time.monotonic() + 1  # for the script to be told too early
        while not caught[0] and time.monotonic() < deadline:
            time.sleep(0.01)

    def delayed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            before_writing()
            return function(*arguments)

        return call

    copies: dict[str, tuple[Any, str]] = {
        "shm": (spans.Spans, "write"),
        "direct": (direct, "reduce_into"),
        "tcp": (link.TcpLink, "receive"),
    }
    owner, name = copies[engine]
    original = getattr(owner, name)
    setattr(owner, name, delayed(original))
    array = np.ones(elements, np.float32)
    tensor = Tensor(array, DataType.FLOAT32, (elements,))
    try:
        for step in range(3):
            armed[0] = step == 2
            collectives.allreduce("allreduce", f"step{step}", [tensor], [tensor], ReduceOp.SUM, awaited=True).wait()
    except HorovodInternalError as error:
        caught[0] = True
        array[:] = -1
        assert generation.workers[0].join(SOON)
        assert "rank 1" in str(error)
        assert rank != 0 or inside.exists()
        return "written" if (array != -1).any() else "left alone"
    finally:
        setattr(owner, name, original)
        context.shutdown()
    return "no error"


@pytest.mark.parametrize("who", ELEMENTS)
@pytest.mark.parametrize("engine", ["shm", "direct", "tcp"])
def test_nothing_is_written_after_the_error(
    ranks: Callable[..., RankPool], tmp_path: Path, engine: str, who: str
) -> None:
    settings = {
        "HOROVOD_CPU_OPERATIONS": "shm" if engine == "direct" else engine,
        "HOROVOD_SHM_DIRECT": "always" if engine == "direct" else "never",
    }
    pool = ranks(SIZE, settings)
    marker = os.fspath(tmp_path / "inside")
    results = pool.run(work, engine, ELEMENTS[who], marker, timeout=LIMIT, dies={1})
    assert results == ["left alone", Death(-signal.SIGKILL), "left alone"]
