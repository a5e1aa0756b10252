"""allreduce in all its forms: every type, shapes with and without elements, what comes back and what stays untouched."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import horovod.torch as hvd
from horovod.torch.tensors import DATA_TYPES

SHAPES = [(), (0,), (5,), (2, 0, 3), (3, 1, 7), (61, 17)]
OPS = {"Sum": np.sum, "Min": np.min, "Max": np.max, "Product": np.prod}


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> np.ndarray[Any, Any]:
    """One rank's elements: small, so that every type holds sums and products of four of them."""
    elements = np.random.default_rng([rank, *shape]).integers(0, 4, size=shape)
    return elements % 2 if dtype == torch.bool else elements


def tensor(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values(rank, shape, dtype))).to(dtype)


def forms() -> dict[str, Callable[..., torch.Tensor]]:
    """Every way to reduce one tensor, each as ``f(tensor, **arguments)``."""

    def in_place(call: Callable[..., Any]) -> Callable[..., torch.Tensor]:
        def run(source: torch.Tensor, **arguments: Any) -> torch.Tensor:
            target = source.clone()
            result = call(target, **arguments)
            assert result is target
            return target

        return run

    return {
        "allreduce": hvd.allreduce,
        "allreduce_async": lambda t, **a: hvd.synchronize(hvd.allreduce_async(t, **a)),
        "allreduce_": in_place(hvd.allreduce_),
        "allreduce_async_": in_place(lambda t, **a: hvd.synchronize(hvd.allreduce_async_(t, **a))),
        "grouped_allreduce": lambda t, **a: hvd.grouped_allreduce([t], **a)[0],
        "grouped_allreduce_async": lambda t, **a: hvd.synchronize(hvd.grouped_allreduce_async([t], **a))[0],
        "grouped_allreduce_": in_place(lambda t, **a: hvd.grouped_allreduce_([t], **a)[0]),
        "grouped_allreduce_async_": in_place(lambda t, **a: hvd.synchronize(hvd.grouped_allreduce_async_([t], **a))[0]),
    }


def same(found: torch.Tensor, wanted: np.ndarray[Any, Any], dtype: torch.dtype) -> bool:
    assert found.dtype == dtype and tuple(found.shape) == wanted.shape
    return bool(np.array_equal(found.to(torch.complex128).numpy(), wanted.astype(np.complex128)))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_type_shape_and_operation_is_reduced_as_numpy_does(job: Any, size: int) -> None:
    def check() -> None:
        for dtype in DATA_TYPES:
            for shape in SHAPES:
                everybody = np.stack([values(rank, shape, dtype) for rank in range(size)])
                source = tensor(hvd.rank(), shape, dtype)
                handles = {
                    name: hvd.allreduce_async(source, name=f"{dtype}{shape}{name}", op=getattr(hvd, name))
                    for name in OPS
                    if name == "Sum" or not dtype.is_complex
                }
                for name in handles:
                    reduce = OPS[name]
                    wanted = reduce(everybody, axis=0)
                    wanted = wanted.astype(bool) if dtype == torch.bool else wanted
                    found = hvd.synchronize(handles[name])
                    assert same(found, wanted, dtype), (name, dtype, shape, found, wanted)
                assert same(source, values(hvd.rank(), shape, dtype), dtype)

    job(size, check)


