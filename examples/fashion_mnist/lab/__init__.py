"""The parts that all scripts of the lab share, so that a script contains only the training.

Nothing here depends on other ranks, except that :func:`lab.data.load` checks that all of them use the same images.
"""

from __future__ import annotations

from lab import data
from lab.checkpoints import Checkpoints
from lab.early_stopping import StopAtAccuracy
from lab.options import parse_options
from lab.reporting import Report
from lab.wide_resnet import wide_resnet

__all__ = ["Checkpoints", "Report", "StopAtAccuracy", "data", "parse_options", "wide_resnet"]
