"""Collectives as graphs record them: as bytes, so that a saved graph contains all that a process needs to run it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import msgspec

from horovod.core.lifecycle.process_set import ProcessSet, global_process_set, membership
from horovod.core.requests.handle import Handle

Outputs = Callable[[], list[Any]]
"""Makes eager tensors of a collective's results. Called once, after the collective is done."""


class Collective(msgspec.Struct, frozen=True):
    """One collective without its tensors. The fields of a subclass are the arguments, of types that msgspec can encode.

    Saved graphs contain the names of the subclass and its fields, so these must not change.

    Attributes:
        mismatch: the text to add to the error if the ranks disagree on ``Request.alike`` in a graph.
    """

    @property
    def mismatch(self) -> str:
        return ""

    kinds: ClassVar[dict[str, type[Collective]]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        Collective.kinds[cls.__name__] = cls

    def start(self, inputs: Sequence[Any], awaited: bool) -> tuple[Handle, Outputs]:
        """Submit eager tensors to the core, and return the handle and the function that makes the outputs.

        Args:
            inputs: the tensors.
            awaited: as in :mod:`horovod.core.submission.collectives`.

        Raises:
            as the functions of :mod:`horovod.core.submission.collectives`.
        """
        raise NotImplementedError


class GraphSubmission(msgspec.Struct, frozen=True):
    """A submission in a graph.

    Attributes:
        operation: identifies the operation of the graph that submits. It is the name of the operation's queue, or, if a session
            runs the graph, a name that is unique in this process.
        per_run: how many submissions this operation makes in one run of the graph.
        line: ``file:line`` of the user's code that made the operation.
        collective: the collective to submit.
    """

    operation: str
    per_run: int
    line: str
    collective: Collective

    def encoded(self) -> bytes:
        """This submission as bytes."""
        fields = msgspec.to_builtins(self.collective, enc_hook=_ranks_of)
        return msgspec.msgpack.encode((self.operation, self.per_run, self.line, type(self.collective).__name__, fields))


@functools.lru_cache(maxsize=4096)
def decoded(message: bytes) -> GraphSubmission:
    """The submission that :meth:`GraphSubmission.encoded` has written, in this process or in the one that saved the graph."""
    operation, per_run, line, kind, fields = msgspec.msgpack.decode(message)
    return GraphSubmission(
        operation, per_run, line, msgspec.convert(fields, Collective.kinds[kind], dec_hook=_set_of_ranks)
    )


class _SetOfRanks(ProcessSet):
    """The process set that has these ranks when it is used. Its number may differ between processes and jobs."""

    @property
    def process_set_id(self) -> int | None:  # type: ignore[override]  # not an attribute, because it is looked up
        return next((number for number, ranks in membership.ranks.items() if ranks == self.ranks), None)


def _ranks_of(process_set: Any) -> list[int]:
    """The ranks of a process set. Of the global one, whose ranks differ between jobs, an empty list."""
    if process_set is global_process_set:
        return []
    if not isinstance(process_set, ProcessSet) or process_set.ranks is None:
        raise TypeError(f"a graph cannot record {process_set!r}")
    return process_set.ranks


def _set_of_ranks(kind: type[Any], ranks: Any) -> ProcessSet:
    return _SetOfRanks(ranks) if ranks else global_process_set