@pytest.mark.parametrize("size", [1, 3])
def test_every_form_gives_the_same(job: Any, size: int) -> None:
    def check() -> None:
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            for shape in SHAPES:
                source = tensor(hvd.rank(), shape, dtype)
                everybody = np.stack([values(rank, shape, dtype) for rank in range(size)])
                for name, form in forms().items():
                    assert same(form(source, op=hvd.Sum), everybody.sum(axis=0), dtype), (name, dtype, shape)
                    scaled = form(source, op=hvd.Max, prescale_factor=2.0, postscale_factor=3.0)
                    assert same(scaled, everybody.max(axis=0) * 6, dtype), (name, dtype, shape)
                    named = form(source, name="given", op=hvd.Sum, process_set=hvd.global_process_set)
                    assert same(named, everybody.sum(axis=0), dtype), (name, dtype, shape)
                    assert same(source, values(hvd.rank(), shape, dtype), dtype), name

    job(size, check)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_averages_keep_their_type_and_those_of_integers_are_cut_towards_zero(job: Any, size: int) -> None:
    def check() -> None:
        own = torch.tensor([1.5, -2.25, 1000.0]) * (hvd.rank() + 1)
        mean = torch.tensor([1.5, -2.25, 1000.0]) * (size + 1) / 2
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            found = hvd.allreduce(own.to(dtype))
            assert found.dtype == dtype
            assert torch.allclose(found.float(), mean.to(dtype).float(), rtol=1e-2 if dtype.itemsize == 2 else 1e-6)
        for dtype in (torch.int8, torch.int32, torch.int64):  # an integer's average is cut towards zero
            total = torch.tensor([7, -7, 3, -1, 0])
            mine = total if hvd.rank() == 0 else torch.zeros_like(total)
            assert hvd.allreduce(mine.to(dtype)).tolist() == [int(x / size) for x in total.tolist()]
            assert hvd.allreduce(mine.to(dtype), op=hvd.Sum, postscale_factor=0.5).tolist() == [3, -3, 1, 0, 0]

    job(size, check)


def test_types_that_cannot_be_averaged_are_refused(job: Any) -> None:
    def check() -> None:
        source = torch.tensor([True, False])
        with pytest.raises(ValueError, match="cannot be averaged or scaled"):
            hvd.allreduce(source)
        with pytest.raises(ValueError, match="cannot be averaged or scaled"):
            hvd.allreduce(source, op=hvd.Sum, prescale_factor=2.0)
        assert hvd.allreduce(source, op=hvd.Max).tolist() == [True, False]

    job(2, check)


def test_half_precision_accumulates_in_single(job: Any) -> None:
    def check() -> tuple[float, float]:
        # 2048 + 1 is 2048 in float16, 256 + 1 is 256 in bfloat16: term by term the ones would be lost.
        half = hvd.allreduce(torch.tensor([2048.0 if hvd.rank() == 0 else 1.0]).half(), op=hvd.Sum)
        brain = hvd.allreduce(torch.tensor([256.0 if hvd.rank() == 0 else 1.0]).bfloat16(), op=hvd.Sum)
        return half.item(), brain.item()

    assert job(3, check) == [(2050.0, 258.0)] * 3


@pytest.mark.parametrize("average", [True, False])
def test_average_is_deprecated_and_means_op(job: Any, average: bool) -> None:
    def check() -> None:
        one = torch.ones(2)
        wanted = [1.0, 1.0] if average else [2.0, 2.0]
        for name, form in forms().items():
            with pytest.warns(DeprecationWarning, match="average"):
                assert form(one, average=average).tolist() == wanted, name
            with pytest.raises(ValueError, match="supersedes average"):
                form(one, average=average, op=hvd.Sum)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert hvd.allreduce(one).tolist() == [1.0, 1.0]
        with pytest.warns(DeprecationWarning):
            assert hvd.allreduce(one, average, "second.is.average").tolist() == wanted
        with pytest.raises(ValueError, match="not a reduction"):
            hvd.allreduce(one, op=17)

    job(2, check)


def test_groups_of_mixed_types_and_shapes_are_reduced(job: Any) -> None:
    def check() -> None:
        rank = hvd.rank()
        tensors = [
            torch.full((3,), rank + 1.0),
            torch.full((2, 2), rank + 1, dtype=torch.int32),
            torch.full((), rank + 1.0, dtype=torch.float64),
            torch.empty((0, 4)),
            torch.full((40000,), rank + 1.0, dtype=torch.bfloat16),
        ]
        for call in (hvd.grouped_allreduce, hvd.grouped_allreduce_):
            result = call([tensor.clone() for tensor in tensors], op=hvd.Sum, name="group")
            assert type(result) is (list if call is hvd.grouped_allreduce else tuple)
            for found, source in zip(result, tensors, strict=True):
                assert found.dtype == source.dtype and found.shape == source.shape
                assert bool((found == 6).all())

    job(3, check)


