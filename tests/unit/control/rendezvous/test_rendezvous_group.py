"""The ranks of one exchange: the time that is left for those that are missing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod._base.running_time import RunningTime
from horovod.control.rendezvous import rendezvous_group
from horovod.control.rendezvous.rendezvous_group import RendezvousGroup


@given(began=st.integers(0, 100), ran=st.integers(0, 50), stopped=st.integers(0, 1000), seconds=st.integers(1, 60))
def test_the_time_in_which_the_process_was_stopped_is_not_taken_from_the_ranks(
    began: int, ran: int, stopped: int, seconds: int
) -> None:
    group = RendezvousGroup(2, began + seconds, seconds, [])
    clock = RunningTime()
    clock.leave_out(began + ran, began + ran + stopped)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous_group, "running_time", clock)
        assert group.left(began + ran) == group.left(began + ran + stopped) == seconds - ran
