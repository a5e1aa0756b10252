"""The ranks' output on its way to the driver: every character arrives once and in order, live or with the results."""

from __future__ import annotations

import threading
from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from horovod.control.rendezvous.server import RendezvousServer
from horovod.runner.on_spark.carried_output import KEY, MOST_CHARACTERS, CarriedOutput
from part import draws
from time_limits import SOON

PIECES = st.lists(st.tuples(st.sampled_from(["stdout", "stderr"]), st.text(min_size=1, max_size=9)), max_size=30)


@given(PIECES)
@settings(max_examples=draws(10))
def test_a_driver_that_can_be_reached_gets_everything_in_order(pieces: list[tuple[str, str]]) -> None:
    heard: dict[str, bytes] = defaultdict(bytes)
    server = RendezvousServer(b"secret")

    def hear(key: str, text: bytes) -> None:
        heard[key.removeprefix(KEY)] += text

    server.pass_on(KEY, hear)
    server.start()
    try:
        with CarriedOutput([("127.0.0.1", server.address[1])], b"secret") as output:
            for stream, text in pieces:
                output.write(stream, text)
        rest = output.rest()
    finally:
        for thread in threading.enumerate():  # one that still connects when the output ends
            if thread.name == "horovod-spark-output":
                thread.join(SOON)
        server.stop()
    for stream in ("stdout", "stderr"):
        live = heard[stream].decode()
        late = "".join(text for name, text in rest if name == stream)
        assert live + late == "".join(text for name, text in pieces if name == stream)


@given(PIECES)
def test_without_a_driver_everything_comes_with_the_results(pieces: list[tuple[str, str]]) -> None:
    with CarriedOutput([], b"") as output:
        for stream, text in pieces:
            output.write(stream, text)
    assert output.rest() == pieces


def test_of_much_output_the_last_is_kept_and_the_rest_is_counted() -> None:
    with CarriedOutput([], b"") as output:
        for number in range(40):
            output.write("stdout", f"{number:02}" + "x" * (MOST_CHARACTERS // 20))
    (stream, said), *rest = output.rest()
    assert stream == "stderr" and "characters of earlier output are left out" in said
    kept = [text[:2] for _, text in rest]
    assert kept == [f"{number:02}" for number in range(40 - len(kept), 40)]
    assert sum(len(text) for _, text in rest) <= MOST_CHARACTERS
    lost = int(said.split()[1])
    assert lost + sum(len(text) for _, text in rest) == 40 * (2 + MOST_CHARACTERS // 20)


def test_a_driver_that_goes_away_costs_no_output_and_no_time() -> None:
    came = threading.Event()
    server = RendezvousServer(b"secret")
    server.pass_on(KEY, lambda *_: came.set())
    server.start()
    with CarriedOutput([("127.0.0.1", server.address[1])], b"secret") as output:
        output.write("stdout", "first")
        assert came.wait(SOON)
        server.stop()
        for _ in range(40):
            output.write("stdout", "x" * (MOST_CHARACTERS // 20))
    assert output.rest()
