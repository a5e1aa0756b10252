"""What arrives is what was sent, whole and in order, or it is refused, whatever a process without the secret does."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod.control.channel import FrameReader
from horovod.control.sealing import Message, Opener, Sealer, SealError

BODIES = st.lists(st.one_of(st.binary(max_size=60), st.binary(min_size=1000, max_size=1100)), min_size=1, max_size=8)
CUTS = st.lists(st.integers(1, 700), max_size=60)
KEY, BACK = secrets.token_bytes(32), secrets.token_bytes(32)
ATTACKS = ("change", "repeat", "drop", "swap", "insert", "reflect", "shorten")


def sealed(bodies: Sequence[bytes], key: bytes = KEY) -> list[bytes]:
    sealer = Sealer(key)
    return [b"".join(sealer.seal(Message(body))) for body in bodies]


def read(stream: bytes, cuts: Sequence[int], key: bytes = KEY) -> tuple[list[bytes], bool]:
    """What a reader makes of a stream that arrives in pieces, and whether it refuses it."""
    reader, found, position = FrameReader(opener=Opener(key)), [], 0
    try:
        for cut in [*cuts, len(stream)]:
            found += reader.feed(stream[position : position + cut])
            position += cut
    except SealError:
        return found, True
    return found, False


@given(BODIES, CUTS, st.sampled_from([KEY, b""]))
def test_messages_survive_any_cutting(bodies: list[bytes], cuts: list[int], key: bytes) -> None:
    assert read(b"".join(sealed(bodies, key)), cuts, key) == (bodies, False)


def attacked(attack: str, messages: list[bytes], place: int, other: int, byte: int, change: int) -> list[bytes]:
    """The messages after an attack."""
    place %= len(messages)
    one, rest = messages[place], messages[place + 1 :]
    if attack == "change":
        changed = bytearray(one)
        changed[byte % len(one)] ^= change
        replaced = [bytes(changed), *rest]
    elif attack == "repeat":
        replaced = [messages[other % (place + 1)], one, *rest]
    elif attack == "drop":
        replaced = rest
    elif attack == "swap":
        replaced = [*rest[:1], one, *rest[1:]]
    elif attack == "insert":
        replaced = [b"\0\0\0\1" + secrets.token_bytes(33), one, *rest]
    elif attack == "reflect":
        replaced = [sealed([b"x"] * (place + 1), BACK)[place], one, *rest]
    else:
        replaced = [one[: byte % len(one)], *rest]
    return messages[:place] + replaced


@given(
    BODIES,
    CUTS,
    st.sampled_from(ATTACKS),
    st.integers(0, 7),
    st.integers(0, 7),
    st.integers(0, 2000),
    st.integers(1, 255),
)
def test_nothing_passes_from_the_first_message_that_was_not_sent(
    bodies: list[bytes], cuts: list[int], attack: str, place: int, other: int, byte: int, change: int
) -> None:
    messages = sealed(bodies)
    now = attacked(attack, messages, place, other, byte, change)
    right = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(messages, now, strict=False)))
    found, refused = read(b"".join(now), cuts)
    assert found == bodies[: len(found)]
    assert len(found) <= right
    if now != messages[: len(now)]:  # else the last messages are missing, which is how a connection ends
        more = sum(map(len, now[right:]))
        assert refused or (attack == "shorten" and more < len(messages[right]))


@given(BODIES, st.integers(0, 7), st.integers(0, 19), st.integers(1, 255))
def test_a_wrong_length_is_refused_before_the_bytes_that_it_announces(
    bodies: list[bytes], place: int, byte: int, change: int
) -> None:
    messages = sealed(bodies)
    place %= len(messages)
    head = bytearray(messages[place][:20])
    head[byte] ^= change
    cuts = [len(message) for message in messages[:place]]
    assert read(b"".join(messages[:place]) + head, cuts) == (bodies[:place], True)


def test_the_other_direction_and_another_connection_have_other_digests() -> None:
    assert len({sealed([b"the same"], key)[0] for key in (KEY, BACK, secrets.token_bytes(32), b"")}) == 4


@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 100_000])
def test_a_message_to_many_connections_is_what_each_would_have_been_sent_alone(size: int) -> None:
    shared = Message(bytes(size))
    for key in (KEY, BACK, b""):
        pieces = Sealer(key).seal(shared)
        assert b"".join(pieces) == sealed([bytes(size)], key)[0]
        assert read(b"".join(pieces), [], key) == ([bytes(size)], False)
        assert (shared.body in [piece for piece in pieces if piece is shared.body]) is (size >= 1024)


def test_nothing_is_taken_after_a_refusal() -> None:
    messages = sealed([b"one", b"two", b"three"])
    reader = FrameReader(opener=Opener(KEY))
    assert reader.feed(messages[0]) == [b"one"]
    with pytest.raises(SealError, match="not what was sent"):
        reader.feed(messages[2])
    for message in messages[1:]:
        with pytest.raises(SealError):
            reader.feed(message)
