"""A tensor counts as alone exactly if no other tensor refers to its memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from horovod.torch.storage_references import ALONE_IN_HOOKS, AVAILABLE, are_alone, is_alone

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="this PyTorch does not count references to memory")

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "detach": torch.Tensor.detach,
    "data": lambda tensor: tensor.data,
    "view": lambda tensor: tensor.view(-1),
    "part": lambda tensor: tensor[:1],
    "transposed": lambda tensor: tensor.t(),
}


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    views=st.lists(st.tuples(st.integers(0, 5), st.sampled_from(sorted(VIEWS))), max_size=6),
)
def test_tensors_are_alone_without_their_views_and_after_them(sizes: list[int], views: list[tuple[int, str]]) -> None:
    tensors = [torch.zeros(size, 2) for size in sizes]
    assert are_alone(tensors)
    kept = [(number % len(sizes), VIEWS[kind](tensors[number % len(sizes)])) for number, kind in views]
    viewed = {number for number, _ in kept}
    assert [is_alone(each) for each in tensors] == [number not in viewed for number in range(len(sizes))]
    assert are_alone(tensors) == (not viewed)
    kept.clear()
    assert are_alone(tensors) and all(map(is_alone, tensors))


LOSSES: dict[str, tuple[bool, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "products, which backward keeps": (False, lambda p, q: (p @ q).sum()),
    "views of one number, which backward copies": (False, lambda p, q: p.sum() + q.sum()),
    "one tensor, which backward copies for one of them": (False, lambda p, q: (p + q).square().sum()),
    "views of one tensor": (True, lambda p, q: (p.t() + q.t()).square().sum()),
    "parts of one tensor": (True, lambda p, q: torch.cat([p, q]).square().sum()),
}
"""What the gradients of two parameters are, and whether they share memory."""


@pytest.mark.parametrize("what", LOSSES)
def test_a_gradient_is_alone_in_its_hook_and_afterwards_unless_others_use_it(what: str) -> None:
    shared, loss = LOSSES[what]
    both = torch.nn.Parameter(torch.ones(3, 3)), torch.nn.Parameter(torch.ones(3, 3))
    found: list[bool] = []

    def hook(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        found.append(is_alone(parameter.grad))

    for parameter in both:
        parameter.register_post_accumulate_grad_hook(hook)
    for passes in (1, 2):  # the second adds to the memory of the first
        loss(*both).backward()
        assert found == [not shared] * 2 * passes or not (ALONE_IN_HOOKS or shared)
        assert [parameter.grad is not None and is_alone(parameter.grad) for parameter in both] == [not shared] * 2
