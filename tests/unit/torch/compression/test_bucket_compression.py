"""PowerSGD and top-k on ranks that are generators in one process; their collectives are plain sums and concatenations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from horovod.torch.compression import Compression
from horovod.torch.compression.bucket_compression import BucketCompressor, BucketReduction

SHAPES = {"square": (16, 16), "bias": (16,), "kernel": (8, 4, 3, 3), "scalar": (), "thin": (40, 1), "empty": (0, 4)}


class Ask:
    """What one rank's compressor asked for."""

    def __init__(self, kind: str, label: str, tensors: Sequence[torch.Tensor]) -> None:
        self.kind = kind
        self.label = label
        self.tensors = list(tensors)
        self.travelled = sum(tensor.numel() for tensor in tensors)

    def wait(self) -> list[torch.Tensor]:
        return self.tensors


class ConcurrentCalls:
    """The collectives of one rank, as the interface has them."""

    def __init__(self, size: int, average: bool) -> None:
        self.size = size
        self.average = average

    def allreduce(self, tensors: Sequence[torch.Tensor], label: str) -> Ask:
        assert all(tensor.is_contiguous() for tensor in tensors)
        return Ask("allreduce", label, tensors)

    def allgather(self, tensors: Sequence[torch.Tensor], label: str) -> Ask:
        return Ask("allgather", label, tensors)


