"""Plays many random sequences of the model of elastic training (``tests/elastic_model``), each from a seed of its own.

    python tests/elastic_sequences.py --count 100000
    python tests/elastic_sequences.py --seed 4711 --log          what happens in one sequence

It says how the sequences have ended, and which seeds have violated what must always hold; then its exit code is 1. What such a
sequence shows becomes a test of its own, in ``tests/unit/runner/elastic/test_policy_bounds.py`` or beside it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from elastic_model import sequence

MOST_SHOWN = 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the first sequence")
    parser.add_argument("--count", type=int, default=1, help="how many sequences")
    parser.add_argument("--log", action="store_true", help="show what happens")
    options = parser.parse_args()
    began = time.monotonic()
    endings: Counter[str] = Counter()
    failures: list[tuple[int, str]] = []
    rounds = deliveries = 0
    for seed in range(options.seed, options.seed + options.count):
        log: list[str] = []
        try:
            ended = sequence.run(sequence.of_seed(seed), log)
        except AssertionError as error:
            failures.append((seed, str(error)))
        else:
            endings[ended.kind] += 1
            rounds, deliveries = rounds + ended.rounds, max(deliveries, ended.deliveries)
        if options.log:
            print("\n".join(log))
    seconds = time.monotonic() - began
    print(f"{options.count} sequences, {rounds} rounds, {seconds:.0f} s; at most {deliveries} deliveries to calm")
    for ending, count in endings.most_common():
        print(f"{count:8} {ending}")
    for seed, text in failures[:MOST_SHOWN]:
        print(f"seed {seed}: {text[:400]}")
    if failures:
        print(f"{len(failures)} sequences have failed")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
