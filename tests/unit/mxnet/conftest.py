"""MXNet has an environment of its own (``make test`` makes it). Elsewhere these tests are not collected."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("mxnet") is None:
    collect_ignore_glob = ["*"]
