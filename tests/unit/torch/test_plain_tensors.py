"""Which tensors torch.distributed's calls hand to the core as they lie in host memory, and where results go."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from horovod.comm.shm import huge_pages
from horovod.comm.spans import address_of
from horovod.torch.distributed.flat_tensors import results_into
from horovod.torch.tensors import plain_view


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).view(2, 3),
        torch.tensor(1.0),
        torch.empty(0),
        torch.nn.Parameter(torch.ones(3)),
        torch.ones(4, dtype=torch.bfloat16),
        torch.ones(4, dtype=torch.bool),
        torch.arange(8)[2:5],
    ],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)}",
)
def test_a_plain_tensor_is_its_own_elements(tensor: torch.Tensor) -> None:
    view = plain_view(tensor)
    assert view is not None and view.shape == (tensor.numel(),)
    elements = view.array
    assert elements.shape == view.shape and elements.dtype == view.data_type.numpy
    assert elements.itemsize == tensor.dtype.itemsize
    assert tensor.numel() == 0 or address_of(elements) == tensor.data_ptr()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6)[::2],
        torch.arange(6).view(2, 3).t(),
        torch.ones(3, dtype=torch.complex64),
        torch.ones(3).to(torch.float8_e5m2),
        torch.ones(3).to_sparse(),
        torch._neg_view(torch.ones(3)),  # type: ignore[attr-defined]
        torch.ones(3, device="meta"),
        torch.ones(3).as_subclass(Subclass),  # type: ignore[no-untyped-call]
    ],
    ids=["strided", "turned", "complex", "float8", "sparse", "negated", "of no memory", "of a subclass"],
)
def test_other_tensors_take_more_steps(tensor: torch.Tensor) -> None:
    assert plain_view(tensor) is None


def test_results_fill_the_output_and_nothing_else_fits() -> None:
    target = np.zeros(6, np.float32)
    assert results_into(target, row_elements=3)(0, 2) is target
    with pytest.raises(ValueError, match="send 9 elements, and the output has room for 6"):
        results_into(target, row_elements=3)(0, 3)


def test_only_a_large_output_asks_for_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(huge_pages, "prefer_huge", lambda address, size: asked.append((address, size)))
    small, large = np.empty(huge_pages.LEAST_BYTES - 1, np.uint8), np.empty(huge_pages.LEAST_BYTES, np.uint8)
    results_into(small)(0, small.size)
    assert not asked
    results_into(large)(0, large.size)
    assert asked == [(address_of(large), large.nbytes)]
