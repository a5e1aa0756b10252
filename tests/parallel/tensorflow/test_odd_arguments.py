"""Odd but plausible arguments: each works or is refused in the call that has it, and the job goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import horovod.tensorflow as hvd

REFUSED = (TypeError, ValueError)


class Whole(int):
    pass


class Text(str):
    pass


def variables() -> list[Any]:
    import keras

    return [tf.Variable(1), keras.Variable(1, dtype="int32")]


def roots() -> tuple[list[Any], list[Any]]:
    good = [1, np.int64(1), np.uint8(1), np.array(1), Whole(1), tf.constant(1), tf.constant(1, tf.int64)]
    return good, [
        None,
        True,
        "1",
        b"1",
        1.0,
        np.float32(1),
        float("nan"),
        [1],
        np.array([1]),
        -1,
        2,
        1 << 70,
        1j,
        tf.constant(1.0),
    ]


def factors() -> tuple[list[Any], list[Any]]:
    good = [2, 2.0, np.float16(2), np.float64(2), np.int64(2), np.array(2.0), tf.constant(2.0), tf.constant(2)]
    return good, [
        None,
        True,
        "2",
        b"2",
        [2.0],
        np.array([2.0]),
        2j,
        float("nan"),
        float("inf"),
        10**400,
        tf.constant([2.0]),
    ]


def splits() -> tuple[list[Any], list[Any]]:
    good = [[1, 3], (1, 3), np.array([1, 3]), np.array([1, 3], np.uint8), [np.int64(1), Whole(3)], range(1, 4, 2)]
    good += [tf.constant([1, 3]), [tf.constant(1), tf.constant(3)]]
    bad = [1, "13", ["1", "3"], [1.0, 3.0], [True, True], [[1, 3]], [4], [1, 2, 1], [None, 4], [5, -1], [3, 3]]
    return good, [*bad, [1 << 40, 0], [1 << 70, 0], [], object(), np.array([1.0, 3.0]), tf.constant([1, 3], tf.int64)]


def names() -> tuple[list[Any], list[Any]]:
    good = [None, "", "a name", Text("t"), np.str_("n"), "ü/ö:", "\0", "a\nb", "n" * 5000, 0, 1, np.int64(2)]
    return good, [b"bytes", 1.0, True, ["n"], ("n",), tf.constant("n"), object(), "n" * 100_000, "\ud800"]


def process_sets() -> list[Any]:
    return [None, 0, "0", [0, 1], 1.5, hvd.ProcessSet([0]), hvd.ProcessSet]


x = np.array([[1.0], [2.0], [3.0], [4.0]], np.float32)

NUMBERS: list[tuple[str, Any, Callable[[Any], Any], Any]] = [
    ("broadcast", roots, lambda root: hvd.broadcast(x * (hvd.rank() + 1), root), 2 * x),
    ("prescale", factors, lambda factor: hvd.allreduce(x, op=hvd.Sum, prescale_factor=factor), 4 * x),
    ("grouped", factors, lambda factor: hvd.grouped_allreduce([x], op=hvd.Sum, postscale_factor=factor)[0], 4 * x),
    ("scatter", factors, lambda factor: hvd.allgather(hvd.reducescatter(x, prescale_factor=factor)), 2 * x),
    ("alltoall", splits, lambda given: tf.shape(hvd.alltoall(x, given)[0])[0], None),
    ("name", names, lambda name: hvd.allreduce(x, name=name), x),
    ("grouped name", names, lambda name: hvd.grouped_allreduce([x, x], name=name)[1], x),
    ("size", names, lambda name: hvd.size_op(name=name), 2),
]


def cases() -> list[tuple[str, Any, Callable[[Any], Any], Any]]:
    """What, value, call, the result; or REFUSED for one that is to be refused."""
    found: list[Any] = []
    for what, values, call, wanted in NUMBERS:
        good, bad = values()
        if what == "alltoall":
            wanted = [2, 6][hvd.rank()]
        found += [(what, value, call, wanted) for value in good] + [(what, value, call, REFUSED) for value in bad]
    for operation in (
        lambda given: hvd.allreduce(x, process_set=given),
        lambda given: hvd.grouped_allreduce([x], process_set=given),
        lambda given: hvd.allgather(x, process_set=given),
        lambda given: hvd.grouped_allgather([x], process_set=given),
        lambda given: hvd.broadcast(x, 0, process_set=given),
        lambda given: hvd.alltoall(x, process_set=given),
        lambda given: hvd.reducescatter(x, process_set=given),
        lambda given: hvd.grouped_reducescatter([x], process_set=given),
    ):
        found += [("process_set", value, operation, REFUSED) for value in process_sets()]
    found += [("compression", None, lambda given: hvd.allreduce(x, compression=given), x)]
    for value in (1, "fp16", object()):
        found += [("compression", value, lambda given: hvd.allreduce(x, compression=given), REFUSED)]
    for value in ("text", ["a"], object(), None, {1: 2}, [[1.0], [1.0, 2.0]]):
        found += [("tensor", value, lambda given: hvd.allreduce(given, op=hvd.Sum), REFUSED)]
        found += [("tensors", value, lambda given: hvd.grouped_allreduce([given], op=hvd.Sum), REFUSED)]
    for value in (2.0, np.float32(2), tf.constant(2.0), True):
        found += [("tensor", value, lambda given: hvd.allreduce(given, op=hvd.Max), value)]
    found += [("tensor", 1j, lambda given: hvd.allreduce(given, op=hvd.Sum), 2j)]
    found += [("tensors", np.ones([2, 3]), lambda given: hvd.grouped_allreduce(given)[1], np.ones(3))]
    found += (
        [("tensors", iter([x]), lambda given: hvd.grouped_allreduce(given)[0], x)] if tf.executing_eagerly() else []
    )
    found += [("op", value, lambda given: hvd.allreduce(x, op=given), 2 * x) for value in (1, np.int64(1), Whole(1))]
    for value, factor in ((np.bool_(True), 1), (np.bool_(False), 2), (2, 1), (0, 2), ([], 2)):
        found += [("average", value, lambda given: hvd.allreduce(x, given), factor * x)]
    found += [("average", np.array([1, 2]), lambda given: hvd.allreduce(x, given), REFUSED)]
    for value in ("Sum", 99, -1, 1.5, [1], object()):
        found += [("op", value, lambda given: hvd.allreduce(x, op=given), REFUSED)]
    return found


def test_an_odd_argument_of_an_operation_works_or_is_an_error_of_that_call(job: Any) -> None:
    def check() -> None:
        from horovod.core.submission import collectives

        for what, value, call, wanted in cases():
            if wanted is REFUSED:
                with pytest.raises(REFUSED):
                    print("not refused:", what, repr(value)[:80], call(value))
            else:
                np.testing.assert_allclose(call(value), wanted, err_msg=f"{what} {value!r:.80}")
            collectives.barrier().wait()
        with pytest.raises(REFUSED):
            hvd.allreduce(1j, op=hvd.Max)
        collectives.barrier().wait()
        for value in variables():
            np.testing.assert_allclose(hvd.broadcast(x * hvd.rank(), value), x)
            np.testing.assert_allclose(hvd.allreduce(x, prescale_factor=value), x)
            assert hvd.broadcast_object(hvd.rank(), value) == 1

    job(2, check)


def test_an_odd_argument_in_a_graph_is_an_error_while_it_is_built(job: Any) -> None:
    def check() -> None:
        from horovod.core.submission import collectives

        for what, value, call, wanted in cases():
            with tf.Graph().as_default(), tf.compat.v1.Session() as session:
                if what == "size" or any(tf.is_tensor(each) for each in [value, *tf.nest.flatten(value)]):
                    continue  # eager tensors are of no graph
                if isinstance(value, hvd.ProcessSet):
                    continue  # it may be registered before the graph is run
                if wanted is REFUSED:
                    with pytest.raises(REFUSED):
                        print("not refused:", what, repr(value)[:80], call(value))
                elif what in ("broadcast", "prescale", "alltoall"):
                    np.testing.assert_allclose(session.run(call(value)), wanted)
        collectives.barrier().wait()

        @tf.function
        def known_later(root: Any) -> Any:
            return hvd.broadcast(x, root)

        with pytest.raises(TypeError, match=r"root_rank=.*expected a whole number"):
            known_later(tf.constant(0))
        collectives.barrier().wait()

    job(2, check)


def test_odd_arguments_of_tapes_and_optimizers_are_refused(job: Any) -> None:
    def check() -> None:
        import keras

        import horovod.tensorflow.keras as hvd_keras
        from horovod.core.submission import collectives

        for make in (tf.Variable, keras.Variable):
            for function in (hvd.broadcast_variables, hvd.broadcast_):
                variable = make([float(hvd.rank())])
                function(variable, np.int64(1))  # alone, without a list
                assert variable.numpy() == [1.0]
        for value in ([1.0], tf.constant(x), [x], "text", None, {"a": tf.Variable(1.0)}, np.ones(2), 1):
            for function in (hvd.broadcast_variables, hvd.broadcast_):
                with pytest.raises(TypeError, match="takes"):
                    function(value, 0)
        plain = tf.compat.v1.train.GradientDescentOptimizer
        wrappers: list[Callable[..., Any]] = [
            lambda **given: hvd.DistributedGradientTape(tf.GradientTape(), **given),
            lambda **given: hvd_keras.DistributedOptimizer(keras.optimizers.SGD(), **given),
            lambda **given: hvd.DistributedOptimizer(keras.optimizers.SGD(), **given),
        ]
        two = [2, np.int64(2), np.array(2), tf.constant(2), tf.Variable(2), keras.Variable(2, dtype="int32")]
        wrong = ["2", b"2", 2j, [2], np.array([2, 2]), float("nan"), True]
        for wrap in wrappers:
            for value in two:
                wrap(gradient_predivide_factor=value, groups=value)
            for value in wrong:
                for name in ("gradient_predivide_factor", "groups", "num_groups", "process_set", "op"):
                    if (name, type(value)) not in {("op", bool)}:
                        with pytest.raises(REFUSED):
                            print("not refused:", name, value, wrap(**{name: value}))
        for make in (
            lambda passes: hvd_keras.DistributedOptimizer(keras.optimizers.SGD(), backward_passes_per_step=passes),
            lambda passes: hvd.DistributedOptimizer(plain(0.1), op=hvd.Adasum, backward_passes_per_step=passes),
        ):
            for value in two:
                make(value)
            for value in [*wrong, 0, -1, 1.5, None]:
                with pytest.raises(REFUSED):
                    print("not refused:", value, make(value))
        for value in (None, 1, "tape", np.float16(1), object()):
            with pytest.raises(TypeError, match=r"tf\.GradientTape"):
                hvd.DistributedGradientTape(value)
            with pytest.raises(REFUSED):
                hvd.DistributedOptimizer(value)
        collectives.barrier().wait()

    job(2, check)
