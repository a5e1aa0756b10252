"""Who knows the secret gets in, whatever the pieces the bytes arrive in; nobody else does, whatever they send."""

from __future__ import annotations

import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod.control.handshake import (
    GREETING,
    LONGEST_PURPOSE,
    MAC,
    MAGIC,
    NONCE,
    ClientHandshake,
    HandshakeError,
    Keys,
    ServerHandshake,
)

SECRET = b"s" * 32


def converse(server: ServerHandshake, client: ClientHandshake) -> None:
    reply = server.receive(client.answer(server.greeting))
    assert reply is not None
    client.finish(reply)


def test_both_sides_prove_themselves_and_the_purpose_arrives() -> None:
    server = ServerHandshake(SECRET)
    converse(server, ClientHandshake(SECRET, b"what for"))
    assert server.purpose == b"what for"


def test_both_sides_have_the_same_keys_one_for_each_direction_and_new_ones_for_each_connection() -> None:
    found: set[bytes] = set()
    for purpose in (b"a", b"a", b"b"):
        server, client = ServerHandshake(SECRET), ClientHandshake(SECRET, purpose)
        assert server.keys == client.keys == Keys(b"", b"")
        converse(server, client)
        assert server.keys.sending == client.keys.receiving
        assert server.keys.receiving == client.keys.sending
        found |= set(server.keys)
    assert len(found) == 6
    assert {len(key) for key in found} == {32}


def test_a_client_that_does_not_wait_for_the_proof_is_refused() -> None:
    server, client = ServerHandshake(SECRET), ClientHandshake(SECRET, b"x")
    with pytest.raises(HandshakeError, match="has not waited"):
        server.receive(client.answer(server.greeting) + b"\0")


def test_another_version_of_the_protocol_is_refused_by_that_name() -> None:
    with pytest.raises(
        HandshakeError, match=r"uses version '1'.*this one version '2': install the same Horovod on all hosts"
    ):
        ClientHandshake(SECRET, b"").answer(b"HVD1" + bytes(NONCE))


@pytest.mark.parametrize("purpose", [b"", b"x", bytes(range(256)), b"p" * LONGEST_PURPOSE])
def test_every_purpose_up_to_the_longest_arrives_whole(purpose: bytes) -> None:
    server = ServerHandshake(SECRET)
    converse(server, ClientHandshake(SECRET, purpose))
    assert server.purpose == purpose


def test_the_wire_form_is_the_documented_one() -> None:
    server, client = ServerHandshake(SECRET), ClientHandshake(SECRET, b"abc")
    assert len(server.greeting) == GREETING == len(MAGIC) + NONCE
    answer = client.answer(server.greeting)
    server_nonce, client_nonce = server.greeting[len(MAGIC) :], answer[:NONCE]
    assert answer[NONCE:-MAC] == b"\0\3abc"

    def proof(role: bytes) -> bytes:
        return hmac.digest(SECRET, role + b"\0" + server_nonce + client_nonce + b"abc", hashlib.sha256)

    assert answer[-MAC:] == proof(b"client")
    reply = server.receive(answer)
    assert reply == proof(b"server")
    client.finish(reply)
    assert client.keys == Keys(sending=proof(b"to server"), receiving=proof(b"to client"))


def test_the_secret_itself_never_travels() -> None:
    server, client = ServerHandshake(SECRET), ClientHandshake(SECRET, b"")
    answer = client.answer(server.greeting)
    reply = server.receive(answer)
    assert reply is not None
    assert SECRET not in server.greeting + answer + reply


def test_a_client_with_another_secret_is_refused() -> None:
    server, client = ServerHandshake(SECRET), ClientHandshake(b"t" * 32, b"x")
    with pytest.raises(HandshakeError, match="does not know the job's secret"):
        server.receive(client.answer(server.greeting))
    assert server.purpose == b""


def test_a_server_with_another_secret_is_refused() -> None:
    client = ClientHandshake(SECRET, b"x")
    client.answer(ServerHandshake(b"t" * 32).greeting)
    with pytest.raises(HandshakeError, match="does not know the job's secret"):
        client.finish(b"\0" * MAC)


def test_a_server_that_answers_for_another_secret_is_refused() -> None:
    """It may even know what the client sent."""
    honest, client = ServerHandshake(SECRET), ClientHandshake(SECRET, b"x")
    answer = client.answer(honest.greeting)
    forged = hmac.digest(b"t" * 32, b"server\0" + honest.greeting[4:] + answer[:NONCE] + b"x", hashlib.sha256)
    with pytest.raises(HandshakeError):
        client.finish(forged)


def test_a_recorded_client_is_worthless_at_the_next_connection() -> None:
    first, client = ServerHandshake(SECRET), ClientHandshake(SECRET, b"x")
    recorded = client.answer(first.greeting)
    assert first.receive(recorded) is not None
    with pytest.raises(HandshakeError):
        ServerHandshake(SECRET).receive(recorded)


