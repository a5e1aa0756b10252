"""The names of ``horovod.mxnet``, and their signatures, as existing scripts use them."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import mxnet as mx
import pytest

import horovod
import horovod.mxnet as hvd
from time_limits import SOON

NAMES = """
Compression allgather_object broadcast_object allgather grouped_allgather allreduce allreduce_ grouped_allreduce
grouped_allreduce_ alltoall broadcast broadcast_ reducescatter grouped_reducescatter init shutdown is_initialized
start_timeline stop_timeline size local_size cross_size rank local_rank cross_rank mpi_threads_supported mpi_enabled mpi_built
gloo_enabled gloo_built nccl_built ddl_built ccl_built cuda_built rocm_built ProcessSet global_process_set add_process_set
remove_process_set Average Sum Adasum Min Max Product DistributedOptimizer DistributedTrainer broadcast_parameters split_list
check_extension
"""
ABSENT = "is_homogeneous join barrier elastic SyncBatchNorm allreduce_async synchronize poll sparse_allreduce_async"

REDUCED = "average name priority prescale_factor postscale_factor process_set op"
SCATTERED = "op name priority process_set prescale_factor postscale_factor"
SIGNATURES = {
    "allreduce": f"tensor {REDUCED}",
    "allreduce_": f"tensor {REDUCED}",
    "grouped_allreduce": f"tensors {REDUCED}",
    "grouped_allreduce_": f"tensors {REDUCED}",
    "allgather": "tensor name priority process_set",
    "grouped_allgather": "tensors name priority process_set",
    "broadcast": "tensor root_rank name priority process_set",
    "broadcast_": "tensor root_rank name priority process_set",
    "alltoall": "tensor splits name priority process_set",
    "reducescatter": f"tensor {SCATTERED}",
    "grouped_reducescatter": f"tensors {SCATTERED}",
    "broadcast_object": "obj root_rank name",
    "allgather_object": "obj name",
    "broadcast_parameters": "params root_rank prefix",
    "DistributedOptimizer": "optimizer gradient_predivide_factor num_groups process_set",
    "DistributedTrainer": "params optimizer optimizer_params compression gradient_predivide_factor prefix "
    "num_groups process_set",
}
DEFAULTS: dict[str, Any] = {
    "average": None,
    "name": None,
    "priority": 0,
    "prescale_factor": 1.0,
    "postscale_factor": 1.0,
    "process_set": hvd.global_process_set,
    "splits": None,
    "prefix": None,
    "optimizer_params": None,
    "compression": hvd.Compression.none,
    "gradient_predivide_factor": 1.0,
    "num_groups": 0,
}


def test_every_name_is_there_and_no_other_operation() -> None:
    assert [name for name in NAMES.split() if not hasattr(hvd, name)] == []
    assert set(NAMES.split()) <= set(hvd.__all__) and all(hasattr(hvd, name) for name in hvd.__all__)
    assert [name for name in ABSENT.split() if hasattr(hvd, name)] == []
    for module in ("compression", "functions", "mpi_ops"):
        importlib.import_module(f"horovod.mxnet.{module}")
    hvd.check_extension("horovod.mxnet", "HOROVOD_WITH_MXNET", hvd.__file__, "mpi_lib")
    assert hvd.split_list([1, 2, 3], 2) == [[1, 2], [3]]


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_have_their_order_and_their_defaults(name: str) -> None:
    parameters = inspect.signature(getattr(hvd, name)).parameters
    assert list(parameters) == SIGNATURES[name].split()
    for parameter in parameters.values():
        assert parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        if parameter.name == "op":
            assert parameter.default == (hvd.Average if "scatter" in name else None)
        elif parameter.name == "root_rank":
            assert parameter.default == (inspect.Parameter.empty if name in ("broadcast", "broadcast_") else 0)
        elif parameter.name in DEFAULTS:
            assert parameter.default == DEFAULTS[parameter.name]


def test_before_init_every_operation_says_so_and_shutdown_is_harmless() -> None:
    assert not hvd.is_initialized()
    with pytest.raises(ValueError, match="has not been initialized"):
        hvd.size()
    for call in (hvd.allreduce, hvd.allreduce_, hvd.allgather, hvd.alltoall, hvd.reducescatter):
        with pytest.raises(hvd.HorovodInternalError, match="has not been initialized"):
            call(mx.nd.ones((1,)))
    with pytest.raises(hvd.HorovodInternalError, match="has not been initialized"):
        hvd.broadcast(mx.nd.ones((1,)), 0)
    hvd.shutdown()  # harmless


@pytest.mark.parametrize("size", [1, 3])
def test_ranks_sizes_and_build_flags_are_those_of_the_job(job: Any, size: int) -> None:
    def check() -> tuple[Any, ...]:
        assert hvd.is_initialized() and hvd.gloo_built() and hvd.gloo_enabled() and not hvd.mpi_enabled()
        assert not (hvd.cuda_built() or hvd.rocm_built() or hvd.nccl_built() or hvd.ddl_built() or hvd.ccl_built())
        with pytest.raises(ValueError, match="not enabled"):
            hvd.mpi_threads_supported()
        return hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()

    assert job(size, check) == [(rank, size, rank, size, 0, 1) for rank in range(size)]


def test_without_mxnet_the_reason_is_said(tmp_path: Path) -> None:
    (tmp_path / "mxnet.py").write_text("raise AttributeError(\"module 'numpy' has no attribute 'bool'\")")
    path = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(Path(horovod.__file__).parents[1])!r}]; "
    done = subprocess.run(
        [sys.executable, "-c", path + "import horovod.mxnet"], capture_output=True, text=True, timeout=SOON
    )
    assert done.returncode == 1
    assert (
        "ImportError: horovod.mxnet needs MXNet 1.9.1, which cannot be imported here: module 'numpy' has" in done.stderr
    )
