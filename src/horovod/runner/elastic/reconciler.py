"""Compares an elastic job as it is with what it should be, after each event, and decides what to do. Pure.

It decides which processes are not needed any more, where new ones can be started, whether a round can begin, whether the
running round must be interrupted, and whether the job is over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from horovod.control.elastic_messages import HostUpdateResult
from horovod.runner.elastic.connected_part import connected_part
from horovod.runner.elastic.decisions import (
    BeginRound,
    Dismiss,
    ElasticDecision,
    KillProcess,
    NotifyHostsChanged,
    StartProcess,
    StopProcess,
)
from horovod.runner.elastic.job_state import Dismissed, JobProcess, JobState, Starting, Training, WaitingForRound
from horovod.runner.elastic.phases import Ending, Finishing, Gathering, Running, count
from horovod.runner.elastic.rank_assignment import RoundMember, assign
from horovod.runner.hosts.slots import HostInfo, SlotInfo
from horovod.runner.policy import Say, Wake

SETTLE_SECONDS = 5.0
"""How long new processes that are ready wait for others that are starting, so that all join in one round."""
FINAL_WORDS_SECONDS = 5.0
"""The time that ranks have to save their state when the job ends."""
LEAVING_SECONDS = 30.0
"""How long a process that has no rank any more may take to end, while others continue."""
SLOW_SECONDS = 30.0
"""After this time a message names the processes that the others wait for."""
MOST_LOST = 8
"""How many lost ranks are named to the ranks of a round."""
SILENT_SECONDS = 5.0
"""How long a job that has not begun to train waits before the launcher says what it waits for."""


class Reconciler:
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
            slots_changed: whether processes may have got, or lost, their slots. If not, this skips the slots, which
                saves time when hundreds of ranks come at once.
        """
        if isinstance(self._job.phase, Ending):
            return []
        decisions = self._stop_unwanted() if slots_changed else []
        if isinstance(self._job.phase, Finishing):
            if slots_changed and self._job.limits.attached:
                decisions += self._turn_away()
            return decisions + self._finish(self._job.phase)
        if slots_changed:
            decisions += self._fill()
        if isinstance(self._job.phase, Running):
            decisions += self._announce(self._job.phase)
        elif isinstance(self._job.phase, Gathering):
            decisions += self._begin()
        return decisions

    def wake(self, timer: str, seconds: float) -> list[ElasticDecision]:
        """Have the policy woken after ``seconds``, unless this timer runs already."""
        if timer in self._timers:
            return []
        self._timers.add(timer)
        return [Wake(timer, seconds)]

    def woken(self, timer: str) -> None:
        """The policy has been woken."""
        self._timers.discard(timer)

    def stop(self, why: str) -> list[ElasticDecision]:
        """The job cannot continue. Processes that wait for a rank get the reason, and may save their state."""
        job = self._job
        job.phase = Ending(why)
        decisions: list[ElasticDecision] = []
        for process in job.processes.values():
            if isinstance(process.state, WaitingForRound):
                decisions += dismiss(process, process.state.question, why, job_ends=True)
            elif isinstance(process.state, Starting):
                decisions.append(StopProcess(process.number))
        return decisions + ([] if job.over else self.wake("ending", FINAL_WORDS_SECONDS))

    def _stop_unwanted(self) -> list[ElasticDecision]:
        """End processes that have not trained and should no longer have a rank in the job."""
        decisions: list[ElasticDecision] = []
        wanted = self._job.wanted()
        for process in self._job.processes.values():
            has_not_begun = isinstance(process.state, Starting | WaitingForRound) and not process.trained
            unfinished = isinstance(self._job.phase, Finishing) and self._job.has_rank(process.number)
            if has_not_begun and process.number not in wanted and not unfinished:
                if isinstance(process.state, WaitingForRound):
                    decisions += dismiss(process, process.state.question, "it is not needed any more", job_ends=False)
                process.state = Dismissed()
                decisions.append(StopProcess(process.number))
        return decisions

    def _fill(self) -> list[ElasticDecision]:
        """Start processes in free slots."""
        job, limits, hosts = self._job, self._job.limits, self._job.usable_hosts()
        if not job.started and sum(host.slots for host in hosts) < limits.start:
            if limits.fixed:
                return self.stop(job.too_few_slots())
            return self._say_soon() + self.wake("slots", limits.patience)
        new = self._new_processes((1 << 30 if limits.most is None else limits.most) - len(job.wanted()))
        if not new:
            return []
        assignments = assign(
            [_member(each) for each in job.processes.values() if not isinstance(each.state, Dismissed)]
        )
        decisions: list[ElasticDecision] = [
            StartProcess(process.number, host, process.slot, assignments[process.number]) for process, host in new
        ]
        return decisions + (self.wake("starting", limits.starting) if job.round == 0 else [])

    def _new_processes(self, room: int) -> list[tuple[JobProcess, HostInfo]]:
        """New processes for free slots, at most ``room``, each with its host."""
        job = self._job
        taken = {(process.host, process.slot) for process in job.processes.values()}
        new: list[tuple[JobProcess, HostInfo]] = []
        for host in job.usable_hosts():
            for slot in range(host.slots):
                if len(new) < room and (host.hostname, slot) not in taken:
                    new.append((job.new_process(host, slot), host))
        return new

    def _turn_away(self) -> list[ElasticDecision]:
        """Answer processes that come by themselves although no further round begins: they end well."""
        decisions: list[ElasticDecision] = []
        for process, host in self._new_processes(1 << 30):
            process.state = Dismissed()
            slot = assign([_member(process)])[process.number]
            decisions.append(StartProcess(process.number, host, process.slot, slot))
        return decisions

    def _announce(self, phase: Running) -> list[ElasticDecision]:
        """Have the running round interrupted if new ranks are ready, or others leave."""
        job = self._job
        if phase.announced or not job.may_reset():
            return []
        members, wanted = job.training(), job.wanted()
        new = [each for each in job.waiting() if each.number in wanted]
        stay = [each for each in members if each.number in wanted]
        leaving = any(each.leaving for each in members)
        starting = any(isinstance(job.processes[number].state, Starting) for number in wanted)
        if new and starting and not leaving and not job.settled:
            # One interruption is enough for all processes that come at about the same time.
            return self.wake(f"settle {job.round}", SETTLE_SECONDS)
        result = HostUpdateResult.no_update
        if new:
            result |= HostUpdateResult.added
        enough = len(stay) + len(new) >= job.least
        if leaving or (len(members) > len(stay) and enough):
            result |= HostUpdateResult.removed
        if result == HostUpdateResult.no_update:
            return []
        job.phase = Running(announced=True)
        return [NotifyHostsChanged(job.round, result)]

    def _begin(self) -> list[ElasticDecision]:
        """Begin the next round, if the processes that are to take part have asked for it, and are enough."""
        job = self._job
        if job.training():
            return []
        if (
            job.round == 0
            and not job.overdue
            and any(isinstance(each.state, Starting) for each in job.processes.values())
        ):
            job.short = False
            return []
        cut_off = self._give_up_cut_off()
        if cut_off or any(each.given_up for each in job.processes.values()):
            return cut_off  # they end soon
        waiting, wanted = job.waiting(), job.wanted()
        have_state = [process for process in waiting if process.has_state]
        if not have_state and (job.has_state or job.lost_all()):
            return self.stop("no remaining rank has the state of the job")
        if job.lost_first():
            return self.stop(
                "rank 0 was lost, and --on-loss continue cannot go on without it; --on-loss continue-any can"
            )
        ready = self._choose(waiting, wanted)
        if len(ready) < job.least:
            return self._release(waiting) + self._wait()
        if job.round and not job.may_reset():
            return self.stop(
                f"Horovod was shutdown because number of resets during elastic job exceeded limit: {job.limits.resets}"
            )
        job.short, job.said = False, ""
        job.early.clear()
        chosen = {process.number for process in ready}
        gone = [each for each in waiting if each.number not in chosen and each.number not in wanted]
        return self._begin_with(ready, gone)

    def _give_up_cut_off(self) -> list[ElasticDecision]:
        """If hosts could not reach each other, kill the ranks outside of the part that goes on."""
        job = self._job
        cut, job.cut = job.cut, set()
        if not cut or not job.formed:
            return []
        wanted = job.wanted()
        there = [process for process in job.waiting() if process.number in wanted]
        ranks = Counter(process.host for process in there)
        part = connected_part(ranks, cut, job.host_of(0), needs_first=job.limits.needs_first)
        if sum(ranks[host] for host in part) < job.least:
            return []  # a round that cannot begin is tried again
        job.fruitless = 0
        decisions: list[ElasticDecision] = []
        for process in there:
            if process.host not in part:
                unreachable = sorted(part & {host for pair in cut if process.host in pair for host in pair})
                others = " and ".join(unreachable) or "the others"
                process.given_up = f"{process.host} and {others} cannot reach each other, and it was killed"
                decisions.append(KillProcess(process.number))
        return decisions

    def _choose(self, waiting: Sequence[JobProcess], wanted: frozenset[int]) -> list[JobProcess]:
        """Those of the waiting processes that take part in the next round."""
        limits = self._job.limits
        ready = [process for process in waiting if process.number in wanted]
        least = self._job.least
        if len(ready) < least:  # processes on withdrawn hosts take part while too few are left without them
            kept = [each for each in waiting if each.number not in wanted and not each.leaving]
            ready += sorted(kept, key=lambda each: not each.has_state)[: least - len(ready)]
        if ready and not any(process.has_state for process in ready):
            # A rank that leaves first passes on its state, which takes two ranks.
            most = None if limits.most is None else max(limits.most, 2)
            ready = [*[each for each in waiting if each.has_state][:1], *ready][:most]
        return ready

    def _release(self, waiting: Sequence[JobProcess]) -> list[ElasticDecision]:
        """There are too few ranks. Processes that were asked to end may do so, unless only they have the state of the job."""
        decisions: list[ElasticDecision] = []
        kept = any(each.has_state and not each.leaving for each in waiting)
        for process in waiting:
            if process.leaving and (kept or not process.has_state):
                decisions += self._let_go(process)
        return decisions

    def _let_go(self, process: JobProcess) -> list[ElasticDecision]:
        """Have a process that waits for a rank end, while others continue."""
        assert isinstance(process.state, WaitingForRound)
        why = "it was asked to end" if process.leaving else "its host is withdrawn"
        if process.host in self._job.hosts and not process.leaving:
            why = "there are as many ranks as --max-np allows"
        decisions = dismiss(process, process.state.question, why, job_ends=False)
        return decisions + self.wake(f"gone {process.number}", LEAVING_SECONDS)

    def _begin_with(self, ready: Sequence[JobProcess], unwanted: Sequence[JobProcess]) -> list[ElasticDecision]:
        job = self._job
        goes_on = job.goes_on(ready)
        job.survived = len(job.lost)
        same_state = job.have_same_state(ready)
        job.resets += job.round > 0
        job.round += 1
        job.connected = job.settled = False
        job.phase = Running(announced=False)
        decisions: list[ElasticDecision] = []
        for process in unwanted:
            decisions += self._let_go(process)
        slots = assign([_member(process) for process in ready])
        job.ranks = {slots[process.number].rank: process.number for process in ready}
        assignments: list[tuple[int, int, SlotInfo]] = []
        for process in ready:
            assert isinstance(process.state, WaitingForRound)
            assignments.append((process.number, process.state.question, slots[process.number]))
            process.state = Training(job.round, slots[process.number].rank)
        job.in_run = any(process.in_run for process in ready)
        begin = BeginRound(job.round, assignments, same_state, job.in_run, job.gone_on_without()[-MOST_LOST:])
        if job.round == 1:
            return [*decisions, begin]
        hosts = len({process.machine for process in ready})
        message = f"horovodrun: round {job.round} begins with {count(len(ready), 'rank')} on {count(hosts, 'host')}"
        survived = [Say(f"horovodrun: {goes_on}")] if goes_on else []
        return [*decisions, *survived, Say(message), begin]

    def _wait(self) -> list[ElasticDecision]:
        """There are too few processes: wait if more can come, otherwise stop the job."""
        job = self._job
        if job.is_hopeless():
            return self.stop(job.too_few())
        job.shortages += not job.short
        job.short = True
        decisions = self.wake(f"patience {job.shortages}", job.limits.patience)
        if not job.round:
            return decisions + self._say_soon()
        if job.said != (message := f"{job.how_many()}; waiting for more"):
            job.said = message
            decisions.append(Say(f"horovodrun: {message}"))
        return decisions

    def _say_soon(self) -> list[ElasticDecision]:
        """Say later what a job that has not begun to train waits for, unless that has been said."""
        return [] if self._job.said == self._job.awaited() else self.wake("silent 0", SILENT_SECONDS)

    def _finish(self, phase: Finishing) -> list[ElasticDecision]:
        """No further round begins: end processes that wait for one; those that train continue to their end."""
        job = self._job
        waiting = job.waiting()
        if not waiting:
            return []
        who = ", ".join(job.describe(process) for process in waiting)
        decisions: list[ElasticDecision] = [
            Say(f"horovodrun: {phase.first}, so no further round begins: ending {who}"),
        ]
        for process in waiting:
            assert isinstance(process.state, WaitingForRound)
            reason = f"{phase.first}, so no further round begins"
            rank = job.rank_of(process.number)
            if rank is not None:  # it has left the last round, and has not finished
                phase = Finishing(phase.first, (*phase.unfinished, (rank, process.state.describe())))
                decisions += self.await_ranks()
            decisions += dismiss(process, process.state.question, reason, job_ends=True)
            decisions += self.wake(f"gone {process.number}", FINAL_WORDS_SECONDS)
        job.phase = phase
        return decisions

    def await_ranks(self) -> list[ElasticDecision]:
        """Wait, for a limited time, for the ranks of a round that others have left because of a failure."""
        job = self._job
        return self.wake(f"slow {job.round}", SLOW_SECONDS) + self.wake(f"late {job.round}", job.limits.patience)


def dismiss(process: JobProcess, question: int, reason: str, *, job_ends: bool) -> list[ElasticDecision]:
    process.state = Dismissed()
    return [Dismiss(process.number, question, reason, job_ends)]


def _member(process: JobProcess) -> RoundMember:
    return RoundMember(process.number, process.machine, process.machine_slot, process.has_state)
