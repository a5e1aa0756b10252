"""Every operation of c10d in every form, by every name of its arguments: what Gloo answers is answered, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from process_groups import run_in_group
from ranks import RankPool
from torch_versions import needs_torch

if TYPE_CHECKING:
    from c10d_calls import Row

GLOO_LACKS = {
    "collectives of every third element",
    "send, recv of every third element",
    "send, recv of a transposed matrix",
}
"""What Gloo refuses, or does wrongly, and the back end does. Gloo reduces a view with gaps in wrong elements."""


def _table() -> list[Row]:
    """Runs on a rank."""
    import torch.distributed as dist

    from c10d_calls import table

    return table(dist.group.WORLD, dist.new_group(backend="gloo"))


@needs_torch("2.13", "Gloo's arguments of these calls, perhaps before 2.13")
@pytest.mark.parametrize("size", [2, 3])
def test_every_form_has_the_results_of_gloo(ranks: Callable[..., RankPool], size: int) -> None:
    for rows in run_in_group(ranks(size, framework="torch"), _table):
        assert len(rows) > 160
        assert not [row for row in rows if row.fails()]
        refused = {row.call for row in rows if row.right.error and not row.own.error}
        assert not refused, "refused by Gloo alone"
        assert {row.call for row in rows if row.lacks()} <= GLOO_LACKS
        assert {row.own.error.split(":")[0] for row in rows if row.own.error} == {"ArgumentError"}
        said = [row for row in rows if row.words()]
        assert len(said) > 30 and not [row for row in said if row.words() not in row.own.error]
