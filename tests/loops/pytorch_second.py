"""Loops with several passes for one step, second derivatives, hooks of the script, and compiled backward passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._dynamo import compiled_autograd

import horovod.torch as hvd
from loops.harness import Table
from loops.pytorch import STEPS, TIGHT, TorchSide, clip, loss, network, sgd

TABLE: Table[TorchSide] = Table("second")


def adversaries(side: TorchSide, through_model: bool, clipped: bool) -> Iterator[Any]:
    """A GAN: the generator's loss flows through the discriminator, whose gradients are then thrown away."""
    generator, judge = network(1, 6, 6), network(2, 6, 1)
    optimizers = [side.wrap(sgd(each), each) for each in (generator, judge)]

    def zero(number: int) -> None:
        (generator, judge)[number].zero_grad() if through_model else optimizers[number].zero_grad()

    for step in range(STEPS):
        zero(1)
        real, made = side.rows(step), generator(side.rows(50 + step)).detach()
        (nn.functional.softplus(-judge(real)).mean() + nn.functional.softplus(judge(made)).mean()).backward()
        clip(judge.parameters(), TIGHT) if clipped else None
        optimizers[1].step()
        zero(0)
        nn.functional.softplus(-judge(generator(side.rows(90 + step)))).mean().backward()
        clip(generator.parameters(), TIGHT) if clipped else None
        optimizers[0].step()
    yield from (*generator.parameters(), *judge.parameters())


@TABLE.loop()
def a_gan_that_zeroes_through_the_models(side: TorchSide) -> Iterator[Any]:
    return adversaries(side, True, True)


@TABLE.loop(part=False)
def a_gan_that_zeroes_through_the_optimizers(side: TorchSide) -> Iterator[Any]:
    return adversaries(side, False, False)


@TABLE.loop(part=False)
def a_gan_whose_generator_throws_away_the_gradients_of_the_other_network(side: TorchSide) -> Iterator[Any]:
    generator, judge = network(1, 6, 6), network(2, 6, 1)
    first, second = side.wrap(sgd(generator), generator), side.wrap(sgd(judge), judge)
    for step in range(STEPS):
        generator.zero_grad()
        (-judge(generator(side.rows(step))).mean()).backward()
        clip(generator.parameters(), TIGHT)
        first.step()
        judge.zero_grad()
        (judge(generator(side.rows(step)).detach()) - judge(side.rows(50 + step))).mean().backward()
        clip(judge.parameters(), TIGHT)
        second.step()
    yield from (*generator.parameters(), *judge.parameters())


@TABLE.loop()
def sharpness_is_minimized(side: TorchSide) -> nn.Module:
    """SAM: a pass, a move along the gradient, a second pass, the way back, and a step."""
    model = network()
    optimizer = side.wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    for step in range(STEPS):
        loss(model, side, step).backward()
        with torch.no_grad():
            gradients = [each.grad for each in model.parameters() if each.grad is not None]
            norm = torch.stack([each.norm() for each in gradients]).norm()
            moves = [each * 0.05 / norm for each in gradients]
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.add_(move)
        optimizer.zero_grad()
        loss(model, side, step).backward()
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.sub_(move)
        clip(model.parameters(), TIGHT)
        optimizer.step()
        optimizer.zero_grad()
    return model


DETACHED = r"RuntimeError: element 0 of tensors does not require grad|RuntimeError: One of the differentiated Tensors"


@TABLE.loop(refused=DETACHED)
def a_hessian_of_reduced_gradients(side: TorchSide) -> nn.Module:
    """AdaHessian: differentiates the gradients that backward has left, which are detached once they are reduced."""
    model = network()
    optimizer = side.wrap(sgd(model), model)
    for step in range(2):
        optimizer.zero_grad()
        loss(model, side, step).backward(create_graph=True)
        gradients = [each.grad for each in model.parameters()]
        signs = [torch.ones_like(each) for each in model.parameters()]
        products = torch.autograd.grad(gradients, [*model.parameters()], grad_outputs=signs)
        with torch.no_grad():
            for parameter, product in zip(model.parameters(), products, strict=True):
                parameter.grad = parameter.grad / (1 + product.abs())
        optimizer.step()
    return model


