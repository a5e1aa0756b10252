"""What a process remembers does not decide what the group does: a rank that arrives makes the same collectives as the others.

Random programs train on two ranks, go wrong in random ways, and go on in a second generation with a third rank, which has seen
nothing of that. HOROVOD_TEST_ARRIVALS=1000 runs that many.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from jobs import make_job
from part import draws
from ranks import RankPool

COUNT = int(os.environ.get("HOROVOD_TEST_ARRIVALS", draws(9)))
AT_ONCE = 3


class Program:
    """A training loop, what goes wrong in it, and the collectives of its second part.

    The kinds of things that go wrong come from the seed, alike on all ranks. What each rank then does depends on its number.
    """

    WRONGS = ("rate", "parameters", "clip", "noise", "state", "no pass", "unused", "sparse", "many parts", "join", "")

    def __init__(self, seed: int) -> None:
        import random

        import torch

        import horovod.torch as hvd

        self.choose = random.Random(seed)
        torch.manual_seed(seed)
        self.model = torch.nn.ModuleList(
            [torch.nn.Embedding(6, 4, sparse=self.choose.random() < 0.3), *(torch.nn.Linear(4, 4) for _ in range(3))]
        )
        kind = self.choose.choice(("sgd", "momentum", "adam"))
        if self.model[0].sparse:
            kind = "sgd"
        plain = {
            "sgd": lambda: torch.optim.SGD(self.model.parameters(), lr=0.05),
            "momentum": lambda: torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9),
            "adam": lambda: torch.optim.Adam(self.model.parameters(), lr=0.01),
        }[kind]()
        compression = hvd.Compression.none
        if not self.model[0].sparse and self.choose.random() < 0.2:
            compression = hvd.Compression.powersgd(1)
        self.optimizer: Any = hvd.DistributedOptimizer(plain, self.model.named_parameters(), compression=compression)
        self.drawn = 0

    def train(self, steps: int, seed: int) -> None:
        import random

        import torch

        import horovod.torch as hvd

        choose = random.Random(seed)
        rank = hvd.rank()
        for _ in range(steps):
            wrong = choose.choice(self.WRONGS)
            some = choose.sample(range(1, 4), choose.randrange(1, 4))
            if wrong == "rate":
                self.optimizer.param_groups[0]["lr"] = 0.01 * (1 + rank)
            if wrong == "parameters":
                with torch.no_grad():
                    for parameter in self.model.parameters():
                        parameter += 0.1 * rank
            if wrong == "state" and rank == 0:
                self.optimizer.state.clear()
            self.optimizer.zero_grad()
            used = [each for each in some if wrong != "many parts" or each != 1 + rank]
            if not (wrong == "no pass" and rank == 1):
                x = self.model[0](torch.tensor([rank, 2, 3]))
                for each in used if wrong != "unused" else used[:1]:
                    x = torch.tanh(self.model[each](x))
                x.square().mean().backward()
            if wrong == "clip" and rank == 0 and not self.model[0].sparse:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1e-3)
            if wrong == "noise":
                for parameter in self.model.parameters():
                    if parameter.grad is not None and not parameter.grad.is_sparse:
                        parameter.grad += 0.1 * rank
            self.optimizer.step()
            if wrong == "join":
                hvd.join()


kept: dict[int, Program] = {}


def first(seeds: list[int]) -> None:
    """Train in the first generation."""
    import builtins
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        builtins._horovod_test_programs = {}  # type: ignore[attr-defined]
        for seed in seeds:
            program = Program(seed)
            program.train(8, seed + 1)
            builtins._horovod_test_programs[seed] = program  # type: ignore[attr-defined]


def second(seeds: list[int]) -> list[list[str]]:
    """Go on in the second generation, or begin; the collectives of this rank, by program."""
    import builtins
    import warnings

    import horovod.torch as hvd
    from horovod.core.lifecycle.context import running

    found = []
    known = vars(builtins).pop("_horovod_test_programs", {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in seeds:
            program = known[seed] if seed in known else Program(seed)
            hvd.broadcast_parameters(program.model.state_dict(), root_rank=0)
            hvd.broadcast_optimizer_state(program.optimizer, root_rank=0)
            program.train(8, seed + 2)
            hvd.barrier()
            recorder = running().workers[0].recorder
            assert recorder is not None
            found.append([f"{each.request.operation.name} {each.request.name}" for each in recorder.ring])
            recorder.ring.clear()
    return found


@pytest.mark.parametrize("begin", range(0, COUNT, AT_ONCE))
def test_a_rank_that_arrives_makes_the_collectives_of_the_others(ranks: Callable[..., RankPool], begin: int) -> None:
    job = make_job(lambda _: ranks(3, framework="torch"), "horovod.torch")
    seeds = [100 * (begin + number) for number in range(AT_ONCE)]
    env = {"HOROVOD_FLIGHT_RECORDER_SIZE": "100000", "HOROVOD_STALL_CHECK_DISABLE": "1"}
    job(2, first, seeds, env=env)
    ranked = job(3, second, seeds, env=env)
    for seed, *each in zip(seeds, *ranked, strict=True):
        assert len(each[0]) > 16, seed
        for rank, sequence in enumerate(each):
            different = next(
                (pair for pair in zip(sequence, each[0], strict=False) if pair[0] != pair[1]),
                None if len(sequence) == len(each[0]) else ("the length", ""),
            )
            assert different is None, f"seed {seed}: rank {rank} and rank 0 make different collectives: {different}"
