"""Says what to install if the framework of a binding cannot be imported."""

from __future__ import annotations


def missing(error: Exception, binding: str, version: str, extra: str, where: str = "") -> ImportError:
    """The error to raise in place of the framework's own.

    Args:
        error: the framework's.
        binding: what needs it, ``horovod.torch``.
        version: what is needed, in words: ``PyTorch 2.1 or newer``.
        extra: of this distribution, which brings the framework.
        where: what else to know about the installation.
    """
    return ImportError(
        f"{binding} needs {version}, which cannot be imported here: {error}. "
        f"Install it with: pip install '.[{extra}]', in the folder of Horovod's repository{where}"
    )
