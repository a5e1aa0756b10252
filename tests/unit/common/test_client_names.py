"""Private names of ``horovod.common`` that clients import."""

from __future__ import annotations

import pytest

from horovod.common import basics
from horovod.common.basics import HorovodBasics
from horovod.common.process_sets import ProcessSet, _temp_process_set_object, global_process_set


def test_basics_as_an_object_answer_as_the_module_does() -> None:
    made = HorovodBasics(__file__, "mpi_lib")
    assert not made.is_initialized()
    made.init(process_sets=[])
    assert (made.rank(), made.size(), made.local_size(), made.gloo_built()) == (0, 1, 1, True)
    assert [made.Average, made.Sum, made.Adasum, made.Min, made.Max, made.Product] == list(range(6))
    assert made._get_process_set_ids_and_ranks() == {0: [0]}
    assert (made._process_set_size(0), made._process_set_rank(0)) == (1, 0)
    with pytest.raises(ValueError, match="Process set 5 does not exist"):
        made._process_set_size(5)
    with pytest.raises(AttributeError, match="no MPI_LIB_CTYPES: this Horovod is pure Python and has no C library"):
        _ = made.MPI_LIB_CTYPES
    made.shutdown()
    assert not basics.is_initialized()


def test_a_process_set_can_be_had_by_its_number() -> None:
    basics.init()
    assert _temp_process_set_object(0) is global_process_set
    with pytest.raises(ValueError, match="Process set 7 does not exist"):
        _temp_process_set_object(7)
    basics.shutdown()
    assert isinstance(global_process_set, ProcessSet)
