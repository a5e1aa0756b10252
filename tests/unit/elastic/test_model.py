"""Elastic training as a model: whatever happens in whatever order, ranks make the same calls, and the job runs or ends.

What must hold is asserted in ``tests/elastic_model/world.py``. ``tests/elastic_sequences.py`` plays many more sequences.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic_model import sequence
from part import draws

SEQUENCES = 1000
LENGTH = 1500
"""Choices: some two for each event."""


@settings(
    max_examples=draws(SEQUENCES),
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.binary(max_size=LENGTH, min_size=LENGTH // 3))
def test_in_any_sequence_ranks_make_the_same_calls_and_the_job_runs_or_ends(choices: bytes) -> None:
    sequence.run(sequence.of_bytes(choices))


def test_the_sequences_lead_to_many_ends() -> None:
    """The model would prove nothing if its jobs did not train, lose ranks and take in others."""
    ended = [sequence.run(sequence.of_seed(seed)) for seed in range(200)]
    reasons = Counter(each.stopped[:15] for each in ended if each.over)
    assert sum(not each.over for each in ended) > 20
    assert len(reasons) > 4
    assert sum(each.rounds > 4 for each in ended) > 20
