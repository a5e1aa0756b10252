"""What ``training.py`` compares, and what a framework's room (``training_torch.py`` and its siblings) must offer for it.

A room is a module ``training_<framework>`` with ``prepare(arrangement, model) -> Training``. It is imported in the processes
that train, never in the one that measures, so no framework is loaded beside another.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

ALONE = "alone"
ONE_RANK = "hvd, 1 rank"
SIDE_BY_SIDE = "side by side"
HVD = "hvd"
DDP = "ddp"
DDP_VIEWS = "ddp, views"
DDP_HOROVOD = "ddp, horovod"
DDP_GOES_ON = "ddp, on loss"
MWMS = "mwms"
KERAS_2 = "alone, keras 2"

OF_ONE_PROCESS = (ALONE, ONE_RANK, KERAS_2)
_HOROVOD = ("--torch-backend", "horovod")
UNDER_HOROVODRUN: dict[str, tuple[str, ...]] = {
    ONE_RANK: (),
    HVD: (),
    DDP_HOROVOD: _HOROVOD,
    DDP_GOES_ON: (*_HOROVOD, "--on-loss", "continue", "--min-np", "1"),
}
"""What horovodrun starts, with its options."""
WITH_HVD = (ONE_RANK, HVD)
WITH_DDP = (DDP, DDP_VIEWS, DDP_HOROVOD, DDP_GOES_ON)
COMMON = (ALONE, ONE_RANK, SIDE_BY_SIDE, HVD)
"""Measured in every run."""


@dataclass(frozen=True)
class Framework:
    """What can be measured of a framework.

    Attributes:
        packages: that must be importable; the first is the framework itself.
        peers: what a ``--peer`` adds to the arrangements.
        peer_packages: which peers need besides.
    """

    packages: tuple[str, ...]
    peers: dict[str, tuple[str, ...]]
    peer_packages: tuple[str, ...] = ()


FRAMEWORKS = {
    "torch": Framework(("torch",), {"ddp": (DDP, DDP_VIEWS), "on-loss": (DDP_HOROVOD, DDP_GOES_ON)}),
    "tensorflow": Framework(("tensorflow", "keras"), {"mwms": (MWMS,)}),
    "keras": Framework(("keras", "tensorflow"), {"mwms": (KERAS_2, MWMS)}, ("tf_keras",)),
}


@dataclass(frozen=True)
class Training:
    """A model that is ready to be trained in one process of one arrangement.

    Attributes:
        run: makes one step that is not counted and then as many as it is told; the seconds that these took.
        parameters, tensors: the size of what is trained.
    """

    run: Callable[[int], float]
    parameters: int
    tensors: int


def timed(step: Callable[[], object]) -> Callable[[int], float]:
    """``Training.run`` of a loop whose body is ``step``."""

    def run(steps: int) -> float:
        step()
        started = time.perf_counter()
        for _ in range(steps):
            step()
        return time.perf_counter() - started

    return run
