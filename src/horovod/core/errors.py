"""The errors that scripts catch."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

_Error = TypeVar("_Error", bound="HorovodInternalError")

_RECALLED = 8
_recent: deque[tuple[str, type[HorovodInternalError], dict[str, Any]]] = deque(maxlen=_RECALLED)
"""The text, the type and the attributes of the last errors. Not the errors: their tracebacks would keep tensors alive."""


class HorovodInternalError(RuntimeError):
    """A collective failed: ranks disagreed, a rank left or died, or the runtime was shut down.

    Its subclasses say what kind of failure it is. Elastic jobs recover from failures that another round may not repeat.

    Attributes:
        ranks: the global ranks that the failure concerns, ascending; empty if they are not known.
        tensor: the name of the tensor or the request; "" if the failure concerns none.
        call_sites: by global rank, the line of the script that submitted the request, or that the rank is at; without ranks
            whose line is not known.
        reason: the cause in one sentence.
    """

    def __init__(
        self,
        *args: object,
        ranks: Iterable[int] = (),
        tensor: str = "",
        call_sites: Mapping[int, str] | None = None,
        reason: str = "",
    ) -> None:
        super().__init__(*args)
        self.ranks = tuple(sorted(ranks))
        self.tensor = tensor
        self.call_sites = dict(call_sites or {})
        text = str(args[0]) if args else ""
        self.reason = reason or text
        if type(self).__module__ == __name__:
            _recent.append((text, type(self), self.__dict__))

    def again(self: _Error) -> _Error:
        """A copy of the error to raise elsewhere, without traceback and context."""
        return copy.copy(self)

    def adopt(self, other: HorovodInternalError) -> None:
        """Copy the attributes of the error that this one replaces."""
        self.ranks, self.tensor, self.call_sites, self.reason = (
            other.ranks,
            other.tensor,
            other.call_sites,
            other.reason,
        )

    def extended(self: _Error, text: str) -> _Error:
        """The same error with a further sentence."""
        made = copy.copy(self)
        made.args = (f"{self} {text}",)
        return made


class MismatchError(HorovodInternalError):
    """Ranks submitted different requests under one name. All of them raise it.

    It also ends elastic jobs, because another round would repeat it.

    ``ranks`` are those that submitted something, ``call_sites`` the lines that did.
    """


class RankLostError(HorovodInternalError):
    """A rank's process ended, was stopped, cannot be reached, or has left the job while others waited for it."""


class RankRaisedError(RankLostError):
    """A rank's script ended with an exception. ``reason`` has its type, text and line."""


class RepeatedFailureError(RankRaisedError):
    """The same exception of the script has ended several rounds of an elastic job in a row, without a completed step between
    them. It ends the job."""


class CollectiveTimeoutError(HorovodInternalError):
    """A rank runs, but did not take part in a collective within the time limit."""


class EngineFailureError(HorovodInternalError):
    """An engine, a device or the runtime failed on a rank, or no engine can serve a collective."""


KINDS = (
    HorovodInternalError,
    MismatchError,
    RankLostError,
    RankRaisedError,
    CollectiveTimeoutError,
    EngineFailureError,
)
"""The types that a collective can fail with. Bindings derive errors of their framework from each."""


def recall(text: str) -> HorovodInternalError | None:
    """The latest error of this process with this text. A framework may have put the error's type before the text."""
    for said, kind, attributes in reversed(list(_recent)):
        if said and (said == text or f"{kind.__name__}: {said}" in text):
            made: HorovodInternalError = kind(said)
            made.__dict__.update(attributes)
            return made
    return None


class NoNextRound(HorovodInternalError):
    """A collective failed, and the job cannot go on with other ranks. ``hvd.elastic.run`` does not catch it."""


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of an elastic job have changed.

    Attributes:
        skip_sync: whether hosts were only removed, so that the state need not be synchronised.
    """

    def __init__(self, skip_sync: bool) -> None:
        super().__init__("the hosts of this job have changed")
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """A framework's installed version is not the one that was expected.

    Attributes:
        name, version, installed_version: the framework, the expected and the found version.
    """

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name = name
        self.version = version
        self.installed_version = installed_version


def get_version_mismatch_message(name: str, version: str, installed_version: str) -> str:
    return f"expected {name} {version}, but {name} {installed_version} is installed"


NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."
SHUT_DOWN = "Horovod has been shut down."


def shut_down_by(rank: int, reason: str, tensor: str = "") -> RankLostError:
    """The error of all requests in flight, and of all later submissions, after ``rank`` has shut down."""
    return RankLostError(
        f"{SHUT_DOWN} This was caused by rank {rank}: {reason}.", ranks=[rank], tensor=tensor, reason=reason
    )
