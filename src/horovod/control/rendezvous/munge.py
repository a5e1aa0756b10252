"""Credentials of MUNGE: text that only one user's processes can read, on any node of a cluster, and that names its sender.

MUNGE is a daemon on every node; all daemons of a cluster hold one key. Slurm uses it to identify the sender of a request. It
encrypts, so a credential that is restricted to one user may be sent to any process. Source: the manual pages munge(7),
munge_encode(3) and munge_decode(3). The library comes with Slurm and is looked up when it is needed.
"""

from __future__ import annotations

import ctypes
import os

_LIBRARY = "libmunge.so.2"
_OPTION_UID_RESTRICTION = 9
_EXPIRED, _REWOUND, _REPLAYED = 15, 16, 17


class MungeError(RuntimeError):
    """MUNGE cannot be used here, or refuses a credential; the message is MUNGE's own."""


class Munge:
    """The MUNGE daemon of this node.

    Raises:
        MungeError: its library is not installed.
    """

    def __init__(self) -> None:
        try:
            self._library = library = ctypes.CDLL(_LIBRARY)
        except OSError as error:
            raise MungeError(f"the library {_LIBRARY} cannot be loaded ({error})") from None
        library.munge_ctx_create.restype = ctypes.c_void_p
        library.munge_ctx_strerror.restype = library.munge_strerror.restype = ctypes.c_char_p
        self._free = ctypes.CDLL(None).free
        self._free.argtypes = [ctypes.c_void_p]
        self._free.restype = None

    def seal(self, payload: bytes) -> bytes:
        """A credential that only processes of this process's user can open.

        Raises:
            MungeError: the daemon does not answer.
        """
        context = ctypes.c_void_p(self._library.munge_ctx_create())
        credential = ctypes.c_void_p()
        try:
            user = ctypes.c_uint32(os.getuid())
            self._check(self._library.munge_ctx_set(context, _OPTION_UID_RESTRICTION, user), context)
            self._check(
                # munge_err_t munge_encode (char **cred, munge_ctx_t ctx, const void *buf, int len)
                self._library.munge_encode(ctypes.byref(credential), context, payload, len(payload)), context
            )  # fmt: skip
            return ctypes.string_at(credential)
        finally:
            self._free(credential)
            self._library.munge_ctx_destroy(context)

    def open(self, credential: bytes) -> bytes:
        """The contents of a credential that a process of the same user has made, on any node.

        A credential that is old, or was opened before, is accepted; a caller that needs a fresh one must check that.

        Raises:
            MungeError: it is not a credential of this cluster, or another user made it, or it is for another user.
        """
        payload, length, user, group = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_uint32(), ctypes.c_uint32()
        try:
            # munge_err_t munge_decode (const char *cred, munge_ctx_t ctx, void **buf, int *len, uid_t *uid, gid_t *gid)
            status = self._library.munge_decode(
                credential, None, ctypes.byref(payload), ctypes.byref(length), ctypes.byref(user), ctypes.byref(group)
            )
            if status not in (_EXPIRED, _REWOUND, _REPLAYED):
                self._check(status, None)
            if user.value != os.getuid():
                raise MungeError(f"the credential is of user {user.value}")
            return ctypes.string_at(payload, length.value)
        finally:
            self._free(payload)

    def _check(self, status: int, context: ctypes.c_void_p | None) -> None:
        if not status:
            return
        text = self._library.munge_ctx_strerror(context) if context is not None else None
        text = text or self._library.munge_strerror(status)
        raise MungeError((text or b"").decode("utf-8", "replace") or f"error {status}")
