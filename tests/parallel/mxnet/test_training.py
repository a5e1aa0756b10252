"""Training on several ranks is training of one process on all their batches together: Gluon, Module, loops of one's own."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import mxnet as mx
import numpy as np
import pytest

import horovod.mxnet as hvd

BATCH = 12  # of all ranks together
STEPS = 6


def data(step: int) -> tuple[Any, Any]:
    """The batch of all ranks."""
    random = np.random.default_rng(step)
    return random.normal(size=(BATCH, 5)).astype(np.float32), random.integers(0, 3, BATCH).astype(np.float32)


def own(array: Any) -> Any:
    return mx.nd.array(np.split(array, hvd.size())[hvd.rank()])


def network(prefix: str = "net_") -> Any:
    """The same whoever makes it."""
    net = mx.gluon.nn.HybridSequential(prefix=prefix)
    with net.name_scope():
        net.add(mx.gluon.nn.Dense(7, activation="tanh", in_units=5), mx.gluon.nn.Dense(3, in_units=7))
    net.initialize()
    random = np.random.default_rng(7)
    for _, parameter in sorted(net.collect_params().items()):
        parameter.set_data(mx.nd.array(random.normal(size=parameter.shape)))
    return net


def backward(net: Any, inputs: Any, labels: Any) -> None:
    with mx.autograd.record():
        loss = mx.gluon.loss.SoftmaxCrossEntropyLoss()(net(inputs), labels)
    loss.backward()


def weights(net: Any) -> list[Any]:
    return [parameter.data().asnumpy() for _, parameter in sorted(net.collect_params().items())]


def alone(optimizer: str, first: int = 0, **parameters: Any) -> list[Any]:
    """What one process learns from the batches of all ranks."""
    net = network()
    trainer = mx.gluon.Trainer(net.collect_params(), optimizer, parameters, kvstore=None)
    for step in range(first, first + STEPS):
        inputs, labels = data(step)
        backward(net, mx.nd.array(inputs), mx.nd.array(labels))
        trainer.step(BATCH)
    return weights(net)


def same(found: list[Any], wanted: list[Any], tolerance: float = 2e-5) -> None:
    assert len(found) == len(wanted)
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=tolerance, atol=tolerance)


def train(trainer: Any, net: Any) -> list[Any]:
    for step in range(STEPS):
        inputs, labels = data(step)
        backward(net, own(inputs), own(labels))
        trainer.step(BATCH // hvd.size())
    return weights(net)


OPTIMIZERS = {"sgd": {"learning_rate": 0.3, "momentum": 0.9, "wd": 0.01}, "adam": {"learning_rate": 0.05}}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_gluon_trains_as_one_process_with_the_same_bits_on_every_rank(job: Any, size: int, optimizer: str) -> None:
    def check() -> list[bytes]:
        parameters = OPTIMIZERS[optimizer]
        wanted = alone(optimizer, **parameters)
        for hybrid in (False, True):
            net = network()
            if hybrid:
                net.hybridize(static_alloc=True)
            found = train(hvd.DistributedTrainer(net.collect_params(), optimizer, parameters), net)
            same(found, wanted)
        return [each.tobytes() for each in found]

    results = job(size, check)
    assert all(result == results[0] for result in results), "the same bits on every rank"


@pytest.mark.parametrize(
    "settings",
    [
        {"num_groups": 1},
        {"num_groups": 2},
        {"num_groups": np.int64(9)},
        {"gradient_predivide_factor": 2.0},
        {"gradient_predivide_factor": np.float32(0.5), "num_groups": 1, "prefix": "model_"},
    ],
    ids=str,
)
def test_gluon_with_groups_and_factors_trains_as_one_process(job: Any, settings: dict[str, Any]) -> None:
    def check() -> None:
        net = network()
        same(
            train(hvd.DistributedTrainer(net.collect_params(), "sgd", OPTIMIZERS["sgd"], **settings), net),
            alone("sgd", **OPTIMIZERS["sgd"]),
        )

    job(2, check)


def test_gluon_with_compression_trains_close_to_one_process_in_its_own_type(job: Any) -> None:
    def check() -> None:
        net = network()
        trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.3}, hvd.Compression.fp16)
        same(train(trainer, net), alone("sgd", learning_rate=0.3), tolerance=5e-3)
        assert all(np.dtype(each.dtype) == np.float32 for each in weights(net))

    job(2, check)


def test_parameters_may_come_as_a_list_or_a_dict_in_any_order(job: Any) -> None:
    def check() -> None:
        wanted = alone("sgd", learning_rate=0.3)
        for make in (lambda p: list(p.values())[::-1], lambda p: tuple(p.values()), lambda p: dict(p.items())):
            net = network()
            trainer = hvd.DistributedTrainer(make(net.collect_params()), "sgd", {"learning_rate": 0.3})
            assert [p.name for p in trainer._params] == sorted(p.name for p in trainer._params)
            same(train(trainer, net), wanted)

    job(2, check)


def test_between_reducing_and_updating_gradients_are_sums(job: Any) -> None:
    def check() -> None:
        net, plain = network(), network()
        trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.3})
        inputs, labels = data(0)
        backward(net, own(inputs), own(labels))
        backward(plain, mx.nd.array(inputs), mx.nd.array(labels))
        trainer.allreduce_grads()
        gradients = [[p.grad().asnumpy() for _, p in sorted(each.collect_params().items())] for each in (net, plain)]
        same(*gradients)
        trainer.update(BATCH // hvd.size())
        mx.gluon.Trainer(plain.collect_params(), "sgd", {"learning_rate": 0.3}, kvstore=None).step(BATCH)
        same(weights(net), weights(plain))

    job(3, check)


def test_two_trainers_whose_steps_overlap_do_not_mix_their_gradients(job: Any) -> None:
    """As those of a GAN: their parameters have the same numbers, and nobody waits between their steps."""

    def check() -> None:
        nets = [network("a_"), network("b_")]
        trainers = [hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.3}) for net in nets]
        for step in range(STEPS):
            for first, net in enumerate(nets):
                inputs, labels = data(first + step)
                backward(net, own(inputs), own(labels))
            for trainer in trainers if step % 2 else reversed(trainers):
                trainer.step(BATCH // hvd.size())
        for first, net in enumerate(nets):
            same(weights(net), alone("sgd", first, learning_rate=0.3))

    job(2, check)


def test_a_trainer_takes_a_distributed_optimizer_apart(job: Any) -> None:
    def check() -> None:
        net = network()
        wrapped = hvd.DistributedOptimizer(mx.optimizer.create("sgd", learning_rate=0.3))
        with pytest.warns(UserWarning, match="unwrapped"):
            trainer = hvd.DistributedTrainer(net.collect_params(), wrapped)
        assert type(trainer._optimizer) is mx.optimizer.SGD
        same(train(trainer, net), alone("sgd", learning_rate=0.3))

    job(2, check)


def test_wrong_arguments_of_trainers_are_refused_and_the_job_goes_on(job: Any) -> None:
    def check() -> None:
        parameters = network().collect_params()
        with pytest.raises(AssertionError, match="prefix=3"):
            hvd.DistributedTrainer(parameters, "sgd", prefix=3)
        for wrong in (
            {"gradient_predivide_factor": 0},
            {"gradient_predivide_factor": -1.0},
            {"gradient_predivide_factor": "two"},
            {"num_groups": -1},
            {"num_groups": 1.5},
            {"process_set": hvd.ProcessSet([0])},
        ):
            with pytest.raises(ValueError):
                hvd.DistributedTrainer(parameters, "sgd", **wrong)
            with pytest.raises((ValueError, TypeError)):
                hvd.DistributedOptimizer(mx.optimizer.SGD(), **wrong)
        with pytest.raises(ValueError, match="First argument must be"):
            hvd.DistributedTrainer([1, 2], "sgd")
        with pytest.raises(ValueError, match=r"expected an mxnet\.optimizer\.Optimizer"):
            hvd.DistributedOptimizer("sgd")
        two = mx.gluon.nn.Dense(2, in_units=2)
        two.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
        with pytest.raises(ValueError, match="several devices"):
            hvd.DistributedTrainer(two.collect_params(), "sgd")
        sparse = mx.gluon.nn.Embedding(3, 2, sparse_grad=True)
        sparse.initialize()
        trainer = hvd.DistributedTrainer(sparse.collect_params(), "sgd")
        with mx.autograd.record():
            sparse(mx.nd.array([1])).sum().backward()
        with pytest.raises(ValueError, match="gradient of 0: sparse arrays"):
            trainer.step(1)
        assert hvd.allreduce(mx.nd.ones((1,)), op=hvd.Sum).asscalar() == 2.0

    job(2, check)


def test_trainers_of_a_process_set_train_as_one_process_with_its_members_data(job: Any) -> None:
    def check(sets: list[Any]) -> None:
        pair = sets[0]
        net = network()
        trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.3}, process_set=pair)
        optimizer = hvd.DistributedOptimizer(mx.optimizer.SGD(learning_rate=0.5), process_set=pair)
        for step in range(STEPS):
            inputs, labels = (np.split(part, 3)[hvd.rank()] for part in data(step))
            backward(net, mx.nd.array(inputs), mx.nd.array(labels))
            trainer.step(BATCH // 3)
        weight, gradient = mx.nd.zeros((2,)), mx.nd.ones((2,)) * (hvd.rank() + 1)
        optimizer.update(0, weight, gradient, optimizer.create_state(0, weight))
        assert weight.asnumpy().tolist() == ([-1.0, -1.0] if pair.included() else [-0.5 * (hvd.rank() + 1)] * 2)
        one = network()
        plain = mx.gluon.Trainer(one.collect_params(), "sgd", {"learning_rate": 0.3}, kvstore=None)
        for step in range(STEPS):
            parts = [np.split(part, 3) for part in data(step)]
            members = [0, 2] if pair.included() else [1]
            backward(one, *(mx.nd.array(np.concatenate([part[rank] for rank in members])) for part in parts))
            plain.step(BATCH // 3 * len(members))
        same(weights(net), weights(one))

    job(3, check, sets=[[0, 2]])


def module(optimizer: Any, distributed: bool) -> list[Any]:
    """What ``Module.fit`` learns, of a rank's part of the batches, or of all."""
    hidden = mx.sym.Activation(mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=7, name="one"), act_type="tanh")
    output = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(hidden, num_hidden=3, name="two"), name="softmax")
    batches = [data(step) for step in range(STEPS)]
    parts = [[own(part) if distributed else mx.nd.array(part) for part in batch] for batch in batches]
    inputs, labels = (mx.nd.concat(*column, dim=0) for column in zip(*parts, strict=True))
    batch_size = BATCH // hvd.size() if distributed else BATCH
    random = np.random.default_rng(7)
    shapes = {"one_weight": (7, 5), "one_bias": (7,), "two_weight": (3, 7), "two_bias": (3,)}
    start = {name: mx.nd.array(random.normal(size=shape)) for name, shape in shapes.items()}
    if distributed and hvd.rank():
        start = {name: array * 2 for name, array in start.items()}
    if distributed:
        hvd.broadcast_parameters(start)
    trained = mx.mod.Module(output)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that rescale_grad is not as Module would set it
        trained.fit(
            mx.io.NDArrayIter(inputs, labels, batch_size),
            optimizer=optimizer(1 / batch_size),
            arg_params=start,
            num_epoch=2,
            kvstore=None,
        )
    return [array.asnumpy() for _, array in sorted(trained.get_params()[0].items())]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_module_fit_trains_as_one_process_with_the_same_bits_on_every_rank(job: Any, size: int, optimizer: str) -> None:
    def check() -> list[bytes]:
        def plain(rescale: float) -> Any:
            return mx.optimizer.create(optimizer, rescale_grad=rescale, **OPTIMIZERS[optimizer])

        wanted = module(plain, distributed=False)
        for settings in ({}, {"num_groups": 2}, {"gradient_predivide_factor": 2.0}):
            found = module(
                lambda rescale, settings=settings: hvd.DistributedOptimizer(plain(rescale), **settings), True
            )
            same(found, wanted)
        return [each.tobytes() for each in found]

    results = job(size, check)
    assert all(result == results[0] for result in results), "the same bits on every rank"


