"""Random training programs with DDP, and what they leave: to run one with different reducers and compare.

A program is plain data: the blocks of a model, and the steps of a script. The ranks interpret it. What it leaves after each
step are the bits of parameters, gradients and buffers, or the text of the error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

WIDTH = 6
BLOCKS = (
    "linear",
    "wide",
    "norm",
    "tied",
    "position",
    "views",
    "double",
    "half",
    "complex",
    "channels",
    "frozen",
    "checkpoint",
    "reentrant",
    "strided",
    "scalar",
)
STEPS = (
    "step",
    "step",
    "no_sync",
    "zeros",
    "two forwards",
    "two backwards",
    "heads",
    "again",
    "evaluate",
    "look",
    "penalty",
    "graph",
    "unused",
    "raise",
    "raise first",
    "late hook",
    "static",
    "join",
    "replace",
    "remove",
    "keep",
    "wrap again",
    "stored",
)
"""What a script does in one step. Several of them end in an error of DDP, and some only if another has come before."""


class Block(nn.Module):
    """A part of the model whose gradients come about in one special way."""

    def __init__(self, kind: str, tied: nn.Linear) -> None:
        super().__init__()
        self.kind = kind
        self.inner: Any = None
        if kind in ("linear", "frozen", "checkpoint", "reentrant"):
            self.inner = nn.Linear(WIDTH, WIDTH)
            if kind == "frozen":
                self.inner.bias.requires_grad_(False)
        elif kind == "wide":
            self.inner = nn.Sequential(nn.Linear(WIDTH, 40, bias=False), nn.ReLU(), nn.Linear(40, WIDTH))
        elif kind == "norm":
            self.inner = nn.BatchNorm1d(WIDTH)
        elif kind == "tied":
            self.inner = tied
        elif kind == "scalar":
            self.weight = nn.Parameter(torch.randn(()))
        elif kind in ("position", "views"):
            self.weight, self.other = (nn.Parameter(torch.randn(WIDTH)) for _ in range(2))
        elif kind in ("double", "half", "complex"):
            dtype = {"double": torch.float64, "half": torch.bfloat16, "complex": torch.complex64}[kind]
            self.weight = nn.Parameter(torch.randn(WIDTH).to(dtype))
        elif kind == "channels":
            self.inner = nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        elif kind == "strided":
            self.weight = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH)[:, ::2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind = self.kind
        if kind == "position":  # what becomes the gradient of ``other`` is read by the rest of backward
            return (x[:1] + self.weight.unsqueeze(0)) + self.other.unsqueeze(0) + x
        if kind == "views":
            return x + (self.weight.view(2, -1) + self.other.view(2, -1)).flatten()
        if kind in ("double", "half"):
            return (x.to(self.weight.dtype) * self.weight).to(x.dtype)
        if kind == "complex":
            return (x * self.weight).abs()
        if kind == "scalar":
            return x * self.weight
        if kind == "strided":
            return x @ self.weight
        if kind == "channels":
            image = torch.stack([x[:4], -x[:4]])[None]
            return x + self.inner(image).mean((0, 1, 2))
        if kind in ("checkpoint", "reentrant"):
            from torch.utils.checkpoint import checkpoint

            return checkpoint(self.inner, x, use_reentrant=kind == "reentrant")
        return self.inner(x).tanh()


class Model(nn.Module):
    """The blocks, one after the other, between two layers, and two heads. ``skip`` leaves out the last block."""

    def __init__(self, blocks: Sequence[str]) -> None:
        super().__init__()
        tied = nn.Linear(WIDTH, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(kind, tied) for kind in blocks)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 2) for _ in range(2))
        self.skip = False

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.first(x)
        blocks = list(self.blocks)
        for block in blocks[:-1] if self.skip else blocks:
            x = block(x)
        first, second = (head(x) for head in self.heads)
        return first, first.detach().tanh() * second if self.skip else second


class Stopped(Exception):
    """Raised by the script itself, in backward."""


class Script:
    """One script: a model in DDP, its optimizer and its data.

    Args:
        program: blocks, steps, and arguments of DDP.
        group: the process group.
        rank: this process's number in it.
    """

    def __init__(self, program: dict[str, Any], group: Any, rank: int) -> None:
        torch.manual_seed(3)
        self.options = dict(program["options"], process_group=group)
        self.model = Model(program["blocks"])
        self.data = torch.Generator().manual_seed(rank)
        self.steps = program["steps"]
        self.to_none = True
        self.wrap()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.5)

    def wrap(self) -> None:
        self.ddp = nn.parallel.DistributedDataParallel(self.model, **self.options)

    def inputs(self) -> torch.Tensor:
        return torch.randn(4, WIDTH, generator=self.data)

    def loss(self) -> torch.Tensor:
        first, second = self.ddp(self.inputs())
        return first.square().mean() + second.square().mean()

    def run(self) -> Iterator[tuple[str, Any]]:
        failed = 0
        unused = False
        for kind in self.steps:
            if failed and kind == "join":
                return  # a rank that has joined would wait for forwards that raise
            try:
                getattr(self, kind.replace(" ", "_"), self.step)()
            except Stopped:
                failed += 1
                yield kind, "stopped"
            except RuntimeError as error:
                failed += 1
                yield kind, str(error)
            else:
                unused = unused or kind == "unused"
                yield kind, "unfinished" if unused else self.bits()
            if failed == 3 or (failed and unused):
                return
            if failed:  # gradients of a pass that did not end are different
                self.optimizer.zero_grad()

    def bits(self) -> list[bytes]:
        found = []
        for tensor in [*self.model.parameters(), *self.model.buffers()]:
            both = [each.detach() for each in (tensor, tensor.grad) if each is not None]
            found.extend(each.contiguous().flatten().view(torch.uint8).numpy().tobytes() for each in both)
        return found

    # The steps.

    def step(self) -> None:
        self.optimizer.zero_grad(self.to_none)
        self.loss().backward()
        self.optimizer.step()

    def no_sync(self) -> None:
        self.optimizer.zero_grad(self.to_none)
        with self.ddp.no_sync():
            self.loss().backward()
            inside = self.loss()
        inside.backward()
        self.loss().backward()
        self.optimizer.step()

    def zeros(self) -> None:
        self.to_none = not self.to_none
        self.step()

    def two_forwards(self) -> None:
        self.optimizer.zero_grad(self.to_none)
        (self.loss() + self.loss()).backward()
        self.optimizer.step()

    def two_backwards(self) -> None:
        self.optimizer.zero_grad(self.to_none)
        first, second = self.loss(), self.loss()
        first.backward()
        second.backward()
        self.optimizer.step()

    def heads_(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.optimizer.zero_grad(self.to_none)
        first, second = self.ddp(self.inputs())
        return first.square().mean(), second.square().mean()

    def heads(self) -> None:
        first, second = self.heads_()
        names = [name for name, p in self.model.named_parameters() if p.requires_grad]
        mine = [p for name, p in self.model.named_parameters() if p.requires_grad and name.startswith("heads.0")]
        rest = [p for name, p in self.model.named_parameters() if p.requires_grad and not name.startswith("heads.0")]
        assert len(names) == len(mine) + len(rest)
        first.backward(retain_graph=True, inputs=mine)
        (first + second).backward(inputs=rest)
        self.optimizer.step()

    def again(self) -> None:
        """Both losses reach some parameters, so DDP refuses the second pass."""
        first, second = self.heads_()
        first.backward(retain_graph=True)
        second.backward()

    def evaluate(self) -> None:
        self.ddp.eval()
        with torch.no_grad():
            self.loss()
        self.ddp.train()

    def look(self) -> None:
        """A forward whose result is not used."""
        self.loss()

    def penalty(self) -> None:
        self.optimizer.zero_grad(self.to_none)
        inputs = self.inputs().requires_grad_()
        first, second = self.ddp(inputs)
        loss = first.square().mean() + second.square().mean()
        (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
        (loss + slope.square().sum()).backward()
        self.optimizer.step()

    def graph(self) -> None:
        self.optimizer.zero_grad(True)
        self.loss().backward(create_graph=True)
        total = sum(p.grad.abs().square().sum() for p in self.model.parameters() if p.grad is not None)
        assert isinstance(total, torch.Tensor)
        total.backward()
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.detach().clone()
        self.optimizer.step()

    def unused(self) -> None:
        """A pass that does not reach the last block. DDP says so in the next forward. What the gradients are until then is not
        defined: those of complete buckets may be reduced."""
        self.model.skip = True
        try:
            self.step()
        finally:
            self.model.skip = False

    def raise_(self, number: int) -> None:
        parameters = [p for p in self.model.parameters() if p.requires_grad]

        def stop(_: Any) -> None:
            raise Stopped

        handle = parameters[number].register_hook(stop)
        try:
            self.step()
        finally:
            handle.remove()

    def raise_first(self) -> None:
        """In the first gradient: nothing of the pass is reduced."""
        self.raise_(-1)

    def late_hook(self) -> None:
        """Registered between forward and backward."""
        self.optimizer.zero_grad(self.to_none)
        loss = self.loss()
        group = self.options["process_group"]

        def hook(state, bucket):  # type: ignore[no-untyped-def]  # PyTorch looks at annotations
            import torch.distributed as dist

            work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
            return work.get_future().then(lambda future: future.value()[0] * 0.25)

        self.ddp.register_comm_hook(None, hook)
        loss.backward()
        self.optimizer.step()

    def static(self) -> None:
        self.ddp._set_static_graph()
        self.step()

    def join(self) -> None:
        import torch.distributed as dist

        rank = dist.get_rank()
        with self.ddp.join():
            for _ in range(1 + rank):
                self.step()

    def replace(self) -> None:
        """Give parameters gradients of the script's own, which share memory."""
        self.optimizer.zero_grad(True)
        trained = [p for p in self.model.parameters() if p.requires_grad and p.dtype is torch.float32]
        whole = torch.ones(sum(p.numel() for p in trained))
        for parameter, part in zip(trained, whole.split([p.numel() for p in trained]), strict=True):
            parameter.grad = part.view(parameter.shape)
        self.loss().backward()
        self.optimizer.step()

    def with_hook(self, act: Callable[[torch.Tensor], None]) -> None:
        parameter = next(self.model.heads[0].parameters())
        handle = parameter.register_post_accumulate_grad_hook(act)
        try:
            self.step()
        finally:
            handle.remove()

    def remove(self) -> None:
        """A hook of the script removes the gradient."""
        self.with_hook(lambda parameter: setattr(parameter, "grad", None))

    def keep(self) -> None:
        """A hook of the script changes the gradient, and keeps a view of it."""
        kept = []

        def act(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad.mul_(3)
            kept.append(parameter.grad.view(-1))

        self.with_hook(act)

    def wrap_again(self) -> None:
        self.wrap()
        self.step()

    def stored(self) -> None:
        """Hooks of the script keep what backward has computed."""
        kept: list[Any] = []
        with ExitStack() as stack:
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    handle = parameter.register_hook(lambda gradient: kept.append(gradient.flatten()))
                    stack.callback(handle.remove)
            self.step()


setattr(Script, "raise", lambda self: self.raise_(0))


def left_by(program: dict[str, Any], group: Any, rank: int) -> tuple[list[tuple[str, Any]], bool]:
    """What a program leaves after each step, and whether gradients were reduced in place at last."""
    script = Script(program, group, rank)
    found = list(script.run())
    return found, getattr(script.ddp.reducer, "in_place", False)
