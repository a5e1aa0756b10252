"""DistributedGradientTape: equals one process with all the data, in every way its gradients can travel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import horovod.tensorflow as hvd

MODES: list[Callable[[Any], Any]] = [lambda function: function, tf.function]


class Regression:
    """Three variables, of which the first is looked up sparsely; every rank has other data."""

    def __init__(self, rank: int) -> None:
        self.table = tf.Variable(tf.reshape(tf.range(8.0), [4, 2]))
        self.weight = tf.Variable([[1.0, -1.0, 2.0], [0.5, 0.0, 1.0]])
        self.bias = tf.Variable([0.0, 1.0, -1.0])
        self.unused = tf.Variable(1.0)
        self.sources = [self.table, self.weight, self.bias, self.unused]
        self.rows = tf.constant([[0, 1], [1, 3], [2, 2]][rank])

    def loss(self) -> Any:
        return tf.reduce_sum(tf.square(tf.nn.embedding_lookup(self.table, self.rows) @ self.weight + self.bias))

    def gradients(self, sources: Any = None, **arguments: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self.loss()
        return hvd.DistributedGradientTape(tape, **arguments).gradient(
            loss, self.sources if sources is None else sources
        )


def plain(rank: int) -> list[Any]:
    """One rank's own gradients, dense; None for what has none."""
    model = Regression(rank)
    with tf.GradientTape() as tape:
        loss = model.loss()
    found = tape.gradient(loss, model.sources)
    return [None if each is None else tf.convert_to_tensor(each).numpy() for each in found]


def close(found: Any, wanted: list[Any], rtol: float = 1e-6) -> None:
    assert len(found) == len(wanted)
    for one, two in zip(found, wanted, strict=True):
        assert (one is None) == (two is None)
        if one is not None:
            np.testing.assert_allclose(tf.convert_to_tensor(one), two, rtol=rtol, atol=rtol)


def mean_of(ranks: range) -> list[Any]:
    every = [plain(rank) for rank in ranks]
    return [None if each[0] is None else np.mean(each, axis=0) for each in zip(*every, strict=True)]


def test_gradients_come_in_the_structure_of_the_sources(job: Any) -> None:
    def check() -> None:
        model, mean = Regression(hvd.rank()), mean_of(range(2))
        table, weight, bias = model.table, model.weight, model.bias
        for sources in [
            weight,
            [weight],
            (weight,),
            {"w": weight},
            {"w": [weight]},
            [[weight]],
            [{"w": (weight,)}],
            [],
            {},
            {"b": bias, "w": (weight,)},
            {"w": weight, "b": bias}.values(),
            ((bias, [weight]), {"none": model.unused}),
            [table],
            {"t": table},
        ]:
            with tf.GradientTape(persistent=True) as tape:
                loss = model.loss()
            plain, wanted = tape.gradient(loss, sources), tf.nest.flatten(sources)
            each = {id(variable): value for variable, value in zip(model.sources, mean, strict=True)}
            found = model.gradients(sources=sources)
            tf.nest.assert_same_structure(plain, found)
            assert type(found) is type(plain), (sources, found)
            close(tf.nest.flatten(found), [each[id(variable)] for variable in wanted])

    job(2, check)


def test_gradients_are_averaged_with_every_argument_of_the_tape(job: Any) -> None:
    def check() -> None:
        model, mean = Regression(hvd.rank()), mean_of(range(3))
        ways: list[dict[str, Any]] = [
            {},
            {"sparse_as_dense": True},
            {"gradient_predivide_factor": 3.0},
            {"compression": hvd.Compression.fp16},
            {"compression": hvd.Compression.bf16, "sparse_as_dense": True},
            {"groups": 2},
            {"groups": [[model.weight, model.unused], [model.table]], "sparse_as_dense": True},
            {"op": hvd.Sum},
            {"device_dense": "/cpu:0", "device_sparse": "/cpu:0"},
        ]
        for way in ways:
            for mode in MODES:
                wanted = [each if each is None or way.get("op") is None else 3 * each for each in mean]
                close(mode(lambda w=way: model.gradients(**w))(), wanted, 2e-2 if "compression" in way else 1e-6)
        with pytest.warns(DeprecationWarning, match="num_groups"):
            close(model.gradients(num_groups=2), mean)
        close([model.gradients(sources=model.weight)], [mean[1]])
        named = model.gradients(sources={"b": model.bias, "w": (model.weight,)})
        close([named["w"][0], named["b"]], mean[1:3])

    def check_small_buckets() -> None:
        check()

    job(3, check)
    job(3, check_small_buckets, env={"HOROVOD_BUCKET_BYTES": "16"})


