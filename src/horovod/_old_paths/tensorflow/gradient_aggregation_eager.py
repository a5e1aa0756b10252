"""``horovod.tensorflow.gradient_aggregation_eager``: an import path of existing scripts."""

from horovod.tensorflow.gradient_aggregation import LocalGradientAggregationHelperEager

__all__ = ["LocalGradientAggregationHelperEager"]
