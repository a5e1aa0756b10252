"""Checkpoints: the whole model with its optimizer, after every epoch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import keras


class Checkpoints(keras.callbacks.Callback):  # type: ignore[misc]  # Keras is untyped
    """A folder with one file per epoch, and the callback that writes them.

    A file with its final name is always complete, even if the process is killed while it writes.

    Args:
        folder: None: nothing is written and nothing is found.
    """

    def __init__(self, folder: Path | None) -> None:
        super().__init__()
        self.folder = folder

    def path(self, epoch: int) -> Path:
        """The file with the state after a number of epochs."""
        assert self.folder is not None
        return self.folder / f"epoch-{epoch:03}.keras"

    def newest(self) -> int:
        """The number of epochs of the newest checkpoint. 0: there is none."""
        files = [] if self.folder is None else self.folder.glob("epoch-???.keras")
        return max((int(file.stem.removeprefix("epoch-")) for file in files), default=0)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            partial = self.folder / f"partial-{os.getpid()}.keras"
            self.model.save(partial)
            partial.replace(self.path(epoch + 1))
