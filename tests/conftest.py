"""What all tests share: pools of rank processes, and the rule that a test leaves nothing behind."""

from __future__ import annotations

import importlib.util
import logging
import os
import signal
import tempfile
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings

if importlib.util.find_spec("triton"):  # of PyTorch's builds for CUDA: it aborts if TensorFlow was imported before
    import triton  # noqa: F401

import native_devices
from leaks import Inventory, left_behind
from ranks import Pools, RankPool
from spent import Spent

settings.register_profile("untimed", deadline=None)  # no test asserts a time: the machine may be busy
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
    config.pluginmanager.register(Spent())


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
