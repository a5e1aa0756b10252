"""Remembers the failure that the groups of a runtime have raised.

C++ code of PyTorch, such as DistributedDataParallel's reducer, makes a RuntimeError of an error that a work or a call has
raised. ``hvd.elastic.run`` recognises such an error by what is remembered here. It does not look at the text, and an error of
the script stays one, even if a rank was lost meanwhile.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from horovod.core.errors import HorovodInternalError
from horovod.core.lifecycle import context
from horovod.core.lifecycle.generation import Generation

_raised: WeakKeyDictionary[Generation, HorovodInternalError] = WeakKeyDictionary()
"""The last failure, by runtime."""


def note(error: HorovodInternalError) -> None:
    """A call or a work of a group is about to raise ``error``. Any thread."""
    if context.is_initialized():
        _raised[context.current()] = error.again()  # without the traceback, which keeps tensors alive


def behind(error: BaseException) -> HorovodInternalError | None:
    """The failure that C++ code has made ``error`` of; None if the groups have raised none."""
    if isinstance(error, HorovodInternalError) or not isinstance(error, RuntimeError) or not context.is_initialized():
        return None
    raised = _raised.get(context.current())
    return None if raised is None else raised.again()
