"""One rank on Ray: an actor that calls functions."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from horovod._base import config
from horovod.core.errors import MismatchError
from horovod.core.lifecycle import context


@dataclass(frozen=True)
class Executable:
    """The object that functions get: its class and arguments. Without a class it is None."""

    cls: Callable[..., Any] | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def parts(self) -> tuple[Any, ...]:
        return self.cls, self.args, self.kwargs

    def make(self) -> Any:
        return None if self.cls is None else self.cls(*self.args, **self.kwargs)


class BaseHorovodWorker:
    """A rank. The executor makes an actor of it.

    Args:
        world_rank, world_size: the rank, and how many there are.
    """

    executable: Any = None
    """The object that the functions get."""

    def __init__(self, world_rank: int = 0, world_size: int = 1) -> None:
        self.update_env_vars({config.HOSTNAME: self.node_id(), config.RANK: world_rank, config.SIZE: world_size})

    def node_id(self) -> str:
        """Ray's number of the node, in hexadecimal."""
        return str(ray.get_runtime_context().get_node_id())

    def hostname(self) -> str:
        return socket.gethostname()

    def get_gpu_ids(self) -> list[str]:
        """The GPUs that Ray has given this actor, as CUDA_VISIBLE_DEVICES names them."""
        return [str(each) for each in ray.get_gpu_ids()]

    def update_env_vars(self, env_vars: Mapping[str, object]) -> None:
        """Set variables of this process."""
        os.environ.update({name: str(value) for name, value in env_vars.items()})

    def env_vars(self) -> dict[str, str]:
        """All variables of this process."""
        return dict(os.environ)

    def start_executable(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Make the object that the functions get."""
        given = Executable(executable_cls, tuple(executable_args or ()), dict(executable_kwargs or {}))
        self.executable = self._guarded(given.make)

    def execute(self, func: Callable[[Any], Any]) -> Any:
        """``func(executable)``. If it raises, this rank leaves the job with that error, so that the other ranks get it too."""
        return self._guarded(func, self.executable)

    @staticmethod
    def _guarded(function: Callable[..., Any], *arguments: Any) -> Any:
        with leaving_on_error():
            return function(*arguments)


@contextlib.contextmanager
def leaving_on_error() -> Iterator[None]:
    """If the code raises, this rank leaves the job with that error, so that the other ranks get it, too."""
    try:
        yield
    except BaseException as error:
        # The process goes on, as an interpreter at a prompt does; this is where Python notes what ended a command there.
        sys.last_value = error
        if sys.version_info >= (3, 12):
            sys.last_exc = error
        with contextlib.suppress(MismatchError):  # the function's error tells more
            context.shutdown()
        raise
