"""Programs that PyTorch's compiler compiles have the results that they have on Gloo: DDP, messages, collectives."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from process_groups import run_in_group
from ranks import RankPool
from torch_versions import needs_torch

pytestmark = needs_torch("2.6", "code that the compiler skips with all that it calls")


def _compare(program: str) -> None:
    """Runs on a rank."""
    from compiled_programs import compare

    compare(program)


PROGRAMS = ["DDP ddp_optimizer", "DDP False", "DDP python_reducer", "messages", "mixed", "futures"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("program", PROGRAMS)
def test_compiled_programs_have_the_results_of_gloo(ranks: Callable[..., RankPool], program: str) -> None:
    run_in_group(ranks(2, framework="torch"), _compare, program)
