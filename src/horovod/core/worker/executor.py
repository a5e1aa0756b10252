"""Carries out the batches of one worker with its engines, and completes their requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from horovod.autotune import best_settings
from horovod.autotune.kept import Tuned
from horovod.comm.base import Communicator, Completion
from horovod.comm.engine import EngineError
from horovod.comm.lasting import lasting_list
from horovod.comm.tuned import TunedSettings
from horovod.core.engines.device_engines import DeviceEngines
from horovod.core.errors import EngineFailureError, HorovodInternalError, MismatchError
from horovod.core.negotiation.messages import Decision
from horovod.core.requests.batch import Batch, Entry, execute, size_of
from horovod.core.requests.devices import moves
from horovod.core.worker.cpu_affinity import CpuPlacement
from horovod.core.worker.in_flight import InFlight
from horovod.core.worker.open_events import OpenEvents
from horovod.observe.flight_recorder import FlightRecorder

_PLACED_BYTES = 4 << 20
"""For a larger batch the worker thread moves to its own cores. The move takes some microseconds."""

kept = lasting_list()
"""Failed requests whose tensors an engine may still use: their memory is not given back."""


class Executor:
    """The engines of one worker, and the collectives that run on them. Only the thread that drives the worker calls its
    methods, except :meth:`abort`, :meth:`fail`, :meth:`drop_members` and :meth:`close`.

    Args:
        ranks: the members' global ranks, in set order.
        communicator: the engine that moves the data of these ranks.
        requests: the worker's requests in flight.
        placement: the cores that the worker thread runs on.
        seconds: how long a device may take for a collective after it has begun it.
        recorder: records the collectives that are carried out; None for no recording.
        disagreed: called with the reason when ranks disagree about a collective.
        settled: called when nothing is in flight any more, before the last handle is completed.

    Attributes:
        begun, ended: how many collectives of these ranks it has begun to carry out, and how many have ended. ``begun`` is the
            same on all ranks that have the same orders.
        devices: on the executor of the global process set, the communicators for the device memory of all sets, if an engine
            moves it; set before the worker's thread starts.
        tuned: the settings that autotuning has chosen for the present batches; None without autotuning.
        agreed: the time at which the ranks agreed on the present batch; the thread that drives the worker sets it.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        communicator: Communicator,
        requests: InFlight,
        placement: CpuPlacement,
        seconds: float,
        recorder: FlightRecorder | None = None,
        disagreed: Callable[[str], None] = lambda reason: None,
        settled: Callable[[], None] = lambda: None,
    ) -> None:
        self.agreed = 0.0
        self.tuned: TunedSettings | None = None
        self.recorder = recorder
        self.begun = self.ended = 0
        self.devices: DeviceEngines | None = None
        self._ranks = ranks
        self._communicator = communicator
        self._requests = requests
        self._placement = placement
        self._disagreed = disagreed
        self._settled = settled
        self._open_events = OpenEvents(seconds)

    @property
    def runs(self) -> bool:
        """Whether it carries something out at this moment. Any thread may ask."""
        ended = self.ended  # first, so that a batch between both is seen
        return self.begun != ended

    @property
    def compresses(self) -> bool:
        """Whether reductions in host memory are compressed where that is asked for; the same on all ranks."""
        return self._communicator.compresses

    def carry_out(self, batch: Batch, driven: bool) -> None:
        """Run one batch, and complete the handles of this rank's requests in it.

        Args:
            driven: by a thread of the script, which stays on its cores.

        Raises:
            PeerFailure, DeviceFailure, Aborted: it could not be carried out; the handles are left to :meth:`fail`.
        """
        if driven or size_of(batch) <= _PLACED_BYTES:
            self._run(batch)
        else:
            with self._placement.at_work():
                self._run(batch)

    def carry_out_alone(
        self, entry: Entry, rows: tuple[tuple[int, ...], ...] = (), received: tuple[int, ...] = (), longest: int = 0
    ) -> None:
        """Run a quick request that all ranks have agreed on without an order, and complete it.

        Args:
            rows, received, longest: as in :class:`Decision`.
        """
        request = entry.request
        self._run([(Decision(-1, request.name, request.operation, rows, received, longest), entry)])

    def tune(self, tuned: Tuned) -> None:
        """Take over settings, which hold for all batches from now on. All ranks do this after the same batch."""
        self.tuned = tuned.settings
        self._communicator.tune(tuned.settings)
        if tuned.best is not None:
            best_settings.known = tuned.best

    def look_at_devices(self) -> float | None:
        """Check whether devices have finished. Returns the milliseconds until the next check; None if no device works.

        Raises:
            DeviceFailure: a device failed, or takes too long.
        """
        if self._open_events:
            self._open_events.look(time.monotonic())
        return self._open_events.milliseconds()

    def abort(self) -> None:
        """Interrupt the running collective. Any thread may call it."""
        self._communicator.abort()
        if self.devices is not None:
            self.devices.abort()

    def fail(self, entries: Sequence[Entry], error: BaseException) -> None:
        """Complete requests that are not in flight any more with ``error``."""
        if self._communicator.may_still_read() or self._communicator.may_still_write():
            kept.extend(entries)
        for entry in entries:
            entry.handle.complete(error)

    def still_in_use(self) -> str:
        """After an abort: the reason why tensors of failed requests may still be written; "" if they are not."""
        if not self._communicator.may_still_write():
            return ""
        return f"The engine {self._communicator.name} has not ended an operation in time"

    def drop_members(self, members: Sequence[int], reason: str) -> None:
        """These ranks are no longer a process set: requests on device memory that not all of them have submitted fail, and
        their communicator is closed. All ranks of the job call it, after everything else of that set has ended."""
        if self.devices is None:
            return
        for entry in self._requests.take_out(members):
            entry.handle.complete(HorovodInternalError(reason))
        self.devices.drop(members)

    def close(self) -> None:
        """Release the engines. Nothing may run on them any more."""
        if self.devices is not None:
            self.devices.close()
        self._communicator.close()

    def _run(self, batch: Batch) -> None:
        first = batch[0][0]
        failure: HorovodInternalError | None = None
        completion: Completion = None
        held: list[object] = []
        recorder = self.recorder
        self.begun += len(batch)
        if first.error:
            if recorder is not None:
                recorder.begins(batch, "", self.agreed)
            failure = MismatchError(first.error, ranks=first.call_sites, tensor=first.name, call_sites=first.call_sites)
        else:
            try:
                communicator, ranks = self._serving(first)
            except EngineError as error:
                if recorder is not None:
                    recorder.begins(batch, "", self.agreed)
                failure = EngineFailureError(str(error), tensor=first.name)
            else:
                if recorder is not None:
                    recorder.begins(batch, communicator.name if communicator is not None else "", self.agreed)
                if communicator is None:  # the batch is of other ranks alone
                    self._settle()
                    self.ended += len(batch)
                    return
                completion = execute(communicator, ranks, batch, held)
        self._complete(batch, failure, completion, held)
        self.ended += len(batch)
        if first.error:
            self._disagreed(first.error)

    def _serving(self, decision: Decision) -> tuple[Communicator | None, Sequence[int]]:
        """The communicator that carries out a decision, and its ranks; None if this rank does not take part."""
        devices = self.devices
        if devices is None or not moves(decision.device, devices.engine):
            return self._communicator, self._ranks
        return devices.of(decision.members)

    def _complete(self, batch: Batch, error: BaseException | None, completion: Completion, held: object) -> None:
        entries = self._requests.finish(batch)
        if completion is not None:
            names = ", ".join(decision.name for decision, _ in batch[:3])
            self._open_events.add(completion, names, (entries, held), time.monotonic())
        self._settle()
        tuned, joined = self.tuned, batch[0][0].template is not None
        special = completion is not None or tuned is not None or joined
        now = time.monotonic()
        for entry in entries:
            if entry is not None:  # else an abort has completed it, or this rank has joined
                handle = entry.handle
                if special:
                    handle.event = completion
                    handle.tuned = tuned
                    handle.joined = joined
                handle.complete(error or entry.error, now)

    def _settle(self) -> None:
        if self._requests.none():
            self._settled()
