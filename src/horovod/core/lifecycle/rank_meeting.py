"""How one rank meets the others in ``init()``: through the rendezvous, until they are connected.

:meth:`Generation.start <horovod.core.lifecycle.generation.Generation.start>` opens a meeting, and connects within it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import msgspec

from horovod._base.config import Config
from horovod._base.running_time import running_time
from horovod.control.lost_rank import LostRankError, stopped_rank, text_of_loss
from horovod.control.mesh import Endpoint, Mesh, MeshError
from horovod.control.processes import STOPPED
from horovod.control.reachability import UnreachableError
from horovod.control.rendezvous.rendezvous_kinds import AllGather
from horovod.control.secret import make_secret
from horovod.core.lifecycle import elastic_process
from horovod.core.lifecycle.initial_process_sets import RequestedSet
from horovod.core.lifecycle.rank_exchange import JobInfo, exchange_rank_infos, own_rank_info, reachable_endpoints
from horovod.core.lifecycle.rendezvous import rendezvous_of
from horovod.core.lifecycle.termination import Termination
from horovod.core.lifecycle.world import World


class RankMeeting:
    """The meeting of the ranks, as a context. Its end closes the listeners. A loss of a rank within it names the first one.

    Args:
        world: the processes that take part; also an attribute.
        termination: gets the rendezvous and the ranks' information, for reports to the launcher.
        calls: the number of calls of ``init()`` with these ranks, including this call.
        seconds: how long the ranks may take to meet.

    Attributes:
        mesh: connects the ranks; None in a job of one rank.
        endpoints: by rank, its endpoint. After :meth:`meet`, with the addresses at which the other hosts reach it.
    """

    def __init__(self, world: World, config: Config, termination: Termination, calls: int, seconds: float) -> None:
        self.world = world
        self._config = config
        self._termination = termination
        self._calls = calls
        self._seconds = seconds
        self._process = elastic_process.this_process()
        self._met = 0.0
        self.mesh: Mesh | None = None
        self.endpoints: list[Endpoint] = []
        identity = world.identity
        if identity.size > 1:
            termination.point = world.rendezvous or rendezvous_of(world)
            self.mesh = Mesh(identity.rank, identity.hostname, world.on_this_host, config.network_interfaces)

    def __enter__(self) -> RankMeeting:
        if self._process is not None and self.mesh is not None:
            self._process.call_when_over(self.mesh.cancel)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, LostRankError):
                reason = self._first_loss(error)
                if reason != str(error):  # which names a rank that has given up because of the lost one
                    raise MeshError(reason) from None
        finally:
            if self._process is not None:
                self._process.call_when_over(None)
            if self.mesh is not None:
                self.mesh.close()

    @property
    def deadline(self) -> float:
        """When the ranks that have met must be connected. Time in which this process was stopped does not count."""
        now = time.monotonic()
        return now + self._seconds - running_time.age(self._met, now)

    def meet(self, generation: int, process_sets: Sequence[RequestedSet]) -> JobInfo:
        """Exchange what every rank must know of the others. Every rank of the job must call it.

        Args:
            generation: the number that this rank proposes for the generation.

        Raises:
            ValueError: the settings of the ranks differ.
            UnreachableError: some hosts cannot reach each other.
            TimeoutError, RuntimeError: ranks are missing; the message names them.
        """
        identity, point = self.world.identity, self._termination.point
        own = Endpoint(identity.rank, identity.hostname, os.getpid(), 0, (), "")
        if self.mesh is not None:
            own = self.mesh.endpoint
        if identity.rank == 0 and (point is None or not (point.secret or point.makes_secret)):
            # The launcher gave the job no secret; this one goes to ranks of this job only.
            own = msgspec.structs.replace(own, secret=make_secret())
        with self._session() as all_gather:
            rank_info = own_rank_info(own, self.world, self._config, generation, process_sets)
            ranks = exchange_rank_infos(rank_info, all_gather, self._seconds)
            job = JobInfo.of(ranks, self.world, self._config, b"" if point is None else point.secret)
            self.endpoints = [each.endpoint for each in ranks]
            self._termination.rank_infos = ranks
            # The same moment for all ranks, so that those that know the reason of a wait give up first.
            self._met = time.monotonic()
            self._keep_reachable(all_gather)
        return job

    def _session(self) -> AbstractContextManager[AllGather]:
        """The rendezvous through which the ranks exchange data until they are connected."""
        point, identity = self._termination.point, self.world.identity
        if point is None:
            return nullcontext(lambda subject, value, seconds: [value])
        return point.session(self._calls, identity.rank, identity.size, self._seconds, self.world.listed)

    def _keep_reachable(self, all_gather: AllGather) -> None:
        """Find the addresses by which the hosts reach each other, before ranks wait for connections."""
        mesh = self.mesh
        if mesh is None or self.world.on_this_host or len({endpoint.host for endpoint in self.endpoints}) == 1:
            return
        try:
            self.endpoints = reachable_endpoints(mesh.endpoint, self.endpoints, all_gather, self.deadline)
        except UnreachableError as error:
            self._termination.cannot_begin(error.pairs[0][0], str(error))
            raise
        mesh.keep_to(self.endpoints[self.world.identity.rank].addresses)

    def _first_loss(self, error: LostRankError) -> str:
        """What a rank says that has lost another one in ``init()``: what was reported first, or which process of its host is
        stopped. A rank that has given up is lost, too, to those that wait for it."""
        rank, lost, reason = self.world.identity.rank, error.lost_rank, str(error)
        processes = [(endpoint.process_namespace, endpoint.pid) for endpoint in self.endpoints]
        stopped = stopped_rank(rank, processes, lost)
        if stopped >= 0:
            lost, reason = stopped, text_of_loss(stopped, "the ranks met in hvd.init()", STOPPED)
        first = self._termination.cannot_begin(lost, reason)
        return reason if stopped >= 0 else first