def test_a_distributed_tape_has_the_methods_of_the_wrapped_tape(job: Any) -> None:
    def check() -> None:
        x = tf.Variable(2.0 + hvd.rank())
        with tf.GradientTape(persistent=True) as tape:
            y, z = x * x, 3 * x
        distributed = hvd.DistributedGradientTape(tape)
        assert isinstance(distributed, tf.GradientTape) and type(distributed).__name__ == "GradientTape"
        assert float(distributed.gradient(y, x)) == 5.0 and float(distributed.gradient(z, x)) == 3.0
        assert distributed.watched_variables()[0] is x
        with hvd.DistributedGradientTape(tf.GradientTape(watch_accessed_variables=False)) as entered:
            constant = tf.constant(1.0 + hvd.rank())
            entered.watch(constant)
            y = constant * constant * x
        assert float(entered.gradient(y, constant)) == 8.0 and entered.watched_variables() == ()
        weighted = hvd.DistributedGradientTape(tape)
        assert float(weighted.gradient(y, x, unconnected_gradients=tf.UnconnectedGradients.ZERO)) == 0.0
        assert float(weighted.gradient(z, x, output_gradients=tf.constant(2.0 * hvd.rank()))) == 3.0
        with tf.GradientTape() as tape_of_the_block:
            inside = hvd.DistributedGradientTape(tape_of_the_block)
            y = x * x
        assert float(inside.gradient(y, x)) == 5.0
        with pytest.raises(RuntimeError, match="one set of gradients"):
            tape_of_the_block.gradient(y, x)
        with pytest.raises(ValueError, match="already"):
            hvd.DistributedGradientTape(distributed)
        for wrong in ({"groups": 0}, {"groups": "all"}, {"gradient_predivide_factor": 2.0, "op": hvd.Sum}):
            with pytest.raises(ValueError, match=r"groups|predivide"):
                hvd.DistributedGradientTape(tape, **wrong)

    job(2, check)


