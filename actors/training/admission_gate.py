"""The gate before each optimizer step: the HealthMonitor decides, and while it doesn't answer, the trainer waits (P7).

    collected ─► check: rules that need no gradients ─► gradients ─► admit: the monitor decides ─► optimizer step
                 known answers begin to be scored                    with their scores, and the log-prob distances
                                                                     low rewards: the run's own record is asked first

Waits for: the monitor, and the servers where prompts are answered again. Unblocked by: their answers, or `stop`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any
from uuid import uuid4

from actors.model.update_stats import LogprobDistance, UpdateStats
from actors.reward.recorded_answers import RecordedAnswers
from actors.rollout.rollout_engine import Stopped
from launcher.base.messages import ServerInfo, ServerKey
from launcher.base.rollouts import RolloutBatch
from launcher.config.schema import RunConfig
from launcher.policy.admission import Admission, BatchReport, GateRules, admit
from launcher.policy.canary_policy import CanaryScore
from launcher.run_files.journal import Journal

ASK_AGAIN_S = 0.5

log = logging.getLogger("trainer")

Ask = Callable[[BatchReport], Admission]
"""Asks the monitor, within a deadline. Raises MonitorAway."""


class MonitorAway(Exception):
    """The monitor is restarting, hangs, or is gone: there is no answer, and so no step."""


class AdmissionGate:
    """`check` a batch, then `admit` it, on the training thread. `ask` None: a run without a monitor; only `check`
    decides. `score` begins to score the known answers of a step; `servers`: those that may have made the batch;
    `record`: the run's own known answers; `doubt` takes a server's traffic away, with the reason;
    `lineage`: how many restores lie behind the weights; `usual_distance`: as of RunPosition."""

    def __init__(
        self,
        config: RunConfig,
        journal: Journal,
        *,
        ask: Ask | None = None,
        score: Callable[[int], Future[tuple[CanaryScore, ...]]] | None = None,
        servers: Callable[[], Sequence[ServerInfo]] = tuple,
        record: RecordedAnswers | None = None,
        doubt: Callable[[ServerKey, str], None] = lambda key, reason: None,
        lineage: Callable[[], int | None] = lambda: None,
        usual_distance: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._rules = GateRules.of(config)
        self._n_samples = config.gconfig.n_samples
        self._journal = journal
        self._ask = ask
        self._score = score
        self._servers = servers
        self._record_of_run = record
        self._doubt = doubt
        self._lineage = lineage
        self._usual_distance = usual_distance
        self._scoring: Future[tuple[CanaryScore, ...]] | None = None
        self._report: BatchReport | None = None
        self._stop = threading.Event()
        self.is_waiting = False

    def check(self, batch: RolloutBatch, *, policy_version: int, global_step: int) -> Admission:
        """Before the gradients. The monitor is asked about a batch that is rejected here too: the server that made it
        may make more of them."""
        report = BatchReport.of(
            batch, policy_version=policy_version, n_samples=self._n_samples, global_step=global_step
        )
        self._scoring = None if self._score is None else self._score(global_step)
        report = dataclasses.replace(report, lineage=self._lineage())
        self._report = report
        decision = admit(report, self._rules)
        if not decision.admitted:
            with contextlib.suppress(Stopped):  # it is rejected, whatever the answer would be
                self._decide(report)
        return decision

    def admit(self, batch: RolloutBatch, stats: UpdateStats) -> Admission:
        """The last question before the weights move, of the batch that was checked last. Raises Stopped where the loop
        is to stop before the answer."""
        assert self._report is not None, "check comes first"
        record, servers = self._record_of_run, self._servers()
        makers = {server.name: server.key for server in servers}  # of now: they may be others when it is answered
        report = dataclasses.replace(
            self._report,
            **self._distances(batch, stats.logprob_distance, servers),
            usual_distance=self._usual_distance(),
            can_check=record is not None and record.is_enough,
        )
        decision = self._decide(report)
        for name in decision.accused:  # at once: the Coordinator learns it later, and the next batch is begun before
            if name in makers:
                self._doubt(makers[name], decision.reason)
        if record is None:
            return decision
        if decision.check_before is not None:
            rescored, replayed = record.check(decision.check_before, report.policy_version)
            self._scoring = None  # the monitor knows them
            canaries = () if rescored is None else (rescored,)
            return self._decide(dataclasses.replace(report, canaries=canaries, replayed=replayed, can_check=False))
        if decision.admitted:
            record.note(batch, report.global_step)
        return decision

    def rejected(self) -> None:
        if self._record_of_run is not None:
            self._record_of_run.distrust()

    def stop(self) -> None:
        self._stop.set()

    def allow(self) -> None:
        self._stop.clear()

    def _distances(
        self, batch: RolloutBatch, distance: LogprobDistance, servers: Sequence[ServerInfo]
    ) -> dict[str, Any]:
        """By the name of each server that made tokens of the batch."""
        names = {server.url: server.name for server in servers}
        mean = distance.mean if distance.of_current is None else distance.of_current
        makers = {rollout.completion.server for group in batch.groups for rollout in group.rollouts}
        by_server = distance.by_server or dict.fromkeys(makers, mean)  # one made all of it
        return {
            "logprob_distance": mean,
            "distances": {names[url]: by for url, by in by_server.items() if url in names},
            "is_of_older": distance.of_current is None,
            "older": tuple((names.get(url, url), version, by) for (url, version), by in distance.older.items()),
        }

    def _decide(self, report: BatchReport) -> Admission:
        if self._ask is None:
            return Admission(admitted=True, reason="no monitor to ask")
        if self._scoring is not None:
            report = dataclasses.replace(report, canaries=self._scoring.result())
        report = dataclasses.replace(report, question=uuid4().hex)
        self.is_waiting = True
        try:
            return self._until_answered(self._ask, report)
        finally:
            self.is_waiting = False

    def _until_answered(self, ask: Ask, report: BatchReport) -> Admission:
        was_away = False
        while True:
            try:
                admission = ask(report)
            except MonitorAway as error:
                if not was_away:
                    self._record("gate.waiting", report, str(error))
                was_away = True
            else:
                if was_away:
                    self._record("gate.answered", report)
                return admission
            if self._stop.wait(ASK_AGAIN_S):
                raise Stopped

    def _record(self, event: str, report: BatchReport, reason: str = "") -> None:
        self._journal.record(event, subject="trainer", reason=reason, global_step=report.global_step)
