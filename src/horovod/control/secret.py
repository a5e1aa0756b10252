"""The job's secret. The launcher makes it, and passes it to the ranks. It is never on a command line, and never printed."""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
from collections.abc import Mapping

from horovod._base.config import USER_SECRET

LENGTH = 32
SHORTEST_TEXT = 16
"""The fewest characters of a user's secret: shorter ones can be guessed."""


def make_secret() -> bytes:
    """A new secret of 32 random bytes."""
    return secrets.token_bytes(LENGTH)


def encode_secret(secret: bytes) -> str:
    """The secret as text for an environment variable."""
    return base64.b64encode(secret).decode("ascii")


def decode_secret(text: str) -> bytes:
    """The secret from the text of an environment variable.

    Raises:
        ValueError: the text is not a secret. The message does not quote it.
    """
    try:
        secret = base64.b64decode(text, validate=True)
    except binascii.Error:
        raise ValueError("the job's secret in the environment is garbled; was it set by hand?") from None
    if len(secret) < LENGTH:
        raise ValueError(f"the job's secret in the environment is shorter than {LENGTH} bytes; was it set by hand?")
    return secret


def secret_of_user(variables: Mapping[str, str]) -> bytes:
    """The secret that the user has given all ranks in the environment; b"" if none.

    Raises:
        ValueError: the text is too short. It is not quoted in the message.
    """
    text = variables.get(USER_SECRET, "").strip()
    try:
        return secret_of_text(text) if text else b""
    except ValueError as error:
        raise ValueError(f"environment variable {USER_SECRET}: {error}") from None


def secret_of_text(text: str) -> bytes:
    """The secret derived from a text that a user has given all ranks.

    Raises:
        ValueError: the text is too short. It is not quoted in the message.
    """
    if len(text) < SHORTEST_TEXT:
        raise ValueError(f"expected at least {SHORTEST_TEXT} characters, as `openssl rand -hex 16` prints them")
    return hashlib.sha256(b"horovod secret of a user\0" + text.encode()).digest()
