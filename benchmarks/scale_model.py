"""Where the design stops: an alpha-beta model of an allreduce between hosts, beside what rank 0 needs to agree on it.

    python benchmarks/scale_model.py benchmarks/published/scale.json --latency-us 30 --gigabits 25
    python benchmarks/scale_model.py benchmarks/published/scale.json --network benchmarks/published/many_ranks.json

What rank 0 needs is fitted to the points of a record of ``scale.py``: a part that grows with its connections, and one that
grows with ranks. The latency and rate of the network are given, or with ``--network`` fitted to what ``many_ranks.py``
measured between two hosts: namespaces of one machine, so they are those of its kernel's TCP and of our engine, and no wire's.
The rate at which a host adds is given. All are printed with the result, and from where they are.

The model of an allreduce of M bytes on H hosts of L ranks (:mod:`horovod.comm.hierarchical`): within the host M bytes are
added and gathered at the rate of memory. Between hosts each of the L columns reduces its M / L bytes on the way that the engine
takes for so many hosts and bytes (:mod:`horovod.comm.exchange.communicator`). Its messages, one after another, take a latency
for each step and processor time of their rank; its bytes share the link with those of the other columns.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from horovod.comm.exchange.communicator import PIECE_BYTES, Way, way_of
from horovod.comm.exchange.tree_reduction import MESSAGE_BYTES

RESNET50_BYTES = 25_557_032 * 4


def main() -> None:
    options = parse_arguments()
    record = json.loads(options.record.read_text())
    points = [each for each in record["measured"] if each["what"] == "cached"]
    each_connection, each_rank = fit([(each["connections"], each["ranks"], each["milliseconds"]) for each in points])
    print(
        f"Rank 0, of {len(points)} points: {each_connection * 1e3:.1f} us a connection and step, "
        f"{each_rank * 1e3:.2f} us a rank."
    )
    origin = "given"
    if options.network:
        measured = json.loads(options.network.read_text())
        latency, rate = fit_network(between_two_hosts(measured))
        options.latency_us, options.gigabits = latency * 1e6, rate * 8 / 1e9
        origin = "fitted"
        print(network_in_words(measured))
    print(
        f"Inputs: {options.latency_us:.3g} us and {options.gigabits:.3g} Gbit/s between hosts ({origin}), "
        f"{options.message_us:g} us of a core for a message (given), "
        f"{options.memory:g} GB/s within one (given), "
        f"{options.local_ranks} ranks a host, {options.bytes / 1e6:.0f} MB of gradients in {options.batches} batches."
    )
    print(
        "| ranks | hosts | rank 0 decides, ms | way | latencies, ms | messages, ms | bytes between hosts, ms "
        "| within hosts, ms |"
    )
    print("| ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: |")
    for hosts in (2, 8, 32, 128, 512, 2048):
        ranks = hosts * options.local_ranks
        decides = each_connection * (hosts + options.local_ranks - 2) + each_rank * ranks
        cost = between_hosts(hosts, options.bytes // options.batches // options.local_ranks)
        latency = options.batches * cost.steps * options.latency_us / 1e3
        messages = options.batches * cost.messages * options.message_us / 1e3
        between = options.batches * options.local_ranks * cost.nbytes / (options.gigabits / 8 * 1e6)
        within = 2 * options.bytes / (options.memory * 1e6)
        cells = [
            f"{ranks:,}",
            f"{hosts:,}",
            f"{decides:.1f}",
            cost.way.name.lower(),
            f"{latency:.1f}",
            f"{messages:.1f}",
        ]
        print(f"| {' | '.join([*cells, f'{between:.0f}', f'{within:.0f}'])} |")


class Cost(NamedTuple):
    """What an allreduce between hosts costs the rank that sends most.

    Attributes:
        way: how it is carried out.
        steps: how many messages follow one another.
        messages: how many the rank sends; it receives as many.
        nbytes: how many bytes it sends, of 32-bit elements.
    """

    way: Way
    steps: int
    messages: int
    nbytes: float


def between_hosts(hosts: int, nbytes: int) -> Cost:
    """The cost of an allreduce of ``nbytes`` among ``hosts`` ranks."""
    way, others = way_of(hosts, nbytes), hosts - 1
    if way is Way.DIRECT:
        return Cost(way, 1, others, others * nbytes)
    if way is Way.SHARDS:
        pieces = -(-nbytes // hosts // PIECE_BYTES)
        return Cost(way, 2, 2 * others * max(1, pieces), 2 * others * nbytes / hosts)
    levels, part, halves = hosts.bit_length() - 1, float(nbytes), 0
    while part > MESSAGE_BYTES and halves < levels:
        part, halves = part / 2, halves + 1
    paired = hosts > 1 << levels
    sent = 2 * (nbytes - part) + (levels - halves) * part + paired * nbytes
    return Cost(way, levels + halves + 2 * paired, levels + halves + paired, sent)


def fit(points: Sequence[tuple[int, int, float]]) -> tuple[float, float]:
    """Milliseconds for each connection and for each rank, by least squares of relative errors; neither is negative."""
    weights = np.array([1 / milliseconds for _, _, milliseconds in points])
    factors = np.array([[connections, ranks] for connections, ranks, _ in points], float) * weights[:, None]
    (connection, rank), *_ = np.linalg.lstsq(factors, np.ones(len(points)), rcond=None)
    if rank < 0:
        return float((factors[:, 0].sum()) / (factors[:, 0] ** 2).sum()), 0.0
    if connection < 0:
        return 0.0, float((factors[:, 1].sum()) / (factors[:, 1] ** 2).sum())
    return float(connection), float(rank)


def between_two_hosts(record: dict[str, Any]) -> dict[int, float]:
    """Of a record of ``many_ranks.py``: by bytes, the seconds of an allreduce of two hosts of one rank."""
    (pair,) = [each for each in record["measured"] if (each["hosts"], each["ranks"]) == (2, 2)]
    return {int(size): seconds for size, seconds in pair["allreduce_seconds"].items()}


def network_in_words(record: dict[str, Any]) -> str:
    """The network that fits such a record, and how well."""
    seconds = between_two_hosts(record)
    latency, rate = fit_network(seconds)
    points = ", ".join(
        f"{size:,} bytes {each * 1e6:,.0f} us (the fit: {(2 * latency + size / rate) * 1e6:,.0f})"
        for size, each in seconds.items()
    )
    return (
        f"Allreduces of 2 hosts of 1 rank: {points}. So the latency is {latency * 1e6:.0f} us, the rate "
        f"{rate * 8 / 1e9:.1f} Gbit/s."
    )


def fit_network(seconds: Mapping[int, float]) -> tuple[float, float]:
    """Seconds of latency and bytes a second, from allreduces of so many bytes by two ranks: 2 latencies, and the bytes once.

    By least squares of relative errors.
    """
    sizes, times = np.array(list(seconds), float), np.array(list(seconds.values()))
    factors = np.stack([np.full(len(sizes), 2.0), sizes], axis=1) / times[:, None]
    (latency, each_byte), *_ = np.linalg.lstsq(factors, np.ones(len(sizes)), rcond=None)
    return float(max(latency, 0.0)), float(1 / each_byte)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path, help="that scale.py has written")
    parser.add_argument("--network", type=Path, help="a record of many_ranks.py with a job of 2x1")
    parser.add_argument("--latency-us", type=float, default=30, help="of one message between hosts")
    parser.add_argument("--message-us", type=float, default=20, help="of a core, to send and to receive a message")
    parser.add_argument("--gigabits", type=float, default=25, help="a second between a host and the others")
    parser.add_argument(
        "--memory", type=float, default=10, help="gigabytes a second that a host's ranks add and gather"
    )
    parser.add_argument("--local-ranks", type=int, default=8)
    parser.add_argument("--bytes", type=int, default=RESNET50_BYTES, help="of all gradients of a step; ResNet-50's")
    parser.add_argument("--batches", type=int, default=8, help="in how many batches they travel")
    return parser.parse_args()


if __name__ == "__main__":
    main()
