"""What follows from the records of all ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod.core.errors import MismatchError
from horovod.torch.optimizer.pass_record import (
    PassRecord,
    TouchedGradients,
    as_bytes,
    as_mask,
    conclude,
    decode,
    is_idle,
)

TOLD = st.builds(
    TouchedGradients,
    st.sampled_from(["a", "b", "c"]),
    st.just(3),
    st.just(12),
    st.integers(0, 2**12 - 1).map(as_bytes),
    st.integers(0, 2**12 - 1).map(as_bytes),
    st.booleans(),
    st.just(1),
    st.sampled_from([0, 5]),
)
RECORD = st.lists(TOLD, max_size=3, unique_by=lambda each: each.name).map(lambda told: PassRecord(tuple(told)))
RECORDS = st.dictionaries(st.integers(0, 7), RECORD, min_size=1, max_size=4)


@given(RECORDS)
def test_what_any_rank_has_touched_is_reduced_and_every_rank_finds_the_same(records: dict[int, PassRecord]) -> None:
    found = conclude(records)
    shuffled = dict(sorted(records.items(), reverse=True))
    assert [*conclude(shuffled).items()] == [*found.items()]
    for name, conclusion in found.items():
        told = [each for record in records.values() for each in record.optimizers if each.name == name]
        for bit in range(12):
            assert bool(conclusion.touched >> bit & 1) == any(as_mask(each.touched) >> bit & 1 for each in told)
        assert conclusion.final == (len(told) == len(records) and all(each.final for each in told))
        assert conclusion.alike == (len({each.held for each in told}) == 1)
    assert {*found} == {each.name for record in records.values() for each in record.optimizers}


@given(RECORD, st.integers(1, 4))
def test_a_record_that_all_ranks_have_sent_leads_to_what_it_says(record: PassRecord, ranks: int) -> None:
    found = conclude(dict.fromkeys(range(ranks), record))
    assert found == {each.name: each.alone() for each in record.optimizers}


@given(RECORD)
def test_a_record_arrives_as_it_was_sent(record: PassRecord) -> None:
    assert decode(record.encode()) == record


def at(steps: int, rounds: int = 0, final: bool = False, name: str = "a", touched: bytes = b"\3") -> PassRecord:
    return PassRecord((TouchedGradients(name, steps, 2, touched, final=final, rounds=rounds),))


def test_ranks_at_different_steps_are_named_with_their_places() -> None:
    text = "ranks 0, 2 are in pass 1 of step 5, rank 1 is in pass 3 of step 4, rank 3 is in step 4"
    with pytest.raises(MismatchError, match=text) as raised:
        conclude({0: at(4), 1: at(3, 2), 2: at(4), 3: at(3, 2, final=True)})
    assert raised.value.ranks == (0, 1, 2, 3)


def test_ranks_in_steps_of_different_optimizers_without_gradients_are_idle() -> None:
    first, second = at(1, final=True, touched=b""), at(1, final=True, name="b", touched=b"")
    assert is_idle({0: first, 1: second})
    assert not is_idle({0: first, 1: first})
    assert not is_idle({0: first, 1: at(1, final=True, name="b")})
    assert not is_idle({0: first, 1: at(1, name="b", touched=b"")})
