"""One process of one arrangement: makes as many steps as ``training.py`` tells it, and says how long they took."""

from __future__ import annotations

import argparse
import importlib
import signal
from multiprocessing.connection import Client

from training_arrangements import Training


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    for option in ("framework", "arrangement", "model", "address"):
        parser.add_argument(f"--{option}", required=True)
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the one that asks, and thereby this
    room = importlib.import_module(f"training_{options.framework}")
    training: Training = room.prepare(options.arrangement, options.model)
    with Client(options.address) as connection:
        connection.send((options.arrangement, training.parameters, training.tensors))
        try:
            while True:
                connection.send(training.run(connection.recv()))
        except (EOFError, OSError):
            pass  # nobody asks any more


if __name__ == "__main__":
    main()
