"""This process as one of an elastic job: its rank in each round, and what the launcher reports meanwhile.

``init()`` asks for a rank. If ``hvd.elastic.run`` begins the next round, it has asked already, with the reason why the last
round ended. In both cases the answer becomes environment variables, from which the runtime learns its rank.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from horovod._base import config
from horovod.control import elastic_messages as messages
from horovod.control.dial import Address
from horovod.control.elastic_messages import (
    Connected,
    HostsChanged,
    Leaving,
    NoRank,
    RankAssignment,
    RankFailed,
    ReadyForRound,
    Returned,
    WorkerMessage,
)
from horovod.control.rendezvous.client import RendezvousClient
from horovod.control.rendezvous.messages import RendezvousError
from horovod.control.secret import decode_secret
from horovod.core.errors import NoNextRound

_log = logging.getLogger("horovod.elastic")

_PATIENCE_SECONDS = 60.0
"""How long the launcher may take to answer a request that it can answer at once."""
_LONGEST_WAIT_SECONDS = 86400.0
"""How long one request waits for the answer before it is sent again."""


class ElasticProcess:
    """A process that an elastic launcher has started.

    Args:
        address, secret: the address and the secret of the launcher's rendezvous server.
        number: the number of this process.
        launched: the id of the process that owns this object; forked children do not use it.

    Attributes:
        has_state: whether it has the state of the job, as ``hvd.elastic.run`` reports; None if that was not called: then every
            process that has been in a round counts as having it.
        rank: in the present round, or the last; -1 before the first.
        same_state: whether all ranks of the present round have the same state.
        in_run: whether it is in ``hvd.elastic.run``.
        alone: whether it has a rank in a round of ranks that are in ``hvd.elastic.run``, and has not come there itself: nobody
            takes part in its collectives.
        lost: the ranks that the job has gone on without, as the launcher describes them; the latest.
        interrupted: the operation and the name of the oldest collective that the last failure has ended here.
    """

    def __init__(self, address: Address, secret: bytes, number: int) -> None:
        self.number = number
        self.launched = os.getpid()
        self._address = address
        self._secret = secret
        self.has_state: bool | None = None
        self.rank = -1
        self.same_state = False
        self.in_run = False
        self.alone = False
        self.lost: list[str] = []
        self.interrupted = ""
        self._connected = False
        self._questions = 0
        self._has_rank = False  # one that no init() has used yet
        self._listener: _Listener | None = None

    @property
    def round(self) -> int:
        """The round that this process is a rank of, or was last; 0 before the first."""
        return 0 if self._listener is None else self._listener.round

    @property
    def store_prefix(self) -> str:
        """The beginning of the keys that process groups of the present round have at the launcher."""
        return messages.store_prefix(self.round)

    def connect(self, seconds: float = _PATIENCE_SECONDS) -> RendezvousClient:
        """Connect to the launcher's rendezvous server."""
        return RendezvousClient(self._address, self._secret, seconds)

    def next(
        self,
        failed: bool,
        reason: str,
        final: bool = False,
        *,
        keeps_state: bool = False,
        line: str = "",
        cut: tuple[tuple[int, int], ...] = (),
    ) -> None:
        """Wait for the rank in the next round, and put it into the environment.

        Args:
            failed: whether a failure has ended the last round.
            reason: why it has ended.
            final: whether another round would fail in the same way, so the launcher ends the job.
            keeps_state: whether all ranks stopped at one check for changed hosts, and this process still has that state.
            line: the line of the script whose collective failed.
            cut: pairs of ranks whose hosts cannot reach each other, so that the last round could not begin.

        Raises:
            NoNextRound: the job ends; the text says why.
            SystemExit: the job goes on without this process.
        """
        earlier = self.round
        if self._listener is not None:
            self._listener.stop()
        question, self._questions = self._questions, self._questions + 1
        collective, self.interrupted = self.interrupted, ""
        try:
            with self.connect() as client:
                has_state = self._connected if self.has_state is None else self.has_state
                self._tell(
                    client,
                    ReadyForRound(
                        question,
                        earlier,
                        failed,
                        reason,
                        final,
                        has_state,
                        keeps_state,
                        self.in_run,
                        line,
                        collective,
                        cut,
                    ),
                )
                answer = messages.decode_answer(_wait(client, messages.answer_key(self.number, question)))
        except RendezvousError as error:
            raise NoNextRound(
                f"{reason} This process could not ask the launcher for a rank in the next round: {error}"
            ) from error
        if isinstance(answer, NoRank):
            if answer.job_ends:
                own = f" {reason}" if failed and reason not in answer.reason else ""
                raise NoNextRound(f"The job ends: {answer.reason.rstrip('.')}.{own}")
            _log.info("this process is not needed any more: %s", answer.reason)
            raise SystemExit(0)
        os.environ.update(variables(answer))
        self.rank = answer.rank
        self.same_state = answer.same_state
        self.lost = answer.lost
        self.alone = answer.in_run and not self.in_run
        try:
            client = self.connect()
        except RendezvousError as error:
            raise NoNextRound(
                f"{reason} The launcher has ended since it gave a rank in the next round: {error}"
            ) from error
        self._listener = _Listener(client, answer.round)
        self._has_rank = True

    def take_rank(self) -> None:
        """Called when ``init()`` begins: wait for a rank, unless this process has one that no ``init()`` has used.

        Raises:
            NoNextRound, SystemExit: as :meth:`next`.
        """
        if not self._has_rank:
            self.next(False, "hvd.init() was called.")
        self._has_rank = False

    def connected(self) -> None:
        """Note that ``init()`` has succeeded."""
        self._connected = True
        self.tell(Connected(self.round))

    def enters_run(self) -> None:
        """Note that ``hvd.elastic.run`` begins. A process that was alone reports it."""
        if self.alone:
            self.tell(Connected(self.round, in_run=True))
        self.in_run, self.alone = True, False

    def leaves_run(self) -> None:
        """Note that ``hvd.elastic.run`` ends, whether it returns or raises."""
        self.in_run = False

    def returned(self, commits: int) -> None:
        """Report that ``hvd.elastic.run`` returns after so many commits."""
        self.tell(Returned(self.round, commits))

    def call_when_over(self, act: Callable[[str], None] | None) -> None:
        """Call ``act(reason)``, on any thread, once the launcher says that the present round is over."""
        if self._listener is not None:
            self._listener.call_when_over(act)

    def take_news(self) -> int:
        """The changes of hosts that the launcher has reported since the last call: a ``HostUpdateResult``."""
        return 0 if self._listener is None else self._listener.take()

    def failed(self, rank: int, reason: str) -> None:
        """Report that a rank of this round has failed. Any thread may call it."""
        self.tell(RankFailed(self.round, rank, reason))

    def leave(self) -> bool:
        """Tell the launcher that this process was asked to end.

        Returns whether it may leave at the next check for changed hosts. Otherwise the whole job ends, or the launcher is gone.
        """
        try:
            with self.connect(2.0) as client:
                try:
                    client.get(messages.ENDING, 0.0)
                    return False
                except TimeoutError:
                    self._tell(client, Leaving(self.round))
                    return True
        except (RendezvousError, OSError):
            return False

    def tell(self, message: WorkerMessage) -> None:
        try:
            with self.connect(2.0) as client:
                self._tell(client, message)
        except (RendezvousError, OSError) as error:
            _log.debug("this process could not tell the launcher %s: %s", message, error)

    def _tell(self, client: RendezvousClient, message: WorkerMessage) -> None:
        client.put(messages.message_key(self.number), messages.encode(message))


