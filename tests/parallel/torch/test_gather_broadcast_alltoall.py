"""Operations that move elements: allgather, broadcast, alltoall and reducescatter, in all their forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import horovod.torch as hvd
from horovod.core.errors import HorovodInternalError
from horovod.torch.tensors import DATA_TYPES

SIZES = [1, 2, 3, 4]


def numbered(rows: int, columns: tuple[int, ...], dtype: torch.dtype, start: int = 0) -> torch.Tensor:
    """Elements that tell where they come from."""
    count = rows * torch.Size(columns).numel()
    return ((torch.arange(count) + start) % 100).reshape(rows, *columns).to(dtype)


def equal(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    assert found.dtype == wanted.dtype and found.shape == wanted.shape, (found.dtype, found.shape, wanted.shape)
    return torch.equal(found.to(torch.complex128), wanted.to(torch.complex128))


@pytest.mark.parametrize("size", SIZES)
def test_allgather_concatenates_rows_of_different_lengths_in_rank_order(job: Any, size: int) -> None:
    def check() -> None:
        rank = hvd.rank()
        for dtype in DATA_TYPES:
            for columns in ((), (3,), (2, 0), (2, 1, 5)):
                # as many rows everywhere; one row more on each rank; none on some; none at all
                for rows in ([4] * size, list(range(1, size + 1)), [r % 2 * 5 for r in range(size)], [0] * size):
                    wanted = torch.cat([numbered(rows[r], columns, dtype, 7 * r) for r in range(size)])
                    mine = numbered(rows[rank], columns, dtype, 7 * rank)
                    handle = hvd.allgather_async(mine, name="gathered")
                    assert equal(hvd.synchronize(handle), wanted), (dtype, columns, rows)
        mine = numbered(rank, (2,), torch.float32, rank)
        wanted = torch.cat([numbered(r, (2,), torch.float32, r) for r in range(size)])
        assert equal(hvd.allgather(mine), wanted)
        assert equal(hvd.allgather(mine, "positional", hvd.global_process_set), wanted)
        group = [mine, torch.tensor([rank]), torch.full((1, 2), rank, dtype=torch.bfloat16)]
        for result in (hvd.grouped_allgather(group), hvd.synchronize(hvd.grouped_allgather_async(group, name="group"))):
            assert type(result) is tuple
            assert equal(result[0], wanted)
            assert result[1].tolist() == list(range(size))
            assert result[2].tolist() == [[r, r] for r in range(size)]

    job(size, check)


def test_allgather_of_large_tensors_concatenates_them_in_rank_order(job: Any) -> None:
    def check() -> None:
        rows = [3_000_001, 0, 70_003]
        mine = numbered(rows[hvd.rank()], (), torch.int32, hvd.rank())
        wanted = torch.cat([numbered(rows[r], (), torch.int32, r) for r in range(3)])
        handles = [hvd.allgather_async(mine), hvd.allgather_async(mine[:10])]
        assert torch.equal(hvd.synchronize(handles[0]), wanted)
        assert hvd.synchronize(handles[1]).numel() == 20

    job(3, check)


@pytest.mark.parametrize("size", [2, 3])
def test_rows_of_a_scalar_are_refused_and_the_job_goes_on(job: Any, size: int) -> None:
    def check() -> None:
        scalar = torch.tensor(1.0)
        for call in (hvd.allgather_async, hvd.alltoall_async):
            handle = call(scalar) if call is hvd.allgather_async else call(scalar, splits=[0] * size)
            with pytest.raises(HorovodInternalError, match="rank-zero tensor"):
                hvd.synchronize(handle)
        with pytest.raises(ValueError, match="does not support scalar"):
            hvd.reducescatter(scalar)
        assert hvd.allreduce(scalar, op=hvd.Sum).item() == size

    job(size, check)


@pytest.mark.parametrize("size", SIZES)
def test_broadcast_sends_the_tensor_of_the_root(job: Any, size: int) -> None:
    def check() -> None:
        rank = hvd.rank()
        for root in range(size):
            for dtype in DATA_TYPES:
                for shape in ((), (0,), (7,), (3, 1, 2)):
                    wanted = numbered(torch.Size(shape).numel(), (), dtype, 10 * root).reshape(shape)
                    mine = numbered(torch.Size(shape).numel(), (), dtype, 10 * rank).reshape(shape)
                    before = mine.clone()
                    assert equal(hvd.synchronize(hvd.broadcast_async(mine, root, "b")), wanted), (root, dtype, shape)
                    assert equal(mine, before)
                    assert hvd.synchronize(hvd.broadcast_async_(mine, root)) is mine
                    assert equal(mine, wanted)
        mine = torch.full((3,), float(rank))
        assert hvd.broadcast(mine, size - 1, "named").tolist() == [size - 1.0] * 3
        assert mine.tolist() == [float(rank)] * 3
        assert hvd.broadcast_(mine, size - 1, "named", hvd.global_process_set) is mine
        assert mine.tolist() == [size - 1.0] * 3
        much = torch.arange(2_000_003, dtype=torch.int64) if rank == 0 else torch.zeros(2_000_003, dtype=torch.int64)
        assert torch.equal(hvd.broadcast(much, 0), torch.arange(2_000_003))

    job(size, check)


@pytest.mark.parametrize("size", SIZES)
def test_alltoall_sends_rows_to_every_rank(job: Any, size: int) -> None:
    def check() -> None:
        rank = hvd.rank()
        for dtype in DATA_TYPES:
            for columns in ((), (3,), (2, 1)):
                # rank r sends r + s + 1 rows to s, or none if both are odd; row numbers tell the way
                counts = [[0 if r % 2 and s % 2 else r + s + 1 for s in range(size)] for r in range(size)]
                blocks = [
                    [numbered(counts[r][s], columns, dtype, 31 * r + 7 * s) for s in range(size)] for r in range(size)
                ]
                source = torch.cat(blocks[rank])
                wanted = torch.cat([blocks[r][rank] for r in range(size)])
                received = [counts[r][rank] for r in range(size)]
                output, got = hvd.synchronize(hvd.alltoall_async(source, splits=counts[rank], name="a"))
                assert equal(output, wanted), (dtype, columns)
                assert got.tolist() == received and got.dtype == torch.int32
        output, got = hvd.alltoall(source, torch.tensor(counts[rank], dtype=torch.int32), "a", hvd.global_process_set)
        assert equal(output, wanted)
        assert got.tolist() == received and got.dtype == torch.int32
        even = torch.arange(2 * size) + 100 * rank
        wanted = torch.cat([torch.arange(2) + 2 * rank + 100 * r for r in range(size)])
        assert torch.equal(hvd.alltoall(even), wanted)  # without splits: one tensor
        output, got = hvd.synchronize(hvd.alltoall_async(even))  # but always two here
        assert torch.equal(output, wanted) and got.tolist() == [2] * size
        output, got = hvd.alltoall(torch.arange(5), [1] + [0] * (size - 1))  # the rows beyond the splits stay
        assert output.numel() == (size if rank == 0 else 0)
        assert hvd.alltoall(torch.empty(0, 4)).shape == (0, 4)

    job(size, check)


def test_alltoall_of_large_tensors_sends_rows_to_every_rank(job: Any) -> None:
    def check() -> None:
        counts = [[0, 1_500_000, 3], [5, 0, 700_001], [1, 1, 1]]
        source = torch.cat([torch.full((counts[hvd.rank()][s],), 10 * hvd.rank() + s) for s in range(3)])
        output, received = hvd.alltoall(source, counts[hvd.rank()])
        assert received.tolist() == [counts[r][hvd.rank()] for r in range(3)]
        wanted = torch.cat([torch.full((counts[r][hvd.rank()],), 10 * r + hvd.rank()) for r in range(3)])
        assert torch.equal(output, wanted)

    job(3, check)


@pytest.mark.parametrize("size", SIZES)
def test_reducescatter_gives_each_rank_its_rows_of_the_reduction(job: Any, size: int) -> None:
    def check() -> None:
        rank = hvd.rank()
        for dtype in (torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64):
            for columns in ((), (3,), (2, 0), (1, 5)):
                for rows in (0, 1, size, size + 1, 2 * size + 3):
                    sources = [(numbered(rows, columns, dtype, 1) % 5 + r).to(dtype) for r in range(size)]
                    dealt = [rows // size + (r < rows % size) for r in range(size)]  # one more for the first
                    start = sum(dealt[:rank])
                    total = torch.stack([source.double() for source in sources]).sum(0)[start : start + dealt[rank]]
                    before = sources[rank].clone()
                    found = hvd.synchronize(hvd.reducescatter_async(sources[rank], op=hvd.Sum, name="r"))
                    assert equal(found, total.to(dtype)), (dtype, columns, rows)
                    assert equal(sources[rank], before)
        source = torch.arange(6.0) * (rank + 1)
        ranks = sum(range(1, size + 1))
        start, stop = (
            (torch.tensor([6 // size + (r < 6 % size) for r in range(size)]).cumsum(0).tolist() * 2)[
                rank - 1 : rank + 1
            ]
            if rank
            else (0, 6 // size + (6 % size > 0))
        )
        mean = (torch.arange(6.0) * ranks / size)[start:stop]
        assert torch.allclose(hvd.reducescatter(source), mean)  # averages unless told otherwise
        assert torch.allclose(
            hvd.reducescatter(source, "positional", hvd.Compression.fp16, hvd.Average), mean, rtol=1e-2
        )
        scaled = hvd.reducescatter(source, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.25)
        assert torch.allclose(scaled, mean * size / 2)
        group = hvd.grouped_reducescatter([source, source.double()], op=hvd.Sum)
        assert type(group) is list and group[1].dtype == torch.float64
        assert torch.allclose(group[0], mean * size) and torch.allclose(group[1], mean.double() * size)
        pair = hvd.synchronize(hvd.grouped_reducescatter_async([source, source], name="pair"))
        assert type(pair) is tuple and torch.allclose(pair[0], mean) and torch.allclose(pair[1], mean)
        for op in (hvd.Min, hvd.Max, hvd.Product):
            with pytest.raises(HorovodInternalError, match="only supports AVERAGE and SUM"):
                hvd.reducescatter_async(source, op=op)

    job(size, check)


def test_reducescatter_has_the_bits_of_an_allreduce(job: Any) -> None:
    def check() -> None:
        generator = torch.Generator().manual_seed(hvd.rank())
        for dtype in (torch.float32, torch.bfloat16):
            source = (torch.rand(100_003, generator=generator) - 0.5).to(dtype)
            parts = hvd.allgather(hvd.reducescatter(source))
            assert torch.equal(parts, hvd.allreduce(source))

    job(3, check)
