"""The HealthMonitor: what is healthy, which batch may be trained on, and what broke.

    servers ─► ServerWatch each ─► verdicts ┐
    metrics.jsonl ─► reward health ─────────┼─► view (pulled by the Coordinator)
    known answers ─► canaries ──────────────┘
    batch ─► admit ─► Admission (asked by the trainer before each optimizer step)

It waits for nobody: a server that hangs costs its own probe alone. What it must know after a restart stands in the
run's files (actors/monitoring/reward_series.py); servers are told to it again, and adopted, with the Coordinator's next
`watch`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from actors.monitoring.memory_watch import MemoryWatch
from actors.monitoring.monitor_view import MonitorView, ServerVerdict, Watched
from actors.monitoring.reward_series import RewardSeries
from actors.monitoring.server_watch import ServerWatch
from actors.serving.remote_process_probe import RemoteProcessTree
from actors.serving.sglang_client import SGLangClient
from launcher.base.messages import Cause, Health, Incident, ServerInfo, Verdict
from launcher.config.schema import RunConfig
from launcher.policy.admission import Admission, BatchReport, Gate, UsualValues, admit
from launcher.policy.canary_policy import CanaryRound, CanaryScore, CanaryVerdict, judge_canaries
from launcher.policy.reward_health import RewardVerdict, ServerFault, find_cause, judge_rewards
from launcher.run_files.journal import Journal, LineLog
from launcher.run_files.run_paths import RunPaths

MOST_ROUNDS = 200
OF_WEIGHTS = frozenset({Cause.SERVER_STALE, Cause.SERVER_CORRUPT})
NO_DOUBT = ("", Cause.SERVER_STALE)


class HealthMonitor:
    """Used on one asyncio loop, where its client must have been made. `changed` is set when a verdict changes."""

    def __init__(
        self,
        config: RunConfig,
        paths: RunPaths,
        journal: Journal,
        client: SGLangClient,
        *,
        clock: Callable[[], float] = time.monotonic,
        far: Callable[[ServerInfo], RemoteProcessTree | None] = lambda server: None,
    ) -> None:
        """`far`: the processes of a server, where they are on another node."""
        self._config = config
        self._far = far
        self._journal = journal
        self._client = client
        self._clock = clock
        self._gate = Gate.of(config)
        self._series = RewardSeries(paths)
        self._rounds: list[CanaryRound] = _rounds_of(self._series)
        self._watches: dict[str, ServerWatch] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._blind: set[tuple[object, ...]] = set()
        self._faults: dict[tuple[str, int], ServerFault] = {}
        self._doubts: dict[str, tuple[str, Cause]] = {}
        self._blank: list[float] = []
        self._incident: Incident | None = None
        self._canary_said = bool(self._rounds)
        self._rejected = 0
        self._compared = 0
        self._last_rejection = ""
        self._memory = MemoryWatch(config.memory, journal, series=LineLog(paths.memory))
        self.changed = asyncio.Event()

    # ── servers ──

    def watch(self, targets: Sequence[Watched]) -> None:
        """These are the servers now. Say it again often: counts in flight grow old. Another life, another watch."""
        self._memory.look_if_due()
        for target in targets:
            known = self._watches.get(target.server.name)
            if known is None or _life(known.server) != _life(target.server):
                self._doubts.pop(target.server.name, None)
                self._begin(target.server)
            elif self._running[target.server.name].done():
                self._begin_again(target.server)
            self._watches[target.server.name].tell(waiting=target.waiting, task=target.task)
        for name in self._watches.keys() - {target.server.name for target in targets}:
            self._end(name)

    def trust(self, name: str) -> None:
        """It has answered a golden probe: what made its weights doubtful is mended."""
        self._doubts.pop(name, None)

    def pids(self) -> dict[str, dict[str, int]]:
        """Of each watched server, by role."""
        return {name: watch.pids() for name, watch in self._watches.items()}

    def _begin_again(self, server: ServerInfo) -> None:
        """Nothing but an error ends a watch: this process has no file left to open, or it is a defect. Without another
        one nobody would see this server hang, for as long as it lives. Said once for each life."""
        error = self._running[server.name].exception()
        if (server.name, *_life(server)) not in self._blind:
            self._blind.add((server.name, *_life(server)))
            reason = f"could not look at it, and begins anew: {error!r}"
            self._journal.record("health.blind", subject=server.name, reason=reason, generation=server.generation)
        self._begin(server)

    def _begin(self, server: ServerInfo) -> None:
        self._end(server.name)
        watch = ServerWatch(
            server,
            self._config.health,
            self._client,
            on_change=self._heard,
            clock=self._clock,
            far=self._far(server),
        )
        self._watches[server.name] = watch
        self._running[server.name] = asyncio.create_task(watch.run())

    def _end(self, name: str) -> None:
        self._watches.pop(name, None)
        running = self._running.pop(name, None)
        if running is not None:
            running.cancel()

    def _heard(self, server: ServerInfo, verdict: Verdict) -> None:
        self._journal.record(
            f"health.{verdict.health.lower()}",
            subject=server.name,
            reason=verdict.reason,
            generation=server.generation,
            cause=verdict.cause,
            at=self._clock(),
        )
        if verdict.health is Health.DEAD and verdict.cause is not None:
            self._note(server.name, verdict.cause)
        self.changed.set()

    def _note(self, name: str, cause: Cause) -> None:
        step = self._series.next_step
        self._faults[name, step] = ServerFault(name=name, cause=cause, since_step=step)

    # ── the gate ──

    def admit(self, report: BatchReport) -> Admission:
        """May this batch be trained on? Also takes in what its known answers were scored."""
        self._series.refresh()
        if self._series.next_step > report.global_step >= 0:
            self._series.restored(report.global_step - 1)  # it is about to repeat them, whatever the journal says yet
        if report.canaries:
            self.canaries(CanaryRound(step=report.global_step, scores=report.canaries))
        self._judge()
        decision = admit(report, self._gate, usual=self._usual(), compared_in_a_row=self._compared)
        known = self._incident
        if known is not None and (decision.admitted or decision.is_compared):  # it says why the batch is unusual
            decision = Admission(admitted=False, reason=known.reason, cause=known.cause, subjects=(known.subject,))
        self._count(report, decision)
        return decision

    def _count(self, report: BatchReport, decision: Admission) -> None:
        if decision.admitted:
            self._rejected = self._compared = 0
            self._doubts.clear()
            self._blank = [*self._blank, report.blank_share][-self._config.gate.usual_steps :]
            return
        self._rejected += 1
        self._compared += decision.is_compared
        self._last_rejection = decision.reason
        if decision.cause is not None and decision.cause in OF_WEIGHTS:
            for name in decision.subjects or self._watches:
                self._doubts[name] = (decision.reason, decision.cause)
                self._note(name, decision.cause)
        self.changed.set()

    def _usual(self) -> UsualValues | None:
        settings = self._config.gate
        last = self._series.steps[-settings.usual_steps :]
        if len(last) < settings.usual_min_steps:
            return None
        return UsualValues.of(
            [step.point for step in last],
            truncated=[step.truncated_share for step in last],
            blank=self._blank,
            distances=[step.distance for step in last],
        )

    # ── rewards ──

    def canaries(self, scored: CanaryRound) -> None:
        """Known answers, scored: with a batch, or again and again while training is paused for a broken verifier."""
        self._rounds = [*self._rounds, scored][-MOST_ROUNDS:]
        self._judge()

    def restored(self, global_step: int) -> None:
        """The trainer holds the weights of this step again."""
        self._series.restored(global_step)
        self._compared = 0
        self._judge()

    def _judge(self) -> None:
        incident = find_cause(
            self._rewards(), self._canary_verdict(), tuple(self._faults.values()), since=self._clock()
        )
        known = self._incident
        if (
            incident is not None
            and known is not None
            and (incident.cause, incident.subject)
            == (
                known.cause,
                known.subject,
            )
        ):
            incident = replace(incident, since=known.since, onset_step=known.onset_step)
        if (incident is None) != (known is None) or (incident and known and incident.cause is not known.cause):
            self._say(incident, known)
            self.changed.set()
        self._incident = incident
        self._say_canaries()

    def _say(self, incident: Incident | None, known: Incident | None) -> None:
        if incident is None:
            assert known is not None
            self._journal.record("health.mended", subject=known.subject, reason=f"no longer: {known.reason}")
            return
        self._journal.record(
            f"health.{incident.cause}",
            subject=incident.subject,
            reason=incident.reason,
            global_step=incident.onset_step,
            at=incident.since,
            evidence=incident.evidence,
        )

    def _say_canaries(self) -> None:
        """Kept for a successor: a verifier that errs now and then must not be acquitted by a restart of its judge."""
        verdict = self._canary_verdict()
        if verdict.is_broken != self._canary_said:
            self._canary_said = verdict.is_broken
            name = "canary.wrong" if verdict.is_broken else "canary.sound"
            self._journal.record(name, subject="reward", reason=verdict.reason, global_step=verdict.onset_step)

    def _rewards(self) -> RewardVerdict:
        points = [p for p in self._series.points if not (math.isnan(p.low) and math.isnan(p.mean))]
        return judge_rewards(points, self._config.reward_health, restored_step=self._series.restored_step)

    def _canary_verdict(self) -> CanaryVerdict:
        return judge_canaries(self._rounds, self._config.reward_health)

    # ── what it says ──

    def view(self) -> MonitorView:
        if self._series.refresh():
            self._judge()
        return MonitorView(
            servers=tuple(
                ServerVerdict(
                    name=name,
                    generation=watch.server.generation,
                    verdict=watch.verdict(),
                    doubt=self._doubts.get(name, NO_DOUBT)[0],
                    doubt_cause=self._doubts.get(name, NO_DOUBT)[1],
                )
                for name, watch in self._watches.items()
            ),
            rewards=self._rewards(),
            canaries=self._canary_verdict(),
            incident=self._incident,
            rejected_in_a_row=self._rejected,
            last_rejection=self._last_rejection if self._rejected else "",
        )

    async def close(self) -> None:
        running = list(self._running.values())
        for name in list(self._watches):
            self._end(name)
        await asyncio.gather(*running, return_exceptions=True)


def _life(server: ServerInfo) -> tuple[int, str, int | None]:
    return server.generation, server.node, server.pid


def _rounds_of(series: RewardSeries) -> list[CanaryRound]:
    """What a predecessor last said of the verifier, if that was bad: as one round that accuses it still."""
    said = series.accusing_canary
    if said is None:
        return []
    step = said.get("global_step")
    score = CanaryScore(name=f"before a restart of the monitor: {said.get('reason')}", expected=0.0, got=math.nan)
    return [CanaryRound(step=step if isinstance(step, int) else series.next_step, scores=(score,))]
