"""The store and the all-gather of ``init()``, with a real server on loopback, friends and strangers."""

from __future__ import annotations

import os
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial

import msgspec
import pytest

from horovod.control.dial import Address, dial
from horovod.control.handshake import GREETING
from horovod.control.rendezvous.client import RendezvousClient
from horovod.control.rendezvous.messages import (
    PURPOSE,
    VALUE_LIMIT,
    CompressedValues,
    ExchangeValues,
    Put,
    Refusal,
    RendezvousError,
    ServerGoneError,
    Values,
    decode_answer,
    encode,
    encode_values,
    values_of,
)
from horovod.control.rendezvous.server import RendezvousServer
from time_limits import SOON
from unit.control.concurrent_ranks import ConcurrentCalls, errors, run_concurrently, wait_until
from unit.control.unauthenticated_clients import BAD_CLIENTS, Recorder, connect, receive, visited_by

SECRET = b"s" * 32
SECONDS = SOON


@pytest.fixture
def server() -> Iterator[RendezvousServer]:
    made = RendezvousServer(SECRET)
    made.start()
    yield made
    made.stop()


def exchange(
    server: RendezvousServer, rank: int, size: int, value: bytes = b"", key: str = "k", seconds: float = SECONDS
) -> list[bytes]:
    with RendezvousClient(server.address, SECRET, SECONDS) as client:
        return client.exchange(key, rank, size, value, seconds)


def everybody(server: RendezvousServer, size: int, key: str = "k") -> list[Callable[[], list[bytes]]]:
    return [partial(exchange, server, rank, size, b"value %d" % rank, key) for rank in range(size)]


def test_of_several_addresses_any_that_answers_will_do(server: RendezvousServer) -> None:
    host, port = server.address
    with RendezvousClient((f"127.0.0.9,{host}", port), SECRET, SECONDS) as client:  # nobody listens at the first
        client.put("a", b"1")
    assert server.peek("a") == b"1"
    with pytest.raises(
        RendezvousError, match=r"127.0.0.8:1 or 127.0.0.9:1, cannot be reached: .*127.0.0.8:1: .*; 127.0.0.9:1: "
    ):
        RendezvousClient(("127.0.0.8,127.0.0.9", 1), SECRET, 0.1)


def test_a_value_that_was_put_can_be_got(server: RendezvousServer) -> None:
    with RendezvousClient(server.address, SECRET, SECONDS) as client:
        client.put("a", b"1")
        assert client.get("a", SECONDS) == b"1"
        client.put("a", b"2")
        client.put("a", b"3", only_first=True)
        assert client.get("a", SECONDS) == b"2"
        client.put("new", b"first", only_first=True)
        assert client.get("new", SECONDS) == b"first"
    assert server.peek("a") == b"2"
    assert server.peek("nothing") is None
    assert server.get("new", SECONDS) == b"first"


@pytest.mark.parametrize("value", [b"", bytes(range(256)) * 20_000], ids=["empty", "5 MB"])
def test_values_of_any_size(server: RendezvousServer, value: bytes) -> None:
    with RendezvousClient(server.address, SECRET, SECONDS) as client:
        client.put("big", value)
        assert client.get("big", SECONDS) == value


def test_a_waiting_client_gets_a_value_when_it_is_stored(server: RendezvousServer) -> None:
    def wait() -> bytes:
        with RendezvousClient(server.address, SECRET, SECONDS) as client:
            return client.get("later", SECONDS)

    waiting = ConcurrentCalls(*[wait] * 3)
    with RendezvousClient(server.address, SECRET, SECONDS) as client:
        client.put("later", b"here")
    assert waiting.results() == [b"here"] * 3


def test_the_owner_can_put_and_wait_too(server: RendezvousServer) -> None:
    def wait() -> bytes:
        with RendezvousClient(server.address, SECRET, SECONDS) as client:
            client.put("up", b"from client")
            return client.get("down", SECONDS)

    waiting = ConcurrentCalls(wait, lambda: server.get("up", SECONDS))
    server.put("down", b"from owner")
    assert waiting.results() == [b"from owner", b"from client"]


