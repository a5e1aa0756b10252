"""The policy of an elastic job, whose hosts and processes change while it runs. Pure: events in, decisions out.

Processes have numbers, which they keep; ranks are assigned again in each round. The policy records each event in the state of
the job (:mod:`horovod.runner.elastic.job_state`), and then reconciles the whole job (:mod:`horovod.runner.elastic.reconciler`).
"""

from __future__ import annotations

import signal
from collections.abc import Iterable

from horovod.control.elastic_messages import Connected, Leaving, RankFailed, ReadyForRound, Returned, WorkerMessage
from horovod.runner.agent.messages import Exit
from horovod.runner.elastic.decisions import ElasticDecision, EndRound, KillProcess, StopProcess
from horovod.runner.elastic.job_state import (
    Dismissed,
    JobProcess,
    JobState,
    LostRank,
    Starting,
    Training,
    WaitingForRound,
)
from horovod.runner.elastic.phases import Early, Ending, Finishing, Gathering, Running, count
from horovod.runner.elastic.reconciler import Reconciler, dismiss
from horovod.runner.hosts.slots import HostInfo
from horovod.runner.output.outcome import ReportedFailure
from horovod.runner.policy import FirstFailure, Policy, Say

HUNG_SECONDS = 5.0
"""The time in which a rank that others have reported as stuck must ask for the next round."""
MOST_FRUITLESS_ROUNDS = 3
"""How many rounds in a row may fail to begin although no process is lost."""


