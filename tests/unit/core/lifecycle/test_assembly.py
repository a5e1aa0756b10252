"""How one process set chooses its engine: what its ranks can and want, told to all of them alike."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import msgspec
import pytest

from connections import ends, frame
from engines import loopback_pair
from horovod._base.config import CPU_OPERATIONS, Config
from horovod.comm.engine import EngineGroup
from horovod.comm.select import EngineError
from horovod.comm.shm.arena import Arena
from horovod.comm.shm.proposals import Proposals
from horovod.control.connection import Connection
from horovod.control.failure import LOST, Cause
from horovod.control.mesh import ConnectionKey, Endpoint
from horovod.core.errors import HorovodInternalError
from horovod.core.lifecycle import assembly
from horovod.core.lifecycle.assembly import CONTROL, assemble, control_connections, tree_of
from horovod.core.worker.coordinator import Coordinator
from horovod.core.worker.cpu_affinity import ANYWHERE
from horovod.core.worker.member import Member
from horovod.core.worker.worker import WorkerThread
from time_limits import SOON
from unit.control.concurrent_ranks import ConcurrentCalls

Pair = Callable[[], tuple[socket.socket, socket.socket]]


class Watch:
    call_sites: dict[int, str] = {}  # noqa: RUF012  nobody writes to it

    def report(self, rank: int, reason: str, suspected: bool = False, cause: Cause = LOST) -> None:
        raise AssertionError(reason)

    def probe(self) -> None:
        pass

    def disagreed(self, reason: str) -> None:
        pass


class Members:
    """The members of one set, connected beforehand; each calls :func:`assemble` on a thread of its own."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self.meshed = 0
        self._lock = threading.Lock()
        self._ends: dict[tuple[int, int, str], dict[int, Connection]] = {}

    def assemble(
        self,
        ranks: Sequence[int],
        engines: Sequence[str] | None = None,
        hosts: Sequence[str] | None = None,
        control: Pair = socket.socketpair,
        seconds: float = SOON,
    ) -> list[WorkerThread | BaseException]:
        size = max(ranks) + 1
        endpoints = [Endpoint(rank, (hosts or ["one"] * size)[rank], 1, 1, (), "") for rank in range(size)]
        sockets: dict[int, dict[ConnectionKey, Connection]] = {rank: {} for rank in ranks}
        for high in ranks[1:]:
            near, far = self._made(control)
            sockets[ranks[0]][ConnectionKey(high, CONTROL, 4)] = near
            sockets[high][ConnectionKey(ranks[0], CONTROL, 4)] = far

        def connect(rank: int, keys: list[ConnectionKey]) -> dict[ConnectionKey, Connection]:
            self.meshed += 1
            return {key: self._end(rank, key) for key in keys}

        def run(number: int, rank: int) -> WorkerThread:
            config = Config(cpu_operations=(engines or [""] * len(ranks))[number])
            worker = assemble(
                4,
                ranks,
                rank,
                ANYWHERE,
                endpoints,
                sockets[rank],
                partial(connect, rank),
                config,
                Watch(),
                lambda *_: None,
                time.monotonic() + seconds,
            )
            self._stack.callback(worker.close)
            return worker

        return ConcurrentCalls(*(partial(run, number, rank) for number, rank in enumerate(ranks))).outcomes()

    def _end(self, rank: int, key: ConnectionKey) -> Connection:
        """One rank's end of a connection, which is made when the first of the two asks for it."""
        with self._lock:
            low, high = sorted((rank, key.peer))
            ends = self._ends.setdefault(
                (low, high, key.role), dict(zip((low, high), self._made(socket.socketpair), strict=True))
            )
            return ends.pop(rank)

    def _made(self, pair: Pair) -> tuple[Connection, Connection]:
        made = ends(pair())
        for each in made:
            self._stack.callback(each.close)
        return made

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def members() -> Iterator[Members]:
    made = Members()
    yield made
    made.close()


def engines_of(outcomes: Sequence[WorkerThread | BaseException]) -> list[str]:
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return [outcome.communicator.name for outcome in outcomes if isinstance(outcome, WorkerThread)]


def errors_of(outcomes: Sequence[WorkerThread | BaseException]) -> set[str]:
    for outcome in outcomes:
        assert isinstance(outcome, EngineError), outcome
    return {str(outcome) for outcome in outcomes}


