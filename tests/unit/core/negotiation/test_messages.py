"""What ranks say survives the wire."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod.comm.datatypes import DataType
from horovod.comm.reduction import ReduceOp
from horovod.core.negotiation.messages import (
    UNNAMED,
    Announce,
    Decision,
    Definition,
    Leave,
    MessageError,
    Operation,
    Order,
    Request,
    Stop,
    TensorSpec,
    decode_from_coordinator,
    decode_from_member,
    encode,
    numbered,
)

names = st.text(max_size=12)
sizes = st.integers(0, 1 << 40)
shapes = st.lists(sizes, max_size=5).map(tuple)
factors = st.floats(allow_nan=False)
specs = st.builds(TensorSpec, names, st.sampled_from(DataType), shapes)
requests = st.builds(
    Request,
    operation=st.sampled_from(Operation),
    name=names,
    tensors=st.lists(specs, max_size=4).map(tuple),
    reduce_op=st.sampled_from(ReduceOp),
    prescale=factors,
    postscale=factors,
    root=st.integers(-1, 1000),
    splits=st.lists(st.integers(0, 1 << 31), max_size=5).map(tuple),
    device=st.sampled_from(["cpu", "cuda:0"]),
    caller=names,
    transient=st.booleans(),
)
definitions = st.builds(Definition, st.integers(-1, 1 << 20), requests)
decisions = st.builds(
    Decision,
    st.integers(-1, 1 << 20),
    names,
    st.sampled_from(Operation),
    rows=st.lists(shapes, max_size=3).map(tuple),
    received=shapes,
    longest=st.integers(0, 1 << 31),
    template=st.none() | requests,
    last_joined=st.integers(-1, 1000),
    error=names,
)
identifiers = st.integers(0, 1 << 20)
from_members = st.builds(Announce, st.lists(identifiers | definitions, max_size=5)) | st.builds(Leave, names)
from_coordinators = st.builds(Order, st.lists(st.lists(identifiers | decisions, max_size=4), max_size=4)) | st.builds(
    Stop, st.integers(0, 1000), names
)


@given(from_members)
def test_messages_of_a_member_survive_encoding(message: Announce | Leave) -> None:
    assert decode_from_member(encode(message)) == message


@given(from_coordinators)
def test_messages_of_the_coordinator_survive_encoding(message: Order | Stop) -> None:
    assert decode_from_coordinator(encode(message)) == message


@given(from_members)
def test_messages_of_one_direction_are_invalid_in_the_other(message: Announce | Leave) -> None:
    with pytest.raises(MessageError):
        decode_from_coordinator(encode(message))


@given(st.binary(max_size=60))
def test_garbage_is_a_message_error_or_a_message(body: bytes) -> None:
    for decode in (decode_from_member, decode_from_coordinator):
        try:
            found = decode(body)
        except MessageError:
            continue
        assert isinstance(found, Announce | Leave | Order | Stop)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc0",
        msgspec.msgpack.encode([0]),
        msgspec.msgpack.encode([0, "x"]),
        msgspec.msgpack.encode([0, [1.5]]),
        msgspec.msgpack.encode([0, [[0, [0]]]]),
        msgspec.msgpack.encode([9, []]),
        msgspec.msgpack.encode([0, [1]]) + b"\x00",
        msgspec.msgpack.encode({"type": 0}),
    ],
)
def test_half_a_message_and_worse(body: bytes) -> None:
    with pytest.raises(MessageError):
        decode_from_member(body)
    with pytest.raises(MessageError):
        decode_from_coordinator(body)


@given(from_members, st.data())
def test_a_message_cut_short_is_none(message: Announce | Leave, data: st.DataObject) -> None:
    body = encode(message)
    with pytest.raises(MessageError):
        decode_from_member(body[: data.draw(st.integers(0, len(body) - 1))])


def test_operations_have_the_numbers_of_the_public_interface() -> None:
    assert {operation.name: int(operation) for operation in Operation} == {
        "ALLREDUCE": 0,
        "ALLGATHER": 1,
        "BROADCAST": 2,
        "JOIN": 3,
        "ADASUM": 4,
        "ALLTOALL": 5,
        "BARRIER": 6,
        "REDUCESCATTER": 7,
    }


def _calls() -> st.SearchStrategy[Request]:
    """Requests of calls with a name and of numbered calls without one, many of which differ in one thing."""

    def request(name: str, shape: tuple[int, ...], number: int, count: int, line: str, compression: str) -> Request:
        labels = [name] if count == 1 else [f"{name}_{each}of{count}" for each in range(count)]
        tensors = tuple(TensorSpec(label, DataType.FLOAT32, shape) for label in labels)
        made = Request(
            Operation.ALLREDUCE,
            name,
            tensors,
            caller=line,
            transient=True,
            unnamed=number > 0,
            compression=compression,
        )
        return numbered(made, number) if number else made

    names = st.sampled_from([f"a{UNNAMED}", f"a{UNNAMED}1", f"b{UNNAMED}", "a"])
    some_shapes = st.sampled_from([(), (1,), (2, 1)])
    numbers, forms = st.sampled_from([0, 1, 2, 256]), st.sampled_from(["", "int8"])
    return st.builds(request, names, some_shapes, numbers, st.integers(1, 2), names, forms)


def _what_must_agree(request: Request) -> Request:
    return msgspec.structs.replace(request, caller="", transient=False)


@given(_calls(), _calls())
def test_an_identity_is_that_of_another_request_only_if_all_that_must_agree_does(one: Request, other: Request) -> None:
    assert (one.identity == other.identity) == (_what_must_agree(one) == _what_must_agree(other)) or (
        one.name == other.name  # a call with a name that is generated otherwise, and one without: they may differ
    )
    assert one.identity == other.identity or not one.identity.startswith(other.identity)


def test_a_numbered_request_has_its_number_in_every_name() -> None:
    alone = Request(Operation.ALLREDUCE, f"a{UNNAMED}", (TensorSpec(f"a{UNNAMED}", DataType.INT8, (2,)),), unnamed=True)
    made = numbered(alone, 3)
    assert (made.name, [each.name for each in made.tensors]) == ("a.noname.3", ["a.noname.3"])
    assert made.nbytes == 2 and not made.unnamed
    group = msgspec.structs.replace(
        alone, tensors=tuple(TensorSpec(f"a{UNNAMED}_{i}of2", DataType.INT8, ()) for i in (1, 2))
    )
    assert [each.name for each in numbered(group, 3).tensors] == ["a.noname.3_1of2", "a.noname.3_2of2"]
