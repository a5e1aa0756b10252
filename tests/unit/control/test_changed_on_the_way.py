"""A process without the secret passes a handshake through, and then changes, repeats, drops or reorders what it carries.

The side that gets such a message refuses it, says why, and acts upon nothing that was not sent.
"""

from __future__ import annotations

import random
import select
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import msgspec
import pytest

from horovod.control.channel import Channel, ChannelClosed
from horovod.control.mesh import ConnectionKey, Mesh
from horovod.control.rendezvous.client import RendezvousClient
from horovod.control.rendezvous.messages import RendezvousError, ServerGoneError
from horovod.control.rendezvous.server import RendezvousServer
from time_limits import SOON
from unit.control.concurrent_ranks import run_concurrently, wait_until
from unit.control.proxy import Attack, Proxy

SECRET = b"s" * 32
SECONDS = SOON


def unchanged(dice: random.Random, messages: list[bytes]) -> list[bytes]:
    return messages


def changed(dice: random.Random, messages: list[bytes]) -> list[bytes]:
    place = dice.randrange(len(messages))
    message = bytearray(messages[place])
    message[dice.randrange(len(message))] ^= dice.randrange(1, 256)
    return [*messages[:place], bytes(message), *messages[place + 1 :]]


def repeated(dice: random.Random, messages: list[bytes]) -> list[bytes]:
    return [*messages, dice.choice(messages)]


def dropped(dice: random.Random, messages: list[bytes]) -> list[bytes]:
    place = dice.randrange(len(messages) - 1)  # not the last: that is like a pause
    return [*messages[:place], *messages[place + 1 :]]


def reordered(dice: random.Random, messages: list[bytes]) -> list[bytes]:
    found = list(messages)
    while found == messages:
        dice.shuffle(found)
    return found


@contextmanager
def channels(attack: Attack, count: int, to_server: bool) -> Iterator[tuple[Channel, Channel]]:
    """The two ends of a connection between two ranks through a proxy: the one that sends what is attacked, and the other."""
    with ExitStack() as stack:
        meshes = [Mesh(rank, f"host {rank}", True) for rank in range(2)]
        for mesh in meshes:
            stack.callback(mesh.close)
        server, client = (mesh.endpoint for mesh in meshes)
        proxy = Proxy(("127.0.0.1", server.port), attack, count, to_server)
        stack.callback(proxy.close)
        through = msgspec.structs.replace(server, port=proxy.address[1])
        deadline = time.monotonic() + SECONDS
        accepted, made = run_concurrently(
            partial(meshes[0].connect, [server, client], [ConnectionKey(1, "control", 0)], "1", SECRET, deadline),
            partial(meshes[1].connect, [through, client], [ConnectionKey(0, "control", 0)], "1", SECRET, deadline),
        )
        ends = [Channel(connection) for found in (made, accepted) for connection in found.values()]
        for end in ends:
            stack.callback(end.close)
        yield (ends[0], ends[1]) if to_server else (ends[1], ends[0])


def talk(sender: Channel, receiver: Channel, bodies: list[bytes]) -> tuple[list[bytes], ChannelClosed | None]:
    """What arrives of ``bodies``, and the reason why the receiver closes the connection."""
    found: list[bytes] = []
    for body in bodies:
        sender.send(body)
    deadline = time.monotonic() + SECONDS
    while len(found) < len(bodies) and time.monotonic() < deadline:
        select.select([receiver], [sender] if sender.wants_write else [], [], 1)
        sender.flush()
        try:
            found += receiver.receive()
        except ChannelClosed as error:
            return found, error
    if select.select([receiver], [], [], 0.2)[0]:  # something more has come
        try:
            return found + receiver.receive(), None
        except ChannelClosed as error:
            return found, error
    return found, None


def bodies_of(dice: random.Random) -> list[bytes]:
    return [dice.randbytes(dice.choice([0, 1, 30, 900, 1024, 5000, 70_000])) for _ in range(dice.randrange(2, 7))]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("to_server", [True, False], ids=["to the server", "to the client"])
@pytest.mark.parametrize("attack", [unchanged, changed, repeated, dropped, reordered])
def test_a_control_message_that_was_not_sent_like_this_is_refused(
    attack: Callable[[random.Random, list[bytes]], list[bytes]], to_server: bool, seed: int
) -> None:
    dice = random.Random(seed)
    bodies = bodies_of(dice)
    with channels(partial(attack, dice), len(bodies), to_server) as (sender, receiver):
        found, error = talk(sender, receiver, bodies)
    assert found == bodies[: len(found)]
    if attack is unchanged:
        assert error is None and len(found) == len(bodies)
    else:
        assert error is not None and error.changed
        assert "its connection is not safe: what arrives is not what was sent" in error.network


@pytest.fixture
def server() -> Iterator[RendezvousServer]:
    made = RendezvousServer(SECRET)
    made.start()
    yield made
    made.stop()


@pytest.mark.parametrize("attack", [changed, repeated])
def test_a_request_that_was_changed_is_not_served(
    server: RendezvousServer,
    attack: Callable[[random.Random, list[bytes]], list[bytes]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    proxy = Proxy(server.address, partial(attack, random.Random(1)), 1, to_server=True)
    try:
        with RendezvousClient(proxy.address, SECRET, SECONDS) as client:
            try:
                client.put("k", b"value")
                client.put("k", b"another")
            except ServerGoneError:
                pass
        wait_until(lambda: not server.connected(), "the end of the connection")
        assert server.peek("k") == (None if attack is changed else b"value")
    finally:
        proxy.close()
    assert "disconnects a client: its connection is not safe: what arrives is not what was sent" in caplog.text


def test_an_answer_that_was_changed_is_not_taken(server: RendezvousServer) -> None:
    server.put("k", b"value")
    proxy = Proxy(server.address, partial(changed, random.Random(2)), 1, to_server=False)
    try:
        with RendezvousClient(proxy.address, SECRET, SECONDS) as client:
            with pytest.raises(
                RendezvousError, match=r"rendezvous server.* is not safe: what arrives is not what was sent"
            ):
                client.get("k", SECONDS)
    finally:
        proxy.close()
