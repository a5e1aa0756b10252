"""Which calls only some ranks make."""

from __future__ import annotations

import textwrap

import pytest

from horovod.observe.rank_conditions import rank_condition

FOUND = {
    "the usual mistake": ("if hvd.rank() == 0:\n    save()\n    hvd.barrier()  # here\n", 1, "hvd.rank() == 0"),
    "the other branch": ("if rank != 0:\n    pass\nelse:\n    x = hvd.allreduce(x)  # here\n", 1, "rank != 0"),
    "elif": ("if a:\n    pass\nelif hvd.local_rank():\n    hvd.barrier()  # here\n", 3, "hvd.local_rank()"),
    "an expression": ("x = hvd.allreduce(x) if hvd.rank() < 2 else x  # here\n", 1, "hvd.rank() < 2"),
    "in a loop": ("if self.rank == 0:\n    for x in y:\n        hvd.allreduce(x)  # here\n", 1, "self.rank == 0"),
    "several lines": ("if hvd.rank():\n    hvd.allreduce(\n        x,  # here\n    )\n", 1, "hvd.rank()"),
    "inside another": ("if hvd.rank() == 0:\n    if verbose:\n        hvd.barrier()  # here\n", 1, "hvd.rank() == 0"),
    "in a function": ("def f():\n    if hvd.rank() == 0:\n        hvd.barrier()  # here\n", 2, "hvd.rank() == 0"),
}
NOT_FOUND = {
    "no condition": "hvd.barrier()  # here\n",
    "another condition": "if epoch == 0:\n    hvd.barrier()  # here\n",
    "both branches": "if hvd.rank() == 0:\n    hvd.broadcast(x, 0)  # here\nelse:\n    hvd.broadcast(y, 0)\n",
    "behind it": "if hvd.rank() == 0:\n    save()\nhvd.barrier()  # here\n",
    "in the condition": "if hvd.allreduce(x) > hvd.rank():  # here\n    pass\n",
    "a function that is made under it": "if hvd.rank() == 0:\n    def f():\n        hvd.barrier()  # here\n",
    "a ranking": "if ranking == 0:\n    hvd.barrier()  # here\n",
    "no program": "if hvd.rank() == 0\n    hvd.barrier()  # here\n",
}


def line_of(source: str) -> int:
    return next(number for number, line in enumerate(source.splitlines(), 1) if "# here" in line)


@pytest.mark.parametrize("case", FOUND)
def test_calls_of_some_ranks(case: str) -> None:
    source, line, text = FOUND[case]
    assert rank_condition(textwrap.dedent(source), line_of(source)) == (line, text)


@pytest.mark.parametrize("case", NOT_FOUND)
def test_calls_of_all_ranks(case: str) -> None:
    assert rank_condition(NOT_FOUND[case], line_of(NOT_FOUND[case])) is None