def test_a_wrapped_optimizer_has_the_settings_of_the_original_and_can_be_pickled(job: Any) -> None:
    def check() -> None:
        inner = mx.optimizer.SGD(
            learning_rate=0.25, momentum=0.5, rescale_grad=0.5, param_idx2name={0: "a_weight", 1: "b_bias"}
        )
        optimizer = hvd.DistributedOptimizer(inner, gradient_predivide_factor=4.0)
        assert isinstance(optimizer, mx.optimizer.Optimizer)
        assert inner.rescale_grad == optimizer.rescale_grad == 0.5 * 4.0 / 2
        optimizer.rescale_grad = 1.0
        assert inner.rescale_grad == 1.0 and optimizer.momentum == 0.5 and optimizer.idx2name == inner.idx2name
        optimizer.set_learning_rate(0.125)
        optimizer.set_lr_mult({"a_weight": 2.0})
        optimizer.set_wd_mult({"b_bias": 3.0})
        assert optimizer.learning_rate == inner.learning_rate == 0.125
        assert inner.lr_mult == {"a_weight": 2.0} and inner.wd_mult["b_bias"] == 3.0
        weight = mx.nd.ones((3,), dtype="float16")
        assert optimizer.create_state(0, weight).shape == (3,)
        inner.multi_precision = True
        assert len(optimizer.create_state_multi_precision(0, weight)) == 2
        with pytest.raises(AttributeError, match="no_such_thing"):
            optimizer.no_such_thing  # noqa: B018  is what fails
        for each in (hvd.DistributedOptimizer(mx.optimizer.Adam()), optimizer):
            again = pickle.loads(pickle.dumps(each))
            assert type(again) is hvd.DistributedOptimizer and again.rescale_grad == each.rescale_grad
            assert type(again._optimizer) is type(each._optimizer)

    job(2, check)


