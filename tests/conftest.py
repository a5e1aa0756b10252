"""What all tests share: pools of rank processes, and the rule that a test leaves nothing behind."""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import re
import signal
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import settings

# PyTorch's threads wait for each other without using the cores that others need: half of what a small training costs.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy's have no such policy

if importlib.util.find_spec("triton"):  # of PyTorch's builds for CUDA: it aborts if TensorFlow was imported before
    import triton  # noqa: F401

import mpi_memory
import native_devices
from eager import framework_imports
from file_order import places
from leaks import Inventory, left_behind
from part import draws
from ranks import Pools, RankPool
from spent import Spent

settings.register_profile(
    "untimed", deadline=None, max_examples=draws(100)
)  # no test asserts a time: the machine may be busy
settings.load_profile("untimed")

# A shell that starts the tests in the background has them ignore Ctrl-C, and nohup a hang-up. Whatever they start would inherit
# that; a handler is not inherited.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)


def pytest_configure(config: pytest.Config) -> None:
    """All temporary files of the tests, and of the processes they start, go to one folder that is removed at the end.

    pytest's own stay where they are: it keeps those of tests that failed.
    """
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    folder = tempfile.TemporaryDirectory(prefix="hvd-", ignore_cleanup_errors=True)  # short: sockets' paths are limited
    config.add_cleanup(folder.cleanup)
    os.environ["TMPDIR"] = tempfile.tempdir = folder.name
    if not hasattr(config, "workerinput"):  # the process that outlives those that run a part of the tests
        config.add_cleanup(mpi_memory.remover())
    config.pluginmanager.register(Spent())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Nothing that is there before the first test is garbage, and the collector need not look through it again and again."""
    framework_imports.install()
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The same order in all processes of pytest."""
    files = [each.nodeid.split("::")[0] for each in items]
    place = places(files)
    items[:] = [item for _, item in sorted(zip(files, items, strict=True), key=lambda pair: place[pair[0]])]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One process of pytest runs a file, or all tests that need one of the pools that take long to start."""
    from xdist.scheduler import LoadFileScheduling

    class ByPool(LoadFileScheduling):  # type: ignore[misc]  # untyped base
        def _split_scope(self, nodeid: str) -> str:
            return pool_of(nodeid) or super()._split_scope(nodeid)

    return ByPool(config, log) if config.getoption("dist") == "loadfile" else None


def pool_of(nodeid: str) -> str:
    """The pool of ranks that a test shares with those of other files; "" if that does not matter."""
    backend = re.search(r"[\[-](jax|torch|tensorflow)[\]-]", nodeid) if "keras" in nodeid else None
    if backend is not None and not nodeid.startswith(("tests/unit", "tests/launcher")):
        return f"Keras on {backend[1]}"
    return "TensorFlow" if nodeid.startswith("tests/parallel/tensorflow") else ""


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    pools.close()


@pytest.fixture
def ranks(pools: Pools) -> Callable[..., RankPool]:
    """``ranks(size, env=None, framework=None)``: a pool of rank processes in working order, reused by later tests."""
    return pools.get


@pytest.fixture(autouse=True)
def log_that_can_be_read() -> Iterator[None]:
    """``init()`` in pytest's own process sends the log elsewhere; that must not outlast the test."""
    logger = logging.getLogger("horovod")
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)
    logger.propagate = propagate


@pytest.fixture(autouse=True)
def nothing_left_behind(pools: Pools) -> Iterator[None]:
    """Fail a test that leaves a thread, a child process or an open descriptor behind in pytest's own process."""
    before = Inventory.take()
    yield

    def take() -> Inventory:
        return Inventory.take().without(pools.processes(), pools.descriptors())

    left = left_behind(before, take)
    assert not left, f"the test left behind: {'; '.join(left)}"


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The library that stands in for CUDA and NCCL."""
    if native_devices.compiler() is None:
        pytest.skip("there is no C compiler for the stand-ins of CUDA and NCCL: install cc, or set CC")
    return native_devices.build(tmp_path_factory.mktemp("stand-in"))
