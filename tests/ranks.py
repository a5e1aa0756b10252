"""Real rank processes for tests: a pool of them, started once and sent one function after another.

    pool.run(function, 3)                    # on every rank, in its main thread; the results, by rank
    call = pool.start(function)              # the same in two steps, so that something can happen meanwhile
    pool.kill(1)
    call.results(dies={1})                   # rank 1's result is a Death

Functions travel by value, so they may be local or lambdas, and test modules need not be importable in the ranks. They
import ``horovod`` themselves. Every wait is bounded; a pool that was given up on is started anew by the next call.
"""

from __future__ import annotations

import os
import pickle
import re
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import cloudpickle

import horovod
from horovod._base import config, pickling
from horovod.control.secret import encode_secret, make_secret
from leaks import Inventory, left_behind
from rank_template import Forked, Template
from rank_worker import LENGTH, STACKS
from time_limits import SOON

TESTS = Path(__file__).resolve().parent
SOURCE = Path(horovod.__file__).resolve().parents[1]
PLAIN = "horovod.common.basics"
"""What processes that need no framework are forked with: the runtime, and all that it imports."""
START_SECONDS = SOON
TAIL_BYTES = 8000
LATE_VARIABLES = re.compile("_?HOROVOD_|PYTEST_|NCCL_|TEST_")
"""How the names of variables begin that no framework reads while it is imported. Each job and each test has others of them."""


class Answer(NamedTuple):
    """What came of a call on one rank.

    Attributes:
        value: what it returned, or the exception that it raised (None if that cannot be pickled).
        traceback: the text of the exception's traceback; "" if it returned.
    """

    value: Any
    traceback: str


class Death(NamedTuple):
    """The result of a rank that ended: its exit code, or minus the signal that killed it."""

    status: int


class RankError(AssertionError):
    """Something went wrong in the ranks; the message shows what, rank by rank.

    Attributes:
        errors: by rank, the exception it raised (None for one that cannot be pickled), or its :class:`Death`.
    """

    def __init__(self, message: str, errors: Mapping[int, BaseException | Death | None]) -> None:
        super().__init__(message)
        self.errors = dict(errors)


class RankTimeout(RankError):
    """Some ranks did not finish in time; the message shows the stacks of all."""


class _Worker:
    """One process and the socket to it. What it prints goes to a file that errors quote."""

    def __init__(
        self, name: str, env: Mapping[str, str], module: str | None = None, template: Template | None = None
    ) -> None:
        self.name = name
        self.log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed by close()
        self.connection, other = socket.socketpair()
        self.process: subprocess.Popen[bytes] | Forked
        with other:
            if template is not None:
                self.process = template.fork(env, other, self.log.fileno())
            else:
                self.process = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "rank_worker",
                        str(other.fileno()),
                        str(os.getpid()),
                        *filter(None, [module]),
                    ],
                    env=env,
                    cwd=TESTS,
                    pass_fds=[other.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=self.log,
                    stderr=self.log,
                    start_new_session=True,  # an interrupt at the terminal is for pytest alone
                )
        self.pidfd = os.pidfd_open(self.process.pid)
        self.buffer = bytearray()
        self.answer: Answer | Death | None = None  # to the present call
        self.log_start = 0

    def ask(self, request: bytes) -> None:
        """Send a call. A worker that has died answers so at once."""
        self.answer = None
        self.log_start = os.fstat(self.log.fileno()).st_size
        try:
            self.connection.settimeout(START_SECONDS)
            self.connection.sendall(LENGTH.pack(len(request)) + request)
        except OSError:
            pass  # listen() finds the cause

    def listen(self) -> bool:
        """Take what has come; sets ``answer`` when it is complete, or when the process has ended without one.

        Returns:
            Whether more can come over the connection.
        """
        status = self.process.poll()  # first, so that a last word before the end is not missed
        more = True
        self.connection.setblocking(False)
        try:
            while part := self.connection.recv(1 << 20):
                self.buffer += part
            more = False
        except BlockingIOError:
            pass
        except OSError:
            more = False
        if len(self.buffer) >= LENGTH.size:
            stop = LENGTH.size + LENGTH.unpack_from(self.buffer)[0]
            if len(self.buffer) >= stop:
                self.answer = Answer(*pickle.loads(self.buffer[LENGTH.size : stop]))
                del self.buffer[:stop]
        if self.answer is None and status is not None:
            self.answer = Death(status)
        return more

    def output(self) -> str:
        """What it has printed since the present call began; the end of it if that is long."""
        size = os.fstat(self.log.fileno()).st_size
        start = max(self.log_start, size - TAIL_BYTES)
        return os.pread(self.log.fileno(), size - start, start).decode(errors="replace")

    def stop(self) -> None:
        """Let it end by itself for a moment, then kill it."""
        self.connection.close()
        try:
            self.process.wait(0 if self.answer is None else 3)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def close(self) -> None:
        self.stop()
        os.close(self.pidfd)
        self.log.close()


