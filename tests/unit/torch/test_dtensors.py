"""DTensors are recognised in every supported version of PyTorch, without importing their module."""

from __future__ import annotations

import torch

from horovod.torch.tensors import is_dtensor


class DTensor(torch.Tensor):
    """What the class of PyTorch 2.1 has of what later ones have; ``full_tensor()`` came after it."""

    to_local = torch.Tensor.detach

    @property
    def device_mesh(self) -> object:
        return None


def test_the_class_of_every_version_is_recognised() -> None:
    assert is_dtensor(DTensor)


def test_other_classes_are_not() -> None:
    assert not any(map(is_dtensor, (torch.Tensor, torch.nn.Parameter, torch.nn.UninitializedParameter)))