def test_a_value_that_no_rank_stores_times_out(server: RendezvousServer) -> None:
    with RendezvousClient(server.address, SECRET, SECONDS) as client:
        with pytest.raises(TimeoutError, match="'never'"):
            client.get("never", 0.05)
        client.put("still", b"works")
    with pytest.raises(TimeoutError, match=r"'never' within 0\.02 seconds"):
        server.get("never", 0.02)


@pytest.mark.parametrize("size", [1, 2, 7])
def test_every_rank_gets_the_values_of_all(server: RendezvousServer, size: int) -> None:
    expected = [b"value %d" % rank for rank in range(size)]
    assert run_concurrently(*everybody(server, size)) == [expected] * size


def test_the_same_key_serves_again_and_again(server: RendezvousServer) -> None:
    def several(rank: int) -> list[list[bytes]]:
        with RendezvousClient(server.address, SECRET, SECONDS) as client:
            return [client.exchange("k", rank, 2, b"%d.%d" % (rank, turn), SECONDS) for turn in range(30)]

    first, second = run_concurrently(partial(several, 0), partial(several, 1))
    assert first == second == [[b"0.%d" % turn, b"1.%d" % turn] for turn in range(30)]
    assert server.peek("k") is None


def test_the_timeout_names_the_missing_rank(server: RendezvousServer) -> None:
    outcomes = ConcurrentCalls(
        partial(exchange, server, 0, 3, seconds=0.3), partial(exchange, server, 2, 3, seconds=0.3)
    ).outcomes()
    assert [type(outcome) for outcome in outcomes] == [TimeoutError, TimeoutError]
    for text in errors(outcomes):
        assert text.startswith("rank 1 of 3 did not call hvd.init() within 0.3 seconds")
        assert "HOROVOD_START_TIMEOUT" in text
    assert run_concurrently(*everybody(server, 3)) == [[b"value 0", b"value 1", b"value 2"]] * 3


def test_the_timeout_names_several_missing_ranks_and_not_thousands(server: RendezvousServer) -> None:
    with pytest.raises(TimeoutError, match=r"^ranks 0, 1, 3 of 4 did not"):
        exchange(server, 2, 4, seconds=0.05)
    with pytest.raises(TimeoutError) as caught:
        exchange(server, 0, 5000, seconds=0.05)
    assert "ranks 1, 2, 3," in str(caught.value)
    assert len(str(caught.value)) < 500


def test_two_processes_that_claim_one_rank(server: RendezvousServer) -> None:
    legitimate = ConcurrentCalls(partial(exchange, server, 0, 2, b"real"))
    wait_until(server.exchanges.arrived, "the first claim")
    with pytest.raises(RendezvousError, match="two processes say they are rank 0"):
        exchange(server, 0, 2, b"double")
    assert exchange(server, 1, 2, b"one") == [b"real", b"one"]
    assert legitimate.results() == [[b"real", b"one"]]


def test_ranks_that_differ_about_the_size(server: RendezvousServer) -> None:
    legitimate = ConcurrentCalls(partial(exchange, server, 0, 2, b"zero"))
    wait_until(server.exchanges.arrived, "the first claim")
    with pytest.raises(RendezvousError, match=r"rank 1 says the job has 3 ranks, others say 2"):
        exchange(server, 1, 3)
    assert exchange(server, 1, 2, b"one") == [b"zero", b"one"]
    assert legitimate.results() == [[b"zero", b"one"]]


def members(server: RendezvousServer, rank: int, ranks: list[int], seconds: float = SECONDS) -> list[bytes]:
    """Launched rank ``rank`` meets with ``ranks`` only."""
    with RendezvousClient(server.address, SECRET, SECONDS) as client:
        return client.exchange(f"k{ranks}", ranks.index(rank), len(ranks), b"%d" % rank, seconds, ranks)


def test_groups_of_launched_ranks_meet_apart(server: RendezvousServer) -> None:
    calls = [partial(members, server, rank, ranks) for ranks in ([3, 0], [1, 4, 2]) for rank in ranks]
    assert run_concurrently(*calls) == [[b"3", b"0"]] * 2 + [[b"1", b"4", b"2"]] * 3


