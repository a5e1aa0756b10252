"""How long threads poll before they sleep."""

from __future__ import annotations

from horovod.core.worker.waiting import WITH_OWN_CORE, polls


def test_no_thread_polls_if_ranks_share_a_core() -> None:
    shared = polls(spins=False)
    assert shared.worker == 0
    assert max(shared) == 1
    assert polls(spins=True) == WITH_OWN_CORE
