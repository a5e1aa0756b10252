"""Stop at a given accuracy."""

from __future__ import annotations

from typing import Any

import keras


class StopAtAccuracy(keras.callbacks.Callback):  # type: ignore[misc]  # Keras is untyped
    """Stop once ``val_accuracy`` has reached ``target`` in ``patience + 1`` epochs in a row.

    If several ranks train one model, all must get the same ``val_accuracy``. Otherwise they stop at different epochs, and the
    ranks that continue wait for those that have ended.

    Args:
        target: from 0 to 1; None: never stop.
        patience: further epochs in a row that must reach it.
    """

    def __init__(self, target: float | None, patience: int) -> None:
        super().__init__()
        self.target = target
        self.patience = patience
        self.reached = 0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.target is None:
            return
        self.reached = self.reached + 1 if logs["val_accuracy"] >= self.target else 0
        if self.reached > self.patience:
            self.model.stop_training = True