def test_updates_of_one_and_of_several_parameters_use_reduced_gradients(job: Any) -> None:
    def check() -> None:
        me = hvd.rank()
        for settings in ({}, {"num_groups": 2}, {"num_groups": 1}):
            for method in ("update", "update_multi_precision"):
                optimizer = hvd.DistributedOptimizer(mx.optimizer.SGD(learning_rate=1.0), **settings)
                update = getattr(optimizer, method)
                weight, gradient = mx.nd.zeros((2,)), mx.nd.ones((2,)) * (me + 1)
                update(3, weight, gradient, None)
                assert weight.asnumpy().tolist() == [-1.5, -1.5] and gradient.asnumpy().tolist() == [3.0, 3.0]
                several = [mx.nd.zeros((2,), dtype=dtype) for dtype in ("float32", "float16", "float32")]
                gradients = [mx.nd.full((2,), me + 2 * i, dtype=each.dtype) for i, each in enumerate(several)]
                for dtype in ("float32", "float16"):
                    chosen = [i for i in range(3) if np.dtype(several[i].dtype) == dtype]
                    update(chosen, [several[i] for i in chosen], [gradients[i] for i in chosen], [None] * len(chosen))
                assert [float(each.asnumpy()[0]) for each in several] == [-0.5, -2.5, -4.5]

    job(2, check)


