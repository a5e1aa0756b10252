"""One rank of ``benchmarks/compression.py``: times compressed allreduces, and compares them with sums in float64."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from cluster import plain
from horovod.comm.datatypes import DataType
from horovod.comm.reduction import ReduceOp
from horovod.core.negotiation.messages import Operation
from horovod.core.requests.tensor import Tensor
from horovod.core.submission.collectives import prepared_call, submit_arrays

Vector = NDArray[np.float32]
FORMS = {"float32": ("", False)} | {
    f"{form}{' fed back' * feeds}": (form, feeds) for form in ("int8", "int4") for feeds in (False, True)
}
"""By name: the format, and whether there is error feedback."""
STEPS = 50


def summing(name: str, length: int) -> Callable[[Vector, Vector], None]:
    """A call that adds a vector over all ranks, always under this name."""
    form, feeds = FORMS[name]
    described = Tensor(np.empty(length, np.float32), DataType.FLOAT32, (length,))
    call = prepared_call(Operation.ALLREDUCE, "", f"{name}.{length}", [described], ReduceOp.SUM, compression=form)

    def add(source: Vector, target: Vector) -> None:
        errors = call.errors(0) if feeds else ()
        submit_arrays(0, call.request, [source], [target], awaited=True, errors=errors).wait()

    return add


def gradient(rank: int, length: int) -> Vector:
    """Normal numbers, whose magnitude differs from row to row."""
    random = np.random.default_rng(rank)
    rows = np.exp(random.normal(size=length // 1024)).astype(np.float32)
    made: Vector = random.standard_normal(length, np.float32) * np.repeat(rows, 1024)
    return made


def errors_of(form: str, length: int) -> dict[str, float]:
    own, result = gradient(plain.rank(), length), np.empty(length, np.float32)
    exact = np.sum([gradient(rank, length).astype(np.float64) for rank in range(plain.size())], axis=0)
    magnitude = np.abs(exact).mean()
    found = {}
    for name, label in ((form, "kept"), (f"{form} fed back", "fed_back")):
        add, total = summing(name, length), np.zeros(length)
        for step in range(STEPS):
            add(own, result)
            total += result
            if name == form and not step:
                found["error"] = np.abs(result - exact).mean() / magnitude
                found["bias"] = (result - exact).mean() / magnitude
        found[label] = np.abs(total - STEPS * exact).mean() / magnitude
    return {key: float(value) for key, value in found.items()}


def main() -> None:
    size, rounds = (int(word) for word in sys.argv[1:3])
    plain.init()
    own, result = gradient(plain.rank(), size // 4), np.empty(size // 4, np.float32)
    calls = {name: summing(name, own.size) for name in FORMS}
    seconds: dict[str, list[float]] = {name: [] for name in FORMS}
    same: dict[str, bool] = {}
    for number in range(rounds + 1):
        for name, call in calls.items():
            plain.allreduce(np.ones(1, np.float32), "mark")
            start = time.perf_counter()
            call(own, result)
            end = time.perf_counter()
            digest = np.frombuffer(hashlib.blake2b(result.tobytes(), digest_size=16).digest(), np.uint8)
            of_all = plain.allgather(digest.astype(np.float32), "digest").reshape(plain.size(), -1)
            same[name] = same.get(name, True) and bool((of_all == of_all[0]).all())
            if number:  # the first is not counted
                seconds[name].append(end - start)
    errors = {form: errors_of(form, 4 << 20) for form in ("int8", "int4")}
    if plain.rank() == 0:
        print(json.dumps({"seconds": seconds, "same": same, "errors": errors}), flush=True)


main()
