"""Models wrapped by PyTorch, trained over ``init_process_group("horovod")`` and over PyTorch's own group, side by side.

Both must end with the same parameters: DistributedDataParallel with each option that changes what is sent, and FSDP.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import horovod.torch as hvd

STEPS = 6
_LAYERS, _WIDTH = 4, 256


def _convolutions() -> nn.Module:
    layers = [
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(128, 9),
    ]
    return nn.Sequential(*layers)


def _dense() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh()) for _ in range(_LAYERS)])


def _batch(model: nn.Module, step: int) -> torch.Tensor:
    shape = (8, _WIDTH) if isinstance(model[0], nn.Sequential) else (8, 3, 16, 16)  # type: ignore[index]  # a Sequential
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * step + hvd.rank()))


def _fully_sharded(model: nn.Module, group: Any) -> nn.Module:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard  # PyTorch 2.6 and newer

    device = next(model.parameters()).device
    mesh = DeviceMesh.from_group(group, device.type)
    for layer in model.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)  # in place
    return model


def _with_options(**options: Any) -> Callable[[nn.Module, Any], nn.Module]:
    return lambda model, group: DistributedDataParallel(model, process_group=group, **options)


def _normalised_together(model: nn.Module, group: Any) -> nn.Module:
    together: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model, group)  # type: ignore[no-untyped-call]
    return DistributedDataParallel(together, process_group=group)


def _trained(
    make: Callable[[], nn.Module],
    wrap: Callable[[nn.Module, Any], nn.Module],
    group: Any,
    device: torch.device,
    how: str,
) -> list[torch.Tensor]:
    """The parameters after some steps."""
    torch.manual_seed(1)
    plain = make().to(device)
    batches = [_batch(plain, step).to(device) for step in range(STEPS)]
    model: Any = wrap(plain, group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    half = torch.float16 if device.type == "cuda" else torch.bfloat16
    for batch in batches:
        optimizer.zero_grad()
        if how == "accumulated":
            with model.no_sync():
                model(batch).square().mean().backward()
        with torch.autocast(device.type, half, enabled=how == "mixed"):
            loss = model(batch).float().square().mean()
        loss.backward()
        optimizer.step()
    parameters = [each.detach() for each in model.parameters()]
    return [each.full_tensor() if hasattr(each, "full_tensor") else each for each in parameters]


def compare(device: torch.device) -> tuple[list[str], list[str]]:
    """Train each. Every rank must call this, with the default group initialised.

    Returns:
        What has the same bits by both groups, and what is only close.

    Raises:
        AssertionError: parameters differ.
    """
    import torch.distributed as dist

    cases: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Any], nn.Module], str]] = {
        "DDP": (_convolutions, _with_options(), ""),
        "DDP with views": (_convolutions, _with_options(gradient_as_bucket_view=True), ""),
        "DDP with a static graph": (_dense, _with_options(static_graph=True), ""),
        "DDP, two backward passes a step": (_dense, _with_options(), "accumulated"),
        "DDP in mixed precision": (_convolutions, _with_options(), "mixed"),
    }
    if device.type == "cuda":
        cases["DDP with SyncBatchNorm"] = _convolutions, _normalised_together, ""
        if hasattr(dist.fsdp, "fully_shard"):
            cases["FSDP"] = _dense, _fully_sharded, ""
    peer = "nccl" if device.type == "cuda" else "gloo"
    same: list[str] = []
    close: list[str] = []
    for name, (make, wrap, how) in cases.items():
        found = [_trained(make, wrap, dist.new_group(backend=each), device, how) for each in ("horovod", peer)]
        for ours, theirs in zip(*found, strict=True):
            if not torch.allclose(ours, theirs, rtol=1e-3, atol=1e-5):
                raise AssertionError(f"rank {hvd.rank()}: {name} has other parameters than with {peer}")
        equal = all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))
        (same if equal else close).append(name)
    return same, close