@TABLE.loop()
def a_penalty_on_gradients_of_autograd_grad(side: TorchSide) -> nn.Module:
    """Second derivatives of each row alone, so the mean over all rows is the mean over ranks."""
    model = network()
    optimizer = side.wrap(sgd(model), model)
    for step in range(STEPS):
        optimizer.zero_grad()
        rows = side.rows(step).requires_grad_()
        (found,) = torch.autograd.grad(model(rows).square().sum(), rows, create_graph=True)
        (loss(model, side, step) + found.norm(dim=1).sub(1).square().mean()).backward()
        clip(model.parameters(), TIGHT)
        optimizer.step()
    return model


@TABLE.loop(refused=r"AssertionError: A hook of the script has removed the gradient of '\S+' inside backward")
def a_hook_removes_a_gradient(side: TorchSide) -> nn.Module:
    model = network()

    def remove(parameter: torch.Tensor) -> None:
        parameter.grad = None

    model[0].weight.register_post_accumulate_grad_hook(remove)
    optimizer = side.wrap(sgd(model), model)
    for step in range(2):
        optimizer.zero_grad()
        loss(model, side, step).backward()
        optimizer.step()
    return model


@TABLE.loop()
def a_hook_clamps_each_ranks_own_gradients(side: TorchSide) -> nn.Module:
    """As with DistributedDataParallel: hooks of tensors see what backward has computed on this rank."""
    model = network()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-TIGHT, TIGHT))
    optimizer = side.wrap(sgd(model), model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for _, rows, of in side.ranks(step):
            nn.functional.cross_entropy(model(rows), of).backward()
        for parameter in model.parameters() if not side.distributed else ():
            assert parameter.grad is not None
            parameter.grad /= side.size
        optimizer.step()
    return model


def compiled_backward(side: TorchSide, backward: Callable[[torch.Tensor], None], **wrapping: Any) -> nn.Module:
    """A loop that steps with what backward leaves."""
    model = network()
    optimizer = side.wrap(sgd(model), model, **wrapping)
    for step in range(2):
        optimizer.zero_grad()
        backward(loss(model, side, step))
        optimizer.step()
    return model


def by_compiled_autograd(loss: torch.Tensor) -> None:
    with compiled_autograd._enable(torch.compile(backend="eager")):
        loss.backward()


def in_a_compiled_function(loss: torch.Tensor) -> None:
    def back() -> None:
        loss.backward()

    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(back, backend="eager")()


def compiled_step(side: TorchSide, backend: str, passes: int, clipped: bool) -> nn.Module:
    """A loop whose step is one compiled function, from ``zero_grad()`` to ``step()``."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = (
        side.wrap(optimizer, model, backward_passes_per_step=passes) if passes > 1 else side.wrap(optimizer, model)
    )

    def train(batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        optimizer.zero_grad()
        for rows, classes in batches:
            (nn.functional.cross_entropy(model(rows), classes) / passes).backward()
        clip(model.parameters(), TIGHT) if clipped else None
        optimizer.step()

    compiled = torch.compile(train, backend=backend)
    try:
        for step in range(STEPS):
            compiled([side.batch(passes * step + each) for each in range(passes)])
    finally:
        torch.compiler.reset()
    return model


for _backend, _passes, _clipped, _part in (
    ("eager", 1, True, True),
    ("eager", 2, False, False),
    ("aot_eager", 1, False, False),
    ("aot_eager", 2, True, False),
):
    TABLE.add(
        f"step_is_compiled_by_{_backend}_{_passes}_{'clipped' if _clipped else 'plain'}",
        partial(compiled_step, backend=_backend, passes=_passes, clipped=_clipped),
        sizes=(2,),
        part=_part,
    )


COMPILED = r"AssertionError: The gradient of '\S+' comes from a backward pass with compiled autograd.*Switch it off"
TABLE.add(
    "backward_is_compiled",
    partial(compiled_backward, backward=by_compiled_autograd),
    refused=COMPILED,
    sizes=(2,),
)
TABLE.add(
    "backward_of_sums_is_compiled",
    partial(compiled_backward, backward=by_compiled_autograd, op=hvd.Sum),
    refused=COMPILED,
    part=False,
)
TABLE.add(
    "backward_inside_a_compiled_function",
    partial(compiled_backward, backward=in_a_compiled_function),
    refused=COMPILED,
    part=False,
)