def test_ranks_with_contradicting_lists_are_named_at_the_timeout(server: RendezvousServer) -> None:
    other = ConcurrentCalls(partial(members, server, 1, [1, 0], 1.0))
    wait_until(server.exchanges.arrived, "the other list")
    (told,) = ConcurrentCalls(partial(members, server, 0, [0, 1], 0.2)).outcomes()
    assert isinstance(told, TimeoutError)
    assert "rank 1 of 2 did not call hvd.init(comm=[0, 1]) within 0.2 seconds" in str(told)
    assert "Instead, rank 1 called hvd.init(comm=[1, 0]). All ranks of one list must pass the same list" in str(told)
    (told,) = other.outcomes()
    assert "rank 0 of 2 did not call hvd.init(comm=[1, 0])" in str(told)
    assert run_concurrently(*everybody(server, 2)) == [[b"value 0", b"value 1"]] * 2


def test_a_group_may_wait_for_a_rank_that_meets_others_first(server: RendezvousServer) -> None:
    first = ConcurrentCalls(partial(members, server, 0, [0, 1]))
    wait_until(server.exchanges.arrived, "the one that waits")
    assert run_concurrently(*(partial(members, server, rank, [1, 2]) for rank in (1, 2))) == [[b"1", b"2"]] * 2
    assert members(server, 1, [0, 1]) == [b"0", b"1"]
    assert first.results() == [[b"0", b"1"]]


def test_early_and_late_waiters_for_an_ended_rank_are_told_at_once(server: RendezvousServer) -> None:
    early = ConcurrentCalls(partial(exchange, server, 0, 3))
    wait_until(server.exchanges.arrived, "rank 0")
    server.depart(1, "exit code 0")
    outcomes = [*early.outcomes(), *ConcurrentCalls(partial(exchange, server, 2, 3)).outcomes()]
    for error in outcomes:
        assert isinstance(error, RendezvousError)
        assert "rank 1 of 3 has ended (exit code 0)" in str(error)
    awaited = server.exchanges.awaited_in_vain()
    assert awaited is not None and awaited[0] == 1
    assert awaited[1].endswith("where rank 0 waited for it")


def test_several_ranks_that_departed_are_all_named_and_the_first_is_to_blame(server: RendezvousServer) -> None:
    server.depart(2, "exit code 3")
    server.depart(1, "exit code 0")
    (error,) = ConcurrentCalls(partial(exchange, server, 0, 3)).outcomes()
    assert "ranks 1, 2 of 3 have ended (exit codes 0, 3)" in str(error)
    assert server.exchanges.awaited_in_vain() == (
        2,
        "it ended (exit code 3) instead of calling hvd.init(), where rank 0 waited for it",
    )


def test_a_rank_that_comes_after_the_others_have_given_up_hears_why(server: RendezvousServer) -> None:
    """They came and ended because of it: they are not the ones that did not come."""
    outcomes = ConcurrentCalls(*(partial(exchange, server, rank, 3, seconds=0.3) for rank in (0, 1))).outcomes()
    for rank in (0, 1):
        server.depart(rank, "exit code 1")
    outcomes += ConcurrentCalls(partial(exchange, server, 2, 3)).outcomes()
    assert [str(outcome).partition(". ")[0] for outcome in outcomes] == [
        "rank 2 of 3 did not call hvd.init() within 0.3 seconds of the first rank"
    ] * 3
    assert server.exchanges.awaited_in_vain() == (2, str(outcomes[0]))


def test_nobody_is_to_blame_for_an_exchange_that_was_repeated(server: RendezvousServer) -> None:
    (error,) = ConcurrentCalls(partial(exchange, server, 0, 2, seconds=0.1)).outcomes()
    assert isinstance(error, TimeoutError) and server.exchanges.awaited_in_vain() is not None
    run_concurrently(*everybody(server, 2))
    assert server.exchanges.awaited_in_vain() is None


def test_a_rank_that_ends_between_two_exchanges_of_init_is_lost_there(server: RendezvousServer) -> None:
    waiting = ConcurrentCalls(partial(exchange, server, 0, 2, key="reachability/"))
    server.depart(1, "exit code 3")
    (error,) = waiting.outcomes()
    reason = "lost rank 1 while the ranks met in init(): its process ended (exit code 3)"
    assert str(error) == f"hvd.init() cannot complete: {reason}. Look at the output of rank 1"
    assert server.exchanges.awaited_in_vain() == (1, reason)


