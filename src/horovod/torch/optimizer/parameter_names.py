"""Names of an optimizer's parameters for messages and errors. They are the same on every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch


def parameter_names(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[torch.Tensor, str]:
    """A name for each of the optimizer's parameters: that of the user, or its position in the parameter groups.

    Raises:
        ValueError: ``named_parameters`` does not consist of pairs, contains a name twice, or lacks a parameter.
    """
    if named_parameters is None:
        return names_by_position(optimizer)
    named = list(named_parameters)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in named):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by model.named_parameters()."
        )
    counts = Counter(name for name, _ in named)
    duplicates = sorted(name for name, count in counts.items() if count > 1)
    if duplicates:
        raise ValueError(
            f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(duplicates)}"
        )
    names = {p: name for name, p in named}
    missing = [p for p in names_by_position(optimizer) if p not in names]
    if missing:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named. "
            f"{len(missing)} parameters of the optimizer have no name, the first of shape {list(missing[0].shape)}."
        )
    return names


def names_by_position(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, str]:
    """``noname.<group>.<index>`` for each of the optimizer's parameters."""
    return {
        p: f"noname.{i}.{j}" for i, group in enumerate(optimizer.param_groups) for j, p in enumerate(group["params"])
    }
