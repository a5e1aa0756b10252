"""Loops that step inside backward, replace gradients, copy optimizers, or make passes of their own on one rank."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import horovod.torch as hvd
from loops.harness import Table
from loops.pytorch import CLASSES, ROWS, STEPS, TIGHT, TorchSide, clip, loss, network, sgd
from loops.pytorch_windows import quiet
from time_limits import SOON

TABLE: Table[TorchSide] = Table("inside")


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


# Steps inside backward, as PyTorch's tutorial makes them to save the memory of gradients.


def step_inside_backward(
    side: TorchSide, wrap_first: bool, zero: bool = True, passes: int = 1, **wrapping: Any
) -> nn.Module:
    """An optimizer for each parameter, and hooks that step as soon as the gradient is there."""
    model = network()
    named = dict(model.named_parameters())
    optimizers: dict[torch.Tensor, Any] = {each: adam([each]) for each in named.values()}

    def wrap() -> None:
        for name, parameter in named.items():
            if side.distributed:
                optimizers[parameter] = hvd.DistributedOptimizer(
                    optimizers[parameter], [(name, parameter)], backward_passes_per_step=passes, **wrapping
                )

    made = 0

    def step(parameter: torch.Tensor) -> None:
        if made % passes == passes - 1:
            optimizers[parameter].step()
            if zero:
                optimizers[parameter].zero_grad()

    if wrap_first:
        wrap()
    for parameter in named.values():
        parameter.register_post_accumulate_grad_hook(step)  # type: ignore[attr-defined]  # PyTorch does not type it
    if not wrap_first:
        wrap()
    for made in range(STEPS * passes):
        loss(model, side, made).backward()
        if not zero:
            model.zero_grad()
    return model


for _first in (True, False):
    _order = "wrapped_before_the_hooks" if _first else "wrapped_after_the_hooks"
    TABLE.add(f"a_step_inside_backward_{_order}", partial(step_inside_backward, wrap_first=_first))
    TABLE.add(
        f"a_step_inside_backward_{_order}_without_zero_grad",
        partial(step_inside_backward, wrap_first=_first, zero=False),
        part=False,
    )
    TABLE.add(
        f"a_step_inside_the_second_backward_{_order}",
        partial(step_inside_backward, wrap_first=_first, passes=2),
        part=False,
    )


def a_step_inside_a_later_backward(side: TorchSide, wrap_first: bool, **wrapping: Any) -> nn.Module:
    """Gradients are reduced by a first pass, and a hook steps in the second, which adds to them."""
    model = network()
    optimizers: dict[torch.Tensor, Any] = {each: adam([each]) for each in model.parameters()}
    scale = side.size if side.distributed and wrapping.get("op") == hvd.Sum else 1
    stepping = False

    def step(parameter: torch.Tensor) -> None:
        if stepping:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

    def wrap() -> None:
        optimizers.update({each: side.wrap(made, **wrapping) for each, made in optimizers.items()})

    if wrap_first:
        wrap()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)  # type: ignore[attr-defined]  # PyTorch does not type it
    if not wrap_first:
        wrap()
    for number in range(2 * STEPS):
        stepping = number % 2 == 1
        (loss(model, side, number) / scale).backward()
        if not stepping:
            clip(model.parameters(), TIGHT)
    return model


for _first in (True, False):
    _order = "wrapped_before_the_hooks" if _first else "wrapped_after_the_hooks"
    _later = partial(a_step_inside_a_later_backward, wrap_first=_first)
    TABLE.add(f"a_step_inside_a_later_backward_{_order}", _later, part=not _first)
    TABLE.add(f"a_step_of_sums_inside_a_later_backward_{_order}", partial(_later, op=hvd.Sum), part=not _first)


def unused_parameters_and_steps_in_another_order(side: TorchSide, unused: bool) -> nn.Module:
    """One rank steps its optimizers in another order than the others."""
    models = nn.ModuleList([network(1), network(2)])
    for model in models if unused else ():
        model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    optimizers = [side.wrap(torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9), each) for each in models]
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        sum(loss(each, side, step) for each in models).backward()  # type: ignore[union-attr]  # not an int
        for optimizer in optimizers if side.rank else reversed(optimizers):
            optimizer.step()
    return models


TABLE.add("optimizers_step_in_another_order", partial(unused_parameters_and_steps_in_another_order, unused=False))
TABLE.add(
    "optimizers_with_unused_parameters_step_in_another_order",
    partial(unused_parameters_and_steps_in_another_order, unused=True),
    refused=r"MismatchError: This rank steps with the optimizer made at .* while other ranks step with other optimizers",
)


@TABLE.loop()
def a_step_for_each_layer_inside_backward(side: TorchSide) -> nn.Module:
    """The last gradient of a layer steps the optimizer of the layer."""
    model = network()
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    optimizers = [side.wrap(adam(layer.parameters())) for layer in layers]

    def follow(layer: nn.Linear, optimizer: Any) -> None:
        ready: list[torch.Tensor] = []

        def step(parameter: torch.Tensor) -> None:
            ready.append(parameter)
            if len(ready) == 2:
                ready.clear()
                optimizer.step()
                optimizer.zero_grad()

        for parameter in layer.parameters():
            parameter.register_post_accumulate_grad_hook(step)  # type: ignore[attr-defined]  # PyTorch does not type it

    for layer, optimizer in zip(layers, optimizers, strict=True):
        follow(layer, optimizer)
    for number in range(STEPS):
        loss(model, side, number).backward()
    return model


@TABLE.loop(part=False)
def a_step_inside_backward_of_shared_layers_under_checkpoint(side: TorchSide) -> nn.Module:
    """Reentrant checkpointing: the step is inside a pass inside a pass."""
    from torch.utils.checkpoint import checkpoint

    model = network()
    optimizers = {each: side.wrap(adam([each])) for each in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)  # type: ignore[attr-defined]  # PyTorch does not type it
    for number in range(STEPS):
        x, y = side.batch(number)
        hidden = checkpoint(model[0], x.requires_grad_(), use_reentrant=True)
        functional.cross_entropy(model[2](model[1](hidden)), y).backward()
    return model


# Gradients that are replaced, set by hand, or views of one buffer.


def replaced_by_each_ranks_own(side: TorchSide, free_first: bool, some: bool = False) -> nn.Module:
    """DARTS: after a pass, gradients of a second loss take the place of the first ones."""
    model = network()
    optimizer = side.wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, side, step).backward()
        found = torch.autograd.grad(loss(model, side, 50 + step), [*model.parameters()])
        if free_first:
            for parameter in model.parameters():
                parameter.grad = None
        for number, (parameter, gradient) in enumerate(zip(model.parameters(), found, strict=True)):
            if not some or number == 1:
                parameter.grad = gradient if free_first else gradient.clone()
        optimizer.step()
    return model


TABLE.add("gradients_replaced_by_each_ranks_own", partial(replaced_by_each_ranks_own, free_first=False))
TABLE.add("gradients_freed_and_set_to_each_ranks_own", partial(replaced_by_each_ranks_own, free_first=True))
TABLE.add(
    "one_gradient_replaced_by_each_ranks_own",
    partial(replaced_by_each_ranks_own, free_first=False, some=True),
    part=False,
)


@TABLE.loop()
def projected_gradients_of_two_passes_zeroed_through_the_model(side: TorchSide) -> nn.Module:
    """PCGrad of reduced gradients, with ``model.zero_grad()``, of which the optimizer does not know."""
    model = network()
    optimizer = side.wrap(sgd(model), model)
    for step in range(STEPS):
        found = []
        for part in range(2):
            model.zero_grad()
            loss(model, side, 2 * step + part).backward()
            found.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
        model.zero_grad()
        for parameter, first, second in zip(model.parameters(), *found, strict=True):
            conflict = (first * second).sum().clamp(max=0) / second.square().sum()
            parameter.grad = first - conflict * second + second
        optimizer.step()
    return model


@TABLE.loop(part=False)
def a_replaced_gradient_with_a_scaler(side: TorchSide) -> nn.Module:
    model = network()
    optimizer = side.wrap(sgd(model), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss(model, side, step)).backward()
        found = torch.autograd.grad(scaler.scale(loss(model, side, 50 + step)), [*model.parameters()])
        for parameter, gradient in zip(model.parameters(), found, strict=True):
            parameter.grad = gradient
        scaler.step(optimizer)
        scaler.update()
    return model


def set_by_hand_after_unfreezing(side: TorchSide, backward: bool, **wrapping: Any) -> nn.Module:
    """A layer that was frozen at first gets gradients by hand; the others get theirs by backward, or none."""
    model = network()
    model.requires_grad_(False)
    model[2].requires_grad_(backward)
    optimizer = side.wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model, **wrapping)
    scale = side.size if side.distributed and wrapping.get("op") == hvd.Sum else 1
    for step in range(STEPS):
        model[0].requires_grad_(step >= 2)
        optimizer.zero_grad()
        found = loss(model, side, step) / scale
        if step >= 2:
            trained = [*model[0].parameters()]
            for parameter, gradient in zip(
                trained, torch.autograd.grad(found, trained, retain_graph=True), strict=True
            ):
                parameter.grad = gradient
        if backward:
            found.backward(inputs=[*model[2].parameters()])
        optimizer.step()
    return model


_unfrozen = partial(set_by_hand_after_unfreezing, backward=True)
TABLE.add("set_by_hand_after_unfreezing", _unfrozen)
TABLE.add("set_by_hand_after_unfreezing_of_sums", partial(_unfrozen, op=hvd.Sum), part=False)
TABLE.add("all_set_by_hand_after_unfreezing", partial(set_by_hand_after_unfreezing, backward=False), part=False)


HAND = r"were set by the script.*optimizer\.synchronize\(\)"


def set_by_hand_and_clipped(side: TorchSide, norm: float) -> nn.Module:
    model = network()
    optimizer = side.wrap(sgd(model), model)
    for step in range(STEPS):
        found = torch.autograd.grad(loss(model, side, step), [*model.parameters()])
        for parameter, gradient in zip(model.parameters(), found, strict=True):
            parameter.grad = gradient
        clip(model.parameters(), norm)
        optimizer.step()
    return model


TABLE.add("set_by_hand_and_clipped", partial(set_by_hand_and_clipped, norm=TIGHT), warns=HAND, tolerance=1.0)


@TABLE.loop()
def set_by_hand_synchronized_and_clipped(side: TorchSide) -> nn.Module:
    """As the hint says."""
    model = network()
    optimizer = side.wrap(sgd(model), model)
    for step in range(STEPS):
        found = torch.autograd.grad(loss(model, side, step), [*model.parameters()])
        for parameter, gradient in zip(model.parameters(), found, strict=True):
            parameter.grad = gradient
        if side.distributed:
            optimizer.synchronize()
        clip(model.parameters(), TIGHT)
        inside: AbstractContextManager[None] = optimizer.skip_synchronize() if side.distributed else nullcontext()
        with inside:
            optimizer.step()
    return model


def views_of_one_buffer(side: TorchSide, passes: int = 1, clipped: bool = True, **wrapping: Any) -> nn.Module:
    """All gradients are parts of one flat tensor, which is zeroed and clipped as a whole."""
    model = network()
    optimizer = side.wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model, **wrapping)
    flat = torch.zeros(sum(each.numel() for each in model.parameters()))
    begin = 0
    for parameter in model.parameters():
        parameter.grad = flat[begin : begin + parameter.numel()].view_as(parameter)
        begin += parameter.numel()
    for step in range(STEPS):
        flat.zero_()
        for part in range(passes):
            loss(model, side, passes * step + part).backward()
        if clipped:
            flat.mul_(TIGHT / (flat.norm() + 1e-6))
        optimizer.step()
    return model


TABLE.add("gradients_are_views_of_one_buffer", views_of_one_buffer)
TABLE.add(
    "gradients_in_a_window_are_views_of_one_buffer",
    partial(views_of_one_buffer, passes=2, backward_passes_per_step=2),
    part=False,
)


def views_clipped_in_a_window(side: TorchSide) -> nn.Module:
    model = network()
    optimizer = side.wrap(sgd(model), model, backward_passes_per_step=2)
    flat = torch.zeros(sum(each.numel() for each in model.parameters()))
    begin = 0
    for parameter in model.parameters():
        parameter.grad = flat[begin : begin + parameter.numel()].view_as(parameter)
        begin += parameter.numel()
    for step in range(2):
        flat.zero_()
        for part in range(2):
            loss(model, side, 2 * step + part).backward()
            clip(model.parameters(), TIGHT)
        optimizer.step()
    return model


TABLE.add(
    "views_of_one_buffer_clipped_inside_a_window",
    views_clipped_in_a_window,
    refused=r"AssertionError: The gradient of '\S+' was changed before its reduction",
)


# Copies of a distributed optimizer.


def _pickled(model: nn.Module, optimizer: Any) -> Any:
    return pickle.loads(pickle.dumps((model, optimizer)))


def _saved(model: nn.Module, optimizer: Any) -> Any:
    file = io.BytesIO()
    torch.save((model, optimizer), file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable[[nn.Module, Any], Any]] = {
    "deep_copied": lambda model, optimizer: copy.deepcopy((model, optimizer)),
    "pickled": _pickled,
    "saved_by_torch": _saved,
    "copied": lambda model, optimizer: (model, copy.copy(optimizer)),
}


def trained_after_a_copy(side: TorchSide, copied: Callable[[nn.Module, Any], Any], **wrapping: Any) -> nn.Module:
    model = network()
    optimizer = side.wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model, **wrapping)
    for step in range(2 * STEPS):
        if step == STEPS:
            model, optimizer = copied(model, optimizer)
        optimizer.zero_grad()
        loss(model, side, step).backward()
        clip(model.parameters(), TIGHT)
        optimizer.step()
    return model


for _name, _copied in COPIES.items():
    TABLE.add(f"an_optimizer_{_name}", partial(trained_after_a_copy, copied=_copied))
TABLE.add(
    "an_optimizer_with_a_compressor_pickled",
    partial(trained_after_a_copy, copied=_pickled, compression=hvd.Compression.none, groups=1),
    part=False,
)


# Passes that one rank makes alone, and others that ranks count differently.

UNEVEN = r"Ranks reduce gradients of .* at different steps: .*no_sync\(\)"


@TABLE.loop(refused=UNEVEN)
def a_pass_for_diagnostics_on_one_rank(side: TorchSide) -> nn.Module:
    model = network()
    optimizer = side.wrap(sgd(model), model)
    for step in range(STEPS):
        optimizer.zero_grad()
        if side.rank == 0 and step == 1:
            loss(model, side, 90).backward()
            optimizer.zero_grad()
        loss(model, side, step).backward()
        optimizer.step()
    return model


@TABLE.loop()
def a_pass_for_diagnostics_on_one_rank_inside_no_sync(side: TorchSide) -> nn.Module:
    """As the error says."""
    model = network()
    optimizer = side.wrap(sgd(model), model)
    for step in range(STEPS):
        optimizer.zero_grad()
        if side.rank == 0:
            with quiet(side, optimizer):
                loss(model, side, 90 + step).backward()
            optimizer.zero_grad()
        loss(model, side, step).backward()
        clip(model.parameters(), TIGHT)
        optimizer.step()
    return model


@TABLE.loop(refused=r"at different steps: rank 0 is in pass 3 of step 1, ranks? 1.* in pass 1 of step 2")
def different_numbers_of_microbatches(side: TorchSide) -> nn.Module:
    model = network()
    optimizer = side.wrap(sgd(model), model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(3 - (side.rank > 0)):
            (loss(model, side, 3 * step + part) / 3).backward()
        optimizer.step()
    return model


class Searching(torch.optim.SGD):
    """A line search by this rank's own loss: it calls its closure until the loss is small enough."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for _ in range(2 + (self.rank > 0)):  # type: ignore[attr-defined]
            found = closure()
        super().step()
        return found


