"""An object is taken once, from the rank that sent it, for the call for which it was sent, and only as it was sent."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod.core.errors import EngineFailureError
from horovod.core.lifecycle.object_protection import ObjectProtection

KEY = b"k" * 32


def sent(by: ObjectProtection, pickled: bytes, call: str) -> memoryview:
    return memoryview(pickled + by.trailer(pickled, call))


@given(st.binary(max_size=300), st.integers(0, 400), st.integers(1, 255), st.integers(0, 60))
def test_no_changed_byte_passes(pickled: bytes, place: int, change: int, cut: int) -> None:
    sender, receiver = ObjectProtection(KEY, 3), ObjectProtection(KEY, 0)
    right = sent(sender, pickled, "call")
    wrong = bytearray(right)
    wrong[place % len(wrong)] ^= change
    for bad in (memoryview(wrong), right[: max(0, len(right) - 1 - cut)]):
        with pytest.raises(
            EngineFailureError, match=r"object of rank 3 for call is not what that rank sent.*was not decoded"
        ):
            receiver.check(bad, 3, "call")
    assert bytes(receiver.check(right, 3, "call")) == pickled


def test_an_object_serves_for_its_sender_and_its_call_alone_and_once() -> None:
    sender, receiver = ObjectProtection(KEY, 3), ObjectProtection(KEY, 0)
    right = sent(sender, b"pickle", "call")
    for key, rank, call in ((KEY, 2, "call"), (KEY, 3, "another call"), (b"another generation", 3, "call")):
        with pytest.raises(EngineFailureError):
            ObjectProtection(key, 0).check(right, rank, call)
    assert bytes(receiver.check(right, 3, "call")) == b"pickle"
    with pytest.raises(EngineFailureError, match="changed or repeated"):
        receiver.check(right, 3, "call")
    assert bytes(ObjectProtection(KEY, 1).check(right, 3, "call")) == b"pickle"


@given(st.integers(0, 1 << 30))
def test_objects_of_threads_may_overtake_each_other_and_old_ones_are_refused(seed: int) -> None:
    sender, receiver = ObjectProtection(KEY, 3), ObjectProtection(KEY, 0)
    objects = [sent(sender, b"%d" % number, "call") for number in range(200)]
    order = objects[:]
    random.Random(seed).shuffle(order)
    for each in order:
        receiver.check(each, 3, "call")
    for _ in range(1200):
        receiver.check(sent(sender, b"", "call"), 3, "call")
    for each in objects:
        with pytest.raises(EngineFailureError):
            receiver.check(each, 3, "call")


def test_on_one_host_objects_are_as_they_are() -> None:
    protection = ObjectProtection(b"", 0)
    assert protection.trailer(b"pickle", "call") == b""
    assert bytes(protection.check(memoryview(b"pickle"), 1, "call")) == b"pickle"
