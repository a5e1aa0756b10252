"""Random events: killed, stopped and ended ranks and agents, hosts that come and go, a discovery script that fails or hangs."""

from __future__ import annotations

from pathlib import Path

import pytest

import elastic_events

EVENTS = 15


def test_a_job_goes_on_after_random_events_and_has_the_undisturbed_result(tmp_path: Path) -> None:
    """``python tests/elastic_events.py --events 300`` plays more."""
    if not elastic_events.available():
        pytest.skip("this machine allows no namespaces of processes")
    assert "the undisturbed result" in elastic_events.ElasticEvents(tmp_path, seed=1).run(EVENTS)
