"""How gradients are cut into buckets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from horovod._bindings.bucket_division import ONE_BUCKET, SMALL_BYTES, cut

SIZES = st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 5 * SMALL_BYTES)), max_size=40)
LIMITS = st.integers(1, 20 * SMALL_BYTES)


@given(SIZES, LIMITS | st.just(ONE_BUCKET))
def test_every_parameter_is_in_one_bucket_of_its_kind_from_the_last_to_the_first(
    sizes: list[tuple[str, int]], limit: int
) -> None:
    buckets = cut(sizes, limit)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(sizes)))
    for bucket in buckets:
        assert bucket == sorted(bucket, reverse=True)
        assert len({sizes[index][0] for index in bucket}) == 1
    assert [bucket[0] for bucket in buckets] == sorted((bucket[0] for bucket in buckets), reverse=True)


@given(SIZES, LIMITS)
def test_a_bucket_of_several_parameters_keeps_to_its_bound(sizes: list[tuple[str, int]], limit: int) -> None:
    for number, bucket in enumerate(cut(sizes, limit)):
        left = sum(size for _, size in sizes[: bucket[0] + 1])
        full = [index for index in bucket if sizes[index][1]]
        nbytes = sum(sizes[index][1] for index in full)
        assert nbytes <= limit or len(full) == 1
        # What follows when less than SMALL_BYTES is left comes on top.
        early = [index for index in full if sum(size for _, size in sizes[: index + 1]) >= SMALL_BYTES]
        bound = SMALL_BYTES if number < 2 else max(SMALL_BYTES, left // 2)
        assert sum(sizes[index][1] for index in early) <= bound or len(early) == 1


@given(SIZES)
def test_without_overlap_there_is_one_bucket_of_each_kind(sizes: list[tuple[str, int]]) -> None:
    assert len(cut(sizes, ONE_BUCKET)) == len({kind for kind, _ in sizes})


def test_the_first_and_the_last_buckets_of_a_model_are_small() -> None:
    buckets = cut([("float32", 250_000)] * 400, 16 * SMALL_BYTES)  # 100 MB, as ResNet-50
    sizes = [250_000 * len(bucket) / SMALL_BYTES for bucket in buckets]
    assert all(size <= 1 for size in sizes[:2]) and all(1 < size < 2 for size in sizes[-2:])
    assert sizes[2:-1] == sorted(sizes[2:-1], reverse=True)


def test_a_little_rest_is_no_bucket() -> None:
    convolutions, large, head = ("float32", 20_000), ("float32", 6 * SMALL_BYTES), ("float32", 50_000)
    assert cut([convolutions, large, head], 16 * SMALL_BYTES) == [[2], [1, 0]]
    assert cut([convolutions, head], 16 * SMALL_BYTES) == [[1, 0]]
    assert cut([convolutions, large, head], 6 * SMALL_BYTES) == [[2], [1], [0]]
