"""Looks at an elastic job as a whole, after whatever has happened, and decides what follows. Pure.

Which processes are not needed any more, where new ones can be started, whether a round can begin, whether the round that
runs has to be interrupted, whether the job is over.
"""

from __future__ import annotations

from collections.abc import Sequence

from horovod.control.elastic_messages import HostUpdateResult
from horovod.runner.elastic.decisions import Announce, Begin, Dismiss, ElasticDecision, Start, Stop
from horovod.runner.elastic.job_state import (
    Dismissed,
    Ending,
    Finishing,
    Gathering,
    JobState,
    Process,
    Running,
    Starting,
    Training,
    Waiting,
    count,
)
from horovod.runner.elastic.places import Member, assign
from horovod.runner.hosts.slots import HostInfo, SlotInfo
from horovod.runner.policy import Say, Wake

SETTLE_SECONDS = 5.0
"""How long new processes that are ready wait for others that start, so that all join in one round."""
FINAL_WORDS_SECONDS = 5.0
"""How long ranks that are told that the job ends may take to save what they have."""


class Reviewer:
    """Reads and changes the state of a job, and says what to do.

    Args:
        job: its state, which the policy shares.
    """

    def __init__(self, job: JobState) -> None:
        self._job = job
        self._timers: set[str] = set()

    def __call__(self, *, slots_changed: bool = True) -> list[ElasticDecision]:
        """Look at the whole job.

        Args:
            slots_changed: whether processes may have got, or lost, their slots. If not, that need not be looked at, which
                matters where hundreds of ranks come at the same time.
        """
        if isinstance(self._job.phase, Ending):
            return []
        decisions = self._stop_unwanted() if slots_changed else []
        if isinstance(self._job.phase, Finishing):
            return decisions + self._finish(self._job.phase)
        if slots_changed:
            decisions += self._fill()
        if isinstance(self._job.phase, Running):
            decisions += self._announce(self._job.phase)
        elif isinstance(self._job.phase, Gathering):
            decisions += self._begin(self._job.phase)
        return decisions

    def wake(self, timer: str, seconds: float) -> list[ElasticDecision]:
        """Have the policy woken, unless that is on its way."""
        if timer in self._timers:
            return []
        self._timers.add(timer)
        return [Wake(timer, seconds)]

    def woken(self, timer: str) -> None:
        """The policy has been woken."""
        self._timers.discard(timer)

    def stop(self, why: str) -> list[ElasticDecision]:
        """The job cannot go on. Processes that wait for a place are told, and may save what they have."""
        job = self._job
        job.phase = Ending(why)
        decisions: list[ElasticDecision] = []
        for process in job.processes.values():
            if isinstance(process.state, Waiting):
                decisions.append(dismiss(process, process.state.question, why, job_ends=True))
            elif isinstance(process.state, Starting):
                decisions.append(Stop(process.number))
        return decisions + ([] if job.over else self.wake("ending", FINAL_WORDS_SECONDS))

    def _stop_unwanted(self) -> list[ElasticDecision]:
        """End processes that have not trained and have no place in the job any more."""
        decisions: list[ElasticDecision] = []
        for process in self._job.processes.values():
            if (
                isinstance(process.state, Starting | Waiting)
                and not process.trained
                and not self._job.is_wanted(process)
            ):
                process.state = Dismissed()
                decisions.append(Stop(process.number))
        return decisions

    def _fill(self) -> list[ElasticDecision]:
        """Start processes in free slots."""
        job, limits, hosts = self._job, self._job.limits, self._job.usable_hosts()
        if not job.started and sum(host.slots for host in hosts) < limits.start:
            return self.stop(job.too_few_slots()) if limits.fixed else self.wake("slots", limits.patience)
        active = sum(not isinstance(each.state, Dismissed) and job.is_wanted(each) for each in job.processes.values())
        room = (1 << 30 if limits.most is None else limits.most) - active
        taken = {(process.host, process.slot) for process in job.processes.values()}
        new: list[tuple[Process, HostInfo]] = []
        for host in hosts:
            for slot in range(host.slots):
                if len(new) < room and (host.hostname, slot) not in taken:
                    new.append((job.new_process(host.hostname, slot), host))
        if not new:
            return []
        places = assign([_member(each) for each in job.processes.values() if not isinstance(each.state, Dismissed)])
        decisions: list[ElasticDecision] = [
            Start(process.number, host, process.slot, places[process.number]) for process, host in new
        ]
        return decisions + (self.wake("starting", limits.starting) if job.round == 0 else [])

    def _announce(self, phase: Running) -> list[ElasticDecision]:
        """Have the round that runs interrupted, if another one would be better."""
        job = self._job
        if phase.announced or not job.may_reset():
            return []
        members = job.training()
        new = [each for each in job.waiting() if job.is_wanted(each)]
        stay = [each for each in members if job.is_wanted(each)]
        leaving = any(each.leaving for each in members)
        starting = any(isinstance(each.state, Starting) and job.is_wanted(each) for each in job.processes.values())
        if new and starting and not leaving and not job.settled:
            # One interruption for all that come at about the same time.
            return self.wake(f"settle {job.round}", SETTLE_SECONDS)
        result = HostUpdateResult.no_update
        if new:
            result |= HostUpdateResult.added
        enough = len(stay) + len(new) >= job.limits.least
        if leaving or (len(members) > len(stay) and enough):
            result |= HostUpdateResult.removed
        if result == HostUpdateResult.no_update:
            return []
        job.phase = Running(announced=True)
        return [Announce(job.round, result)]

    def _begin(self, phase: Gathering) -> list[ElasticDecision]:
        """Begin the next round, if the processes that take part have come and are enough."""
        job = self._job
        if job.training():
            return []
        starting = any(isinstance(process.state, Starting) for process in job.processes.values())
        if job.round == 0 and starting and not job.overdue:
            return []
        waiting = job.waiting()
        have_state = [process for process in waiting if process.has_state]
        if not have_state and (job.has_state or job.lost_all()):
            return self.stop("no rank is left that has the state of the job")
        ready = [process for process in waiting if job.is_wanted(process)]
        if have_state and not any(process.has_state for process in ready):
            ready = [have_state[0], *ready][: job.limits.most]  # it hands on the state, and goes after that
        if len(ready) < job.limits.least:
            return self._wait(phase, starting)
        if job.round and not job.may_reset():
            return self.stop(
                f"Horovod was shutdown because number of resets during elastic job exceeded limit: {job.limits.resets}"
            )
        chosen = {process.number for process in ready}
        gone = [each for each in waiting if each.number not in chosen and not job.is_wanted(each)]
        return self._begin_with(ready, gone)

    def _begin_with(self, ready: Sequence[Process], unwanted: Sequence[Process]) -> list[ElasticDecision]:
        job = self._job
        same_state = job.have_same_state(ready)
        job.resets += job.round > 0
        job.round += 1
        job.connected = job.settled = False
        job.phase = Running(announced=False)
        decisions: list[ElasticDecision] = []
        for process in unwanted:
            assert isinstance(process.state, Waiting)
            why = "it was asked to end" if process.leaving else "its host is withdrawn"
            decisions.append(dismiss(process, process.state.question, why, job_ends=False))
        slots = assign([_member(process) for process in ready])
        job.ranks = {slots[process.number].rank: process.number for process in ready}
        places: list[tuple[int, int, SlotInfo]] = []
        for process in ready:
            assert isinstance(process.state, Waiting)
            places.append((process.number, process.state.question, slots[process.number]))
            process.state = Training(job.round, slots[process.number].rank)
        begin = Begin(job.round, places, same_state)
        if job.round == 1:
            return [*decisions, begin]
        hosts = len({process.host for process in ready})
        words = f"horovodrun: round {job.round} begins with {count(len(ready), 'rank')} on {count(hosts, 'host')}"
        return [*decisions, Say(words), begin]

    def _wait(self, phase: Gathering, starting: bool) -> list[ElasticDecision]:
        """There are too few processes: wait if more can come, else stop."""
        job = self._job
        ends = any(isinstance(process.state, Dismissed) for process in job.processes.values())  # and frees its slot
        if job.limits.fixed and not starting and not ends and not job.hosts_come_back():
            return self.stop(job.too_few())
        decisions = self.wake(f"patience {phase.number}", job.limits.patience)
        if decisions and job.round:
            decisions.append(Say(f"horovodrun: {job.how_many()}; waiting for more"))
        return decisions

    def _finish(self, phase: Finishing) -> list[ElasticDecision]:
        """No further round: processes that wait for one are not needed, those that train go on to their end."""
        job, waiting = self._job, self._job.waiting()
        if job.training() or not waiting:
            return []
        who = ", ".join(job.describe(process) for process in waiting)
        words = f"process {phase.process} has done its work and ended with exit code 0"
        decisions: list[ElasticDecision] = [
            Say(f"horovodrun: {words}, so no further round begins: ending {who}"),
        ]
        for process in waiting:
            assert isinstance(process.state, Waiting)
            decisions.append(dismiss(process, process.state.question, words, job_ends=True))
        return decisions + self.wake("ending", FINAL_WORDS_SECONDS)


def dismiss(process: Process, question: int, reason: str, *, job_ends: bool) -> Dismiss:
    process.state = Dismissed()
    return Dismiss(process.number, question, reason, job_ends)


def _member(process: Process) -> Member:
    return Member(process.number, process.host, process.slot, process.has_state)