def test_gradients_of_local_sources_stay_on_their_rank(job: Any) -> None:
    def check() -> None:
        me = hvd.rank()
        shared, own = tf.Variable(1.0), tf.Variable(1.0)
        for mode in MODES:
            for scale in (True, False):

                def step(scale: bool = scale) -> Any:
                    with tf.GradientTape(persistent=True) as tape:
                        loss = (me + 1.0) * (shared + own)
                    distributed = hvd.DistributedGradientTape(tape, scale_local_gradients=scale)
                    distributed.register_local_source(own)
                    local, everybodys = distributed.get_local_and_global_gradients(loss, [own, shared])
                    return distributed.gradient(loss, [shared, own]), local[0][1], everybodys[0][1], len(local)

                both, local, everybodys, count = mode(step)()
                mine = (me + 1.0) / 2 if scale else me + 1.0
                assert [float(each) for each in both] == [1.5, mine]
                assert float(local) == mine and float(everybodys) == 1.5 and int(count) == 1

        layers = [tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="ones") for _ in range(2)]
        x = tf.constant([[1.0 + me]])

        def partial(local_layers: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(layers[1](layers[0](x)))
            variables = [layer.trainable_weights[0] for layer in layers]
            distributed = hvd.PartialDistributedGradientTape(tape, local_layers=local_layers)
            return [float(tf.squeeze(each)) for each in distributed.gradient(loss, variables)]

        assert partial(layers[0]) == [(1.0 + me) / 2, 1.5] and partial(layers) == [(1.0 + me) / 2] * 2
        assert partial(None) == [1.5, 1.5]
        with pytest.raises(ValueError, match="must be of tf"):
            partial([3])

    job(2, check)


def test_gradients_of_a_local_layer_that_is_built_later_stay_on_their_rank(job: Any) -> None:
    def check() -> None:
        layer = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        with tf.GradientTape() as tape:
            distributed = hvd.PartialDistributedGradientTape(tape, local_layers=layer, scale_local_gradients=False)
            loss = tf.reduce_sum(layer(tf.constant([[1.0 + hvd.rank()]])))
        assert float(tf.squeeze(distributed.gradient(loss, layer.trainable_weights)[0])) == 1.0 + hvd.rank()

    job(2, check)


def test_a_tape_reduces_over_its_process_set(job: Any) -> None:
    def check(sets: list[Any]) -> None:
        for mode in MODES:
            found = mode(lambda: Regression(hvd.rank()).gradients(process_set=sets[0]))
            if mode is MODES[1]:
                model = Regression(hvd.rank())
                found = mode(lambda m=model: m.gradients(process_set=sets[0]))
            close(found(), mean_of(range(2)) if hvd.rank() < 2 else plain(2))

    job(3, check, sets=[[0, 1]])


def test_a_tape_can_combine_gradients_by_adasum(job: Any) -> None:
    def check() -> None:
        x = tf.Variable([1.0, 1.0])
        direction = tf.constant([[1.0, 0.0], [0.0, 2.0]][hvd.rank()])
        for mode in MODES:

            def step() -> Any:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum(x * direction)
                return hvd.DistributedGradientTape(tape, op=hvd.Adasum).gradient(loss, [x])

            np.testing.assert_allclose(mode(step)()[0], [1.0, 2.0])

    job(2, check)


def test_two_tapes_in_one_function_do_not_mix_their_gradients(job: Any) -> None:
    def check() -> None:
        me = hvd.rank()
        generator, judge = tf.Variable([1.0, 2.0]), tf.Variable([3.0, 4.0])

        @tf.function
        def step(x: Any) -> Any:
            with tf.GradientTape() as one, tf.GradientTape() as two:
                image = generator * x
                realness = tf.reduce_sum(judge * image)
                blame = -realness * x
            one, two = hvd.DistributedGradientTape(one), hvd.DistributedGradientTape(two)
            tapes = [(one, realness, judge), (two, blame, generator)]
            found = {id(of): tape.gradient(loss, [of])[0] for tape, loss, of in tapes}
            return found[id(generator)], found[id(judge)]

        for _ in range(3):
            for_generator, for_judge = step(tf.constant(me + 1.0))
            np.testing.assert_allclose(for_generator, [-7.5, -10.0])
            np.testing.assert_allclose(for_judge, [1.5, 3.0])

    job(2, check)


def test_a_model_too_large_for_one_bucket_is_reduced_in_several(job: Any) -> None:
    def check() -> None:
        variables = [tf.Variable(tf.fill([50, 10], float(index))) for index in range(60)]

        @tf.function
        def step(x: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(tf.square(each) * x) for each in variables])
            gradients = hvd.DistributedGradientTape(tape).gradient(loss, variables)
            names = [each.name for each in tf.compat.v1.get_default_graph().get_operations() if "_submit_" in each.name]
            assert len([name for name in names if "input" not in name]) == 20  # of three variables each
            return gradients

        for number in range(3):
            found = step(tf.constant(float(hvd.rank() + number)))
            for index, each in enumerate(found):
                np.testing.assert_array_equal(each, np.full((50, 10), index * (1.0 + 2 * number)))

    job(2, check, env={"HOROVOD_BUCKET_BYTES": "6000"})
