"""What a worker that waits reports."""

from __future__ import annotations

import logging
import threading
from datetime import timedelta

import pytest

from horovod.core.negotiation.messages import (
    Announce,
    Decision,
    Definition,
    Operation,
    Order,
    Request,
)
from unit.control.concurrent_ranks import wait_until
from unit.core.workers import (
    Set,
    allreduce_request,
    ones,
    wait,
)


def test_an_idle_worker_probes_no_peer_and_a_waiting_one_does(process_set: Set) -> None:
    rank, peers = process_set.part(1, 2, timeout=timedelta(seconds=0.15))
    threading.Event().wait(0.2)
    assert rank.watch.probes == 0
    handle = rank.allreduce("x", ones())
    wait_until(lambda: rank.watch.probes >= 2, "two questions")
    peers[0].say(Order([[Decision(-1, "x", Operation.ALLREDUCE)]]))
    wait(handle)


def test_a_stall_is_reported_with_all_that_is_known(process_set: Set, caplog: pytest.LogCaptureFixture) -> None:
    rank, peers = process_set.part(0, 3, stall_warning_time=timedelta(seconds=0.1))
    rank.watch.call_sites[2] = "train.py:77 in validate"
    rank.allreduce("grad", ones(), caller="train.py:12")
    peers[1].say(Announce([Definition(0, allreduce_request("grad", (4,)))]))
    with caplog.at_level(logging.WARNING, "horovod.core"):
        wait_until(lambda: "waiting for remainder of ranks" in caplog.text, "the report")
    assert "2: [grad] (it is at train.py:77 in validate)" in caplog.text
    assert "grad was submitted as: allreduce(Sum) float32 [4] at train.py:12" in caplog.text
    assert rank.watch.reports == []


def test_a_rank_that_waits_in_join_for_others_is_reported(process_set: Set, caplog: pytest.LogCaptureFixture) -> None:
    rank, _ = process_set.part(0, 3, stall_warning_time=timedelta(seconds=0.1))
    rank.watch.call_sites[2] = "train.py:77 in validate"
    rank.submit(Request(Operation.JOIN, "join.noname", caller="train.py:12", transient=True))
    with caplog.at_level(logging.WARNING, "horovod.core"):
        wait_until(lambda: "waiting for remainder of ranks" in caplog.text, "the report")
    assert "1: [join.noname]" in caplog.text
    assert "2: [join.noname] (it is at train.py:77 in validate)" in caplog.text
    assert "join.noname was submitted as: join at train.py:12" in caplog.text


def test_a_stall_that_lasts_ends_the_job(process_set: Set, caplog: pytest.LogCaptureFixture) -> None:
    rank, _ = process_set.part(
        0, 3, stall_warning_time=timedelta(seconds=0.05), stall_shutdown_time=timedelta(seconds=0.1)
    )
    rank.allreduce("grad", ones())
    wait_until(lambda: rank.watch.reports, "the end")
    who, text, suspected = rank.watch.reports[0]
    assert (who, suspected) == (1, False)
    assert "1!: [grad]" in text
    assert "2!: [grad]" in text
    assert "Will shutdown." in text
    assert any(record.levelno == logging.ERROR for record in caplog.records)


def test_a_stall_check_that_is_off_says_nothing(process_set: Set, caplog: pytest.LogCaptureFixture) -> None:
    rank, _ = process_set.part(0, 2, stall_warning_time=timedelta(seconds=0.02), stall_check=False)
    rank.allreduce("grad", ones())
    threading.Event().wait(0.2)
    assert caplog.text == ""


def test_a_shutdown_time_below_the_warning_time_is_off(process_set: Set, caplog: pytest.LogCaptureFixture) -> None:
    rank, _ = process_set.part(
        0, 2, stall_warning_time=timedelta(seconds=0.1), stall_shutdown_time=timedelta(seconds=0.01)
    )
    assert "is off" in caplog.text
    rank.allreduce("grad", ones())
    wait_until(lambda: "waiting for remainder of ranks" in caplog.text, "the warning")
    assert rank.watch.reports == []
