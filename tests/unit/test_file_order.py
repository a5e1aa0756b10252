"""The order in which files of tests run."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from file_order import places

FILES = st.lists(
    st.tuples(
        st.sampled_from(["cluster", "faults", "loops", "parallel", "unit", "unit/core", "unit/control/rendezvous"]),
        st.integers(0, 60),
    ),
    max_size=60,
).map(lambda drawn: [f"tests/{folder}/test_{number}.py" for folder, number in drawn])

WAIT = "/cluster/", "/faults/", "/unit/control/"


@given(FILES)
def test_files_that_wait_are_spread_and_those_of_units_come_last(files: list[str]) -> None:
    place = places(files)
    assert set(place) == set(files)
    order = sorted(dict.fromkeys(files), key=place.__getitem__)
    units = [file for file in order if file.startswith("tests/unit/") and "/control/" not in file]
    assert order[len(order) - len(units) :] == units
    before = order[: len(order) - len(units)]
    waiting = [index for index, file in enumerate(before) if any(each in file for each in WAIT)]
    if waiting:
        most = (len(before) - len(waiting)) / len(waiting) + 2
        assert all(later - earlier <= most for earlier, later in pairwise([-1, *waiting, len(before)]))