class _Listener:
    """Receives the launcher's messages about one round."""

    def __init__(self, client: RendezvousClient, round_number: int) -> None:
        self.round = round_number
        self._client = client
        self._lock = threading.Lock()
        self._hosts = 0
        self._over = ""
        self._act: Callable[[str], None] | None = None
        self._thread = threading.Thread(target=self._listen, name="horovod-elastic", daemon=True)
        self._thread.start()

    def take(self) -> int:
        with self._lock:
            hosts, self._hosts = self._hosts, 0
        return hosts

    def call_when_over(self, act: Callable[[str], None] | None) -> None:
        with self._lock:
            self._act = act
            over = self._over
        if over and act is not None:
            act(over)

    def stop(self) -> None:
        self._client.interrupt()
        self._thread.join()
        self._client.close()

    def _listen(self) -> None:
        number = 0
        while True:
            try:
                news = messages.decode_news(_wait(self._client, messages.news_key(self.round, number)))
            except RendezvousError:
                return  # stopped, or the launcher is gone, which the runtime can ignore
            number += 1
            with self._lock:
                if isinstance(news, HostsChanged):
                    self._hosts |= news.result
                    continue
                self._over = news.reason
                act = self._act
            if act is not None:
                act(news.reason)


VARIABLES = (*config.OF_TORCHRUN, *config.OF_TORCHRUN.values(), config.ELASTIC_ROUND)
"""The environment variables that :func:`variables` sets."""


def variables(assignment: RankAssignment) -> dict[str, str]:
    """A rank assignment as environment variables."""
    numbers = {
        config.RANK: str(assignment.rank),
        config.SIZE: str(assignment.size),
        config.LOCAL_RANK: str(assignment.local_rank),
        config.LOCAL_SIZE: str(assignment.local_size),
        config.CROSS_RANK: str(assignment.cross_rank),
        config.CROSS_SIZE: str(assignment.cross_size),
    }
    of_torchrun = {theirs: numbers[name] for name, theirs in config.OF_TORCHRUN.items()}
    return {**numbers, **of_torchrun, config.ELASTIC_ROUND: str(assignment.round)}


def _wait(client: RendezvousClient, key: str) -> bytes:
    while True:
        try:
            return client.get(key, _LONGEST_WAIT_SECONDS)
        except TimeoutError:
            continue


_process: ElasticProcess | None = None


def this_process() -> ElasticProcess | None:
    """This process as one of an elastic job; None in any other job, and in forked children."""
    global _process
    if _process is None:
        variables = os.environ
        number, address = variables.get(config.ELASTIC_PROCESS, ""), variables.get(config.RENDEZVOUS_ADDRESS, "")
        port, secret = variables.get(config.RENDEZVOUS_PORT, ""), variables.get(config.SECRET_KEY, "")
        if not (number.isdecimal() and address and port.isdecimal() and secret):
            return None
        _process = ElasticProcess((address, int(port)), decode_secret(secret), int(number))
    return _process if _process.launched == os.getpid() else None
