"""The loop around an elastic training function: synchronise, train, and after an interruption begin the next round."""

from __future__ import annotations

import functools
import logging
import traceback
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from horovod.core.errors import HorovodInternalError, HostsUpdatedInterrupt, NoNextRound
from horovod.core.lifecycle import context
from horovod.elastic import launched
from horovod.elastic.notification import notification_manager
from horovod.elastic.rank_policy import Begun, Call, Completed, ErrorKind, Failed, Interrupted, Outcome, RankPolicy
from horovod.elastic.repetition import Repetition
from horovod.elastic.rounds import Reason, Reset
from horovod.elastic.state import State
from horovod.observe.call_site import raised_at

_Result = TypeVar("_Result")

_log = logging.getLogger("horovod.elastic")


def run_fn(func: Callable[..., _Result], reset: Callable[[], object]) -> Callable[..., _Result]:
    """Wrap ``func(state, ...)`` so that it survives failures and changes of the hosts. Every rank must call the result.

    The state is synchronised before each call of ``func``. After a HorovodInternalError the state goes back to the last commit.
    After a HostsUpdatedInterrupt, which all ranks raise at the same check, it stays as it is. Then ``reset`` begins the next
    round. Errors that another round would repeat end the job: ranks that disagree, and the same exception of the script in
    several rounds in a row without a completed step. Any other exception ends the call.

    Args:
        func: its first argument is a :class:`~horovod.elastic.state.State`. It continues at the position that the state has.
        reset: begins the next round: shuts the runtime down and initialises it. A :class:`~horovod.elastic.rounds.Reset` also
            gets the reason why the last round ended.

    Returns:
        A function with the arguments of ``func``, which returns what ``func`` returns.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> _Result:
        launched.connect()
        notification_manager.init()
        notification_manager.register_listener(state)
        try:
            with launched.in_run() as process:
                result = _Rank(state, functools.partial(func, state, *args, **kwargs), reset).run()
                if process is not None:
                    process.returned(state.checks)
                return result
        finally:
            notification_manager.remove_listener(state)

    return wrapper


class _Rank(Generic[_Result]):
    """Makes the calls of one rank's policy, and tells it how they ended."""

    def __init__(self, state: State, train: Callable[[], _Result], reset: Callable[[], object]) -> None:
        self._state = state
        self._train = train
        self._reset = reset
        self._policy = RankPolicy()
        self._repetition = Repetition()
        self._reason: Reason = HostsUpdatedInterrupt(skip_sync=False)
        self._result: _Result

    def run(self) -> _Result:
        while self._policy.call is not Call.RETURN:
            try:
                outcome = self._make(self._policy.call)
            except Exception as error:
                outcome = self._note(error)
                if self._policy.after(outcome) is Call.RAISE:
                    raise
                release_frames(error)
            else:
                self._policy.after(outcome)
        return self._result

    def _make(self, call: Call) -> Outcome:
        state, policy = self._state, self._policy
        if call is Call.SYNC:
            state.sync()
        elif call is Call.TRAIN:
            self._result = self._train()
        elif call is Call.RESTORE:
            state.restore()
        elif call is Call.SAVE:
            state.on_interrupt()
        elif call is Call.RESET:
            state.on_reset()
        elif isinstance(self._reset, Reset):
            if call is Call.SHUTDOWN:
                self._reset.shutdown(self._reason)
            elif call is Call.NEXT:
                self._reset.next(self._reason, has_state=policy.has_state, keeps_state=policy.keeps_state)
            else:
                return Begun(self._reset.init())
        elif call is Call.INIT:
            self._reset()
            return Begun(same_state=False)  # the other ranks are not known
        return Completed()

    def _note(self, error: Exception) -> Outcome:
        """How a call has ended, and with it perhaps the round."""
        outcome = outcome_of(error, self._policy.call, own_reset=not isinstance(self._reset, Reset))
        if isinstance(outcome, Interrupted) and isinstance(error, HostsUpdatedInterrupt):
            self._reason = error
        elif isinstance(outcome, Failed) and outcome.kind is ErrorKind.CONNECTION:
            self._reason = HorovodInternalError(f"The next round could not begin: {str(error).rstrip('.')}.")
        elif isinstance(error, HorovodInternalError) and outcome == Failed(ErrorKind.COLLECTIVE):
            _log.warning("going back to the last commit: %s", error)
            if context.is_initialized():
                error.call_sites.setdefault(context.current().identity.rank, raised_at(error))
            self._reason = self._repetition.after(error, self._state.checks)
        return outcome


def release_frames(error: BaseException) -> None:
    """Clear the local variables of an error's traceback, which hold the tensors of a whole step.

    The error is kept as the reason why the round ended, and other code may keep it, too. The next round needs the memory.
    """
    chain: list[BaseException | None] = [error]
    seen: set[int] = set()
    while chain:
        each = chain.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            traceback.clear_frames(each.__traceback__)  # leaves those that still run
            each.__traceback__ = None
            chain += [each.__cause__, each.__context__]


def outcome_of(error: Exception, call: Call, *, own_reset: bool = False) -> Outcome:
    """The kind of an error for the policy. Pure.

    Args:
        call: the call that has raised it.
        own_reset: whether ``reset`` is a function of the script. Its errors, other than failed collectives, end the call.
    """
    if isinstance(error, HostsUpdatedInterrupt):
        return Interrupted(error.skip_sync)
    if isinstance(error, NoNextRound | NotImplementedError):
        return Failed(ErrorKind.FINAL)
    if call is Call.INIT and not own_reset and isinstance(error, OSError | RuntimeError):  # TimeoutError is an OSError
        return Failed(ErrorKind.CONNECTION)
    return Failed(ErrorKind.COLLECTIVE if isinstance(error, HorovodInternalError) else ErrorKind.FINAL)
