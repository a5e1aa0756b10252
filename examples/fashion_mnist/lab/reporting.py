"""Reports the speed and the accuracy of training."""

from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import Any

import keras


class Report(keras.callbacks.Callback):  # type: ignore[misc]  # Keras is untyped
    """Print the images per second of training after every epoch, and the time that training has taken so far.

    Validation does not count. The same, with all metrics and the learning rate, goes to ``epochs.csv``, a line for each epoch.

    Args:
        folder: of the file, which is appended to.
        batch_size: images of one step.
        verbose: print and write. Otherwise only measure.

    Attributes:
        seconds: of training so far.
    """

    def __init__(self, folder: Path, batch_size: int, verbose: bool = True) -> None:
        super().__init__()
        self.file = folder / "epochs.csv"
        self.batch_size = batch_size
        self.verbose = verbose
        self.seconds = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.ended: float | None = None
        self.began = time.perf_counter()

    def on_test_begin(self, logs: Any = None) -> None:
        """Validation begins within the epoch, when the metrics of its last step are there."""
        self.ended = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        seconds = (self.ended or time.perf_counter()) - self.began
        rate = self.params["steps"] * self.batch_size / seconds
        self.seconds += seconds
        if self.verbose:
            of = f"{epoch + 1}/{self.params['epochs']}"
            print(f"epoch {of}: {rate:,.0f} images/sec, {self.seconds:.1f} s of training so far", flush=True)
            self._write({"epoch": epoch + 1, "images_per_second": rate, "seconds": self.seconds, **(logs or {})})

    def _write(self, row: dict[str, Any]) -> None:
        row["learning_rate"] = float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a", newline="") as file:
            writer = csv.DictWriter(file, sorted(row), extrasaction="ignore")
            if file.tell() == 0:
                writer.writeheader()
            writer.writerow(row)
