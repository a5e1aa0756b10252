"""Runs examples on ranks that exist already, as ``horovodrun python SCRIPT`` would, and looks at what they came to.

Each runs as a copy in a folder without anything else, since its readers may have only this one file. With HOROVOD_CHECK=error:
the ranks of no example come apart.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from keras_ranks import env_of
from ranks import RankPool

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


class Ended(NamedTuple):
    """How a script ended on one rank.

    Attributes:
        printed: what it wrote to stdout.
        parameters: for each of its distributed optimizers, the bytes of all parameters; PyTorch's only.
    """

    printed: str
    parameters: list[bytes]


@pytest.fixture
def example(ranks: Callable[..., RankPool], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Ended]]:
    """``example("pytorch_x.py --epochs 2", size=2)``: run an example to its end on every rank; by rank, how it ended.

    ``backend`` is that of Keras.
    """

    def run(command: str, size: int = 2, backend: str = "tensorflow") -> list[Ended]:
        script, *arguments = shlex.split(command)
        framework, env = ("torch", None) if script.startswith("pytorch") else ("keras", env_of(backend))
        alone = shutil.copy(EXAMPLES / script, tmp_path_factory.mktemp("alone"))
        return ranks(size, env, framework).run(_run_script, str(alone), framework, arguments)

    return run


def _run_script(script: str, framework: str, arguments: list[str]) -> Ended:
    """Runs on a rank: the script as ``__main__``, and then what was left of it."""
    import contextlib
    import importlib
    import io
    import os
    import runpy
    import signal
    import sys
    from pathlib import Path

    from horovod._base import config

    hvd = importlib.import_module(f"horovod.{framework}")
    optimizers = []

    def noted(*args: object, **kwargs: object) -> object:
        optimizers.append(wrap(*args, **kwargs))
        return optimizers[-1]

    wrap, hvd.DistributedOptimizer = hvd.DistributedOptimizer, noted
    before = (sys.argv, list(sys.path), dict(os.environ))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    sys.argv, sys.path[:0] = [script, *arguments], [str(Path(script).parent)]
    os.environ[config.CHECK] = "error"
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            try:
                runpy.run_path(script, run_name="__main__")
            except SystemExit as end:
                assert not end.code, f"the script ended with {end.code!r}"
        parameters = [
            b"".join(p.detach().numpy().tobytes() for group in optimizer.param_groups for p in group["params"])
            for optimizer in optimizers
            if hasattr(optimizer, "param_groups")
        ]
        return Ended(printed.getvalue(), parameters)
    finally:
        hvd.DistributedOptimizer = wrap
        hvd.shutdown()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        sys.argv, sys.path[:] = before[0], before[1]
        os.environ.clear()
        os.environ.update(before[2])