def test_clients_that_do_not_wait_for_an_ended_rank_are_not_told(server: RendezvousServer) -> None:
    server.depart(1, "exit code 0")
    assert run_concurrently(*(partial(members, server, rank, [2, 0]) for rank in (0, 2))) == [[b"2", b"0"]] * 2
    assert server.exchanges.awaited_in_vain() is None


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_outside_the_job(server: RendezvousServer, rank: int, size: int) -> None:
    with pytest.raises(RendezvousError):
        exchange(server, rank, size, key="outside", seconds=0.1)


class Guest:
    """A connection that speaks the protocol by hand, so that it can stop in the middle."""

    def __init__(self, server: RendezvousServer) -> None:
        self.connection = dial(server.address, SECRET, PURPOSE, time.monotonic() + SECONDS)

    def say(self, message: object) -> None:
        self.connection.send(msgspec.msgpack.encode(message), time.monotonic() + SECONDS)

    def __enter__(self) -> Guest:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()


def arrived(server: RendezvousServer, key: str, count: int) -> Callable[[], bool]:
    return lambda: len(server.exchanges.arrived().get(key, ())) == count


def test_a_rank_that_leaves_during_an_exchange_ends_the_wait_of_the_others(server: RendezvousServer) -> None:
    waiting = ConcurrentCalls(partial(exchange, server, 0, 3), partial(exchange, server, 2, 3))
    with Guest(server) as leaver:
        wait_until(arrived(server, "k", 2), "two arrivals")
        elsewhere = ConcurrentCalls(partial(exchange, server, 0, 2, b"", "elsewhere"))
        wait_until(arrived(server, "elsewhere", 1), "an exchange that has nothing to do with it")
        leaver.connection.close()
    wait_until(lambda: server.connected() == 3, "the end of the guest")
    assert arrived(server, "k", 2)()  # a guest that took no part does not matter
    assert exchange(server, 1, 3) == [b"", b"", b""]
    waiting.results()

    waiting = ConcurrentCalls(partial(exchange, server, 0, 3, seconds=600.0))
    wait_until(arrived(server, "k", 1), "one arrival")
    with Guest(server) as leaver:
        leaver.say(ExchangeValues("k", 1, 3, b"", SECONDS))
        wait_until(arrived(server, "k", 2), "two arrivals")
    (outcome,) = waiting.outcomes()
    assert type(outcome) is RendezvousError
    assert str(outcome) == "lost rank 1 while the other ranks waited for it in init(): it closed its connection"
    assert arrived(server, "elsewhere", 1)()
    assert exchange(server, 1, 2, b"", "elsewhere") == [b"", b""]
    elsewhere.results()


def test_after_somebody_left_the_next_attempt_starts_from_nothing(server: RendezvousServer) -> None:
    with Guest(server) as leaver:
        leaver.say(ExchangeValues("k", 1, 2, b"stale", SECONDS))
        wait_until(arrived(server, "k", 1), "an arrival")
    wait_until(lambda: "k" not in server.exchanges.arrived(), "its end")
    assert run_concurrently(*everybody(server, 2)) == [[b"value 0", b"value 1"]] * 2


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x80", msgspec.msgpack.encode({"type": "Drop", "key": "a"})])
def test_a_message_that_is_none_ends_that_conversation_only(server: RendezvousServer, body: bytes) -> None:
    with Guest(server) as guest:
        guest.connection.send(body, time.monotonic() + SECONDS)
        assert guest.connection.socket.recv(10) == b""
    assert run_concurrently(*everybody(server, 2)) == [[b"value 0", b"value 1"]] * 2


def test_a_connection_made_for_another_purpose_is_closed(server: RendezvousServer) -> None:
    with dial(server.address, SECRET, b"something else", time.monotonic() + SECONDS) as connection:
        connection.socket.settimeout(SOON)
        assert connection.socket.recv(10) == b""