def test_ranks_whose_models_differ_get_the_same_error_with_the_line(job: Any) -> None:
    def check() -> str:
        net = mx.gluon.nn.Dense(3, in_units=4 + hvd.rank(), prefix="dense_")
        net.initialize()
        trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", prefix="model_")
        backward(net, mx.nd.ones((2, 4 + hvd.rank())), mx.nd.zeros((2,)))
        trainer.step(2)
        with pytest.raises(mx.MXNetError, match="Mismatched ALLREDUCE tensor shapes") as found:
            net.weight.data().asnumpy()
        assert isinstance(found.value, hvd.HorovodInternalError)
        return str(found.value)

    texts = job(2, check)
    assert texts[0] == texts[1] and "horovod_allreduce.model_" in texts[0] and __file__ in texts[0], texts[0]


def test_training_goes_on_in_the_next_generation(job: Any) -> None:
    def check() -> None:
        net = network()
        trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.3})
        for step in range(STEPS):
            inputs, labels = data(step)
            backward(net, own(inputs), own(labels))
            trainer.step(BATCH // hvd.size())
            if step == 2:
                weights(net)
                hvd.allgather_object("everybody is here")
                hvd.shutdown()
                hvd.init()
        same(weights(net), alone("sgd", learning_rate=0.3))

    job(2, check)


@pytest.mark.parametrize("kind", ["trainer", "optimizer"])
def test_ranks_that_differ_are_told_once(job: Any, kind: str) -> None:
    """What no collective shows: a learning rate that one rank has changed, and weights that were never broadcast."""

    def check(kind: str) -> list[str]:
        net = network()
        next(iter(net.collect_params().values())).data()[:] = hvd.rank()
        if kind == "trainer":
            trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.3})
        else:
            optimizer = hvd.DistributedOptimizer(mx.optimizer.SGD(learning_rate=0.3))
            trainer = mx.gluon.Trainer(net.collect_params(), optimizer, kvstore=None)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(7):
                if step == 3:
                    trainer.set_learning_rate(0.3 - 0.1 * hvd.rank())
                inputs, labels = data(step)
                backward(net, own(inputs), own(labels))
                trainer.step(BATCH // hvd.size())
        weights(net)  # not waitall(), which raises what operations of earlier jobs in this process have failed with
        return [str(each.message) for each in caught if "HOROVOD_CHECK" in str(each.message)]

    told, silent = job(2, check, kind)
    assert silent == [] and len(told) == 2
    assert "parameters of the ranks differ" in told[0] and "] on rank 1" in told[0]
    assert "lr: 0.3 on rank 0, 0.2 on rank 1" in told[1].replace("0.19999999999999998", "0.2")
