"""The HealthMonitor: what is healthy, which batch may be trained on, and what broke.

`HealthMonitor` is the plain class, `HealthMonitorActor` the async Ray actor around it.

    servers' actors ─► ServerPoll each ─► their reports ┐
    admitted batches ─► reward health ──────────────────┼─► report (pulled by the Coordinator)
    known answers ─► canaries ──────────────────────────┘
    batch ─► admit ─► Admission (asked by the trainer before each optimizer step)
                └───► low, or the first after a restore: the trainer asks its own record first, then `admit` again

It waits for nobody: a server that hangs costs its own poll alone, and a disk that hangs only what is written to it.
What it must know after a restart is in the run's files (actors/monitoring/reward_series.py) and in the next `watch`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError

from actors.cluster.actor_calls import ActorAway, answer
from actors.cluster.fencing import bind_to_cluster
from actors.monitoring.alerts import IncidentAlerts
from actors.monitoring.memory_watch import SAMPLE_INTERVAL_S, MemoryWatch
from actors.monitoring.reward_series import RewardSeries, rounds_of
from actors.processes.background_tasks import BackgroundCall
from actors.processes.long_poll import hold_answer
from actors.serving.server_report import ServerReport, ServerWork
from launcher.base.errors import JournalError, LauncherError, StorageError
from launcher.base.messages import Cause, Health, Incident, Verdict
from launcher.config.schema import RunConfig
from launcher.policy.admission import COMPARED_REJECTIONS, OF_WEIGHTS, Admission, BatchReport, GateRules, admit
from launcher.policy.canary_policy import CanaryRound, CanaryScore, explains, is_sound, judge_canaries
from launcher.policy.incident_policy import ENVIRONMENT
from launcher.policy.reward_health import (
    Level,
    LowerLevel,
    RewardVerdict,
    as_learned,
    find_cause,
    has_learned,
    judge_rewards,
    low_since,
    never_rewarded,
)
from launcher.run_files.journal import Journal, LineLog
from launcher.run_files.run_paths import RunPaths

MOST_ROUNDS = 200
MOST_ANSWERS = 8
"""Kept, for questions that come twice."""
HOLD_S = 0.5
"""A question is held so long: what it says of the server's work is as old at most. Each costs two processes 2 ms."""
ANSWER_S = 3.0
"""In which a question must be answered beyond that."""
AGAIN_S = 0.25
"""Before the next question to an actor that could not be asked: Ray may be starting it."""
FRESH_S = 5.0
"""Age from which an answer shows nothing any more."""
READ_AGAIN_S = 1.0
"""Between two tries to read the run's past from a disk that does not give it."""
AWAY = Verdict(health=Health.UNKNOWN, reason="its actor does not answer")

log = logging.getLogger("health_monitor")

