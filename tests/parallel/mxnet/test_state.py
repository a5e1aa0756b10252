"""Bringing ranks to one state: parameters of Gluon and Module, objects."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np
import pytest

import horovod.mxnet as hvd


def parameters_of(net: Any) -> list[Any]:
    return [parameter.data().asnumpy() for parameter in net.collect_params().values()]


def everywhere_alike(net: Any) -> bool:
    everybody = hvd.allgather_object(parameters_of(net))
    return all(np.array_equal(a, b) for theirs in everybody for a, b in zip(theirs, everybody[0], strict=True))


@pytest.mark.parametrize("root", [0, 2])
def test_parameters_of_a_block_and_of_a_dict_become_those_of_the_root(job: Any, root: int) -> None:
    def check() -> None:
        mx.random.seed(hvd.rank())
        net = mx.gluon.nn.HybridSequential(prefix="net_")
        net.add(  # named here, since automatic names count the layers that earlier tests have made in this process
            mx.gluon.nn.Dense(4, in_units=3, prefix="first_"),
            mx.gluon.nn.BatchNorm(in_channels=4, prefix="norm_"),
            mx.gluon.nn.Dense(2, in_units=4, prefix="last_"),
        )
        net.initialize(mx.init.Uniform(1.0))
        before = net[0].weight.data().asnumpy()
        assert not everywhere_alike(net)
        hvd.broadcast_parameters(net.collect_params(), root_rank=root)
        assert everywhere_alike(net)
        assert np.array_equal(net[0].weight.data().asnumpy(), before) == (hvd.rank() == root)
        arrays = {"b": mx.nd.ones((2,)) * hvd.rank(), "a": mx.np.ones((3,)) * hvd.rank(), "c": net[0].bias}
        hvd.broadcast_parameters(arrays, np.int64(root), prefix="second_")
        assert arrays["a"].asnumpy().tolist() == [root] * 3 and arrays["b"].asnumpy().tolist() == [root] * 2

    job(3, check)


def test_parameters_whose_shape_is_not_known_yet_are_broadcast_when_it_is(job: Any) -> None:
    def check() -> None:
        for hybrid in (False, True):
            mx.random.seed(hvd.rank())
            net = mx.gluon.nn.HybridSequential(prefix=f"net{hybrid}_")
            net.add(  # named here, as above
                mx.gluon.nn.Dense(4, activation="relu", prefix="first_"),
                mx.gluon.nn.BatchNorm(prefix="norm_"),
                mx.gluon.nn.Dense(2, in_units=4, prefix="last_"),
            )
            net.initialize(mx.init.Uniform(1.0))
            if hybrid:
                net.hybridize()
            if hvd.rank() == 1:
                net(mx.nd.ones((1, 3)))  # one rank knows the shapes already
            hvd.broadcast_parameters(net.collect_params(), root_rank=1)
            output = net(mx.nd.ones((1, 3)))
            assert everywhere_alike(net)
            assert len(set(hvd.allgather_object(output.asnumpy().tobytes()))) == 1
            kind = mx.gluon.Parameter
            assert all("_init_impl" not in vars(each) for each in net.collect_params().values() if type(each) is kind)

    job(2, check)


def test_parameters_of_a_module_become_those_of_rank_0(job: Any) -> None:
    def check() -> None:
        mx.random.seed(hvd.rank())
        module = mx.mod.Module(
            mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=3), name="softmax")
        )
        module.bind([("data", (2, 4))], [("softmax_label", (2,))])
        module.init_params(mx.init.Uniform(1.0))
        arguments, auxiliary = module.get_params()
        hvd.broadcast_parameters(arguments)
        hvd.broadcast_parameters(auxiliary)
        module.set_params(arguments, auxiliary)
        mine = {name: array.asnumpy().tolist() for name, array in module.get_params()[0].items()}
        assert all(theirs == mine for theirs in hvd.allgather_object(mine))

    job(2, check)


def test_other_objects_than_parameters_are_refused(job: Any) -> None:
    def check() -> None:
        for wrong in ([mx.nd.ones((1,))], mx.nd.ones((1,)), None, "params"):
            with pytest.raises(ValueError, match="invalid params of type"):
                hvd.broadcast_parameters(wrong)
        with pytest.raises(ValueError, match="invalid root rank 5"):
            hvd.broadcast_parameters({"a": mx.nd.ones((1,))}, root_rank=5)
        hvd.broadcast_parameters({})

    job(2, check)


def test_a_job_of_one_broadcasts_nothing(job: Any) -> None:
    def check() -> None:
        hvd.broadcast_parameters({"a": mx.nd.ones((1,)), "not an array": 3}, root_rank=0)

    job(1, check)


def test_objects_are_broadcast_and_gathered(job: Any) -> None:
    def check() -> None:
        me = hvd.rank()
        assert hvd.broadcast_object({"rank": me, "f": lambda: 3}, 1)["rank"] == 1
        assert hvd.broadcast_object([me], np.int64(2), name="named") == [2]
        assert hvd.allgather_object("x" * me) == ["", "x", "xx"]
        array = hvd.broadcast_object(mx.nd.ones((2,)) * me, root_rank=2)
        assert array.asnumpy().tolist() == [2.0, 2.0]

    job(3, check)