def test_a_recorded_server_is_worthless_at_the_next_connection() -> None:
    server, client = ServerHandshake(SECRET), ClientHandshake(SECRET, b"x")
    greeting = server.greeting
    reply = server.receive(client.answer(greeting))
    assert reply is not None
    victim = ClientHandshake(SECRET, b"x")
    victim.answer(greeting)
    with pytest.raises(HandshakeError):
        victim.finish(reply)


def test_a_clients_own_proof_sent_back_to_it_is_no_proof() -> None:
    client = ClientHandshake(SECRET, b"x")
    answer = client.answer(ServerHandshake(SECRET).greeting)
    with pytest.raises(HandshakeError):
        client.finish(answer[-MAC:])


def test_a_servers_own_greeting_sent_back_to_it_is_no_proof() -> None:
    server = ServerHandshake(SECRET)
    with pytest.raises(HandshakeError):
        server.receive(server.greeting[4:] + b"\0\0" + server.greeting[4:])


def test_a_proof_for_one_purpose_does_not_serve_for_another() -> None:
    server = ServerHandshake(SECRET)
    answer = bytearray(ClientHandshake(SECRET, b"read").answer(server.greeting))
    answer[NONCE + 2 : NONCE + 6] = b"root"
    with pytest.raises(HandshakeError):
        server.receive(bytes(answer))


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_any_single_changed_byte_is_noticed(position: int, change: int) -> None:
    server = ServerHandshake(SECRET)
    answer = bytearray(ClientHandshake(SECRET, b"purpose").answer(server.greeting))
    answer[position % len(answer)] ^= change
    try:
        assert server.receive(bytes(answer)) is None  # a longer purpose was announced: it waits for the rest
    except HandshakeError:
        pass


@given(st.lists(st.integers(1, 120), max_size=40), st.binary(max_size=50))
def test_the_pieces_in_which_bytes_arrive_do_not_matter(cuts: list[int], purpose: bytes) -> None:
    server, client = ServerHandshake(SECRET), ClientHandshake(SECRET, purpose)
    answer = client.answer(server.greeting)
    pieces, position = [], 0
    for cut in cuts:
        pieces.append(answer[position : position + cut])
        position += cut
    pieces.append(answer[position:])
    replies = [server.receive(piece) for piece in pieces[:-1]]
    if position >= len(answer):  # the last piece is empty
        replies = [reply for reply in replies if reply is not None]
        assert replies
        client.finish(replies[0])
        return
    assert replies == [None] * len(replies)
    reply = server.receive(pieces[-1])
    assert reply is not None
    client.finish(reply)
    assert server.purpose == purpose


def test_messages_may_arrive_byte_by_byte() -> None:
    server, client = ServerHandshake(SECRET), ClientHandshake(SECRET, b"slow")
    answer = client.answer(server.greeting)
    for index in range(len(answer) - 1):
        assert server.receive(answer[index : index + 1]) is None
    reply = server.receive(answer[-1:])
    assert reply is not None
    client.finish(reply)


def test_a_truncated_answer_never_gets_a_reply() -> None:
    server = ServerHandshake(SECRET)
    answer = ClientHandshake(SECRET, b"x").answer(server.greeting)
    assert server.receive(answer[:-1]) is None
    assert server.receive(b"") is None


def test_an_overlong_purpose_is_refused_before_it_is_waited_for() -> None:
    server = ServerHandshake(SECRET)
    with pytest.raises(HandshakeError, match="too long"):
        server.receive(bytes(NONCE) + (LONGEST_PURPOSE + 1).to_bytes(2, "big"))
    with pytest.raises(ValueError, match="1024"):
        ClientHandshake(SECRET, b"p" * (LONGEST_PURPOSE + 1))


@given(st.lists(st.binary(max_size=2000), max_size=5))
def test_garbage_is_refused_or_waited_for_but_never_answered(pieces: list[bytes]) -> None:
    server = ServerHandshake(SECRET)
    try:
        for piece in pieces:
            assert server.receive(piece) is None
    except HandshakeError:
        pass
    assert server.purpose == b""


@given(st.binary(max_size=100))
def test_a_greeting_that_is_none_is_refused(greeting: bytes) -> None:
    with pytest.raises(HandshakeError, match="not part of a Horovod job"):
        ClientHandshake(SECRET, b"").answer(greeting)


@given(st.binary(max_size=64))
def test_a_random_proof_is_refused(proof: bytes) -> None:
    client = ClientHandshake(SECRET, b"")
    client.answer(ServerHandshake(SECRET).greeting)
    with pytest.raises(HandshakeError):
        client.finish(proof)


def test_a_proof_before_any_greeting_is_refused() -> None:
    with pytest.raises(HandshakeError):
        ClientHandshake(SECRET, b"").finish(bytes(MAC))


def test_no_two_connections_share_a_nonce() -> None:
    greetings = {ServerHandshake(SECRET).greeting for _ in range(100)}
    assert len(greetings) == 100