def test_ranks_of_one_host_share_memory(members: Members) -> None:
    outcomes = members.assemble([0, 1, 2])
    assert engines_of(outcomes) == ["shm"] * 3
    assert members.meshed == 0
    assert [type(outcome.role) for outcome in outcomes] == [Coordinator, Member, Member]


def test_a_set_of_one_needs_nobody(members: Members) -> None:
    assert engines_of(members.assemble([0], hosts=["one"])) == ["single"]


def test_a_sets_first_rank_need_not_be_rank_0(members: Members) -> None:
    outcomes = members.assemble([2, 5])
    assert engines_of(outcomes) == ["shm"] * 2
    workers = [outcome for outcome in outcomes if isinstance(outcome, WorkerThread)]
    assert [(worker.ranks, worker.index) for worker in workers] == [([2, 5], 0), ([2, 5], 1)]


def test_ranks_of_several_hosts_use_sockets(members: Members) -> None:
    assert engines_of(members.assemble([0, 1, 2], hosts=["one", "two", "three"])) == ["tcp"] * 3
    assert members.meshed == 3


def test_hosts_with_several_ranks_are_served_in_steps(members: Members) -> None:
    assert engines_of(members.assemble([0, 1, 2], hosts=["one", "two", "one"])) == ["hierarchical"] * 3


def test_the_engine_and_the_reason_are_logged(members: Members, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "horovod.core"):
        members.assemble([0, 1], control=loopback_pair)
    assert "a process set of 2 ranks exchanges host memory by tcp (rank 1: no descriptor can be passed" in caplog.text


def test_ranks_that_can_pass_no_descriptor_use_sockets(members: Members) -> None:
    """One host by name, but the Unix socket was not to be reached: a container, say."""
    assert engines_of(members.assemble([0, 1], control=loopback_pair)) == ["tcp"] * 2