Ask = Callable[[str, ServerWork, float], Awaitable[ServerReport]]
"""Name, work, and for how long the answer may be held. Raises LauncherError."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorReport:
    """What the Coordinator gets: each server's report by name, and what is wrong with the learning. `incident_age_s`:
    seconds since `incident` was first seen; its `since` is of another clock. `lower_level`: of the rewards."""

    servers: Mapping[str, ServerReport] = field(default_factory=dict)
    incident: Incident | None = None
    incident_age_s: float = 0.0
    lower_level: LowerLevel | None = None


class HealthMonitor:
    """Used on one asyncio loop, which the journal must not block."""

    def __init__(
        self,
        config: RunConfig,
        journal: Journal,
        ask: Ask,
        *,
        series: RewardSeries,
        memory: MemoryWatch | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ask` asks a server's actor."""
        self._config = config
        self._journal = journal
        self._ask = ask
        self._clock = clock
        self._gate = GateRules.of(config)
        self._series = series
        self._rounds: list[CanaryRound] = rounds_of(series, journal.attempt)
        self._polls: dict[str, ServerPoll] = {}
        self._polling: dict[str, asyncio.Task[None]] = {}
        self._verdicts: dict[str, Verdict] = {}  # as last recorded
        self._blind: set[tuple[str, int]] = set()
        self._doubts: dict[str, tuple[str, Cause]] = {}
        self._incident: Incident | None = None
        self._outside: Incident | None = None
        self._replayed: CanaryScore | None = None
        self._told = {"canary.wrong"} if self._rounds else set[str]()  # a restart of the judge acquits nobody
        self._compared_in_a_row = 0
        self._alerted_at = 0
        self._answered: deque[tuple[str, Admission]] = deque(maxlen=MOST_ANSWERS)
        self._lineage = series.lineage if series.attempt == journal.attempt else 0
        self._memory = memory
        self._memory_look = BackgroundCall()
        self.changed = asyncio.Event()
        if series.attempt == journal.attempt:  # of what its predecessor knew nobody is to think that it is over
            self._judge()

    # ── servers ──

    def watch(self, servers: Mapping[str, ServerWork]) -> None:
        """These are the servers now; repeat it often."""
        if self._memory is not None:
            look = partial(asyncio.to_thread, self._memory.sample_memory)
            self._memory_look.start_if_due(look, self._clock(), SAMPLE_INTERVAL_S)
        for name, work in servers.items():
            known = self._polls.get(name)
            if known is not None and known.ordered == work.generation:
                known.take_work(work)
                if self._polling[name].done():
                    self._polling[name].result()  # a defect: it would be blind for good
                continue
            self._doubts.pop(name, None)
            self._end(name)
            poll = self._polls[name] = ServerPoll(
                name, work, self._ask, proof_s=self._config.health.proof_s, changed=self._heard, clock=self._clock
            )
            self._polling[name] = asyncio.create_task(poll.run())
        for name in self._polls.keys() - servers.keys():
            self._end(name)

    def trust(self, name: str) -> None:
        """Its weights were sent again, or a golden probe has verified them."""
        self._doubts.pop(name, None)

    def _end(self, name: str) -> None:
        self._polls.pop(name, None)
        self._verdicts.pop(name, None)
        polling = self._polling.pop(name, None)
        if polling is not None:
            polling.cancel()

    def _heard(self, name: str, report: ServerReport) -> None:
        """A server's report has changed. Each verdict of another health or cause is recorded."""
        self.changed.set()
        if report.blind and (name, report.ordered) not in self._blind:
            self._blind.add((name, report.ordered))
            reason = f"could not observe it, and continues: {report.blind}"
            self._journal.record("health.blind", subject=name, reason=reason, generation=report.ordered)
        verdict, before = report.verdict, self._verdicts.get(name)
        if verdict is None or (before and (before.health, before.cause) == (verdict.health, verdict.cause)):
            return
        self._verdicts[name] = verdict
        self._journal.record(
            f"health.{verdict.health.lower()}",
            subject=name,
            reason=verdict.reason,
            generation=report.ordered,
            cause=verdict.cause,
            at=self._clock(),
        )

    # ── the gate ──

    def admit(self, report: BatchReport) -> Admission:
        """May this batch be trained on? It is recorded with that, once for each `question`, however late the answer.
        A question from before a restore, for whose answer nobody waits any more, is not recorded."""
        if report.lineage is not None and report.lineage < self._lineage:
            return Admission(admitted=False, reason="it was asked before the trainer was restored")
        for question, admission in self._answered:
            if report.question and report.question == question:
                return admission
        self._answered.append((report.question, self._answer(report)))
        return self._answered[-1][1]

    def _answer(self, report: BatchReport) -> Admission:
        self._lineage = self._lineage if report.lineage is None else report.lineage
        if self._series.next_step > report.global_step >= 0:  # it is about to repeat them
            self.restored(report.global_step - 1, None if self._incident is None else self._incident.onset_step)
        if report.canaries:
            self._add_round(CanaryRound(step=report.global_step, scores=report.canaries))
        self._replayed = report.replayed
        self._judge()
        before = self._to_check_before(report)
        decision = self._decide(report)
        if before is not None and (decision.admitted or decision.is_compared):  # else it is rejected for what it is
            if report.can_check:
                return Admission(admitted=False, reason="the run's own record is asked first", check_before=before)
            if self._series.owes_proof:
                self._check_restore(report)
                decision = self._decide(report)
        if decision.admitted:
            self._take_in(report)
        else:
            self._doubt(decision)
        return decision

    def _decide(self, report: BatchReport) -> Admission:
        return admit(
            report,
            self._gate,
            usual=self._series.usual(),
            compared_in_a_row=self._compared_in_a_row,
            incident=self._incident,
        )

    def _to_check_before(self, report: BatchReport) -> int | None:
        """The step before which the run's own record is from healthy steps, where it is to be asked."""
        if self._incident is not None or report.logprob_distance is None:
            return None
        if self._series.owes_proof:
            return self._series.next_step
        series, settings = self._series, self._config.reward_health
        return low_since(report.figures.point, series.points, settings, restored_step=series.restored_step)

    def _check_restore(self, report: BatchReport) -> None:
        """Nothing was trained on since the restore, so that it can be undone."""
        point, settings, before = report.figures.point, self._config.reward_health, self._series.evidence
        reason = self._series.contradicted(point, report.replayed, settings)
        if (left := self._series.evidence) != before:  # a monitor that takes over must know it
            open_ = "the restored weights earn less than when they were saved, and alone that shows too little"
            told = open_ if left else "no restore leaves it open any more whether the weights were at fault"
            self._journal.record("restore.evidence", subject=ENVIRONMENT, reason=told, evidence=left)
        if reason:
            self._outside = Incident(
                cause=Cause.OUTSIDE_WEIGHTS, subject=ENVIRONMENT, reason=reason, since=self._clock()
            )
            self._judge()

    def _take_in(self, report: BatchReport) -> None:
        """It is trained on. Only servers that made some of its tokens have shown that their weights are right."""
        has_changed = self._compared_in_a_row >= COMPARED_REJECTIONS
        has_changed &= admit(report, self._gate, usual=self._series.usual()).is_compared
        self._compared_in_a_row = 0
        for name in report.distances:
            self._doubts.pop(name, None)
        if report.global_step >= 0:
            before = self._series.lower_level
            self._series.admitted(report.figures, has_changed=has_changed)
            if self._series.lower_level != before:  # known before the step is: else its incident would seem to be over
                self.changed.set()
            self._judge()
            drift = self._series.drift(self._gate, report.distances)
            is_known = self._series.usual() is not None
            has_drifted = bool(drift) if is_known else None
            self._tell(has_drifted, "gate.drift", "gate.drift_over", "servers", drift, report.global_step)

    def _doubt(self, decision: Admission) -> None:
        self._compared_in_a_row += decision.is_compared
        if decision.cause is not None and decision.cause in OF_WEIGHTS:
            step = self._series.next_step
            for name in decision.subjects or self._polls:
                self._doubts[name] = (decision.reason, decision.cause)
                self.changed.set()
                self._series.blame(name, decision.cause, step)

    # ── rewards ──

    def canaries(self, scored: CanaryRound) -> None:
        """Known answers, scored while training is paused for a broken reward function."""
        self._add_round(scored)
        self._judge()

    def _add_round(self, scored: CanaryRound) -> None:
        self._rounds = [*self._rounds, scored][-MOST_ROUNDS:]

    def restored(self, global_step: int, onset_step: int | None = None, lineage: int | None = None) -> None:
        """The trainer holds the weights of this step again; `onset_step`: of the damage that it went back from;
        `lineage`: how many restores lie behind it now."""
        self._lineage = self._lineage if lineage is None else lineage
        self._series.restored(global_step, onset_step)
        self._compared_in_a_row = 0
        self._outside = self._replayed = None
        self._judge()

    def _judge_rewards(self) -> RewardVerdict:
        """A fall that old prompts do not show is one of the new prompts: training continues at the new level."""
        series, settings = self._series, self._config.reward_health
        verdict = judge_rewards(series.points, settings, restored_step=series.restored_step)
        if verdict.level is not Level.BREAK or verdict.onset_step is None:
            return verdict
        healthy = [point for point in series.points if point.step < verdict.onset_step]
        replayed = as_learned(self._replayed, healthy, settings)
        if replayed is None or replayed.got is None or not explains(replayed, verdict.drop):
            return verdict
        reason = (
            f"{verdict.reason}; but {replayed.name} earn {replayed.got:.3g}, where {replayed.expected:.3g} is usual: "
            "for those weights, servers and reward function are as they were; new ones are harder, or scored otherwise"
        )
        facts = {"global_step": verdict.onset_step, "before_step": series.next_step}
        self._journal.record("reward.rebased", subject="data", reason=reason, **facts)
        series.base = verdict.onset_step
        return judge_rewards(series.points, settings, restored_step=series.restored_step)

    def _judge(self) -> None:
        """What is wrong with the learning now. Each change is recorded once."""
        settings, known = self._config.reward_health, self._incident
        rewards = self._judge_rewards()
        canaries = judge_canaries(self._rounds, settings)
        learned = rewards.level is Level.BREAK and has_learned(self._series.points, rewards.onset_step, settings)
        found = find_cause(
            rewards,
            canaries,
            tuple(self._series.faults.values()),
            since=self._clock(),
            had_learned=learned,
            staleness=self._config.rollout.max_head_offpolicyness,
        )
        if self._outside is not None and (found is None or found.cause is Cause.REWARD_COLLAPSE):
            found = self._outside
        if found is not None and known is not None and (found.cause, found.subject) == (known.cause, known.subject):
            found = replace(found, since=known.since, onset_step=known.onset_step)
        self._incident = found
        if (found and found.cause) != (known and known.cause):
            self._record_incident(found, known)
            self.changed.set()
        is_wrong = True if canaries.is_broken else None if not self._are_scored_right() else False
        self._tell(is_wrong, "canary.wrong", "canary.sound", "reward", canaries.reason, canaries.onset_step)
        is_alert, reason = self._is_alert(rewards), rewards.reason
        if is_alert and never_rewarded(self._series.points, self._rounds):
            reason += ", and reward.fn was never seen to reward anything in this run"
        self._tell(is_alert, "reward.alert", "reward.alert_over", "policy", reason, rewards.onset_step)

    def _are_scored_right(self) -> bool:
        last = self._rounds[-1] if self._rounds else None
        return last is not None and bool(last.scores) and is_sound(last, self._config.reward_health)

    def _is_alert(self, rewards: RewardVerdict) -> bool | None:
        """None where it is neither an alert nor over: a streak that reaches the breaker has become worse, and one that
        a restore has undone, or that a limit allows again, has not ended."""
        points = self._series.points
        if rewards.level is not Level.SOUND:
            self._alerted_at = self._series.next_step
            return True if rewards.level is Level.ALERT else None
        has_ended = bool(points) and not points[-1].is_zero and self._series.next_step > self._alerted_at
        return False if has_ended else None

    def _tell(self, is_so: bool | None, name: str, over: str, subject: str, reason: str, step: int | None) -> None:
        """Once when it begins, and once when it is over. None: neither was seen."""
        if is_so is not None and is_so != (name in self._told):
            self._told ^= {name}
            self._journal.record(name if is_so else over, subject=subject, reason=reason, global_step=step)

    def _record_incident(self, found: Incident | None, known: Incident | None) -> None:
        if found is not None:
            self._journal.record(
                f"health.{found.cause}",
                subject=found.subject,
                reason=found.reason,
                global_step=found.onset_step,
                at=found.since,
                evidence=found.evidence,
            )
        elif known is not None:
            self._journal.record("health.mended", subject=known.subject, reason=f"no longer: {known.reason}")

    # ── what it knows ──

    def report(self) -> MonitorReport:
        found = self._incident
        reports = {name: poll.report() for name, poll in self._polls.items()}
        return MonitorReport(
            servers={name: self._doubted(name, one) for name, one in reports.items() if one is not None},
            incident=found,
            incident_age_s=0.0 if found is None else max(self._clock() - found.since, 0.0),
            lower_level=self._series.lower_level,
        )

    def _doubted(self, name: str, report: ServerReport) -> ServerReport:
        """With the doubt of its weights, where there is one, in place of a verdict that says that it lives."""
        doubt = self._doubts.get(name)
        if doubt is None or (report.verdict is not None and report.verdict.health is Health.DEAD):
            return report
        return replace(report, verdict=Verdict(health=Health.SUSPECT, reason=doubt[0], cause=doubt[1]))

    async def close(self) -> None:
        polling = list(self._polling.values())
        for name in list(self._polls):
            self._end(name)
        await asyncio.gather(*polling, self._memory_look.close(), return_exceptions=True)


