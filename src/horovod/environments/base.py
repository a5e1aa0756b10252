"""The base of the launchers of this folder: each turns its variables into a
:class:`~horovod._base.process_identity.ProcessIdentity`. Nothing here opens a connection, starts a process or imports a
framework.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from horovod._base.process_identity import HostList, ProcessIdentity, Rank0


class Environment(ABC):
    """One kind of launcher. Subclasses are stateless; the variables are passed in."""

    name: ClassVar[str]
    """The launcher's usual name; shown in errors."""

    over_mpi: ClassVar[bool] = False
    """Whether its ranks can exchange data through MPI, or through MPI's process manager."""

    @staticmethod
    @abstractmethod
    def detect(env: Mapping[str, str]) -> bool:
        """Whether this launcher started the process that has the variables ``env``."""

    @staticmethod
    @abstractmethod
    def identity(env: Mapping[str, str]) -> ProcessIdentity:
        """Read the identity. Called only if :meth:`detect` is true.

        Raises:
            ValueError: a variable is missing, does not parse or contradicts another; the message says what to do.
        """

    @staticmethod
    def host_list(env: Mapping[str, str]) -> HostList | None:
        """The hosts of the job that this process belongs to; None if the launcher's variables do not tell.

        Raises:
            ValueError: a variable does not parse.
        """
        return None


@dataclass(frozen=True)
class Number:
    """A whole number together with where it was read, so that an error can quote its source."""

    value: int
    source: str


class EnvironmentVariables:
    """Reads the variables of one launcher; every error names the variable, its value and the launcher.

    Args:
        env: the environment.
        launcher: the launcher's name, for errors.
        advice: what to do, for errors; ends with a full stop.
    """

    def __init__(self, env: Mapping[str, str], launcher: str, advice: str) -> None:
        self._env = env
        self._launcher = launcher
        self._advice = advice

    def number(self, name: str, default: int | None = None) -> Number:
        """The whole number, at least 0, in variable ``name``; ``default`` if the variable is missing or empty.

        Raises:
            ValueError: the variable is missing and has no default, or does not parse.
        """
        text = self._env.get(name, "").strip()
        if not text:
            if default is None:
                raise self.error(f"environment variable {name} is missing")
            return Number(default, f"{name} (missing, taken as {default})")
        try:
            value = int(text)
        except ValueError:
            raise self.error(f"environment variable {name}={text!r} is not a whole number") from None
        if value < 0:
            raise self.error(f"environment variable {name}={text!r} is negative")
        return Number(value, f"{name}={text!r}")

    def text(self, *names: str) -> str:
        """The first of ``names`` that is set and not empty, else ""."""
        return next((value for name in names if (value := self._env.get(name, "").strip())), "")

    def hostname(self, *names: str) -> str:
        """The host name that the launcher put in one of ``names``, else the machine's."""
        return self.text(*names) or socket.gethostname()

    def identity(
        self,
        *,
        rank: Number,
        size: Number,
        local_rank: Number,
        local_size: Number,
        cross_rank: Number,
        cross_size: Number,
        hostname: str,
        job: str,
        local_ranks_known: bool = True,
        node: str = "",
        rank_0: Rank0 | None = None,
    ) -> ProcessIdentity:
        """Check the numbers against one another, and make a ProcessIdentity of them.

        Raises:
            ValueError: the numbers contradict one another.
        """
        for position, count in ((rank, size), (local_rank, local_size), (cross_rank, cross_size)):
            if count.value < 1:
                raise self.error(f"{count.source} must be at least 1")
            if position.value >= count.value:
                raise self.error(f"{position.source} must be below {count.source}")
        for part in (local_size, cross_size):
            if part.value > size.value:
                raise self.error(f"{part.source} exceeds the size of the whole job, {size.source}")
        return ProcessIdentity(
            rank=rank.value,
            size=size.value,
            local_rank=local_rank.value,
            local_size=local_size.value,
            cross_rank=cross_rank.value,
            cross_size=cross_size.value,
            hostname=hostname,
            launcher=self._launcher,
            job=job,
            local_ranks_known=local_ranks_known,
            node=node,
            rank_0=rank_0,
        )

    def without_local_ranks(
        self, *, rank: Number, size: Number, hostname: str, rank_0: Rank0 | None = None
    ) -> ProcessIdentity:
        """A ProcessIdentity whose local and cross numbers the rendezvous finds from the ranks' hosts."""
        one, zero = Number(1, "1"), Number(0, "0")
        return self.identity(
            rank=rank, size=size, local_rank=zero, local_size=one, cross_rank=zero, cross_size=one,
            hostname=hostname, job="", local_ranks_known=False, rank_0=rank_0,
        )  # fmt: skip

    def port(self, name: str) -> int:
        """The port number in variable ``name``.

        Raises:
            ValueError: the variable is missing, or is not a port number.
        """
        number = self.number(name)
        if not 0 < number.value < 65536:
            raise self.error(f"environment variable {number.source} is not the number of a port")
        return number.value

    def error(self, problem: str) -> ValueError:
        """The error to raise: the problem, the launcher and the advice."""
        return ValueError(f"{problem}. This process seems to have been started by {self._launcher}: {self._advice}")


def consecutive(rank: Number, size: Number, local_size: Number) -> tuple[Number, Number]:
    """Cross rank and cross size if the launcher gives none, as if ranks filled equal hosts one after the other.

    This is a guess: pass ``local_ranks_known=False``, so that the rendezvous replaces the guess by the right numbers.
    """
    assumed = f"assumed from {rank.source}, {size.source} and {local_size.source}"
    per_host = max(1, local_size.value)
    hosts = max(1, -(-size.value // per_host))
    return Number(rank.value // per_host, f"cross rank {assumed}"), Number(hosts, f"cross size {assumed}")
