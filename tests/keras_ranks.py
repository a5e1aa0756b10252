"""What tests of Keras share: what is installed, a pool of ranks for each backend as Keras keeps its own, and training data."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from horovod.common.util import is_version_greater_equal_than
from ranks import RankPool

POOL = 3
"""Ranks of a pool; smaller jobs use a part of it, for TensorFlow and JAX take seconds to import."""

QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0", "CUDA_VISIBLE_DEVICES": ""}


def env_of(backend: str, version: int = 3) -> dict[str, str]:
    """The environment of ranks on one backend, whose ``tf.keras`` is this version of Keras; the test is skipped where they are
    not installed. JAX compiles faster with few optimizations, which no test is about.
    """
    for needed in (backend, "keras" if version == 3 else "tf_keras"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    env = {**QUIET, "KERAS_BACKEND": backend, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    return env if version == 3 else {**env, "TF_USE_LEGACY_KERAS": "1"}


def needs_keras(version: str, why: str) -> None:
    """Skip the test where Keras is older."""
    installed = importlib.metadata.version("keras")
    if not is_version_greater_equal_than(installed, version):
        pytest.skip(f"Keras {installed}; before {version} {why}")


def tensorflow_pool(ranks: Callable[..., RankPool], version: int) -> RankPool:
    """A pool with TensorFlow whose ``tf.keras`` is this version of Keras; for Keras 3, the pool of its TensorFlow backend."""
    return ranks(POOL, env_of("tensorflow", version), "keras" if version == 3 else "tensorflow.keras")


def batches(
    size: int, rank: int | None, steps: int, batch: int, widths: tuple[int, int], seed: int = 3
) -> tuple[Any, Any]:
    """Inputs and targets of ``steps`` batches of one rank. For None, those of all ranks, in ``steps`` larger batches."""
    random = np.random.default_rng(seed)
    parts = [random.normal(size=(steps, size, batch, width)).astype(np.float32) for width in widths]
    x, y = ((part if rank is None else part[:, rank]).reshape(-1, part.shape[-1]) for part in parts)
    return x, y
