"""The processes of ``scale.py``: one for each measurement, and in it some that simulate ranks."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

fork = multiprocessing.get_context("fork")

Record = dict[str, Any]


class Simulation:
    """The processes of the simulated ranks.

    Args:
        pairs: by rank its connection with rank 0, both ends. Here the rank's own end is closed, in its process all else.
        run: called in each process with the ranks that it simulates.
        together: how many ranks in a row are always in one process.
    """

    def __init__(
        self,
        pairs: dict[int, tuple[socket.socket, socket.socket]] | dict[int, None],
        options: argparse.Namespace,
        run: Callable[[list[int]], Any],
        together: int = 1,
    ) -> None:
        self._started: list[tuple[Any, Connection]] = []
        for mine in shares(list(pairs), options.processes, together):
            reader, writer = fork.Pipe(duplex=False)

            def body(mine: Sequence[int], writer: Connection) -> None:
                for rank, pair in pairs.items():
                    if pair is not None:
                        pair[0].close()
                        if rank not in mine:
                            pair[1].close()
                try:
                    writer.send((run(list(mine)), ""))
                except BaseException:
                    writer.send((None, traceback.format_exc()))

            process = fork.Process(target=body, args=(mine, writer))
            process.start()
            writer.close()
            self._started.append((process, reader))
        for pair in pairs.values():
            if pair is not None:
                pair[1].close()

    def results(self) -> list[Any]:
        """What each process has returned. Raises RuntimeError if one has failed."""
        found = []
        for process, reader in self._started:
            result, error = received(reader)
            process.join()
            if error:
                raise RuntimeError(f"simulated ranks have failed:\n{error}")
            found.append(result)
        return found


def apart(measure: Callable[[], Record]) -> Record:
    """Measure in a process of its own, so that its memory is that of this measurement alone."""
    reader, writer = fork.Pipe(duplex=False)

    def body() -> None:
        try:
            writer.send((measure(), ""))
        except BaseException:
            writer.send((None, traceback.format_exc()))
            os._exit(1)  # simulated ranks that are left see their connections close, and end

    process = fork.Process(target=body)
    process.start()
    writer.close()
    result, error = received(reader)
    process.join()
    if error:
        raise SystemExit(error)
    measured: Record = result
    return measured


def received(reader: Connection) -> tuple[Any, str]:
    try:
        found: tuple[Any, str] = reader.recv()
    except EOFError:
        return None, "a process of the simulation was killed"
    return found


def shares(ranks: Sequence[int], processes: int, together: int = 1) -> list[Sequence[int]]:
    """The ranks that each of the processes simulates."""
    found = [[rank for rank in ranks if rank // together % processes == first] for first in range(processes)]
    return [share for share in found if share]