class Call:
    """A function under way on some ranks of a pool."""

    def __init__(self, pool: RankPool, ranks: Sequence[int]) -> None:
        self._pool = pool
        self._ranks = ranks

    def results(self, timeout: float = SOON, dies: Collection[int] = ()) -> list[Any]:
        """Wait for all; what each returned, in the order of the ranks asked.

        Args:
            dies: ranks that must end instead of returning; their results are :class:`Death`.

        Raises:
            RankError: a rank raised, or ended and was not to, or was to and did not.
            RankTimeout: not all had finished after ``timeout`` seconds. The pool is killed.
        """
        workers = {rank: self._pool._workers[rank] for rank in self._ranks}
        late = _listen(workers, timeout)
        if late:
            raise self._pool._give_up(f"ranks {late} did not finish within {timeout:g} seconds", workers)
        errors: dict[int, BaseException | Death | None] = {}
        texts = []
        for rank, worker in workers.items():
            answer = worker.answer
            if isinstance(answer, Death):
                if rank not in dies:
                    errors[rank] = answer
                    texts.append(f"--- rank {rank} ended with {_status(answer.status)}\n{worker.output()}")
            else:
                assert answer is not None
                if answer.traceback:
                    errors[rank] = answer.value
                    texts.append(f"--- rank {rank}\n{answer.traceback}{worker.output()}")
                elif rank in dies:
                    errors[rank] = None
                    texts.append(f"--- rank {rank} was to end, but returned {answer.value!r}\n")
        if errors:
            raise RankError(f"ranks {sorted(errors)} of {self._pool.size} failed\n" + "\n".join(texts), errors)
        return [
            worker.answer if isinstance(worker.answer, Death) else worker.answer.value  # type: ignore[union-attr]
            for worker in workers.values()
        ]


