"""Variables of one rank among several, in a form that no known launcher sets: an error, never a job of one process.

An ordinary shell may have a size of 1, a size without a rank, or a batch system's variables for an allocation. These are not
errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from horovod._base import config
from horovod._base.process_identity import ProcessIdentity
from horovod.environments.base import Environment


class Sign(NamedTuple):
    """The variables that one kind of launcher gives each of its ranks."""

    launcher: str
    rank: str
    size: str
    advice: str
    """What the user must do; begins with a verb."""


_SIGNS = (
    Sign("torchrun", "RANK", "TORCHELASTIC_RUN_ID",
         "start the script with torchrun and leave RANK and WORLD_SIZE as it sets them"),
    Sign("a PyTorchJob, or another launcher for torch.distributed", "RANK", "WORLD_SIZE",
         "set MASTER_ADDR and MASTER_PORT as well, to where rank 0 can listen, the same for all ranks"),
    Sign("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
         "start the script with mpirun and leave its variables as they are"),
    Sign("an MPI with PMI", "PMI_RANK", "PMI_SIZE", "start the script with mpiexec and leave its variables as they are"),
    Sign("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "start the job with horovodrun, or with mpirun"),
    Sign("Cray PALS", "PALS_RANKID", "PALS_SIZE", "start the job with horovodrun"),
)  # fmt: skip
_RANKS_ALONE = (
    ("PMIx", "PMIX_RANK"),
    ("jsrun", "JSM_NAMESPACE_RANK"),
    ("Cray PALS", "PALS_RANKID"),
    ("Cray ALPS", "ALPS_APP_PE"),
)
"""Launchers and variables with a rank but without a size; only a rank above 0 shows that there are several ranks."""


def problem(env: Mapping[str, str]) -> str:
    """Which variables are incomplete, which launcher they look like, and what to do; "" if there are none. Pure."""

    def number(name: str) -> int | None:
        text = env.get(name, "").strip()
        return int(text) if text.isdecimal() else None

    def shown(*names: str) -> str:
        return ", ".join(f"{name}={env[name]!r}" if env.get(name) else f"no {name}" for name in names)

    alone = "to run the script alone, unset them"
    for sign in _SIGNS:
        rank, size = number(sign.rank), number(sign.size)
        if sign.size == "TORCHELASTIC_RUN_ID":
            if env.get(sign.size) and not (env.get("RANK") and env.get("WORLD_SIZE")):
                return _text(shown("RANK", "WORLD_SIZE", sign.size), sign.launcher, sign.advice, alone)
        elif size is not None and rank is not None and (size > 1 or rank >= size):
            extra = tuple(name for name in ("MASTER_ADDR", "MASTER_PORT") if sign.size == "WORLD_SIZE")
            contradiction = f"{sign.rank} must be below {sign.size}, and " if rank >= size else ""
            return _text(shown(sign.rank, sign.size, *extra), sign.launcher, contradiction + sign.advice, alone)
    if env.get(config.RENDEZVOUS_ADDRESS):
        names = (config.RENDEZVOUS_ADDRESS, config.RANK, config.SIZE)
        return _text(shown(*names), "horovodrun", f"set {config.RANK} and {config.SIZE}, too", alone)
    for launcher, name in _RANKS_ALONE:
        if number(name):
            return _text(shown(name), launcher, "start the job with horovodrun, or with mpirun", alone)
    return ""


def _text(found: str, launcher: str, advice: str, alone: str) -> str:
    return (
        f"this process looks like one rank of several and cannot find out which: its environment has {found}, as if "
        f"{launcher} had started it. Please {advice}; {alone}."
    )


class Unclear(Environment):
    name = "an unknown launcher"

    @staticmethod
    def detect(env: Mapping[str, str]) -> bool:
        return bool(problem(env))

    @staticmethod
    def identity(env: Mapping[str, str]) -> ProcessIdentity:
        raise ValueError(problem(env))