class Job:
    """Ranks that reduce one bucket again and again.

    Attributes:
        travelled: by step, the elements each rank has sent.
    """

    def __init__(self, compressor: BucketCompressor, size: int, average: bool = True) -> None:
        self.compressor = compressor
        self.collectives = [ConcurrentCalls(size, average) for _ in range(size)]
        self.memories: list[dict[str, dict[str, Any]]] = [defaultdict(dict) for _ in range(size)]
        self.travelled: list[int] = []
        self.average = average

    def step(self, gradients: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """What every rank has after one step, when that is the same bits."""
        copies = [{name: each.clone() for name, each in some.items()} for some in gradients]
        with torch.no_grad():
            steps = [
                self.compressor.reduce(some, memory, together)
                for some, memory, together in zip(copies, self.memories, self.collectives, strict=True)
            ]
            asks: list[Any] = [next(each, None) for each in steps]
            sent = 0
            while asks[0] is not None:
                assert len({(ask.kind, ask.label, len(ask.tensors)) for ask in asks}) == 1, "all ranks ask the same"
                sent += asks[0].travelled
                self._perform(asks)
                following = []
                for each, ask in zip(steps, asks, strict=True):
                    try:
                        following.append(each.send(ask.tensors))
                    except StopIteration:
                        following.append(None)
                asks = following
            assert asks == [None] * len(asks)
        self.travelled.append(sent)
        for other in copies[1:]:
            for name, each in copies[0].items():
                assert torch.equal(other[name].nan_to_num(), each.nan_to_num()), "the same bits on every rank"
        return copies[0]

    def _perform(self, asks: Sequence[Ask]) -> None:
        for tensors in zip(*[ask.tensors for ask in asks], strict=True):
            if asks[0].kind == "allreduce":
                total = torch.stack(tensors).sum(0)
                for tensor in tensors:
                    tensor.copy_(total / len(asks) if self.average else total)
        if asks[0].kind == "allgather":
            gathered = [torch.cat(tensors) for tensors in zip(*[ask.tensors for ask in asks], strict=True)]
            for ask in asks:
                ask.tensors = gathered


def gradients(size: int, step: int = 0, dtype: torch.dtype = torch.float32) -> list[dict[str, torch.Tensor]]:
    found = []
    for rank in range(size):
        random = torch.Generator().manual_seed(100 * step + rank)
        found.append({name: torch.randn(shape, generator=random).to(dtype) for name, shape in SHAPES.items()})
    return found


def mean(everybodys: Sequence[Mapping[str, torch.Tensor]], average: bool = True) -> dict[str, torch.Tensor]:
    total = {name: sum(some[name] for some in everybodys) for name in everybodys[0]}
    return {name: each / len(everybodys) if average else each for name, each in total.items()}  # type: ignore[misc,union-attr]


@pytest.mark.parametrize("average", [True, False], ids=["average", "sum"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_powersgd_is_exact_for_a_matrix_of_low_rank(size: int, average: bool) -> None:
    """What all ranks span together has rank 2, so two columns lose nothing."""
    torch.manual_seed(5)
    left, right = torch.randn(16, 2), torch.randn(16, 2)
    job = Job(Compression.powersgd(rank=2), size, average)
    everybodys = [{"square": left @ torch.randn(2, 2) @ right.T, "bias": torch.randn(16)} for _ in range(size)]
    found, wanted = job.step(everybodys), mean(everybodys, average)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert job.travelled == [2 * (16 + 16) + 16]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "compressor",
    [Compression.powersgd(rank=1), Compression.powersgd(3), Compression.topk(ratio=0.1), Compression.topk(0.5)],
)
def test_the_error_of_a_step_is_sent_in_later_steps(compressor: BucketCompressor, dtype: torch.dtype) -> None:
    """Error feedback: with a constant gradient what has arrived after n steps differs from n gradients by a bounded rest."""
    size, steps = 3, 120
    everybodys = gradients(size, dtype=dtype)
    wanted = mean([{name: each.double() for name, each in some.items()} for some in everybodys])
    job = Job(compressor, size)
    arrived = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for _ in range(steps):
        for name, each in job.step(everybodys).items():
            assert each.dtype == dtype
            arrived[name] += each.double()
    for name, each in arrived.items():
        torch.testing.assert_close(
            each / steps, wanted[name], rtol=0.0, atol=0.3, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_warm_start_finds_the_best_factors() -> None:
    """A constant gradient without error feedback in the way: iterating from the last factors approaches the best rank-1 fit."""
    torch.manual_seed(7)
    u, _, v = torch.linalg.svd(torch.randn(16, 16))
    matrix = u @ torch.diag(torch.tensor([4.0, 2.0, *[0.1] * 14])) @ v
    job = Job(Compression.powersgd(rank=1), 1)
    errors = []
    for _ in range(8):
        job.memories[0]["square"].pop("error", None)
        errors.append(torch.linalg.matrix_norm(job.step([{"square": matrix}])["square"] - matrix).item())
    best = torch.linalg.matrix_norm(matrix - 4.0 * torch.outer(u[:, 0], v[0])).item()
    assert errors[0] > 1.05 * best
    assert errors[-1] < 1.001 * best


def test_after_a_join_the_factors_become_equal_again() -> None:
    job = Job(Compression.powersgd(rank=1), 2)
    for step in range(3):
        job.step(gradients(2, step))
    # Rank 1 misses a step: rank 0's factors go on without it.
    alone = Job(job.compressor, 1)
    alone.memories = job.memories[:1]
    alone.step(gradients(1, 3))
    factors = [memory["square"]["factor"].clone() for memory in job.memories]
    assert not torch.equal(*factors)
    job.step(gradients(2, 4))  # sees that all ranks have the same gradients
    assert torch.equal(*[memory["square"]["factor"] for memory in job.memories])


@pytest.mark.parametrize("average", [True, False], ids=["average", "sum"])
def test_topk_with_a_ratio_of_1_is_exact(average: bool) -> None:
    everybodys = gradients(3)
    found = Job(Compression.topk(ratio=1.0), 3, average).step(everybodys)
    torch.testing.assert_close(found, mean(everybodys, average))


def test_topk_sends_the_largest_elements_first() -> None:
    gradient = torch.tensor([1.0, -8.0, 0.5, 4.0, -2.0, 0.0, 0.25, 0.125])
    job = Job(Compression.topk(ratio=0.25), 1)
    assert job.step([{"g": gradient}])["g"].tolist() == [0, -8, 0, 4, 0, 0, 0, 0]
    assert job.travelled == [4]  # two values, two indices
    zeros = torch.zeros(8)
    assert job.step([{"g": zeros}])["g"].tolist() == [1, 0, 0, 0, -2, 0, 0, 0]
    assert job.step([{"g": zeros}])["g"].tolist() == [0, 0, 0.5, 0, 0, 0, 0.25, 0]
    assert job.step([{"g": gradient}])["g"].tolist() == [0, -8, 0, 4, 0, 0, 0, 0]


@pytest.mark.parametrize("compressor", [Compression.powersgd(rank=2), Compression.topk(ratio=0.05)])
def test_an_overflow_reaches_the_result_and_not_later_steps(compressor: BucketCompressor) -> None:
    """A loss scaler must see it on every rank; the steps after it must not."""
    job = Job(compressor, 2)
    job.step(gradients(2, 0))
    everybodys = gradients(2, 1)
    everybodys[1]["square"][3:8] = torch.inf  # more than can be sent at once
    assert not torch.isfinite(job.step(everybodys)["square"]).all()
    for step in range(2, 4):
        for name, each in job.step(gradients(2, step)).items():
            assert torch.isfinite(each).all(), name


def test_after_a_gradient_of_zeros_powersgd_works_again() -> None:
    job = Job(Compression.powersgd(rank=2), 2)
    zeros = [{name: torch.zeros(shape) for name, shape in SHAPES.items()}] * 2
    for _ in range(3):
        assert not any(each.any() for each in job.step(zeros).values())
    assert job.step(gradients(2))["square"].any()


def test_compressed_gradients_take_few_bytes() -> None:
    whole = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    sent = {}
    for name, compressor in (("powersgd", Compression.powersgd(rank=1)), ("topk", Compression.topk(ratio=0.02))):
        job = Job(compressor, 2)
        job.step(gradients(2))
        sent[name] = job.travelled[0]
    # 16 + 16 for the square, 8 + 36 for the kernel, and the rest as it is; values and indices of 2 %, at least 1 of each.
    assert sent == {"powersgd": 32 + 44 + 16 + 1 + 40, "topk": 2 * (6 + 1 + 6 + 1 + 1)}
    assert max(sent.values()) < whole / 4


@pytest.mark.parametrize("rank", [0, -1, 1.5, None])
def test_a_rank_of_powersgd_that_is_not_positive_is_refused(rank: Any) -> None:
    with pytest.raises(ValueError, match="positive integer"):
        Compression.powersgd(rank=rank)


@pytest.mark.parametrize("ratio", [0, -0.1, 1.01, float("nan")])
def test_a_ratio_of_topk_outside_of_0_to_1_is_refused(ratio: Any) -> None:
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        Compression.topk(ratio=ratio)


def test_a_failed_collective_ends_the_reduction() -> None:
    closed = []

    class Failing:
        def wait(self) -> list[torch.Tensor]:
            raise RuntimeError("rank 1 has left")

    def steps() -> Any:
        try:
            yield Failing()
        finally:
            closed.append(True)

    reduction = BucketReduction(steps())
    assert not closed
    assert not reduction.advance()
    assert closed and not reduction.advance()
    with pytest.raises(RuntimeError, match="rank 1 has left"):
        reduction.wait()


def test_wait_raises_an_error_of_the_compressor() -> None:
    def steps() -> Any:
        raise ZeroDivisionError("before the first collective")
        yield

    with pytest.raises(ZeroDivisionError):
        BucketReduction(steps()).wait()


def test_operations_refuse_a_compressor_of_buckets() -> None:
    with pytest.raises(ValueError, match="pass it to DistributedOptimizer"):
        Compression.topk().compress(torch.ones(3))