class ElasticPolicy(Policy):
    """An elastic job.

    A host on which a process fails gets no new ones, forever or for its cool-down; its running processes continue. After a
    failure the next round begins as soon as all processes of the last one have asked for it or are lost, without waiting for
    replacements, if enough are left. Replacements and additions join later: the policy interrupts the running round when they
    are ready. Hosts that are withdrawn are given up as soon as enough ranks are left without them. Once a rank has ended
    with exit code 0 by itself, no further round begins. The job has succeeded if all ranks of that round end in this way.

    Args:
        job: its state, which only this policy and its reconciler change.
        batch_job: as for :class:`~horovod.runner.policy.Policy`.
    """

    def __init__(self, job: JobState, batch_job: str = "") -> None:
        super().__init__(None, batch_job)
        self._job = job
        self._reconciler = Reconciler(job)

    @property
    def running(self) -> frozenset[int]:
        return frozenset(self._job.processes)

    @property
    def undecided(self) -> bool:
        return not (self._job.over or self.ending)

    @property
    def round(self) -> int:
        """The number of the last round that has begun; 0 before the first."""
        return self._job.round

    @property
    def survived(self) -> list[str]:
        """The ranks that the job has lost, and has gone on without."""
        return self._job.gone_on_without()

    @property
    def stopped(self) -> str:
        """Why the job ended although no rank was to blame; "" if it did not."""
        return self._job.phase.why if isinstance(self._job.phase, Ending | Finishing) else ""

    def hosts_found(self, hosts: Iterable[HostInfo]) -> list[ElasticDecision]:
        """The discovery has found the hosts that are available now."""
        self._job.update_hosts(hosts)
        return self._reconcile()

    def host_signalled(self, names: Iterable[str], number: int) -> list[ElasticDecision]:
        """The agent of a host got a signal that asks it to end: the host and its processes are about to be lost."""
        if self.ending:
            return []
        decisions: list[ElasticDecision] = []
        for name in names:
            message = f"horovodrun: the agent of {name} got {signal.Signals(number).name}: that host counts as lost."
            more, following = self._shun(name)
            decisions += [*following, Say(message + more)]
        return decisions

    def on_message(self, number: int, message: WorkerMessage) -> list[ElasticDecision]:
        """A process has sent a message to the launcher."""
        job = self._job
        process = job.processes.get(number)
        if process is None or self.ending:
            return []
        decisions: list[ElasticDecision] = []
        slots_changed = False
        if isinstance(message, ReadyForRound):
            if isinstance(job.phase, Ending):
                return dismiss(process, message.question, job.phase.why, job_ends=True)
            if isinstance(process.state, Dismissed):
                return dismiss(process, message.question, "it has no rank in the job any more", job_ends=False)
            kept = message.round if message.keeps_state else None
            was, process.state = (
                process.state,
                WaitingForRound(message.question, kept, message.line, message.reason, message.collective),
            )
            process.has_state, process.in_run = message.has_state, message.in_run
            if message.round == job.round:
                job.cut |= {frozenset(map(job.host_of, pair)) for pair in message.cut}
            job.has_state = job.has_state or message.has_state
            if not job.asked:
                job.asked = True
                for early in job.early.values():
                    job.blacklist.remove(early.host)
                    decisions += self._say_early(early)
            if isinstance(was, Training) and was.round == job.round:
                decisions += self._leave_round(message.reason)
            if message.final and not isinstance(job.phase, Finishing):
                return decisions + self._reconciler.stop(message.reason)
        elif isinstance(message, Connected):
            if message.round != job.round:
                return []
            process.trained = job.formed = True
            process.in_run = process.in_run or message.in_run
            if job.connected:
                return []
            job.connected, job.fruitless = True, 0
            slots_changed = job.limits.continues  # those that have not come yet come too late
        elif isinstance(message, Returned):
            process.commits = message.commits
            return []
        elif isinstance(message, RankFailed):
            decisions += self._on_rank_failed(message)
        elif isinstance(message, Leaving):
            process.leaving = slots_changed = True
        return decisions + self._reconcile(slots_changed=slots_changed)

    def ended(self, number: int, end: Exit, reported: ReportedFailure | None = None) -> list[ElasticDecision]:
        job = self._job
        process = job.processes.pop(number, None)
        if process is None:
            return []
        self.exits[number] = end
        if self.ending:
            return []
        decisions: list[ElasticDecision] = []
        dismissed = isinstance(process.state, Dismissed) or isinstance(job.phase, Ending)
        if end.code == 0 and not dismissed:
            decisions += self._on_end(process)
        elif end.code and not dismissed:
            decisions += self._on_failure(process, end)
        elif process.leaving and process.host in job.hosts and process.host not in job.blacklist:
            more, following = self._shun(process.host)  # the host is about to be lost, so no process is started there
            message = f"horovodrun: {job.describe(process)} has left, as it was asked to."
            decisions += [Say(message + more), *following]
        if job.has_rank(number) and not isinstance(process.state, WaitingForRound):
            decisions += self._leave_round(f"{job.describe(process)} has ended with exit code {end}", lost=True)
        if end.code and not dismissed and not job.has_state and not job.lost_all() and job.all_failed():
            return decisions + self._reconciler.stop("all processes have failed")
        return decisions + self._reconcile()

    def woken(self, reason: str, reported: ReportedFailure | None = None) -> list[ElasticDecision]:
        job = self._job
        self._reconciler.woken(reason)
        if self.ending:
            return []
        kind, *arguments = reason.split()
        if kind == "ending":
            return [*self._end_all()]
        if isinstance(job.phase, Ending):
            return []
        decisions: list[ElasticDecision] = []
        if kind == "cooldown":
            job.blacklist.remove(arguments[0])
        elif kind == "starting":
            job.overdue = True
        elif kind == "settle":
            job.settled = job.settled or int(arguments[0]) == job.round
        elif kind == "hung":
            process = job.processes.get(int(arguments[0]))
            if process is not None and isinstance(process.state, Training) and process.state.round == int(arguments[1]):
                process.given_up = "it was stuck, and was killed"
                decisions.append(KillProcess(process.number))
        elif kind == "gone" and int(arguments[0]) in job.processes:
            decisions.append(StopProcess(int(arguments[0])))
        elif kind == "late":
            decisions += self._give_up_late(job.awaited_ranks(int(arguments[0])))
        elif kind == "silent" and job.phase == Gathering(0) and job.said != job.awaited():
            job.said = job.awaited()
            decisions.append(Say(f"horovodrun: {job.said}"))
        elif kind == "slow" and (slow := job.awaited_ranks(int(arguments[0]))):
            waits = "the job has failed, and waits" if isinstance(job.phase, Finishing) else "the next round waits"
            decisions.append(Say(f"horovodrun: {waits} for {', '.join(map(job.describe, slow))}"))
        elif kind == "slots" and not job.started:
            return self._reconciler.stop(job.too_few_slots())
        elif kind == "patience" and job.short and job.shortages == int(arguments[0]):
            return self._reconciler.stop(job.too_few())
        return decisions + self._reconcile()

    def _reconcile(self, *, slots_changed: bool = True) -> list[ElasticDecision]:
        """The decisions that follow from the state of the job."""
        if self.ending:
            return []
        before = self._job.round
        decisions = self._reconciler(slots_changed=slots_changed)
        if self._job.round != before:
            self.exits.clear()  # of processes that ended long ago
            self.first_failure = None
        return decisions

    # Reactions to a single event.

    def _on_rank_failed(self, message: RankFailed) -> list[ElasticDecision]:
        job = self._job
        number = job.ranks.get(message.rank)
        if message.round != job.round or number is None:
            return []
        decisions = self._leave_round(f"rank {message.rank} failed: {message.reason}")
        if number in job.processes and isinstance(job.processes[number].state, Training):
            decisions += self._reconciler.wake(f"hung {number} {message.round}", HUNG_SECONDS)
        return decisions

    def _on_end(self, process: JobProcess) -> list[ElasticDecision]:
        """A process has ended by itself with exit code 0. It has done its work only if it was a rank of a round that ran."""
        job = self._job
        if isinstance(process.state, Training) and job.connected and (process.in_run or not job.in_run):
            if not isinstance(job.phase, Finishing):
                returned = ""
                if process.commits is not None:
                    returned = f"returned from the training function after {count(process.commits, 'commit')} and "
                unfinished = tuple(each for early in job.early.values() for each in early.unfinished)
                job.phase = Finishing(f"{job.describe(process)} {returned}ended with exit code 0", unfinished)
            if self.first_failure is not None and not job.has_rank(self.first_failure.culprit):
                self.first_failure = None  # of a process that would have joined in another round
            return []
        when = "while it waited for a rank"
        if isinstance(process.state, Starting):
            when = "before it called hvd.init()"
        elif isinstance(process.state, Training):
            when = "before it reached hvd.elastic.run" if job.connected else f"while round {job.round} began"
        rank, unfinished = job.rank_of(process.number), ()
        if isinstance(process.state, WaitingForRound) and rank is not None:
            unfinished = ((rank, process.state.describe()),)
        early = Early(process.host, f"{job.describe(process)} ended with exit code 0 {when}", unfinished)
        job.early[process.number] = early
        if job.asked:
            return self._say_early(early)
        if process.host not in job.blacklist:
            job.blacklist.add(process.host)
        if not job.processes and self.first_failure is None:  # the program does not use Horovod
            job.phase = Finishing(early.text)
        return []

    def _say_early(self, early: Early) -> list[ElasticDecision]:
        more, decisions = self._shun(early.host)
        return [Say(f"horovodrun: {early.text}.{more}"), *decisions]

    def _on_failure(self, process: JobProcess, end: Exit) -> list[ElasticDecision]:
        job = self._job
        if self.first_failure is None or (
            job.has_rank(process.number) and not job.has_rank(self.first_failure.culprit)
        ):
            self.first_failure = FirstFailure(process.number, process.number, end, "")
        rank = job.rank_of(process.number)
        if rank is not None and process.trained:
            how = process.given_up or f"exit code {end}"
            job.lost.append(LostRank(job.round, rank, process.number, process.host, how))
        more, decisions = self._shun(process.host)
        return [Say(f"horovodrun: {job.describe(process)} exit with status code {end}.{more}"), *decisions]

    def _shun(self, host: str) -> tuple[str, list[ElasticDecision]]:
        """Start no new processes on a host, forever or for its cool-down. Returns the text about it and the decisions: none if
        the host is on the blacklist already."""
        if host in self._job.blacklist:
            return "", []
        seconds = self._job.blacklist.add(host)
        if self._job.limits.attached:
            return "", []
        if seconds is None:
            return f" No new processes are started on {host}.", []
        message = f" No new processes are started on {host} for {seconds:.3g} seconds."
        return message, self._reconciler.wake(f"cooldown {host}", seconds)

    def _leave_round(self, reason: str, *, lost: bool = False) -> list[ElasticDecision]:
        """End the running round: all its ranks will ask for a rank in the next one, or end."""
        job = self._job
        if not isinstance(job.phase, Running):
            return []
        job.fruitless = 0 if lost or job.connected else job.fruitless + 1
        job.phase = Gathering(job.round)
        decisions: list[ElasticDecision] = [EndRound(job.round, reason)]
        if job.fruitless >= MOST_FRUITLESS_ROUNDS:
            return decisions + self._reconciler.stop(f"{job.fruitless} rounds in a row could not begin. {reason}")
        return decisions + self._reconciler.await_ranks()

    def _give_up_late(self, late: Iterable[JobProcess]) -> list[ElasticDecision]:
        """Kill the ranks of the last round that neither come to the next one nor end: the others have waited long enough."""
        job = self._job
        decisions: list[ElasticDecision] = []
        what = "ended" if isinstance(job.phase, Finishing) else "come to the next round"
        for process in late:
            message = f"{job.describe(process)} has not {what} within {job.limits.patience:.6g} seconds"
            process.given_up = f"it had not {what} in time, and was killed"
            decisions += [Say(f"horovodrun: {message}: it is killed"), KillProcess(process.number)]
        return decisions