def test_many_reductions_can_be_in_flight_in_another_order_on_each_rank(job: Any) -> None:
    def check() -> None:
        names = list(range(200))
        if hvd.rank() == 1:
            names.reverse()  # the order in which ranks submit names is their own affair
        handles = {n: hvd.allreduce_async(torch.full((n,), 1.0 + hvd.rank()), name=str(n), op=hvd.Sum) for n in names}
        for n, handle in handles.items():
            assert torch.equal(hvd.synchronize(handle), torch.full((n,), 6.0))

    job(3, check)


def test_the_same_bits_on_every_rank_and_every_time_fused_or_not(job: Any) -> None:
    def results() -> list[bytes]:
        generator = torch.Generator().manual_seed(hvd.rank())
        found = []
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            sources = [(torch.rand(n, generator=generator) - 0.5).to(dtype) for n in (1, 1000, 70001, 600000)]
            for _ in range(2):
                handles = [hvd.allreduce_async(source) for source in sources]
                found.append(b"".join(hvd.synchronize(h).view(torch.uint8).numpy().tobytes() for h in handles))
            found.append(
                b"".join(
                    each.view(torch.uint8).numpy().tobytes() for each in hvd.grouped_allreduce(sources, name="all")
                )
            )
        return found

    fused = job(3, results)
    apart = job(3, results, env={"HOROVOD_FUSION_THRESHOLD": "0"})
    tcp = job(3, results, env={"HOROVOD_CPU_OPERATIONS": "tcp"})
    pieces = job(3, results, env={"HOROVOD_SHM_PIECE_BYTES": "4096"})
    direct = job(3, results, env={"HOROVOD_SHM_DIRECT": "always"})
    for kind in range(3):
        assert (
            len(
                {
                    run[rank][kind * 3 + i]
                    for run in (fused, apart, tcp, pieces, direct)
                    for rank in range(3)
                    for i in range(3)
                }
            )
            == 1
        )


def test_a_parameter_reduced_in_place_stays_a_leaf_that_needs_gradients(job: Any) -> None:
    def check() -> None:
        weight = torch.nn.Parameter(torch.full((3,), 1.0 + hvd.rank()))
        assert hvd.allreduce_(weight) is weight
        assert weight.requires_grad and weight.is_leaf and weight.tolist() == [1.5, 1.5, 1.5]

    job(2, check)


def test_a_view_with_an_offset_is_reduced_and_its_surroundings_are_not(job: Any) -> None:
    def check() -> None:
        base = torch.arange(12.0) * (hvd.rank() + 1)
        hvd.allreduce_(base[3:7], op=hvd.Sum)
        factor = torch.tensor([hvd.rank() + 1.0] * 3 + [3.0] * 4 + [hvd.rank() + 1.0] * 5)
        assert torch.equal(base, torch.arange(12.0) * factor)

    job(2, check)


def test_an_empty_group_does_not_end_the_job(job: Any) -> None:
    def check() -> tuple[float, int]:
        for call in (hvd.grouped_allreduce_, hvd.grouped_allreduce):
            try:
                assert len(call([])) == 0
            except ValueError:
                pass  # as good an answer: what matters is that the job lives on
        return hvd.allreduce(torch.ones(1), op=hvd.Sum).item(), hvd.size()

    assert job(2, check) == [(2.0, 2), (2.0, 2)]


def test_compressed_reductions_come_back_in_the_type_of_their_input(job: Any) -> None:
    def check() -> None:
        source = torch.tensor([1.0, 2.5, -3.0]) * (hvd.rank() + 1)
        for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16):
            found = hvd.allreduce(source, compression=compression)
            assert found.dtype == torch.float32 and found.tolist() == [1.5, 3.75, -4.5]
            found = hvd.grouped_allreduce([source, source.double()], compression=compression)[1]
            assert found.dtype == torch.float64 and found.tolist() == [1.5, 3.75, -4.5]
            assert hvd.allreduce(torch.tensor([3]), compression=compression, op=hvd.Sum).tolist() == [6]
        tenth = torch.tensor([0.1])
        assert hvd.allreduce(tenth, compression=hvd.Compression.fp16).item() != hvd.allreduce(tenth).item()

    job(2, check)
