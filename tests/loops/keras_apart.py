"""Loops of Keras 3 whose ranks come apart after the first step, which they are told within 50 steps, on every backend."""

from __future__ import annotations

from functools import partial
from typing import Any

from loops.harness import Table

TABLE: Table[Any] = Table("Keras apart")
FIRST = 3
"""The step in which ranks begin to differ."""
LONG = FIRST + 50
APART = r"(?!.*before the first step)(?=.*ranks?\b)(?=.*\bstep\b)(?=.*(kernel|bias))"
"""What ranks are told: the step, the ranks and a variable."""


CHANGED = f"(?=.*gradients of the ranks differ after they were reduced){APART}"
"""What they are told of gradients."""


@TABLE.loop(told=CHANGED)
def reduced_gradients_divided_by_each_ranks_count_in_train_step(side: Any) -> Any:
    def divided(ops: Any, gradients: Any) -> Any:
        return [each / (3 + side.rank) for each in gradients]

    return side.fitted(side.compiled(side.custom(side.network(), divided, True), side.wrap(side.sgd())), steps=50)


def changed_by_a_callback(side: Any, what: str) -> Any:
    """One rank sets weights, or clears the optimizer's state, between two steps of ``fit``."""

    class Change(side.keras.callbacks.Callback):  # type: ignore[name-defined, misc]
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch != 1 or side.rank:
                return
            if what == "weights":
                side.initialized(self.model, seed=7)
            else:
                for variable in self.model.optimizer.variables:
                    if "momentum" in variable.path or "velocity" in variable.path:
                        variable.assign(side.ops.zeros_like(variable.value))

    model = side.compiled(side.network(), side.wrap(side.adam()))
    return side.fitted(model, steps=FIRST, epochs=LONG // FIRST, callbacks=[Change()])


TABLE.add("weights_set_on_one_rank", partial(changed_by_a_callback, what="weights"), told=APART)
TABLE.add("the_state_of_adam_cleared_in_fit_on_one_rank", partial(changed_by_a_callback, what="state"), told=APART)
