"""The errors that scripts catch."""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """A collective failed: ranks disagreed, a rank left or died, or the runtime was shut down. Elastic jobs recover from it."""


class NoNextRound(HorovodInternalError):
    """A collective failed, and the job cannot go on with other ranks. ``hvd.elastic.run`` does not catch it."""


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of an elastic job have changed.

    Attributes:
        skip_sync: whether the state need not be synchronised (hosts were only removed).
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
