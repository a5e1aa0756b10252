"""A job that one program starts as a whole: when it ends, and what is said of that."""

from __future__ import annotations

import signal
from dataclasses import replace

from horovod.runner.agent.messages import Exit
from horovod.runner.external.base import CHILD, ExternalJobPolicy, outcome
from horovod.runner.output.outcome import Outcome, ReportedFailure
from horovod.runner.policy import EndAll


def test_a_good_end_leaves_alone_what_the_ranks_have_left_running() -> None:
    policy = ExternalJobPolicy(reads_input=False)
    assert policy.ended(CHILD, Exit(0), None) == []
    assert not policy.running and not policy.ending


def test_after_a_failure_whatever_is_left_on_this_host_is_ended() -> None:
    (decision,) = ExternalJobPolicy(reads_input=False).ended(CHILD, Exit(3), ReportedFailure(1, "why"))
    assert isinstance(decision, EndAll)


def test_ctrl_c_ends_the_child() -> None:
    decisions = ExternalJobPolicy(reads_input=False).signalled(signal.SIGINT)
    assert isinstance(decisions[-1], EndAll)


def test_the_last_words() -> None:
    good = outcome(Outcome({CHILD: Exit(0)}), "mpirun", None)
    assert (good.failed, good.status, good.describe()) == (False, 0, "")
    bad = outcome(Outcome({CHILD: Exit(137, signal.SIGKILL)}), "mpirun", None)
    assert (bad.failed, bad.status) == (True, 137)
    assert bad.describe() == "horovodrun: the job failed: mpirun ended with exit code 137 (killed by SIGKILL)."
    named = outcome(Outcome({CHILD: Exit(1)}), "mpirun", ReportedFailure(2, "it raised ValueError"))
    assert named.describe().splitlines()[1] == "Rank 2 failed first. Reason: it raised ValueError"
    lost = replace(outcome(Outcome({CHILD: Exit(255)}), "mpirun", None), unreachable={"far": "its name is unknown"})
    assert lost.describe().splitlines()[1:] == ["Host far cannot be reached by ssh: its name is unknown"]
    stopped = outcome(Outcome({CHILD: Exit(143, signal.SIGTERM)}, interrupted=signal.SIGINT), "mpirun", None)
    assert (stopped.failed, stopped.status, stopped.describe()) == (True, 130, "horovodrun: ended by SIGINT")