class ServerPoll:
    """One question to a server's actor at a time, held there until something changes, and its last answer. An actor
    that does not answer is unknown, however long it is away: unknown is never a reason to kill (P7).

    Of the incarnation that `work` is of. `run` until cancelled. `changed` is called with each report that differs
    from the one before in more than its ages."""

    def __init__(
        self,
        name: str,
        work: ServerWork,
        ask: Ask,
        *,
        proof_s: float,
        changed: Callable[[str, ServerReport], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`proof_s`: the age from which what is known of its work counts no more."""
        self.ordered = work.generation
        self._name = name
        self._ask = ask
        self._proof_s = proof_s
        self._changed = changed
        self._clock = clock
        self._report: ServerReport | None = None
        self._answered_at = 0.0
        self._unanswered = 0
        self._noted: object = None
        self.take_work(work)

    def take_work(self, work: ServerWork) -> None:
        self._work = work
        self._work_at = self._clock()

    def report(self) -> ServerReport | None:
        """As of now; None where it has not had the time to answer."""
        silent_s = self._unanswered * (HOLD_S + ANSWER_S)
        if self._report is None:
            if not self._unanswered:
                return None
            # A HealthMonitor that was restarted beside an actor that hangs: that it is silent is known all the same.
            return ServerReport(ordered=self.ordered, info=None, verdict=AWAY, silent_s=silent_s)
        age_s = self._clock() - self._answered_at
        report = replace(self._report.aged(age_s), silent_s=silent_s)
        if age_s <= FRESH_S or report.end is not None:  # an end is no less true for being old
            return report
        return replace(report, verdict=AWAY)

    async def run(self) -> None:
        while True:
            try:
                report = await self._ask(self._name, self._work_now(), HOLD_S)
            except LauncherError as error:
                self._unanswered += isinstance(error.__cause__, TimeoutError)
                self._note()
                await asyncio.sleep(AGAIN_S)
            else:
                self._report = report
                self._answered_at = self._clock()
                self._unanswered = 0
                self._note()

    def _work_now(self) -> ServerWork:
        """With its age; nothing where the trainer was not heard of for long."""
        age_s = self._clock() - self._work_at
        return self._work.aged(age_s) if age_s <= self._proof_s else ServerWork(generation=self.ordered)

    def _note(self) -> None:
        report, before = self.report(), self._noted
        if report is None:
            return
        verdict = report.verdict
        health = None if verdict is None else (verdict.health, verdict.cause)
        self._noted = (report.info, health, report.end is None, report.blind)
        if self._noted != before:
            self._changed(self._name, report)


@ray.remote(num_cpus=0)
class HealthMonitorActor:
    """Nothing in `__init__` can fail: an actor whose constructor raises is never restarted."""

    def __init__(self, config: RunConfig, paths: RunPaths, attempt: int) -> None:
        bind_to_cluster(config)
        self._config = config
        self._paths = paths
        self._attempt = attempt
        self._monitor: HealthMonitor | None = None
        self._alerts: IncidentAlerts | None = None
        self._journal: Journal | None = None
        self._beginning = asyncio.Lock()

    async def _ready(self) -> HealthMonitor:
        """Made on the first call, on its loop, which no file may block: the pings that show it is alive share it."""
        async with self._beginning:
            if self._monitor is None:
                self._monitor = await self._begin()
        return self._monitor

    async def _begin(self) -> HealthMonitor:
        config, paths = self._config, self._paths
        journal = self._journal = Journal(paths.events, self._attempt, time.time, in_background=True)
        journal.record("monitor.started", subject="health_monitor", pid=os.getpid())
        self._alerts = IncidentAlerts.begun(config.alerts, paths, self._attempt)
        memory = MemoryWatch(journal, series=LineLog(paths.memory))
        is_ahead = config.rollout.max_head_offpolicyness > 0
        series = await _until_read(partial(RewardSeries.read, paths, is_ahead=is_ahead))
        return HealthMonitor(config, journal, ServerActors().ask, series=series, memory=memory)

    async def watch(self, servers: Mapping[str, ServerWork], hold_s: float = 0.0) -> MonitorReport:
        """Take these servers, and report: when something has changed since the last report, at once where another asks,
        else after `hold_s`."""
        monitor = await self._ready()
        if self._journal is not None:
            self._journal.write_waiting()
        monitor.watch(servers)
        await hold_answer(monitor.changed, hold_s)
        return monitor.report()

    async def admit(self, report: BatchReport) -> Admission:
        return (await self._ready()).admit(report)

    async def canaries(self, scored: CanaryRound) -> None:
        (await self._ready()).canaries(scored)

    async def restored(self, global_step: int, onset_step: int | None = None, lineage: int | None = None) -> None:
        (await self._ready()).restored(global_step, onset_step, lineage)

    async def trust(self, name: str) -> None:
        (await self._ready()).trust(name)

    async def send_alerts(self) -> None:
        """Send what the journal holds, and wait until it has left; at the end of the run."""
        await self._ready()
        if self._alerts is not None:
            await asyncio.to_thread(self._alerts.finish, self._config.alerts.timeout)


async def _until_read(read: Callable[[], T]) -> T:
    """Without the run's past nothing may be admitted: while a disk doesn't give it, nobody gets an answer (P7). An
    error would end the step loop."""
    while True:
        try:
            return await asyncio.to_thread(read)
        except (JournalError, StorageError) as error:
            log.warning("monitor.waits reason=%r", str(error))
            await asyncio.sleep(READ_AGAIN_S)


class ServerActors:
    """Found by their names. One that did not answer is looked for again: another may have its name."""

    def __init__(self) -> None:
        self._found: dict[str, Any] = {}

    async def ask(self, name: str, work: ServerWork, hold_s: float) -> ServerReport:
        """Raises LauncherError."""
        try:
            if name not in self._found:
                self._found[name] = await asyncio.to_thread(_find, name)  # the cluster's store may be away
            call = self._found[name].report.remote(work, hold_s)
            report: ServerReport = await answer(call, within_s=hold_s + ANSWER_S, of=name)
        except LauncherError:
            self._found.pop(name, None)
            raise
        return report


def _find(name: str) -> Any:
    """Raises ActorAway."""
    try:
        return ray.get_actor(name)
    except (RayError, ValueError) as error:  # ValueError: no actor of that name
        raise ActorAway(f"{name} can't be found: {error}") from error
