"""The environment of ranks that run Keras: it has its backend for life, so there is a pool for each."""

from __future__ import annotations

POOL = 3
"""Ranks of a pool; smaller jobs use a part of it, for TensorFlow and JAX take seconds to import."""

QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0", "CUDA_VISIBLE_DEVICES": ""}


def env_of(backend: str) -> dict[str, str]:
    """The environment of ranks on one backend."""
    return {**QUIET, "KERAS_BACKEND": backend}
