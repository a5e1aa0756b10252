"""DDP that reduces gradients in place leaves what it leaves with PyTorch's reducer, to the bit, or raises the same error."""

from __future__ import annotations

import os
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ddp_programs import BLOCKS, STEPS
from horovod._base import config
from horovod.torch.storage_references import ALONE_IN_HOOKS
from process_groups import run_in_group
from ranks import RankPool

Ranks = Callable[..., RankPool]

PROGRAMS = int(os.environ.get("TEST_DDP_PROGRAMS", "15"))
"""How many random programs run together."""

pytestmark = pytest.mark.skipif(not ALONE_IN_HOOKS, reason="this PyTorch lets no gradient be alone in its hook")


def random_program(random: Random) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if random.random() < 0.5:
        options["bucket_cap_mb"] = random.choice([0.0001, 0.0005])
    if random.random() < 0.3:
        options["gradient_as_bucket_view"] = True
    if random.random() < 0.2:
        options["broadcast_buffers"] = False
    return {
        "blocks": random.choices(BLOCKS, k=random.randrange(6)),
        "steps": ["step", *random.choices(STEPS, k=random.randrange(2, 8))],
        "options": options,
    }


def run(batch: list[dict[str, Any]], others: bool) -> list[list[Any]]:
    """Each program on this back end, and if ``others``, on Gloo."""
    import warnings

    import torch
    import torch.distributed as dist

    from ddp_programs import left_by

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    groups = [dist.group.WORLD, *([dist.new_group(backend="gloo")] if others else [])]
    found = [[left_by(program, group, dist.get_rank()) for group in groups] for program in batch]
    dist.barrier()  # a program that ends in an error may have collectives in flight, for which another rank still waits
    return found


def set_in_place(value: str | None) -> None:
    os.environ.pop(config.DDP_IN_PLACE, None)
    if value is not None:
        os.environ[config.DDP_IN_PLACE] = value


def compared(ranks: Ranks, batch: list[dict[str, Any]], size: int = 2) -> list[bool]:
    """Run programs with each reducer, compare, and return which of them reduced gradients in place to the end.

    Gloo is compared on two ranks only: with more, it adds in another order.
    """
    pool = ranks(size, framework="torch")
    found = run_in_group(pool, run, batch, size == 2)
    pool.run(set_in_place, "0")
    try:
        off = run_in_group(pool, run, batch, False)
    finally:
        pool.run(set_in_place, None)
    in_place = []
    for number, program in enumerate(batch):
        for rank in range(size):
            mine, used = found[rank][number][0]
            buckets, unused = off[rank][number][0]
            assert not unused
            for name, other in (("buckets", buckets), *(("gloo", gloo) for gloo, _ in found[rank][number][1:])):
                assert [kind for kind, _ in mine] == [kind for kind, _ in other], (program, name)
                for step, ((kind, own), (_, theirs)) in enumerate(zip(mine, other, strict=True)):
                    if own != theirs:
                        shown = own if isinstance(own, str) else "bits", theirs if isinstance(theirs, str) else "bits"
                        raise AssertionError(f"{program}: step {step}, {kind!r}, unlike {name}: {shown}")
        in_place.append(used)
    return in_place


@settings(
    max_examples=4, deadline=None, phases=[Phase.explicit, Phase.generate], suppress_health_check=list(HealthCheck)
)
@given(seed=st.integers(0, 1 << 32))
def test_random_programs(ranks: Ranks, seed: int) -> None:
    random = Random(seed)
    compared(ranks, [random_program(random) for _ in range(PROGRAMS)])


@pytest.mark.parametrize("block", BLOCKS)
def test_each_block(ranks: Ranks, block: str) -> None:
    steps = ["step", "step", "zeros", "zeros", "no_sync", "step"]
    options: list[dict[str, Any]] = [{}, {"bucket_cap_mb": 0.0001}, {"gradient_as_bucket_view": True}]
    batch = [{"blocks": [block, "linear"], "steps": steps, "options": each} for each in options]
    assert compared(ranks, batch) == [True] * 3


def test_three_ranks(ranks: Ranks) -> None:
    """The factor is not a power of two."""
    steps = ["step", "step", "zeros", "no_sync", "step"]
    blocks = [["linear", "half", "norm"], ["double", "complex", "views", "strided"]]
    options: list[dict[str, Any]] = [{"bucket_cap_mb": 0.0001}, {"gradient_as_bucket_view": True}]
    batch = [{"blocks": each, "steps": steps, "options": option} for each in blocks for option in options]
    assert compared(ranks, batch, 3) == [True, False] * 2


def test_each_step(ranks: Ranks) -> None:
    """After each of them, scripts go on in place, unless DDP needs buckets from then on."""
    ends = {"late hook", "join", "wrap again"}
    errors = {"again", "unused", "raise", "static"}
    steps = sorted(set(STEPS) - errors)
    batch = [
        {"blocks": ["linear", "norm", "views"], "steps": ["step"] * 3 + [step] + ["step"] * 2, "options": {}}
        for step in steps
    ]
    found = dict(zip(steps, compared(ranks, batch), strict=True))
    assert {step for step, used in found.items() if not used} == ends - {"wrap again"}
    batch = [{**batch[0], "steps": ["step"] * 3 + [step] + ["step"] * 2} for step in sorted(errors)]
    compared(ranks, batch)
