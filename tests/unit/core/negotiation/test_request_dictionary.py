"""What a member abbreviates always means what was announced in full."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod.comm.datatypes import DataType
from horovod.core.negotiation.messages import (
    Announce,
    Definition,
    MessageError,
    Operation,
    Request,
    TensorSpec,
    decode_from_member,
    encode,
)
from horovod.core.negotiation.request_dictionary import RequestDecoder, RequestEncoder


def make(name: str, version: int = 0, transient: bool = False) -> Request:
    return Request(Operation.ALLREDUCE, name, (TensorSpec(name, DataType.FLOAT32, (version,)),), transient=transient)


def test_the_second_time_a_number_says_it_all() -> None:
    encoder, decoder = RequestEncoder(4), RequestDecoder(4)
    request = make("a")
    first, second, third = encoder.item(request), encoder.item(request), encoder.item(make("a"))
    assert first == Definition(0, request)
    assert (second, third) == (0, 0)  # the same object, or one that says the same
    assert all(found is request for found in decoder.requests([first, second]))


def test_a_changed_request_is_sent_in_full_with_its_old_number() -> None:
    encoder, decoder = RequestEncoder(4), RequestDecoder(4)
    decoder.requests([encoder.item(make("a", 1))])
    changed = make("a", 2)
    item = encoder.item(changed)
    assert item == Definition(0, changed)
    assert decoder.requests([item])[0] == changed
    assert encoder.item(changed) == 0
    assert decoder.requests([0])[0] == changed


def test_a_name_that_will_not_come_again_takes_no_place() -> None:
    encoder = RequestEncoder(1)
    for number in range(5):
        request = make(f"t{number}", transient=True)
        assert encoder.item(request) == Definition(-1, request)
    assert encoder.item(make("a")) == Definition(0, make("a"))


def test_the_oldest_name_makes_room() -> None:
    encoder = RequestEncoder(2)
    for name in "abc":
        encoder.item(make(name))
    assert encoder.item(make("b")) == 1
    assert encoder.item(make("c")) == 0
    assert isinstance(encoder.item(make("a")), Definition)


def test_a_capacity_of_nothing_says_everything_in_full() -> None:
    encoder, decoder = RequestEncoder(0), RequestDecoder(0)
    for _ in range(3):
        item = encoder.item(make("a"))
        assert item == Definition(-1, make("a"))
        assert decoder.requests([item])[0] == make("a")
    with pytest.raises(MessageError, match="beyond the capacity 0"):
        decoder.requests([Definition(0, make("a"))])


@given(
    st.integers(0, 4),
    st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 1), st.booleans()), max_size=80),
)
def test_both_ends_of_a_dictionary_agree_over_any_sequence(
    capacity: int, sequence: list[tuple[str, int, bool]]
) -> None:
    encoder, decoder = RequestEncoder(capacity), RequestDecoder(capacity)
    for name, version, transient in sequence:
        request = make(name, version, transient)
        (item,) = decode_from_member(encode(Announce([encoder.item(request)]))).items  # type: ignore[union-attr]  # an Announce
        assert decoder.requests([item])[0] == request
    assert len(decoder) <= capacity
    assert len(encoder) <= capacity


@given(st.integers(0, 5), st.integers(-3, 10))
def test_a_number_that_was_never_defined(capacity: int, number: int) -> None:
    with pytest.raises(MessageError, match=f"request {number} was never defined"):
        RequestDecoder(capacity).requests([number])


@pytest.mark.parametrize("identifier", [-2, 3, 1 << 40])
def test_a_number_beyond_the_capacity_is_refused_and_not_kept(identifier: int) -> None:
    decoder = RequestDecoder(3)
    with pytest.raises(MessageError, match="beyond the capacity 3"):
        decoder.requests([Definition(identifier, make("a"))])
    assert len(decoder) == 0
