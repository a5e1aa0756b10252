"""The names of ``horovod.tensorflow``, and their signatures, as existing scripts use them."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import tensorflow as tf

import horovod.tensorflow as hvd

NAMES = [
    "allreduce",
    "grouped_allreduce",
    "reducescatter",
    "grouped_reducescatter",
    "allgather",
    "grouped_allgather",
    "broadcast",
    "broadcast_",
    "alltoall",
    "join",
    "rank_op",
    "local_rank_op",
    "size_op",
    "local_size_op",
    "process_set_included_op",
    "allgather_object",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "broadcast_global_variables",
    "init",
    "shutdown",
    "is_initialized",
    "start_timeline",
    "stop_timeline",
    "size",
    "local_size",
    "cross_size",
    "rank",
    "local_rank",
    "cross_rank",
    "is_homogeneous",
    "mpi_threads_supported",
    "mpi_enabled",
    "mpi_built",
    "gloo_enabled",
    "gloo_built",
    "nccl_built",
    "ddl_built",
    "ccl_built",
    "cuda_built",
    "rocm_built",
    "ProcessSet",
    "global_process_set",
    "add_process_set",
    "remove_process_set",
    "handle_average_backwards_compatibility",
    "check_num_rank_power_of_2",
    "gpu_available",
    "split_list",
    "check_extension",
    "Average",
    "Sum",
    "Adasum",
    "Min",
    "Max",
    "Product",
    "Compression",
    "SyncBatchNormalization",
    "BroadcastGlobalVariablesHook",
    "LocalGradientAggregationHelper",
    "DistributedOptimizer",
    "DistributedGradientTape",
    "PartialDistributedGradientTape",
]

SIGNATURES = {
    "allreduce": "tensor average device_dense device_sparse compression op prescale_factor postscale_factor name process_set "
    "ignore_name_scope",
    "grouped_allreduce": "tensors average device_dense device_sparse compression op prescale_factor postscale_factor "
    "process_set ignore_name_scope name",
    "reducescatter": "tensor device_dense compression op name process_set ignore_name_scope prescale_factor postscale_factor",
    "grouped_reducescatter": "tensors device_dense compression op process_set prescale_factor postscale_factor",
    "allgather": "tensor name ignore_name_scope process_set",
    "grouped_allgather": "tensors name ignore_name_scope process_set",
    "broadcast": "tensor root_rank name ignore_name_scope process_set",
    "broadcast_": "variables root_rank name process_set",
    "alltoall": "tensor splits name ignore_name_scope process_set",
    "join": "",
    "size_op": "process_set_id name",
    "rank_op": "name",
    "broadcast_variables": "variables root_rank process_set inplace",
    "broadcast_object": "obj root_rank session name process_set",
    "broadcast_object_fn": "root_rank session name process_set",
    "allgather_object": "obj session name process_set",
    "DistributedOptimizer": "optimizer name use_locking device_dense device_sparse compression sparse_as_dense "
    "backward_passes_per_step op gradient_predivide_factor average_aggregated_gradients num_groups groups process_set "
    "scale_local_gradients",
    "DistributedGradientTape": "gradtape device_dense device_sparse compression sparse_as_dense op gradient_predivide_factor "
    "num_groups groups process_set scale_local_gradients",
    "PartialDistributedGradientTape": "gradtape device_dense device_sparse compression sparse_as_dense op "
    "gradient_predivide_factor num_groups groups process_set local_layers scale_local_gradients",
}


def test_every_name_is_there() -> None:
    assert [name for name in NAMES if not hasattr(hvd, name)] == []
    assert set(NAMES) <= set(hvd.__all__)
    for module in ("compression", "functions", "mpi_ops", "util", "sync_batch_norm", "gradient_aggregation"):
        importlib.import_module(f"horovod.tensorflow.{module}")
    from horovod.tensorflow.gradient_aggregation_eager import LocalGradientAggregationHelperEager
    from horovod.tensorflow.mpi_ops import _normalize_name

    assert issubclass(LocalGradientAggregationHelperEager, hvd.LocalGradientAggregationHelper)
    assert _normalize_name("a/b:0") == "a_b_0"


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_have_their_names_and_their_order(name: str) -> None:
    assert list(inspect.signature(getattr(hvd, name)).parameters) == SIGNATURES[name].split()


def test_before_init_questions_and_operations_say_so() -> None:
    assert not hvd.is_initialized()
    with pytest.raises(ValueError, match="has not been initialized"):
        hvd.size()
    with pytest.raises(tf.errors.FailedPreconditionError, match="has not been initialized"):
        hvd.allreduce(tf.constant(1.0))


def test_private_operations_reduce_without_compression_or_average(job: Any) -> None:
    def check() -> None:
        from horovod.tensorflow import mpi_ops

        assert hvd._IS_TF2 and hvd._LegacyOptimizer is tf.compat.v1.train.Optimizer
        assert hvd._allreduce is mpi_ops._allreduce
        x = tf.constant([1.0, 2.0]) * (hvd.rank() + 1.0)
        for call in (lambda function, *args: function(*args), lambda function, *args: tf.function(function)(*args)):
            assert call(mpi_ops._allreduce, x).numpy().tolist() == [3.0, 6.0]
            assert call(mpi_ops._grouped_allreduce, [x, x])[1].numpy().tolist() == [3.0, 6.0]
            assert call(mpi_ops._reducescatter, x).numpy().tolist() == [[3.0], [6.0]][hvd.rank()]
            assert call(mpi_ops._grouped_reducescatter, [x])[0].numpy().tolist() == [[3.0], [6.0]][hvd.rank()]
        assert mpi_ops._allreduce(x, name="largest", op=hvd.Max).numpy().tolist() == [2.0, 4.0]
        assert mpi_ops._basics.rank() == hvd.rank()

    job(2, check)
