"""The client of the rendezvous server."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Sequence

from horovod._base.running_time import TURN_SECONDS, running_time
from horovod.control.dial import Address, Addresses, Secret, alternatives, describe, dial_until
from horovod.control.rendezvous.messages import (
    PURPOSE,
    VALUE_LIMIT,
    Answer,
    ExchangeValues,
    Get,
    Put,
    Refusal,
    RendezvousError,
    Request,
    ServerGoneError,
    decode_answer,
    encode,
    values_of,
)
from horovod.control.rendezvous.store_requests import StoreRequest
from horovod.control.sealing import SealError


class RendezvousClient:
    """One rank's connection to the server, a context manager. For one thread at a time.

    Args:
        address: the server's address, several candidates, or a function that finds them on this host. A host may be several
            names, separated by commas.
        secret: the job's secret, or a function that reads it from the connection.
        timeout: the most seconds to try to connect.

    Raises:
        ServerGoneError: the server could not be reached within ``timeout`` seconds.
    """

    def __init__(self, address: Address | Addresses, secret: Secret, timeout: float) -> None:
        addresses = alternatives(address) if isinstance(address, str | tuple) else address
        where = " or ".join(map(describe, addresses[:4])) if isinstance(addresses, list) else "on this host"
        self._server = f"the rendezvous server of this job, {where},"
        try:
            self._connection = dial_until(addresses, secret, PURPOSE, time.monotonic() + timeout)
        except ConnectionError as error:
            raise ServerGoneError(f"{self._server} cannot be reached: {error}") from error

    def put(self, key: str, value: bytes, *, only_first: bool = False, timeout: float = 60.0) -> None:
        """Store a value. With ``only_first`` an earlier value is kept.

        Raises:
            RendezvousError: the server has ended, took longer than ``timeout`` seconds, or what it sent was changed on its way.
        """
        self._ask(Put(key, value, only_first), timeout, slack=0.0)

    def get(self, key: str, timeout: float) -> bytes:
        """Wait for a value.

        Raises:
            TimeoutError: no rank stored it within ``timeout`` seconds.
        """
        return self._ask(Get(key, timeout), timeout)[0]

    def change(self, request: StoreRequest, timeout: float) -> list[bytes]:
        """Change values, or look at them, in one step. Returns what the request's docstring says.

        Raises:
            RendezvousError: as for :meth:`put`; or the value does not allow it.
        """
        return self._ask(request, timeout, slack=0.0)

    def exchange(
        self,
        key: str,
        rank: int,
        size: int,
        value: bytes,
        timeout: float,
        members: Sequence[int] = (),
        round_number: int = 0,
    ) -> list[bytes]:
        """All-gather ``value`` under ``key``: every one of ``size`` ranks must call it. Returns the values by rank.

        Args:
            members: the ranks' numbers in the launched job, if only some of the launched ranks take part.
            round_number: the round of an elastic job; 0 for other jobs.

        Raises:
            TimeoutError: a rank is missing; the message names it.
            RendezvousError: a rank has left, or two processes claim one rank.
        """
        return self._ask(ExchangeValues(key, rank, size, value, timeout, list(members), round_number), timeout)

    def interrupt(self) -> None:
        """Make a thread that waits for an answer raise RendezvousError. Any thread."""
        try:
            self._connection.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the server has closed the connection already

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> RendezvousClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _await_answer(self, began: float, seconds: float) -> float:
        """Wait for an answer until ``seconds`` are over in which this process runs. Returns the end of that time."""
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        while True:
            now = time.monotonic()
            left = seconds - running_time.age(began, now)
            sleep = max(0.0, min(left, TURN_SECONDS))
            if poll.poll(sleep * 1000 + 1) or left <= 0:
                return max(now + left, time.monotonic() + 0.1)
            running_time.turn(now + sleep, time.monotonic())

    def _ask(self, request: Request, seconds: float, slack: float = 10.0) -> list[bytes]:
        """Send a request and wait for the answer: ``slack`` seconds longer than the server waits."""
        began = time.monotonic()
        try:
            self._connection.send(encode(request), began + seconds + slack)
            deadline = self._await_answer(began, seconds + slack)
            # The answer may be large.
            body, _ = self._connection.receive(VALUE_LIMIT, deadline, rest_seconds=60.0 if slack else 0.0)
        except SealError as error:
            raise RendezvousError(f"the connection with {self._server} is not safe: {error}") from error
        except OSError as error:
            raise ServerGoneError(
                f"{self._server} has ended ({error}). The launcher runs it, or rank 0 if the launcher does not. Look at their "
                "output"
            ) from error
        answer: Answer = decode_answer(body)
        if isinstance(answer, Refusal):
            raise TimeoutError(answer.reason) if answer.timed_out else RendezvousError(answer.reason)
        return values_of(answer)
