"""The retry loop and the states without a framework: what is saved, restored and synchronised, and when a job goes on."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from horovod.common.elastic import (
    HorovodInternalError,
    HostsUpdatedInterrupt,
    HostUpdateResult,
    NoNextRound,
    ObjectState,
    Reset,
    connect,
    disconnect,
    notification_manager,
    run_fn,
)
from horovod.core.errors import RankRaisedError, RepeatedFailureError
from horovod.elastic.rounds import Reason


class Launcher:
    """An elastic launcher, as a rank knows it."""

    def __init__(self, rounds: int = 100) -> None:
        self.reasons: list[Reason] = []
        self.news: list[HostUpdateResult] = []
        self.brought: list[tuple[bool, bool]] = []
        self.same = True  # as if the other ranks, too, came with the state that this one has
        self.rounds = rounds

    def next(self, reason: Reason, *, has_state: bool, keeps_state: bool) -> None:
        self.brought.append((has_state, keeps_state))
        self.reasons.append(reason)
        if len(self.reasons) > self.rounds:
            raise NoNextRound("too few hosts are left")

    def same_state(self) -> bool:
        return self.same and self.brought[-1][1]

    def poll(self) -> HostUpdateResult:
        result = HostUpdateResult.no_update
        while self.news:
            result |= self.news.pop(0)
        return result


class Calls(ObjectState):
    """A state that notes what becomes of it, in a job of one."""

    def __init__(self, **kwargs: Any) -> None:
        self.log: list[str] = []
        super().__init__(lambda obj: obj, lambda: 0, **kwargs)

    def save(self) -> None:
        self.log.append("save")
        super().save()

    def restore(self) -> None:
        self.log.append("restore")
        super().restore()

    def sync(self) -> None:
        self.log.append("sync")
        super().sync()

    def reset(self) -> None:
        self.log.append("reset")


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    launcher = Launcher()
    connect(launcher, launcher)
    yield launcher
    disconnect()


def nothing() -> None:
    pass


def raising(*errors: Exception) -> Callable[..., str]:
    """A training function that raises each of these, one in each call, and then returns."""
    left = list(errors)

    def train(state: Any) -> str:
        if left:
            raise left.pop(0)
        return "done"

    return train


def test_a_function_that_succeeds_is_called_once_with_a_synchronised_state() -> None:
    state = Calls(epoch=3)

    def train(state: Any, more: int, *, extra: int) -> int:
        """Its text."""
        return int(state.epoch) + more + extra

    wrapped = run_fn(train, Reset(nothing, nothing))
    assert wrapped(state, 4, extra=5) == 12
    assert state.log == ["sync"]
    assert wrapped.__doc__ == "Its text."


def test_after_a_failure_the_state_goes_back_to_the_commit_and_is_synchronised(launcher: Launcher) -> None:
    state = Calls(batch=0)
    seen = []

    def train(state: Any) -> int:
        seen.append(state.batch)
        if len(seen) == 1:
            state.batch = 5
            state.commit()
            state.batch = 9
            raise HorovodInternalError("rank 1 failed")
        return int(state.batch)

    assert run_fn(train, Reset(nothing, nothing))(state) == 5
    assert seen == [0, 5]
    assert state.log == ["sync", "save", "restore", "reset", "sync"]
    assert [str(reason) for reason in launcher.reasons] == ["rank 1 failed"]


def test_a_script_that_fails_in_the_same_way_in_each_round_ends_the_job(launcher: Launcher) -> None:
    launcher.rounds = 2
    failures = [RankRaisedError(f"rank {rank} failed", reason="it raised KeyError: 3") for rank in range(9)]
    with pytest.raises(NoNextRound):
        run_fn(raising(*failures), Reset(nothing, nothing))(Calls())
    assert [type(reason) for reason in launcher.reasons] == [RankRaisedError, RankRaisedError, RepeatedFailureError]


def test_a_script_that_commits_between_failures_goes_on(launcher: Launcher) -> None:
    calls = []

    def train(state: Any) -> str:
        state.commit()
        calls.append(1)
        if len(calls) < 9:
            raise RankRaisedError("rank 1 failed", reason="it raised KeyError: 3")
        return "done"

    assert run_fn(train, Reset(nothing, nothing))(Calls()) == "done"
    assert all(type(reason) is RankRaisedError for reason in launcher.reasons)


@pytest.mark.parametrize(
    ("news", "synchronised"),
    [
        ([HostUpdateResult.added], True),
        ([HostUpdateResult.removed], False),
        ([HostUpdateResult.removed, HostUpdateResult.added], True),
    ],
)
def test_changed_hosts_interrupt_at_the_next_check_and_lose_nothing(
    launcher: Launcher, news: list[HostUpdateResult], synchronised: bool
) -> None:
    """What was done since the last commit stays, since all ranks stop after the same step."""
    state = Calls(batch=0)

    def train(state: Any) -> int:
        if not launcher.reasons:
            state.batch = 7
            launcher.news += news
            state.check_host_updates()
        return int(state.batch)

    assert run_fn(train, Reset(nothing, nothing))(state) == 7
    assert state.log == ["sync", "save", "reset"] + ["sync"] * synchronised
    (reason,) = launcher.reasons
    assert isinstance(reason, HostsUpdatedInterrupt) and reason.skip_sync is not synchronised


def test_a_round_begins_between_shutdown_and_init(launcher: Launcher) -> None:
    log = []
    launcher.next = lambda reason, **_: log.append("next")  # type: ignore[method-assign]
    launcher.same_state = lambda: False  # type: ignore[method-assign]
    reset = Reset(lambda: log.append("shutdown"), lambda: log.append("init"))
    assert run_fn(raising(HorovodInternalError("lost")), reset)(Calls()) == "done"
    assert log == ["shutdown", "next", "init"]


def test_a_rank_that_is_lost_while_a_round_begins_costs_one_more_round(launcher: Launcher) -> None:
    outcomes: list[Exception | None] = [TimeoutError("rank 1 did not call hvd.init()"), ConnectionError("gone"), None]

    def init() -> None:
        outcome = outcomes.pop(0)
        if outcome is not None:
            raise outcome

    assert run_fn(raising(HorovodInternalError("lost")), Reset(nothing, init))(Calls()) == "done"
    assert [type(reason) for reason in launcher.reasons] == [HorovodInternalError] * 3
    assert "The next round could not begin: rank 1 did not call" in str(launcher.reasons[1])


def test_settings_that_contradict_each_other_are_not_tried_again(launcher: Launcher) -> None:
    def init() -> None:
        raise ValueError("HOROVOD_CYCLE_TIME is 1 on rank 0")

    with pytest.raises(ValueError, match="CYCLE_TIME"):
        run_fn(raising(HorovodInternalError("lost")), Reset(nothing, init))(Calls())
    assert len(launcher.reasons) == 1


def test_a_rank_that_is_lost_while_the_state_is_synchronised_costs_one_more_round(launcher: Launcher) -> None:
    class Fragile(Calls):
        def sync(self) -> None:
            super().sync()
            if len(launcher.reasons) == 1:
                raise HorovodInternalError("rank 2 failed")

    assert run_fn(raising(HorovodInternalError("rank 1 failed")), Reset(nothing, nothing))(Fragile()) == "done"
    assert [str(reason) for reason in launcher.reasons] == ["rank 1 failed", "rank 2 failed"]


def test_a_failure_without_an_elastic_launcher_says_so() -> None:
    state = Calls(epoch=1)

    def train(state: Any) -> None:
        state.epoch = 2
        raise HorovodInternalError("Horovod: rank 1 failed: it was killed.")

    with pytest.raises(HorovodInternalError) as caught:
        run_fn(train, Reset(nothing, nothing))(state)
    assert "rank 1 failed: it was killed. hvd.elastic.run cannot go on" in str(caught.value)
    assert "not started by an elastic launcher" in str(caught.value)
    assert isinstance(caught.value.__cause__, HorovodInternalError)
    assert state.epoch == 1, "the state is that of the last commit"


@pytest.mark.parametrize("interrupted", [False, True], ids=["failed", "interrupted"])
def test_nothing_of_the_step_that_has_ended_a_round_is_kept(launcher: Launcher, interrupted: bool) -> None:
    """Its tensors would lie beside those of the next step."""
    activations: list[weakref.ref[Any]] = []
    kept: list[BaseException] = []

    class Tensors:
        pass

    def step() -> None:
        tensors = Tensors()
        activations.append(weakref.ref(tensors))
        try:
            raise OSError("the connection broke")
        except OSError as error:
            failed = HorovodInternalError("rank 1 failed")
            kept.append(failed)  # as a handle does
            raise (HostsUpdatedInterrupt(True) if interrupted else failed) from error

    class Watched(Calls):
        def save(self) -> None:
            self.look("save")

        def restore(self) -> None:
            self.look("restore")

        def look(self, what: str) -> None:
            self.log.append(what)
            assert activations[-1]() is None

    def train(state: Any) -> str:
        batch = Tensors()
        if len(activations) < 2:
            activations.append(weakref.ref(batch))
            step()
        return "done"

    gc.disable()  # what is in cycles would go later, and the memory is needed now
    try:
        state = Watched()
        assert run_fn(train, Reset(nothing, nothing))(state) == "done"
    finally:
        gc.enable()
    assert state.log == ["sync", "save" if interrupted else "restore", "reset", *([] if interrupted else ["sync"])]
    assert [each() for each in activations] == [None, None]


def test_no_more_rounds_end_the_call(launcher: Launcher) -> None:
    launcher.rounds = 1
    with pytest.raises(NoNextRound, match="too few hosts"):
        run_fn(raising(*[HorovodInternalError("lost")] * 5), Reset(nothing, nothing))(Calls())
    assert len(launcher.reasons) == 2


@pytest.mark.parametrize("error", [ValueError("wrong"), RuntimeError("wrong"), KeyboardInterrupt(), SystemExit(0)])
def test_other_exceptions_are_the_scripts_own(launcher: Launcher, error: BaseException) -> None:
    def train(state: Any) -> None:
        raise error

    state = Calls()
    with pytest.raises(type(error)) as caught:
        run_fn(train, Reset(nothing, nothing))(state)
    assert caught.value is error
    assert not launcher.reasons and state.log == ["sync"]


def test_a_reset_of_ones_own_is_called_without_arguments() -> None:
    calls = []
    assert run_fn(raising(HorovodInternalError("lost")), lambda: calls.append("reset"))(Calls()) == "done"
    assert calls == ["reset"]


def test_a_state_hears_of_hosts_while_its_function_runs_and_not_afterwards() -> None:
    state = Calls()

    def train(state: Any) -> None:
        threading.Thread(target=notification_manager.handle_hosts_updated, args=(1, 2)).run()
        with pytest.raises(HostsUpdatedInterrupt):
            state.check_host_updates()

    run_fn(train, Reset(nothing, nothing))(state)
    notification_manager.handle_hosts_updated(2, 2)
    state.check_host_updates()


def test_an_update_is_told_once_and_an_older_one_not_again() -> None:
    state = Calls()
    state.on_hosts_updated(10, 1)
    with pytest.raises(HostsUpdatedInterrupt) as caught:
        state.check_host_updates()
    assert caught.value.skip_sync
    state.check_host_updates()
    state.on_hosts_updated(9, 2)
    state.check_host_updates()
    state.on_hosts_updated(11, 2)
    with pytest.raises(HostsUpdatedInterrupt):
        state.check_host_updates()


def test_the_ranks_go_by_what_rank_0_has_heard() -> None:
    state = ObjectState(lambda obj: (0, 5, 1), lambda: 1)
    with pytest.raises(HostsUpdatedInterrupt) as caught:
        state.check_host_updates()
    assert caught.value.skip_sync
    deaf = ObjectState(lambda obj: (0, 0, 0), lambda: 1)
    deaf.on_hosts_updated(5, 1)
    deaf.check_host_updates()


def test_updates_before_a_round_are_not_repeated_after_it() -> None:
    state = Calls()
    state.on_hosts_updated(10, 2)
    state.on_reset()
    state.check_host_updates()
    state.on_hosts_updated(3, 2)  # the clock of another rank 0
    with pytest.raises(HostsUpdatedInterrupt):
        state.check_host_updates()


def test_reset_callbacks_run_in_order_after_the_states_own(launcher: Launcher) -> None:
    state = Calls()
    state.register_reset_callbacks([lambda: state.log.append("one"), lambda: state.log.append("two")])
    run_fn(raising(HostsUpdatedInterrupt(True)), Reset(nothing, nothing))(state)
    assert state.log == ["sync", "save", "reset", "one", "two"]


def test_attributes_are_what_was_saved_after_restoring_and_what_rank_0_saved_after_synchronising() -> None:
    state = ObjectState(lambda saved: {**saved, "batch": 40}, lambda: 1, batch=0, epoch=0)
    state.batch, state.epoch = 1, 2
    state.restore()
    assert (state.batch, state.epoch) == (0, 0)
    state.epoch = 3
    state.save()
    state.epoch = 4
    state.sync()
    assert (state.batch, state.epoch) == (40, 3)
    state.batch, state.epoch = 0, 0
    state.restore()
    assert (state.batch, state.epoch) == (40, 3)


def test_an_attribute_that_would_hide_a_method_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ObjectState\(commit=...\)"):
        ObjectState(lambda obj: obj, lambda: 0, commit=1)
