"""The worker thread of every member but the first: announces to the coordinator, and does what it orders."""

from __future__ import annotations

from horovod.core.coordination.messages import (
    Announce,
    Announcer,
    Decision,
    Leave,
    MessageError,
    Request,
    Stop,
    Succeeded,
    decode_from_coordinator,
    encode,
)
from horovod.core.execution.batch import Batch
from horovod.core.execution.worker import WorkerThread


class MemberThread(WorkerThread):
    """The worker thread of every member but the first."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]  # the signature is Lane's
        self._announcer = Announcer(self._config.cache_capacity)
        self._decisions: dict[int, Decision] = {}

    def _announce(self, requests: list[Request]) -> None:
        proposal = self._fast_path.given_up(requests[0]) if self._fast_path is not None else 0
        self._connections.send(0, encode(Announce([self._announcer.item(request) for request in requests], proposal)))

    def _say_leave(self, reason: str) -> None:
        self._connections.send(0, encode(Leave(reason)))

    def _receive(self, member: int, body: bytes) -> None:
        message = decode_from_coordinator(body)
        if isinstance(message, Stop):
            self._stopping = (message.rank, message.reason)
            self._connections.drop(member)  # nothing else comes, and that it closes then is no loss
        elif isinstance(message, Succeeded):
            self._resolve()
        else:
            self._due.extend([[self._decision(item) for item in batch] for batch in message.batches])

    def _resolve(self) -> None:
        """What this rank has given up, and announced, is done all the same."""
        if self._fast_path is None:
            raise MessageError("there are no attempts without shared memory")
        try:
            entry = self._fast_path.resolve()
        except ValueError as error:
            raise MessageError(str(error)) from error
        self._done(entry)

    def _decide(self) -> None:
        pass  # the coordinator has

    def _at_rest(self) -> None:
        pass

    def _before_stop(self, rank: int, reason: str) -> None:
        """What this rank has given up may be done all the same, and the coordinator may have left before it heard of that."""
        if self._fast_path is not None and self._fast_path.has_succeeded():
            self._done(self._fast_path.resolve())

    def _execute(self, batch: Batch) -> None:
        self._run_batch(batch)
        self._announce_submitted()

    def _announce_submitted(self) -> None:
        """Between batches, so that the coordinator hears early what comes next."""
        submitted = self._requests.take()
        if submitted:
            self._announce([entry.request for entry in submitted])

    def _decision(self, item: int | Decision) -> Decision:
        if isinstance(item, int):
            try:
                return self._decisions[item]
            except KeyError:
                raise MessageError(f"decision {item} was never defined") from None
        if item.identifier >= 0:
            self._decisions[item.identifier] = item
        return item