class RankPool:
    """The processes of a job of ``size`` ranks on one host, and the rendezvous server they meet at.

    Args:
        env: environment variables on top of those of the job; they are part of what the ranks see from their start.
        framework: import ``horovod.<framework>`` before the first call.
        templates: where there are processes that have imported it, or the runtime alone, from which the ranks and the
            server are forked.
    """

    def __init__(
        self,
        size: int,
        env: Mapping[str, str] | None = None,
        framework: str | None = None,
        templates: Templates | None = None,
    ) -> None:
        self.size = size
        self._env = dict(env or {})
        self._framework = framework
        self._templates = templates
        self._workers: list[_Worker] = []
        self._host: _Worker | None = None
        self.restart()

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = SOON,
        ranks: Sequence[int] | None = None,
        dies: Collection[int] = (),
    ) -> list[Any]:
        """Run ``function(*args)`` on all ranks, or on ``ranks``; see :meth:`Call.results`."""
        return self.start(function, *args, ranks=ranks).results(timeout, dies)

    def start(self, function: Callable[..., Any], *args: Any, ranks: Sequence[int] | None = None) -> Call:
        """Have ``function(*args)`` run; wait for it with :meth:`Call.results`."""
        if not self._workers:
            self.restart()
        chosen = list(range(self.size) if ranks is None else ranks)
        request = _pickled(function, args)
        for rank in chosen:
            self._workers[rank].ask(request)
        return Call(self, chosen)

    def kill(self, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a rank a signal."""
        self._workers[rank].process.send_signal(number)

    def alive(self, rank: int) -> bool:
        """Whether a rank's process exists (a stopped one does)."""
        return bool(self._workers) and self._workers[rank].process.poll() is None

    def healthy(self) -> bool:
        """Whether every rank is there and waits for a call."""
        return bool(self._workers) and all(
            worker.process.poll() is None and isinstance(worker.answer, Answer) for worker in self._workers
        )

    def output(self, rank: int) -> str:
        """What a rank has printed during the present or last call."""
        return self._workers[rank].output()

    @contextmanager
    def leaves_nothing(self, patience: float = SOON) -> Iterator[None]:
        """Fail if what happens inside leaves a thread, a child or a descriptor behind in any rank.

        Args:
            patience: how many seconds endings get; few where a test leaves something on purpose.
        """
        before = self.run(Inventory.take)
        yield
        left = {rank: new for rank, new in enumerate(self.run(_left_behind, before, patience)) if new}
        assert not left, f"left behind, by rank: {left}"

    def restart(self) -> None:
        """New processes, whatever state the old ones are in."""
        self.close()
        secret = make_secret()
        base = {
            name: value
            for name, value in os.environ.items()
            if "HOROVOD" not in name and name != "PYTEST_CURRENT_TEST"  # a template serves the pools of many tests
        }
        path = [str(TESTS), str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])]
        base["PYTHONPATH"] = os.pathsep.join(path)
        base["PYTHONUNBUFFERED"] = "1"
        base["OMP_NUM_THREADS"] = base["MKL_NUM_THREADS"] = "1"
        self._host = _Worker("rendezvous", base, template=self._template(PLAIN, base))
        self._check(_listen({0: self._host}, START_SECONDS), [self._host])
        self._host.ask(_pickled(_serve_rendezvous, (secret,)))
        self._check(_listen({0: self._host}, START_SECONDS), [self._host])
        assert isinstance(self._host.answer, Answer)
        host, port = self._host.answer.value
        job = {
            **base,
            config.SIZE: str(self.size),
            config.LOCAL_SIZE: str(self.size),
            config.CROSS_RANK: "0",
            config.CROSS_SIZE: "1",
            config.HOSTNAME: "localhost",
            config.RENDEZVOUS_ADDRESS: host,
            config.RENDEZVOUS_PORT: str(port),
            config.SECRET_KEY: encode_secret(secret),
        }
        module = f"horovod.{self._framework}" if self._framework else None
        template = self._template(module or PLAIN, {**job, **self._env})
        for rank in range(self.size):
            env = {**job, config.RANK: str(rank), config.LOCAL_RANK: str(rank), **self._env}
            self._workers.append(_Worker(f"rank {rank}", env, module, template))
        self._check(_listen(dict(enumerate(self._workers)), START_SECONDS), self._workers)

    def _template(self, module: str, env: Mapping[str, str]) -> Template | None:
        return self._templates.get(module, env) if self._templates is not None else None

    def _check(self, late: list[int], workers: Sequence[_Worker]) -> None:
        """See that workers have started."""
        failed = [worker for worker in workers if not isinstance(worker.answer, Answer) or worker.answer.traceback]
        if late or failed:
            texts = [f"--- {worker.name}: {worker.answer}\n{worker.output()}" for worker in failed]
            self.close()
            raise RankError("the processes of a pool did not start\n" + "\n".join(texts), {})

    def _give_up(self, reason: str, workers: Mapping[int, _Worker]) -> RankTimeout:
        """Kill everything; the error, with everybody's stacks."""
        asked = []
        for worker in workers.values():
            if worker.answer is None and _state(worker.process.pid) != "T":
                worker.process.send_signal(STACKS)
                asked.append(worker)
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline and not all("(most recent" in worker.output() for worker in asked):
            time.sleep(0.02)
        time.sleep(0.1)  # a dump takes several writes
        texts = []
        for rank, worker in workers.items():
            state = "is stopped" if worker not in asked else "was here"
            if worker.answer is not None:
                state = f"had finished: {worker.answer}"
            texts.append(f"--- rank {rank} {state}\n{worker.output()}")
        self.close()
        return RankTimeout(f"{reason}\n" + "\n".join(texts), {})

    def let_go(self) -> None:
        """Have all processes end, so that :meth:`close` need not wait for one after another."""
        for worker in self._workers:
            worker.connection.close()

    def close(self) -> None:
        """End all processes. The next call starts new ones."""
        self.let_go()
        for worker in [*self._workers, *filter(None, [self._host])]:
            worker.close()
        self._workers, self._host = [], None

    def processes(self) -> set[int]:
        """The child processes that are the pool's."""
        return {worker.process.pid for worker in [*self._workers, *filter(None, [self._host])]}

    def descriptors(self) -> set[int]:
        """The descriptors in this process that are the pool's."""
        workers = [*self._workers, *filter(None, [self._host])]
        return {fd for w in workers for fd in (w.connection.fileno(), w.pidfd, w.log.fileno())}


