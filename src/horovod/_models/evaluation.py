"""``evaluate`` over all ranks' samples, for every backend and version of Keras.

An average of the ranks' averages is wrong if ranks have different numbers of samples. Metrics are therefore not averaged. Keras
stores each metric as sums (of losses and weights, of true positives and so on). These sums are added up over the ranks, and the
result is computed from the totals.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from horovod._bindings.sharding.shares import rank_and_size
from horovod._models import contents
from horovod.comm.reduction import ReduceOp
from horovod.core.lifecycle.process_set import ProcessSet, global_process_set
from horovod.core.negotiation.messages import Operation
from horovod.core.submission.collectives import make_request, submit
from horovod.observe.call_site import caller

_NAME = "evaluate"


def evaluate(
    model: Any, x: Any, y: Any = None, *, process_set: ProcessSet = global_process_set, **options: Any
) -> dict[str, Any]:
    """``model.evaluate`` over the samples of all ranks. Every rank must call it with its part, and gets the same result.

    The results are those of one process with all samples, however many samples each rank has. This also holds for metrics that
    are not averages of samples (AUC, precision, mean IoU), if their variables are sums, as in all metrics of Keras. Afterwards
    the model's metrics contain the totals of all ranks. The model's weights are neither changed nor compared.

    Args:
        model: a compiled Keras model, with the same metrics on every rank.
        x, y: this rank's part of the data, at least one sample, as for ``model.evaluate``. With ``uneven="keep"``,
            :func:`horovod.keras.data.shard` keeps every sample.
        process_set: the ranks that evaluate together.
        options: further arguments of ``model.evaluate``. The default of ``verbose`` is 0.

    Returns:
        The loss and every metric by name: a float, or an array for a metric with several values.

    Raises:
        ValueError: not initialised, or a custom ``test_step`` returns numbers that no metric of the model keeps.
        HorovodInternalError: ranks have different metrics.
    """
    rank_and_size(process_set)
    line = caller()
    own = model.evaluate(x, y, **{"verbose": 0, **options, "return_dict": True})
    variables = [(metric.name, variable) for metric in model.metrics for variable in metric.variables]
    kept = contents.read([variable for _, variable in variables])
    sums = [each.astype(np.float64) for each in kept]
    if sums:
        tensors = [contents.described(each) for each in sums]
        labels = [f"{_NAME}.{metric}.{number}" for number, (metric, _) in enumerate(variables)]
        line += f", where the metrics are {', '.join(sorted(own))}"
        request = make_request(
            Operation.ALLREDUCE, "", _NAME, tensors, ReduceOp.SUM, line=line, labels=labels, transient=True
        )
        submit(process_set.process_set_id, request, tensors, tensors).wait()
    of_all = [each.astype(old.dtype) for each, old in zip(sums, kept, strict=True)]
    contents.write([variable for _, variable in variables], of_all)
    results = {name: _plain(value) for name, value in model.get_metrics_result().items()}
    if foreign := sorted(set(own) - set(results)):
        raise ValueError(
            f"{', '.join(foreign)}: test_step returns numbers that no metric of the model keeps, so ranks' values cannot be "
            "combined. Let a keras.metrics.Metric keep each, as an attribute of the model"
        )
    return results


def _plain(value: Any) -> Any:
    """A metric's result as a float or a NumPy array."""
    if not tuple(getattr(value, "shape", ())):
        return float(value)
    return np.asarray(value.cpu() if hasattr(value, "cpu") else value)