def test_a_client_that_leaves_before_its_answer_does_not_disturb_others(server: RendezvousServer) -> None:
    for number in range(20):
        with Guest(server) as guest:
            guest.say(Put(f"key {number}", b"x" * 1000))
    wait_until(lambda: not server.connected(), "all gone")
    assert run_concurrently(*everybody(server, 2)) == [[b"value 0", b"value 1"]] * 2


def test_a_client_that_does_not_read_delays_no_other_client(server: RendezvousServer) -> None:
    """Its answer, far larger than the kernel takes at once, waits in the server; the others have theirs."""
    big = os.urandom(6_000_000)  # cannot be compressed
    with Guest(server) as slow:
        slow.say(ExchangeValues("k", 0, 2, big, SECONDS))
        assert exchange(server, 1, 2, b"small") == [big, b"small"]
        assert run_concurrently(*everybody(server, 2, "another")) == [[b"value 0", b"value 1"]] * 2
        answer, _ = slow.connection.receive(VALUE_LIMIT, time.monotonic() + SECONDS)
        assert len(answer) > len(big)


@pytest.mark.parametrize("stranger", BAD_CLIENTS)
def test_unauthenticated_clients_do_not_disturb(server: RendezvousServer, stranger: str) -> None:
    early = ConcurrentCalls(partial(exchange, server, 0, 3, b"value 0"))
    wait_until(arrived(server, "k", 1), "the first rank")
    with visited_by(stranger, server.address):
        late = ConcurrentCalls(*everybody(server, 3)[1:])
        expected = [b"value 0", b"value 1", b"value 2"]
        assert early.results() + late.results() == [expected] * 3
        assert run_concurrently(*everybody(server, 2)) == [[b"value 0", b"value 1"]] * 2


@pytest.mark.parametrize("stranger", BAD_CLIENTS)
def test_a_server_that_stops_releases_everything_with_unauthenticated_clients_connected(stranger: str) -> None:
    server = RendezvousServer(SECRET)
    server.start()
    with visited_by(stranger, server.address):
        exchange(server, 0, 1)
        address: Address = server.address
        server.stop()
        assert "horovod-rendezvous" not in [thread.name for thread in threading.enumerate()]
        with pytest.raises(ConnectionRefusedError):
            connect(address)


def test_a_replayed_handshake_opens_nothing(server: RendezvousServer) -> None:
    recorder = Recorder(server.address)
    with RendezvousClient(recorder.address, SECRET, SECONDS) as client:
        client.put("a", b"1")
        client.put("a", b"2", only_first=True)
    recorder.close()
    server.put("a", b"3")
    with connect(server.address) as replay:
        receive(replay, GREETING)
        replay.sendall(recorder.said)
        try:
            assert replay.recv(100) == b""
        except ConnectionResetError:
            pass
    assert server.peek("a") == b"3"
    assert run_concurrently(*everybody(server, 2)) == [[b"value 0", b"value 1"]] * 2


def test_a_client_with_a_wrong_secret_says_that_it_could_not_get_in(server: RendezvousServer) -> None:
    with pytest.raises(RendezvousError, match="the rendezvous server of this job"):
        RendezvousClient(server.address, b"wrong", 0.1)


def test_no_server_is_an_error() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with pytest.raises(RendezvousError, match=f"127.0.0.1:{closed.getsockname()[1]}"):
            RendezvousClient(closed.getsockname(), SECRET, 0.05)


def test_a_server_that_goes_away_ends_the_wait() -> None:
    server = RendezvousServer(SECRET)
    server.start()
    waiting = ConcurrentCalls(partial(exchange, server, 0, 2, seconds=600.0))
    wait_until(arrived(server, "k", 1), "the arrival")
    server.stop()
    (outcome,) = waiting.outcomes()
    assert type(outcome) is ServerGoneError
    assert "has ended" in str(outcome)


def test_a_wait_that_is_longer_than_the_kernel_can_sleep(server: RendezvousServer) -> None:
    waiting = ConcurrentCalls(partial(exchange, server, 0, 2, seconds=1e9))
    wait_until(arrived(server, "k", 1), "the arrival")
    assert exchange(server, 1, 2, seconds=1e9) == [b"", b""]
    waiting.results()


