"""What collectives are called in graphs: equal wherever the same function is traced."""

from __future__ import annotations

from typing import Any

import pytest

tf = pytest.importorskip("tensorflow")

from horovod.tensorflow.graph.names import collective_name  # noqa: E402  TensorFlow may be missing

KIND = "HorovodAllreduce"


def test_eager_collectives_have_only_the_name_that_the_user_gives() -> None:
    x = tf.constant(1.0)
    assert collective_name(KIND, None, [x]) == (KIND, None)
    assert collective_name(KIND, "mine", [x]) == ("mine", "mine")


def test_in_a_graph_the_name_comes_from_the_tensor() -> None:
    with tf.Graph().as_default():
        x, y = tf.compat.v1.placeholder(tf.float32, name="x"), tf.compat.v1.placeholder(tf.float32, name="y")
        assert collective_name(KIND, None, [x]) == ("HorovodAllreduce_x_0", "x_0")
        assert collective_name(KIND, None, [x, x, y]) == ("HorovodAllreduce_x_0_y_0", "x_0_y_0")
        assert collective_name(KIND, None, [x]) == ("HorovodAllreduce_x_0_1", "x_0_1")
        assert collective_name(KIND, "given: 1", [x]).node == "given__1"
        with tf.name_scope("scope"):
            assert collective_name(KIND, "given", [x]) == ("scope/given", "scope/given")
            ignoring = collective_name(KIND, "given", [x], ignore_name_scope=True)
            assert ignoring == ("scope/given_1", "given_1")


def test_unique_among_the_graphs_of_a_function_and_equal_each_time() -> None:
    names: list[list[Any]] = []

    @tf.function
    def traced(x: Any) -> Any:
        names.append([])

        def name(y: Any) -> Any:
            names[-1].append(collective_name(KIND, None, [y]).negotiated)
            return y

        z = tf.cond(x[0] > 0, lambda: name(x), lambda: name(x))
        return name(z)

    for count in range(1, 4):
        traced(tf.ones([count]))
    assert names[0] == names[1] == names[2] and len(set(names[0])) == 3


def test_a_graph_that_tensorflow_builds_twice_keeps_its_names() -> None:
    """TensorFlow traces a function again if it has made variables; where they exist already it does not."""
    names: list[Any] = []

    def trace(variables: list[Any]) -> list[Any]:
        names.clear()

        @tf.function
        def inner(x: Any) -> Any:
            if not variables:
                variables.append(tf.Variable(1.0))

            def name() -> Any:
                names.append(collective_name(KIND, "given", [x]).negotiated)
                return x

            return tf.cond(x > 0, name, name) + name()

        tf.function(lambda x: inner(x))(tf.constant(1.0))
        return list(names)

    once, twice = trace([tf.Variable(1.0)]), trace([])
    assert len(set(once)) == len(once) == 3 and twice == once * 2


def test_functions_of_one_name_get_different_names_of_collectives() -> None:
    names: list[Any] = []

    def make() -> Any:
        def same(x: Any) -> Any:
            names.append(collective_name(KIND, "given", [x]).negotiated)
            return x

        return tf.function(same)

    @tf.function
    def outer(x: Any) -> Any:
        kept = make()
        for function in (kept, make(), make(), kept):
            x = function(x)
        return x

    outer(tf.constant(1.0))
    assert names == ["given", "given_1", "given_2"]


def test_a_captured_tensor_does_not_name_a_collective() -> None:
    names: list[Any] = []

    def trace(outside: Any) -> None:
        @tf.function
        def traced() -> Any:
            names.append(collective_name(KIND, None, [tf.convert_to_tensor(outside)]))
            return outside

        traced()

    trace(tf.constant(1.0))
    for _ in range(3):
        tf.constant(1.0)
    trace(tf.constant(2.0) + 1)
    assert names == [("HorovodAllreduce_captured", "captured")] * 2
