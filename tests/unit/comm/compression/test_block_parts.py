"""How blocks are dealt to ranks and cut into pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from horovod.comm.compression.block_parts import block_chunks, block_pieces

LENGTHS = st.lists(st.integers(0, 500), min_size=1, max_size=6)


@given(lengths=LENGTHS, half=st.integers(1, 20), ranks=st.integers(1, 6), step=st.integers(1, 10))
def test_every_element_is_in_one_piece_of_one_rank(lengths: list[int], half: int, ranks: int, step: int) -> None:
    block = 2 * half
    found: list[tuple[int, int]] = []
    for part in block_pieces(tuple(lengths), block, ranks, step):
        for index, piece in enumerate(part):
            assert piece.blocks == step or (index == len(part) - 1 and 0 < piece.blocks < step)
            place = 0
            for run in piece.runs:
                assert run.place == place and run.start % block == 0 and run.start < run.stop
                assert run.stop % block == 0 or run.stop == lengths[run.vector]
                place += -(-(run.stop - run.start) // block) * block
                found += [(run.vector, element) for element in range(run.start, run.stop)]
            assert place == piece.blocks * block
    assert sorted(found) == [(vector, element) for vector, length in enumerate(lengths) for element in range(length)]


@given(
    lengths=LENGTHS,
    half=st.integers(1, 20),
    ranks=st.integers(1, 6),
    step=st.integers(1, 10),
    other=st.integers(0, 500),
)
def test_the_owner_of_an_element_depends_on_its_own_vector_alone(
    lengths: list[int], half: int, ranks: int, step: int, other: int
) -> None:
    def owners(lengths: list[int], step: int) -> dict[tuple[int, int], int]:
        return {
            (run.vector, element): rank
            for rank, part in enumerate(block_pieces(tuple(lengths), 2 * half, ranks, step))
            for piece in part
            for run in piece.runs
            for element in range(run.start, run.stop)
        }

    alone, beside = owners(lengths, step), owners([*lengths, other], step + 1)
    assert alone == {place: rank for place, rank in beside.items() if place[0] < len(lengths)}


@given(lengths=LENGTHS, half=st.integers(1, 20), step=st.integers(1, 10), other=st.integers(0, 500))
def test_a_vector_is_cut_into_the_same_chunks_beside_any_other(
    lengths: list[int], half: int, step: int, other: int
) -> None:
    def chunks(lengths: list[int]) -> list[tuple[int, int, int]]:
        pieces = block_chunks(tuple(lengths), 2 * half, step)
        assert all(sum(-(-(run.stop - run.start) // (2 * half)) for run in piece) <= step for piece in pieces)
        return [run[1:] for piece in pieces for run in piece]

    found = chunks([other, *lengths])
    assert [(vector + 1, start, stop) for vector, start, stop in chunks(lengths)] == [each for each in found if each[0]]
    covered = [(vector, element) for vector, start, stop in found for element in range(start, stop)]
    assert covered == [
        (vector, element) for vector, length in enumerate([other, *lengths]) for element in range(length)
    ]