@TABLE.loop(refused=r"at different steps: .*closure")
def closures_called_unequally_often(side: TorchSide) -> nn.Module:
    model = network()
    plain = Searching(model.parameters(), lr=0.1)
    plain.rank = side.rank  # type: ignore[attr-defined]
    optimizer = side.wrap(plain, model)

    for step in range(STEPS):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            found = loss(model, side, step)
            found.backward()
            return found

        optimizer.step(closure)
    return model


@TABLE.loop(refused=r"[Tt]hreads?|left the job")
def two_threads_with_an_optimizer_each(side: TorchSide) -> nn.Module:
    """Both threads' passes have one name among ranks, and the threads come in any order.

    Where they come one after the other, the rank is told that another one has left, which refused them.
    """
    models = nn.ModuleList([network(1), network(2)])
    optimizers = [side.wrap(sgd(each), each) for each in models]
    errors: list[BaseException] = []
    turns = threading.Barrier(2)

    def train(number: int) -> None:
        try:
            with torch.no_grad():
                pass
            for step in range(STEPS):
                optimizers[number].zero_grad()
                turns.wait(SOON)
                loss(models[number], side, step).backward()
                optimizers[number].step()
        except BaseException as error:
            errors.append(error)
            turns.abort()

    if not side.distributed:
        for number in (0, 1):
            for step in range(STEPS):
                optimizers[number].zero_grad()
                loss(models[number], side, step).backward()
                optimizers[number].step()
        return models
    threads = [threading.Thread(target=train, args=(number,)) for number in (0, 1)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return models


@TABLE.loop(refused=r"(?=.*[Ll]azy)(?=.*before)", sizes=(2,))
def a_lazy_module_that_is_not_initialized(side: TorchSide) -> nn.Module:
    """Its parameters get shapes in the first pass."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.Linear(8, CLASSES))
    optimizer = side.wrap(sgd(model), model)
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = side.batch(step)
        assert len(x) in (ROWS, ROWS * side.size)
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model