def test_ranks_that_cannot_map_the_memory_use_sockets(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    def attach(*_: object) -> Arena:
        raise OSError("not permitted")

    monkeypatch.setattr(Arena, "attach", attach)
    assert engines_of(members.assemble([0, 1])) == ["tcp"] * 2


def test_no_memory_to_share_means_sockets(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    def create(*_: object) -> Arena:
        raise OSError("no memory")

    monkeypatch.setattr(Arena, "create", create)
    assert engines_of(members.assemble([0, 1])) == ["tcp"] * 2


@pytest.fixture
def contributions(monkeypatch: pytest.MonkeyPatch) -> dict[int, int | None]:
    """By rank, how large a contribution to a proposal may be; None where the ranks have no proposals."""
    found: dict[int, int | None] = {}
    real = assembly.build_proposals

    def build(group: EngineGroup, *arguments: Any) -> Proposals | None:
        made = real(group, *arguments)
        found[group.rank] = None if made is None else made.data_bytes
        return made

    monkeypatch.setattr(assembly, "build_proposals", build)
    return found


def test_ranks_of_one_host_agree_through_shared_memory_whatever_engine_is_forced(
    members: Members, contributions: dict[int, int | None]
) -> None:
    assert engines_of(members.assemble([0, 1, 2], ["tcp"] * 3)) == ["tcp"] * 3
    assert contributions == dict.fromkeys(range(3), 0)  # the engine moves the smallest tensor, too


def test_small_tensors_travel_with_proposals_where_memory_is_the_engine(
    members: Members, contributions: dict[int, int | None]
) -> None:
    members.assemble([0, 1])
    assert len(contributions) == 2 and all(contributions.values())


def test_ranks_of_several_hosts_agree_by_messages(members: Members, contributions: dict[int, int | None]) -> None:
    members.assemble([0, 1], hosts=["one", "two"])
    assert contributions == dict.fromkeys(range(2))


def test_ranks_that_can_pass_no_descriptor_agree_by_messages(
    members: Members, contributions: dict[int, int | None], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "horovod.core"):
        members.assemble([0, 1], ["tcp"] * 2, control=loopback_pair)
    assert contributions == dict.fromkeys(range(2))
    assert "a process set of 2 ranks agrees by messages alone: rank 1: no descriptor can be passed to it" in caplog.text


@pytest.mark.parametrize("engines", [["tcp", "tcp"], ["tcp", ""], ["", "tcp"]])
def test_an_engine_forced_on_one_rank_is_used_by_all(members: Members, engines: list[str]) -> None:
    assert engines_of(members.assemble([0, 1], engines)) == ["tcp"] * 2


def test_contradicting_forced_engines_are_an_error_on_every_rank(members: Members) -> None:
    (text,) = errors_of(members.assemble([0, 1, 2], ["", "tcp", "shm"]))
    assert text == f"ranks ask for different engines with {CPU_OPERATIONS}: shm on rank 2, tcp on rank 1; use one"


@pytest.mark.parametrize("engines", [["shm", "shm"], ["shm", ""], ["", "shm"]])
def test_an_engine_that_was_forced_is_never_replaced(members: Members, engines: list[str]) -> None:
    (text,) = errors_of(members.assemble([0, 1], engines, hosts=["one", "two"]))
    assert text.startswith(f"{CPU_OPERATIONS}=shm cannot serve this group: rank 0: the group's ranks are on several")


def test_a_forced_engine_that_one_member_cannot_use_names_the_member(members: Members) -> None:
    (text,) = errors_of(members.assemble([0, 1], ["shm", "shm"], control=loopback_pair))
    assert "rank 1: no descriptor can be passed to it" in text


def test_a_member_that_does_not_answer_ends_the_attempt(members: Members) -> None:
    near, far = ends(socket.socketpair())
    with near, far:
        endpoints = [Endpoint(rank, "one", 1, 1, (), "") for rank in range(2)]
        with pytest.raises(TimeoutError):
            assemble(
                0,
                [0, 1],
                0,
                ANYWHERE,
                endpoints,
                {ConnectionKey(1, CONTROL, 0): near},
                lambda keys: {},
                Config(cpu_operations="tcp"),
                Watch(),
                lambda *_: None,
                time.monotonic() + 0.05,
            )


@pytest.mark.parametrize(
    "answer", [b"\xff\xff\xff\xff", frame(b"\xc1"), frame(msgspec.msgpack.encode(["tcp"])), b"\0\0", b""]
)
def test_a_member_that_answers_nonsense_ends_the_attempt(answer: bytes) -> None:
    near, far = ends(socket.socketpair())
    with near, far:
        far.socket.sendall(answer)
        far.socket.shutdown(socket.SHUT_WR)
        endpoints = [Endpoint(rank, "one", 1, 1, (), "") for rank in range(2)]
        with pytest.raises((OSError, msgspec.DecodeError)):
            assemble(
                0,
                [0, 1],
                0,
                ANYWHERE,
                endpoints,
                {ConnectionKey(1, CONTROL, 0): near},
                lambda keys: {},
                Config(cpu_operations="tcp"),
                Watch(),
                lambda *_: None,
                time.monotonic() + SOON,
            )


def test_an_assembled_process_set_works_and_can_be_ended(members: Members) -> None:
    workers = [outcome for outcome in members.assemble([0, 1, 2]) if isinstance(outcome, WorkerThread)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.leave("done")
    for worker in workers:
        assert worker.join(SOON)
        worker.abort(HorovodInternalError("too late"))


def test_the_tree_connects_members_with_relays_and_the_coordinator() -> None:
    def peers(hosts: str, ranks: list[int], rank: int) -> list[int]:
        endpoints = [Endpoint(each, host, 1, 1, (), "") for each, host in enumerate(hosts)]
        keys = control_connections(3, ranks, rank, tree_of(ranks, endpoints, Config(relay_threshold=0)))
        assert all(key == ConnectionKey(key.peer, CONTROL, 3) for key in keys)
        return [key.peer for key in keys]

    assert peers("x" * 10, [2, 5, 9], 2) == [5, 9]
    assert peers("x" * 10, [2, 5, 9], 5) == peers("x" * 10, [2, 5, 9], 9) == [2]
    assert peers("x" * 10, [2], 2) == []
    # On several hosts the first of each other host stands between.
    ranks, hosts = [0, 1, 2, 3, 4, 6], "xyzyxxz"
    assert {rank: peers(hosts, ranks, rank) for rank in ranks} == {
        0: [1, 2, 4],
        1: [0, 3],
        2: [0, 6],
        3: [1],
        4: [0],
        6: [2],
    }
