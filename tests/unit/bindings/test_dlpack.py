"""What is read of a DLPack capsule, against NumPy, which makes them."""

from __future__ import annotations

import numpy as np
import pytest

from horovod._bindings.dlpack import address_in


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (1, 4, 1)])
def test_where_an_array_lies(shape: tuple[int, ...]) -> None:
    array = np.ones(shape, np.float32)
    assert address_in(array.__dlpack__()) == array.__array_interface__["data"][0]
    part = np.ones((4, 4))[1:3]
    assert address_in(part.__dlpack__()) == part.__array_interface__["data"][0]


def test_an_array_without_elements_lies_nowhere() -> None:
    assert address_in(np.ones((3, 0)).__dlpack__()) == 0


def test_the_capsule_is_not_consumed() -> None:
    array = np.arange(3.0)
    capsule = array.__dlpack__()
    assert address_in(capsule) == address_in(capsule)
    with pytest.raises(ValueError, match="incorrect name"):
        address_in(np.random.default_rng().bit_generator.capsule)