def test_a_server_on_a_unix_socket_of_the_same_user() -> None:
    name = f"\0horovod-test-rendezvous-{os.getpid()}"
    server = RendezvousServer(b"", name=name)
    server.start()
    try:

        def meet(rank: int) -> list[bytes]:
            with RendezvousClient(name, b"", SECONDS) as client:
                return client.exchange("k", rank, 2, b"%d" % rank, SECONDS)

        assert run_concurrently(partial(meet, 0), partial(meet, 1)) == [[b"0", b"1"]] * 2
        with pytest.raises(OSError, match="in use"):
            RendezvousServer(b"", name=name)
    finally:
        server.stop()


def test_waiting_until_the_clients_have_left(server: RendezvousServer) -> None:
    one, two = (RendezvousClient(server.address, SECRET, SECONDS) for _ in range(2))
    run_concurrently(lambda: one.exchange("k", 0, 2, b"", SECONDS), lambda: two.exchange("k", 1, 2, b"", SECONDS))
    server.wait_until_left(time.monotonic() + 0.02)  # in vain
    assert server.connected() == 2
    leaving = threading.Timer(0.05, two.close)
    leaving.start()
    server.wait_until_left(time.monotonic() + SECONDS)
    assert server.connected() == 1
    leaving.join()
    one.close()


def test_a_rank_that_is_back_for_its_next_rendezvous_is_not_waited_for(server: RendezvousServer) -> None:
    """It has come before rank 0 has ended this one, and waits for it; both would wait until the timeout."""
    one, two = (RendezvousClient(server.address, SECRET, SECONDS) for _ in range(2))
    run_concurrently(lambda: one.exchange("k", 0, 2, b"", SECONDS), lambda: two.exchange("k", 1, 2, b"", SECONDS))
    with RendezvousClient(server.address, SECRET, SECONDS) as back:
        waiting = ConcurrentCalls(lambda: back.exchange("k", 1, 2, b"", SECONDS))
        wait_until(server.exchanges.arrived, "the rank that is back")
        two.close()
        ConcurrentCalls(lambda: server.wait_until_left(time.monotonic() + 10 * SECONDS)).results()
        server.stop()
        (ended,) = waiting.outcomes()
    assert isinstance(ended, ServerGoneError)
    one.close()


def test_stopping_twice_and_stopping_what_never_started() -> None:
    server = RendezvousServer(SECRET)
    server.stop()
    server = RendezvousServer(SECRET)
    server.start()
    server.stop()
    server.stop()


def test_a_hundred_servers_after_one_another() -> None:
    for _ in range(100):
        server = RendezvousServer(SECRET)
        server.start()
        assert exchange(server, 0, 1, b"x") == [b"x"]
        server.stop()


def test_values_that_repeat_one_another_travel_compressed(server: RendezvousServer) -> None:
    size = 20
    values = [b"node%d.cluster.example " % rank * 200 for rank in range(size)]
    found = run_concurrently(*(partial(exchange, server, rank, size, values[rank]) for rank in range(size)))
    assert found == [values] * size
    assert len(encode_values(values)) < len(b"".join(values)) / 10


@pytest.mark.parametrize("length", [0, 1, 100, 5000, 70_000])
def test_any_values_are_decoded_as_they_were(length: int) -> None:
    for values in ([os.urandom(length) for _ in range(9)], [b"a" * length] * 9, []):
        answer = decode_answer(encode_values(values))
        assert not isinstance(answer, Refusal)
        assert values_of(answer) == values


@pytest.mark.parametrize("damaged", [b"", b"x", zlib.compress(b"x"), zlib.compress(encode(Refusal("", False)))])
def test_damaged_values_are_an_error(damaged: bytes) -> None:
    with pytest.raises(RendezvousError, match="the rendezvous server has sent"):
        values_of(CompressedValues(100, damaged))


@pytest.mark.parametrize("size", [0, -1, 1 << 33, 5])
def test_compressed_values_of_a_wrong_size_are_refused(size: int) -> None:
    """In particular 0, by which zlib would decompress without a limit."""
    deflated = zlib.compress(encode(Values([b"x" * 1000])))
    with pytest.raises(RendezvousError, match="has sent values"):
        values_of(CompressedValues(size, deflated))
