"""The phases of an elastic job, and what is known of processes that have ended well. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

MOST_REASONS = 4
"""How many processes a message quotes."""


class Early(NamedTuple):
    """A process that has ended with exit code 0 before it did its work: it had no rank in a round that ran."""

    host: str
    text: str
    """Which process, and when, as a clause."""
    unfinished: tuple[tuple[int, str], ...]
    """As for :class:`Finishing`, if it had left the last round to ask for another one."""


@dataclass(frozen=True)
class Gathering:
    """No round runs: the job waits for processes for the next one."""

    number: int
    """How many rounds have ended."""


@dataclass(frozen=True)
class Running:
    """A round runs, or begins."""

    announced: bool
    """Whether its ranks know that hosts have changed, so that it ends soon."""


@dataclass(frozen=True)
class Finishing:
    """A rank of the last round has ended by itself with exit code 0: no further round begins.

    Attributes:
        first: which rank, and how, as a clause.
        unfinished: the other ranks of that round that have asked for a further one, each with where it waited. The job has
            failed if there are any.
    """

    first: str
    unfinished: tuple[tuple[int, str], ...] = ()

    @property
    def why(self) -> str:
        """Why the job has failed; "" if it has not."""
        if not self.unfinished:
            return ""
        waited = [f"  rank {rank} {what}" for rank, what in self.unfinished[:MOST_REASONS]]
        said = f"{self.first} before {count(len(self.unfinished), 'other rank')} had finished:"
        return "\n".join([said, *waited]).rstrip(".")


@dataclass(frozen=True)
class Ending:
    """The job cannot continue."""

    why: str


def count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
