"""``horovod.runner.common.util.secret``: keys, and digests of messages; an import path that scripts use."""

from __future__ import annotations

import hashlib
import hmac

from horovod._base.config import SECRET_KEY
from horovod.control.secret import LENGTH, make_secret

HOROVOD_SECRET_KEY = SECRET_KEY
"""The variable that carries a job's key."""
DIGEST_LENGTH_BYTES = LENGTH


def make_secret_key() -> bytes:
    """A new key of 32 random bytes."""
    return make_secret()


def compute_digest(key: bytes, message: bytes) -> bytes:
    """The HMAC-SHA256 of a message, 32 bytes."""
    return hmac.digest(key, message, hashlib.sha256)


def check_digest(key: bytes, message: bytes, digest: bytes) -> bool:
    """Whether ``digest`` is that of ``message``."""
    return hmac.compare_digest(compute_digest(key, message), digest)
