"""Converts the arguments of a script to plain Python values: numbers, names, flags, process sets. Pure.

Requests travel as messages of plain Python types. So a NumPy scalar, a tensor of one element or a member of an enumeration is
converted here, and every other value is refused here: in the thread that makes the call, before anything is sent.
``core.submission.collectives`` does this for all bindings. A binding that uses an argument before that does it itself.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

from horovod.core.lifecycle.process_set import ProcessSet

LONGEST_NAME = 1 << 16
"""The length of a collective's name in bytes. Names are part of every error, report and timeline."""

_TEXT = (str, bytes, bytearray)
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1


def whole_number(value: Any, what: str) -> int:
    """A whole number: an int, a NumPy integer, an integer tensor without dimensions.

    Args:
        what: the argument's name, for the error.

    Raises:
        TypeError: anything else, including bools and floats.
        ValueError: the number takes more than 64 bits.
    """
    if type(value) is int:
        number = value
    else:
        _refuse(value, what, "a whole number", ("bool",))
        try:
            number = operator.index(value)
        except Exception:
            raise _wrong(value, what, "a whole number") from None
    if not _LEAST <= number <= _MOST:
        raise ValueError(f"{what}={shown(value)} takes more than 64 bits")
    return number


def real_number(value: Any, what: str) -> float:
    """A finite number: an int, a float, a NumPy scalar, a tensor without dimensions, a fraction.

    Infinity and NaN are refused. A NaN does not equal that of another rank, so ranks could never agree on it.

    Raises:
        TypeError: anything else.
        ValueError: the number is not finite, or too large for a float.
    """
    if type(value) is float:
        number = value
    else:
        _refuse(value, what, "a number", ("bool", "complex"))
        try:
            number = float(value)
        except OverflowError:
            raise ValueError(f"{what}={shown(value)} is too large for a float") from None
        except Exception:
            raise _wrong(value, what, "a number") from None
    if not math.isfinite(number):
        raise ValueError(f"{what}={shown(value)} is not finite")
    return number


def whole_numbers(values: Any, what: str) -> list[int]:
    """Several whole numbers: a list, a tuple, an array or a tensor of one dimension. Raises as :func:`whole_number`."""
    if isinstance(values, _TEXT) or not isinstance(values, Iterable):
        raise _wrong(values, what, "a list of whole numbers")
    try:
        elements = list(values)
    except Exception:  # an array without dimensions calls itself iterable
        raise _wrong(values, what, "a list of whole numbers") from None
    return [whole_number(element, f"{what}[{index}]") for index, element in enumerate(elements)]


def loose_truth(value: Any, what: str) -> bool:
    """Whether a value of any type is true, as in an ``if``: scripts pass any values for flags.

    Raises:
        TypeError: the value is neither true nor false, such as an array of several elements.
    """
    try:
        return bool(value)
    except Exception:
        raise _wrong(value, what, "True or False") from None


def flag_value(value: Any, what: str) -> bool:
    """A flag: a bool, also of NumPy or of a tensor without dimensions; 0 or 1.

    Raises:
        TypeError, ValueError: anything else, such as a string.
    """
    if isinstance(value, bool):
        return value
    if "bool" in _element_type(value) and not _dimensions(value):
        return bool(value)
    number = whole_number(value, what)
    if number not in (0, 1):
        raise ValueError(f"{what}={shown(value)}: expected True or False")
    return bool(number)


def full_name(prefix: str, name: Any) -> str:
    """The name that identifies a collective: ``<prefix>.<name>``; "" where ``name`` is None or "". A number is a name, too.

    Raises:
        TypeError: the name is neither a string nor a whole number.
        ValueError: the name is too long, or not valid Unicode.
    """
    if name is None:
        return ""
    if not isinstance(name, str):
        try:
            name = str(whole_number(name, "name"))
        except TypeError:
            raise TypeError(f"name={shown(name)}: the name of a collective is a string, not {_kind(name)}") from None
    text = str.__str__(name)  # the value of an enumeration's member
    if not text:
        return ""
    try:
        length = len(text.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"name={shown(name)}: a name must be valid Unicode, and {error}") from None
    if length > LONGEST_NAME:
        raise ValueError(f"name={shown(name)} has {length} bytes; a name may have {LONGEST_NAME}")
    return f"{prefix}.{text}"


def set_id(process_set: Any) -> int | None:
    """The number of a process set; None before it is registered.

    Raises:
        TypeError: it is not a :class:`~horovod.core.lifecycle.process_set.ProcessSet`.
    """
    if not isinstance(process_set, ProcessSet):
        raise TypeError(
            f"process_set={shown(process_set)}: expected a hvd.ProcessSet that was passed to hvd.init() or "
            f"hvd.add_process_set(), not {_kind(process_set)}"
        )
    return process_set.process_set_id


def shown(value: Any) -> str:
    """A value for an error message: its ``repr``, cut to 100 characters."""
    try:
        text = repr(value)
    except Exception:  # such as an int with more digits than Python prints
        return f"<{_kind(value)}>"
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= 100 else f"{text[:97]}..."


def _refuse(value: Any, what: str, wanted: str, element_types: tuple[str, ...]) -> None:
    """Raise TypeError for values that convert to a number but are not numbers: text, bools, and tensors with dimensions."""
    text_or_bool = isinstance(value, bool | str | bytes | bytearray)
    if text_or_bool or _dimensions(value) or any(each in _element_type(value) for each in element_types):
        raise _wrong(value, what, wanted)


def _dimensions(value: Any) -> Any:
    """The number of dimensions of an array or a tensor; 0 for anything else."""
    return getattr(value, "ndim", 0)


def _element_type(value: Any) -> str:
    """The name of the element type. In every framework it contains ``bool`` or ``complex`` where the type is one."""
    return str(getattr(value, "dtype", ""))


def _wrong(value: Any, what: str, wanted: str) -> TypeError:
    return TypeError(f"{what}={shown(value)}: expected {wanted}, not {_kind(value)}")


def _kind(value: Any) -> str:
    return type(value).__name__
