"""``init()``, ``shutdown()``, and the generation of the runtime that runs between them in this process.

There is at most one generation at a time. Bindings submit through ``core.submission.collectives``, and get everything else from
:func:`current`.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from horovod._base.config import CHECK, GOES_ON, ON_LOSS, Config, goes_on
from horovod.control.reachability import UnreachableError
from horovod.core.errors import NOT_INITIALIZED, HorovodInternalError, MismatchError, NoNextRound
from horovod.core.lifecycle import crash, elastic_process, initial_process_sets, malloc_threshold
from horovod.core.lifecycle.before_run import BeforeRun
from horovod.core.lifecycle.elastic_process import ElasticProcess
from horovod.core.lifecycle.generation import Generation
from horovod.core.lifecycle.process_set import ProcessSet, global_process_set, membership
from horovod.core.lifecycle.world import choose
from horovod.core.negotiation.messages import Operation
from horovod.core.worker.worker import WorkerThread
from horovod.observe import logging as observe_logging
from horovod.observe.call_site import warn

if TYPE_CHECKING:
    from horovod._base.process_identity import ProcessIdentity
    from horovod.control.rendezvous.rendezvous_kinds import Rendezvous

_log = logging.getLogger("horovod.core")

_running: Generation | None = None
_latest = 0
"""The number of the last generation in this process."""
_calls: Counter[tuple[int, ...]] = Counter()
"""How often ``init()`` was called with the same ranks."""
_lock = threading.Lock()
_hooked = False
_asked_for = False
"""Whether the script itself has called ``init()`` for the running generation."""


@dataclass(frozen=True)
class Foundation:
    """The parameters of a runtime that a process group of ``torch.distributed`` starts.

    Attributes:
        rendezvous: how the ranks find each other; None: as the launcher provides.
        time_limit: the time after which a collective that some ranks have not submitted ends the job; the user's settings come
            first.
        start_limit: how long the ranks may take to meet; None: as the user's settings say.
    """

    rendezvous: Rendezvous | None
    time_limit: timedelta
    start_limit: timedelta | None = None


def init(
    identify: Callable[[], ProcessIdentity],
    process_sets: Sequence[ProcessSet] = (),
    comm: Any = None,
    foundation: Foundation | None = None,
) -> None:
    """Start the runtime. Every rank must call it. A second call while it runs only looks up the process sets.

    Args:
        identify: finds out which rank the launcher started this process as; called if the runtime does not run yet.
        comm: which processes make up the job; see :func:`horovod.core.lifecycle.world.choose`.
        foundation: given if a process group starts the runtime, so that :func:`release` may end it; None for the script.

    Raises:
        ValueError: the environment, ``comm`` or the process sets are wrong; the text begins "Horovod initialization failed" if
            ranks contradict each other.
        NotImplementedError: a set is made from an mpi4py communicator, and the job is not.
        TimeoutError, RuntimeError: the ranks did not find each other; the message names the missing ranks.
    """
    global _running, _latest, _asked_for
    with _lock:
        sets = list(process_sets)
        if _running is not None and _running.process == os.getpid():
            if comm is not None and choose(comm, _running.world.launched) != _running.world:
                _log.warning("Horovod already runs with ranks other than those of comm; call hvd.shutdown() first")
            _asked_for = _asked_for or foundation is None
            if foundation is None and _running.config.on_loss != "end":
                raise ValueError(_NOT_BY_SCRIPT)
            initial_process_sets.look_up(sets, _running.world)
            return
        process = elastic_process.this_process()
        if goes_on(os.environ):
            _prepare_to_go_on(process, foundation)
        generation, settled = (
            _start(identify, sets, comm, foundation)
            if process is None
            else _start_elastic(process, identify, sets, comm, foundation)
        )
        _running, _latest, _asked_for = generation, generation.generation, foundation is None
        _hook()
        _register(sets, settled, generation)
        if settled.duplicate is not None:
            raise ValueError(
                "Horovod could not be initialized because process_sets entry number "
                f"{settled.duplicate} is a duplicate: {sets[settled.duplicate]} has the same ranks as another set."
            )


_NOT_BY_SCRIPT = (
    "Horovod initialization failed: --on-loss continue is for scripts that only use the default process group of "
    "torch.distributed. Leave it out for scripts that call hvd.init(); hvd.elastic.run is for those."
)


def _prepare_to_go_on(process: ElasticProcess | None, foundation: Foundation | None) -> None:
    """Under ``--on-loss continue``: refuse what cannot go on. No process ever joins, so all are as in ``hvd.elastic.run``."""
    if foundation is None:
        raise ValueError(_NOT_BY_SCRIPT)
    if process is None:
        raise ValueError(
            f"Horovod initialization failed: {ON_LOSS}={GOES_ON} needs horovodrun with --min-np, which decides which ranks "
            f"continue: "
            "horovodrun -np 4 --min-np 2 --on-loss continue python train.py"
        )
    process.in_run = True


def _start(
    identify: Callable[[], ProcessIdentity], sets: Sequence[ProcessSet], comm: Any, foundation: Foundation | None
) -> tuple[Generation, initial_process_sets.StaticSets]:
    launched = identify()
    config = Config.from_env()
    world = choose(comm, launched)
    if foundation is not None:
        world = replace(world, rendezvous=foundation.rendezvous)
        config = config.limited_to(foundation.time_limit)
    requested_sets = initial_process_sets.requested_sets(sets, world)
    observe_logging.configure(world.identity.rank, config.log_level, hide_time=config.log_hide_time)
    malloc_threshold.keep_largest_results()
    crash.forget()
    _calls[world.listed] += 1
    start_limit = None if foundation is None else foundation.start_limit
    generation = Generation(world, config, _latest, _calls[world.listed], start_limit)
    try:
        return generation, generation.start(requested_sets)
    except BaseException:
        generation.discard()
        raise


def _start_elastic(
    process: ElasticProcess,
    identify: Callable[[], ProcessIdentity],
    sets: Sequence[ProcessSet],
    comm: Any,
    foundation: Foundation | None,
) -> tuple[Generation, initial_process_sets.StaticSets]:
    """Begin the round for which the launcher has given this process a rank; the next one if a rank is lost meanwhile."""
    if comm is not None:
        raise ValueError(
            "Horovod initialization failed: comm cannot be given in an elastic job, whose ranks change; use hvd.init()."
        )
    while True:
        process.take_rank()
        try:
            started = _start(identify, sets, comm, foundation)
        except NotImplementedError:
            raise  # a RuntimeError, but of the arguments: another round would fail, too
        except (OSError, RuntimeError) as error:  # TimeoutError is an OSError
            if reason := crash.ending():
                raise NoNextRound(f"Rank {process.rank} takes part in no further round: {reason}.") from error
            cut = error.pairs if isinstance(error, UnreachableError) else ()
            process.next(True, f"Round {process.round} could not begin: {str(error).rstrip('.')}.", cut=cut)
            continue
        process.connected()
        if not process.in_run:
            started[0].guard = BeforeRun(process.alone, process.rank)
        return started


def _register(sets: Sequence[ProcessSet], settled: initial_process_sets.StaticSets, generation: Generation) -> None:
    """Fill in the numbers and ranks of the process sets."""
    global_process_set.ranks = list(range(generation.identity.size))
    global_process_set.mpi_comm = generation.world.communicator
    for process_set, number in zip(sets, settled.ids, strict=True):
        process_set.process_set_id = number
        if number is not None:
            process_set.ranks = list(settled.ranks[number - 1])


def _hook() -> None:
    """Once in each process: shut down when it ends, and close inherited connections in forked children."""
    global _hooked
    if not _hooked:
        _hooked = True
        atexit.register(_end)
        crash.watch(_crashed)
        os.register_at_fork(after_in_child=_after_fork)


def _crashed(reason: str) -> None:
    """An error ends this process, which may take long: tell the other ranks now."""
    generation = _running
    if generation is not None and generation.process == os.getpid():
        generation.crashed(reason)


def shutdown() -> None:
    """End the runtime on this rank, and with it the collectives of all ranks. Does nothing if it does not run.

    It warns if an optimizer of this rank has made a different number of steps than on the first rank that has left.

    Raises:
        MismatchError: instead of the warning, if ``HOROVOD_CHECK=error``. The runtime has ended.
    """
    found, strict = _shut_down()
    if found and strict:
        raise MismatchError(found)
    if found:
        warn(f"{found} ({CHECK}=error makes this an error, {CHECK}=off hides it.)")


def _end() -> None:
    """Shut down at the end of the process, when no error can be raised any more."""
    found, _ = _shut_down()
    if found:
        warn(f"{found} ({CHECK}=off hides this.)")


def end(reason: str) -> bool:
    """End the runtime for a process group that gets other members. Their numbers of steps are not compared: they may differ.

    Args:
        reason: what this rank did, with "it" as the subject; errors of the other ranks quote it.

    Returns:
        Whether the script itself had called ``init()``.
    """
    asked_for = _running is not None and _asked_for
    _shut_down(reason)
    return asked_for


def _shut_down(reason: str = "") -> tuple[str, bool]:
    """End the runtime. Returns the difference in numbers of steps, or "", and whether it is an error."""
    global _running
    with _lock:
        generation, _running = _running, None
        if generation is None or generation.process != os.getpid():
            return "", False
        try:
            return generation.stop(reason), generation.config.check == "error"
        finally:
            membership.clear()
            global_process_set.ranks = []
            global_process_set.mpi_comm = None


def release() -> None:
    """End the runtime as :func:`shutdown`, if a process group has started it and the script has not called ``init()``."""
    if not _asked_for:
        shutdown()


def runs(generation: Generation) -> bool:
    """Whether this is the running generation. Never raises."""
    return _running is generation


def is_initialized() -> bool:
    """Whether ``init()`` has been called and ``shutdown()`` has not. Never raises."""
    return _running is not None


def current() -> Generation:
    """The running generation.

    Raises:
        ValueError: there is none.
    """
    if _running is None:
        raise ValueError(NOT_INITIALIZED)
    return _running


def running() -> Generation:
    """The running generation, for a collective.

    Raises:
        HorovodInternalError: there is none. Elastic training recovers from it by ``init()``.
    """
    if _running is None:
        raise HorovodInternalError(NOT_INITIALIZED)
    return _running


def worker_of(process_set_id: int | None, operation: int) -> WorkerThread:
    """The worker thread of a process set, for submitting an ``Operation``.

    Raises:
        ValueError: the set is not registered, or this rank is not a member.
        HorovodInternalError: no generation runs, or this process is a forked child.
    """
    generation = _running
    if generation is None:
        raise HorovodInternalError(NOT_INITIALIZED)
    if generation.guard is not None:
        generation.guard(operation)
    worker = generation.workers.get(-1 if process_set_id is None else process_set_id)
    if worker is None:
        what = Operation(operation).name.capitalize()
        if process_set_id not in membership.ranks:
            raise ValueError(f"{what}: Process set provided does not exist, or has not been registered.")
        raise ValueError(f"{what}: Rank {generation.identity.rank} is not a member of the provided process set.")
    return worker


def before_run() -> BeforeRun | None:
    """The guard of a process of an elastic job that has not entered ``hvd.elastic.run``; otherwise None."""
    guard = _running.guard if _running is not None else None
    return guard if isinstance(guard, BeforeRun) else None


def enter_run() -> None:
    """This process enters ``hvd.elastic.run``."""
    if _running is not None and before_run() is not None:
        _running.guard = None


def meet(what: str) -> None:
    """Called before ranks wait for each other for ``what`` outside of collectives of the runtime.

    Raises:
        RuntimeError: this process has joined an elastic job, and has not come to the others yet.
    """
    guard = before_run()
    if guard is not None:
        guard.meet(what)


def keeps_own(what: str) -> bool:
    """Whether ``what``, a broadcast of parameters or optimizer state, leaves the values of this process as they are."""
    guard = before_run()
    if guard is None:
        return False
    if not guard.alone:
        guard.tell(what)
    return guard.alone


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    if _running is not None:
        _running.abandon()