class Templates:
    """Templates by what they have imported, and in which environment. The one unused for longest is closed."""

    def __init__(self, most: int = 5) -> None:
        self._templates: OrderedDict[tuple[object, ...], Template] = OrderedDict()
        self._most = most

    def get(self, module: str, env: Mapping[str, str]) -> Template:
        """A template for ranks with this environment; the same one if only :data:`LATE_VARIABLES` differ."""
        imports = {name: value for name, value in env.items() if not LATE_VARIABLES.match(name)}
        key = (module, tuple(sorted(imports.items())))
        template = self._templates.pop(key, None)
        if template is not None and not template.alive():
            template.close()
            template = None
        while len(self._templates) >= self._most:
            self._templates.popitem(last=False)[1].close()
        self._templates[key] = template or Template(module, imports, TESTS)
        return self._templates[key]

    def processes(self) -> set[int]:
        return {template.process.pid for template in self._templates.values()}

    def descriptors(self) -> set[int]:
        return {fd for template in self._templates.values() for fd in template.descriptors()}

    def close(self) -> None:
        for template in self._templates.values():
            template.close()
        self._templates.clear()


class Pools:
    """The pools of a test session by what they are, started when first asked for. Those unused for longest are closed.

    Attributes:
        templates: what their processes are forked from; also for pools that a test makes and closes itself.
    """

    def __init__(self, most_ranks: int = 14) -> None:
        self._pools: OrderedDict[tuple[object, ...], RankPool] = OrderedDict()
        self.templates = Templates()
        self._most_ranks = most_ranks

    def get(self, size: int, env: Mapping[str, str] | None = None, framework: str | None = None) -> RankPool:
        """A pool whose ranks all wait for a call."""
        key = (size, tuple(sorted((env or {}).items())), framework)
        pool = self._pools.pop(key, None)
        while self._pools and size + sum(other.size for other in self._pools.values()) > self._most_ranks:
            self._pools.popitem(last=False)[1].close()
        if pool is None:
            pool = RankPool(size, env, framework, self.templates)
        elif not pool.healthy():
            pool.restart()
        self._pools[key] = pool
        return pool

    def processes(self) -> set[int]:
        return self.templates.processes().union(*(pool.processes() for pool in self._pools.values()))

    def descriptors(self) -> set[int]:
        return self.templates.descriptors().union(*(pool.descriptors() for pool in self._pools.values()))

    def close(self) -> None:
        for pool in self._pools.values():
            pool.let_go()
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
        self.templates.close()


def _listen(workers: Mapping[int, _Worker], timeout: float) -> list[int]:
    """Wait until every worker has answered or ended; the ranks that have done neither in time."""
    deadline = time.monotonic() + timeout
    with selectors.DefaultSelector() as selector:
        waiting = dict(workers)
        for rank, worker in workers.items():
            selector.register(worker.connection, selectors.EVENT_READ, rank)
            selector.register(worker.pidfd, selectors.EVENT_READ, rank)
        while waiting and (remaining := deadline - time.monotonic()) > 0:
            for rank in {key.data for key, _ in selector.select(remaining)}:
                worker = workers[rank]
                if not worker.listen() and worker.connection in selector.get_map():
                    selector.unregister(worker.connection)
                if worker.answer is not None:
                    if worker.connection in selector.get_map():
                        selector.unregister(worker.connection)
                    selector.unregister(worker.pidfd)
                    del waiting[rank]
    return sorted(waiting)


def _pickled(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """The call by value: with the function comes what it uses of its module, unless workers can import that."""
    module = sys.modules.get(getattr(function, "__module__", ""))
    path = getattr(module, "__file__", None)
    foreign = module is not None and path is not None and TESTS in Path(path).resolve().parents
    if foreign and Path(path).resolve().parent != TESTS:
        cloudpickle.register_pickle_by_value(module)
        try:
            return pickling.dumps((function, args))
        finally:
            cloudpickle.unregister_pickle_by_value(module)
    return pickling.dumps((function, args))


def _serve_rendezvous(secret: bytes) -> tuple[str, int]:
    """Runs in the pool's own process beside the ranks, and serves until that ends."""
    from horovod.control.rendezvous.server import RendezvousServer

    server = RendezvousServer(secret, host="127.0.0.1", port=0)
    server.start()
    return server.address


def _left_behind(before: list[Inventory], patience: float) -> list[str]:
    return left_behind(before[int(os.environ[config.RANK])], patience=patience)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _status(status: int) -> str:
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
