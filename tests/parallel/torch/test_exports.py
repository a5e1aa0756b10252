"""Names, signatures and import paths that existing scripts rely on."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import torch

import horovod.torch as hvd

NAMES = """
Compression allgather_object broadcast_object broadcast_optimizer_state broadcast_parameters
allreduce allreduce_async allreduce_ allreduce_async_
grouped_allreduce grouped_allreduce_async grouped_allreduce_ grouped_allreduce_async_ sparse_allreduce_async
allgather allgather_async grouped_allgather grouped_allgather_async
broadcast broadcast_async broadcast_ broadcast_async_ alltoall alltoall_async
reducescatter reducescatter_async grouped_reducescatter grouped_reducescatter_async
join barrier poll synchronize init shutdown is_initialized
size local_size cross_size rank local_rank cross_rank
mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built ccl_built cuda_built rocm_built
elastic ProcessSet global_process_set add_process_set remove_process_set start_timeline stop_timeline
Average Sum Adasum Min Max Product HorovodInternalError DistributedOptimizer SyncBatchNorm check_extension
"""

REDUCED = "average name op prescale_factor postscale_factor process_set"
COMPRESSED = "average name compression op prescale_factor postscale_factor process_set"
SIGNATURES = {
    "allreduce": f"tensor {COMPRESSED}",
    "allreduce_": f"tensor {REDUCED}",
    "allreduce_async": f"tensor {REDUCED}",
    "allreduce_async_": f"tensor {REDUCED}",
    "grouped_allreduce": f"tensors {COMPRESSED}",
    "grouped_allreduce_": f"tensors {REDUCED}",
    "grouped_allreduce_async": f"tensors {REDUCED}",
    "grouped_allreduce_async_": f"tensors {REDUCED}",
    "sparse_allreduce_async": "tensor name op process_set",
    "allgather": "tensor name process_set",
    "allgather_async": "tensor name process_set",
    "grouped_allgather": "tensors name process_set",
    "grouped_allgather_async": "tensors name process_set",
    "broadcast": "tensor root_rank name process_set",
    "broadcast_": "tensor root_rank name process_set",
    "broadcast_async": "tensor root_rank name process_set",
    "broadcast_async_": "tensor root_rank name process_set",
    "alltoall": "tensor splits name process_set",
    "alltoall_async": "tensor splits name process_set",
    "reducescatter": "tensor name compression op process_set prescale_factor postscale_factor",
    "reducescatter_async": "tensor name op process_set prescale_factor postscale_factor",
    "grouped_reducescatter": "tensors name compression op process_set prescale_factor postscale_factor",
    "grouped_reducescatter_async": "tensors name op process_set prescale_factor postscale_factor",
    "join": "device",
    "barrier": "process_set",
    "poll": "handle",
    "synchronize": "handle",
    "broadcast_parameters": "params root_rank",
    "broadcast_optimizer_state": "optimizer root_rank model",
    "broadcast_object": "obj root_rank name process_set",
    "allgather_object": "obj name process_set",
    "DistributedOptimizer": (
        "optimizer named_parameters compression backward_passes_per_step op gradient_predivide_factor num_groups groups "
        "sparse_as_dense process_set"
    ),
}
DEFAULTS = {
    "average": None,
    "name": None,
    "op": None,
    "prescale_factor": 1.0,
    "postscale_factor": 1.0,
    "splits": None,
    "device": -1,
    "compression": hvd.Compression.none,
    "process_set": hvd.global_process_set,
    "named_parameters": None,
    "backward_passes_per_step": 1,
    "gradient_predivide_factor": 1.0,
    "num_groups": 0,
    "groups": None,
    "sparse_as_dense": False,
    "model": None,
}
OBLIGATORY = {"tensor", "tensors", "handle", "params", "optimizer", "obj", "root_rank"}


def test_every_name_is_there() -> None:
    assert set(NAMES.split()) <= set(hvd.__all__)
    assert all(hasattr(hvd, name) for name in hvd.__all__)
    assert hvd._check_has_gpu() is torch.cuda.is_available()
    hvd.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", hvd.__file__, "mpi_lib_v2")
    assert (hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product) == (0, 1, 2, 3, 4, 5)


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_have_their_names_order_and_defaults(name: str) -> None:
    parameters = inspect.signature(getattr(hvd, name)).parameters
    assert list(parameters) == SIGNATURES[name].split()
    for parameter in parameters.values():
        assert parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        if parameter.name in OBLIGATORY and name not in ("broadcast_object", "sparse_allreduce_async"):
            assert parameter.default is inspect.Parameter.empty
        elif parameter.name == "op" and ("reducescatter" in name or name == "DistributedOptimizer"):
            assert parameter.default == hvd.Average
        elif parameter.name == "root_rank":
            assert parameter.default == 0
        elif name != "sparse_allreduce_async" and parameter.name != "obj":
            assert parameter.default == DEFAULTS[parameter.name]


@pytest.mark.parametrize(
    ("module", "names"),
    [
        (
            "horovod.torch.mpi_ops",
            "allreduce allreduce_async_ synchronize poll rank size init shutdown Average is_homogeneous",
        ),
        ("horovod.torch.mpi_ops", "handle_average_backwards_compatibility HorovodAllreduce HorovodGroupedAllreduce"),
        ("horovod.torch.mpi_ops", "HorovodAllgather HorovodGroupedAllgather HorovodBroadcast HorovodAlltoall"),
        ("horovod.torch.mpi_ops", "HorovodReducescatter HorovodGroupedReducescatter join barrier"),
        ("horovod.torch.functions", "broadcast_parameters broadcast_optimizer_state broadcast_object allgather_object"),
        ("horovod.torch.compression", "Compression Compressor NoneCompressor FP16Compressor"),
        ("horovod.torch.optimizer", "DistributedOptimizer"),
        ("horovod.common.exceptions", "HorovodInternalError HostsUpdatedInterrupt HorovodVersionMismatchError"),
        ("horovod.common.process_sets", "ProcessSet global_process_set"),
        ("horovod.common.util", "env extension_available gpu_available is_iterable split_list num_rank_is_power_2"),
        ("horovod.common.basics", "rank size init shutdown is_initialized"),
    ],
)
def test_names_can_be_imported_from_where_scripts_import_them(module: str, names: str) -> None:
    imported = importlib.import_module(module)
    assert not [name for name in names.split() if not hasattr(imported, name)]


def test_the_error_class_is_the_same_under_every_import_path() -> None:
    exceptions = importlib.import_module("horovod.common.exceptions")
    assert hvd.HorovodInternalError is exceptions.HorovodInternalError
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
    assert importlib.import_module("horovod.torch.mpi_ops").HorovodInternalError is hvd.HorovodInternalError


@pytest.mark.parametrize("size", [1, 3])
def test_ranks_and_sizes_are_those_of_the_job(job: Any, size: int) -> None:
    def check() -> tuple[Any, ...]:
        hvd.init()  # a second call is harmless
        assert hvd.is_initialized() and hvd.gloo_built() and hvd.gloo_enabled() and not hvd.mpi_enabled()
        assert (hvd.cuda_built(), hvd.rocm_built()) == (torch.version.cuda is not None, torch.version.hip is not None)
        assert (hvd.nccl_built() > 0) == (hvd.cuda_built() or hvd.rocm_built())
        if hvd.cuda_built():  # that of PyTorch, also where there is no GPU
            major, minor, patch = torch.cuda.nccl.version()
            assert hvd.nccl_built() == major * 10000 + minor * 100 + patch
        assert not hvd.ddl_built() and not hvd.ccl_built()
        with pytest.raises(ValueError, match="not enabled"):
            hvd.mpi_threads_supported()
        from horovod.torch.mpi_ops import is_homogeneous

        assert is_homogeneous() is True
        return hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()

    assert job(size, check) == [(rank, size, rank, size, 0, 1) for rank in range(size)]


def test_before_init_every_question_says_to_use_init_and_shutdown_is_harmless() -> None:
    assert hvd.is_initialized() is False
    for question in (hvd.rank, hvd.size, hvd.local_rank, hvd.local_size, hvd.cross_rank, hvd.cross_size):
        with pytest.raises(ValueError, match=r"not been initialized; use hvd\.init\(\)"):
            question()
    hvd.shutdown()  # harmless


def test_compressors_halve_floats_leave_integers_and_restore_the_type() -> None:
    source = torch.tensor([1.0, 0.1])
    for compressor, narrow in ((hvd.Compression.fp16, torch.float16), (hvd.Compression.bf16, torch.bfloat16)):
        small, context = compressor.compress(source)
        assert small.dtype == narrow and compressor.decompress(small, context).dtype == torch.float32
        whole, context = compressor.compress(torch.tensor([3]))
        assert whole.dtype == torch.int64 and compressor.decompress(whole, context).dtype == torch.int64
    assert hvd.Compression.none.compress(source)[0] is source


def test_the_classes_of_distributed_optimizers_have_their_private_names(job: Any) -> None:
    def check() -> None:
        import torch

        import horovod.torch as hvd
        from horovod.torch.optimizer import _DistributedAdasumOptimizer, _DistributedOptimizer

        def wrapped(op: Any) -> Any:
            return hvd.DistributedOptimizer(torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1), op=op)

        assert isinstance(wrapped(hvd.Average), _DistributedOptimizer)
        assert not isinstance(wrapped(hvd.Average), _DistributedAdasumOptimizer)
        assert isinstance(wrapped(hvd.Adasum), _DistributedAdasumOptimizer)
        assert hvd.mpi_ops._basics.size() == 2

    job(2, check)
