"""What the digests of control messages cost: of one message, and of a round of rank 0 with many relays, beside none.

    python benchmarks/digests.py --relays 128 --json benchmarks/results/digests.json

A round is what rank 0 does for one order: it sends the same message to every relay, and receives one from each, by the Channels
that it uses. The relays are the other ends of the connections, in this process; their part is not counted. Rounds with digests
and without alternate, and the figures are medians.
"""

from __future__ import annotations

import argparse
import json
import secrets
import select
import socket
import statistics
import time
from pathlib import Path

from horovod.control.channel import Channel, FrameReader
from horovod.control.connection import NO_KEYS, Connection
from horovod.control.handshake import Keys
from horovod.control.sealing import Message, Opener, Sealer

MESSAGES = 2000


def message_cost(size: int, key: bytes) -> tuple[float, float]:
    """Seconds to seal, and to split and check, one message of ``size`` bytes."""
    sealer, reader, body = Sealer(key), FrameReader(opener=Opener(key)), bytes(size)
    began = time.perf_counter()
    sealed = [sealer.seal(Message(body)) for _ in range(MESSAGES)]
    sent = time.perf_counter() - began
    streams = [b"".join(pieces) for pieces in sealed]
    began = time.perf_counter()
    for stream in streams:
        reader.feed(stream)
    return sent / MESSAGES, (time.perf_counter() - began) / MESSAGES


class Relays:
    """Rank 0's connections with ``count`` relays over loopback, with digests or without."""

    def __init__(self, count: int, with_digests: bool) -> None:
        self.own: list[Channel] = []
        self.theirs: list[Channel] = []
        with socket.create_server(("127.0.0.1", 0), backlog=count) as listener:
            for _ in range(count):
                there = socket.create_connection(listener.getsockname())
                here, _ = listener.accept()
                down, up = secrets.token_bytes(32), secrets.token_bytes(32)
                keys = (Keys(down, up), Keys(up, down)) if with_digests else (NO_KEYS, NO_KEYS)
                self.own.append(Channel(Connection(here, keys[0])))
                self.theirs.append(Channel(Connection(there, keys[1])))

    def round(self, order: bytes, announcement: bytes) -> float:
        """The processor time of rank 0's part."""
        for each in self.theirs:
            each.send(announcement)
        began = time.thread_time()
        message = Message(order)
        for channel in self.own:
            channel.send(message)
        for channel in self.own:
            if not channel.receive():
                raise RuntimeError("an announcement has not arrived")
        spent = time.thread_time() - began
        for each in self.theirs:
            while not each.receive():
                for channel in self.own:
                    channel.flush()
                select.select([each], [], [])
        return spent

    def close(self) -> None:
        for each in (*self.own, *self.theirs):
            each.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--relays", type=int, default=128)
    parser.add_argument("--sizes", type=int, nargs="+", default=[40, 400, 4000, 40_000], help="of messages, in bytes")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    records = []
    relays = {digests: Relays(options.relays, digests) for digests in (False, True)}
    print(
        f"{'bytes':>7} {'digests':>8} {'send, us':>9} {'receive, us':>12} {f'round of {options.relays} relays, us':>28}"
    )
    for size in options.sizes:
        rounds: dict[bool, list[float]] = {False: [], True: []}
        costs: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        for _ in range(options.rounds):
            for digests, found in rounds.items():
                found.append(relays[digests].round(bytes(size), bytes(40)))
        for _ in range(9):
            for digests in costs:
                costs[digests].append(message_cost(size, secrets.token_bytes(32) if digests else b""))
        for digests in (False, True):
            send, receive = (statistics.median(each) * 1e6 for each in zip(*costs[digests], strict=True))
            each_round = statistics.median(rounds[digests]) * 1e6
            records.append(
                {
                    "bytes": size,
                    "digests": digests,
                    "send_us": send,
                    "receive_us": receive,
                    "round_us": each_round,
                    "relays": options.relays,
                }
            )
            print(f"{size:>7} {'yes' if digests else 'no':>8} {send:>9.2f} {receive:>12.2f} {each_round:>28.0f}")
    for each in relays.values():
        each.close()
    if options.json:
        Path(options.json).write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
