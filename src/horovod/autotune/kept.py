"""The best settings of a run: as a file for the next run, and as a message that ranks keep when their number changes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import msgspec

from horovod._base import whole_file
from horovod.comm.tuned import TunedSettings


class Fit(msgspec.Struct, frozen=True):
    """The properties of a job that must be the same for its settings to suit another job.

    Attributes:
        version: of this package.
        size: the number of ranks.
        hosts: how many ranks each host has, in order of ranks.
        tensors: the digest of the tensors that recur.
        searched: the digest of the settings that were searched, with their values, and of those that the user had set.
    """

    version: str
    size: int
    hosts: tuple[int, ...]
    tensors: str
    searched: str

    def differences(self, other: Fit) -> str:
        """How another job differs from this one, as text; "" if it does not."""
        named = {
            "version": f"version {other.version} instead of {self.version}",
            "size": f"{other.size} ranks instead of {self.size}",
            "hosts": f"ranks by host {list(other.hosts)} instead of {list(self.hosts)}",
            "tensors": "other tensors",
            "searched": "other settings to search",
        }
        return ", ".join(text for name, text in named.items() if getattr(self, name) != getattr(other, name))


class Kept(msgspec.Struct, frozen=True):
    """The best settings that were found.

    Attributes:
        fit: the job that they were found for.
        finished: the search was complete. Otherwise the next run continues from them.
        gain: how much faster they are than the initial settings, as a share.
    """

    fit: Fit
    settings: TunedSettings
    finished: bool
    gain: float = 0.0


class Tuned(msgspec.Struct, frozen=True, array_like=True):
    """Rank 0's message to all ranks: the settings from now on, and the best known ones, for a later generation."""

    settings: TunedSettings
    best: Kept | None = None


class KeptFileError(ValueError):
    """A file is not one that autotuning has written."""


def digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def default_path(fit: Fit, home: str, cache: str) -> Path:
    """The default file for the choice of a job.

    Args:
        home: the user's home folder; ``cache``: ``XDG_CACHE_HOME``, or "".
    """
    folder = Path(cache) if cache else Path(home) / ".cache"
    name = digest([fit.version, str(fit.size), str(fit.hosts), fit.tensors, fit.searched])
    return folder / "horovod" / "autotune" / f"{name}.json"


def read(path: Path) -> Kept | None:
    """The settings in a file; None if there is no file.

    Raises:
        OSError: it cannot be read.
        KeptFileError: it is something else.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(data, type=_File).kept()
    except (msgspec.DecodeError, TypeError) as error:
        raise KeptFileError(f"{path} was not written by autotuning ({error}); remove it or name another file") from None


def write(path: Path, kept: Kept) -> None:
    """Keep it. A reader sees the old content or the new one.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    whole_file.write(path, msgspec.json.format(msgspec.json.encode(_File.of(kept)), indent=1) + b"\n")


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """The content of the file: settings by name, for people who read it."""

    fit: Fit
    settings: dict[str, int | str | bool]
    finished: bool
    gain: float

    @staticmethod
    def of(kept: Kept) -> _File:
        return _File(kept.fit, msgspec.structs.asdict(kept.settings), kept.finished, round(kept.gain, 4))

    def kept(self) -> Kept:
        given = set(self.settings)
        if given != set(TunedSettings.__struct_fields__):
            raise TypeError(f"its settings are {', '.join(sorted(given))}")
        settings = msgspec.convert(
            [self.settings[name] for name in TunedSettings.__struct_fields__], TunedSettings, strict=True
        )
        return Kept(self.fit, settings, self.finished, self.gain)
