"""P7: while the monitor can't be asked the trainer waits, and can still be stopped."""

import dataclasses
import math
import threading
from concurrent.futures import Future

import pytest

from actors.model.update_stats import LogprobDistance
from actors.rollout.rollout_engine import Stopped
from actors.training import admission_gate as gate_module
from actors.training.admission_gate import AdmissionGate, MonitorAway
from launcher.base.messages import Cause, ServerInfo, ServerState
from launcher.checkpoints import in_memory_checkpoints
from launcher.config.schema import RunConfig
from launcher.config.supervision import GateConfig
from launcher.policy.admission import Admission, GateRules, admit
from launcher.policy.canary_policy import CanaryScore
from launcher.run_files.journal import Journal, read_lines
from tests.support.replay import Replay, prompts
from tests.support.worlds.policy import OneTake, spoiled
from tests.support.worlds.training import N_PROMPTS, SAMPLES, Trial, poison

BATCH = Replay(prompts(4), 2).collect(OneTake(), want=4, weight_version=7)
URL = BATCH.groups[0].rollouts[0].completion.server
NOW = {"policy_version": 7, "global_step": 7}
YES = Admission(admitted=True, reason="sound")
KNOWN = CanaryScore(name="right", expected=1.0, got=1.0)


class Figures:
    def __init__(self, mean=1e-7, **more):
        self.logprob_distance = LogprobDistance(mean=mean, max=mean, **more)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(gate_module, "ASK_AGAIN_S", 0.001)


@pytest.fixture
def journal(tmp_path):
    return Journal(tmp_path / "events.jsonl", attempt=1)


def gate_of(journal, ask, **more):
    config = RunConfig(experiment_name="exp")
    config.gconfig.n_samples = 2
    return AdmissionGate(config, journal, ask=ask, **more)


def admitted(gate, figures=None):
    assert gate.check(BATCH, **NOW).admitted
    return gate.admit(BATCH, figures or Figures())


def test_the_monitor_is_told_the_distance_that_is_usual_to_the_trainer(journal):
    told = []

    def ask(report):
        told.append(report.usual_distance)
        return YES

    assert admitted(gate_of(journal, ask, usual_distance=lambda: 1.6e-5)) == YES
    assert told == [1.6e-5]


def test_it_asks_until_it_is_answered_and_records_it_once(journal):
    answers, questions = [MonitorAway("restarting"), MonitorAway("restarting"), YES, YES], []

    def ask(report):
        questions.append(report.question)
        answer = answers.pop(0)
        if isinstance(answer, MonitorAway):
            raise answer
        return answer

    gate = gate_of(journal, ask)
    assert admitted(gate) == YES
    assert admitted(gate) == YES
    assert len(questions) == 4
    assert len(set(questions[:3])) == 1
    assert questions[3] not in questions[:3]
    assert all(questions)
    events = [(e["event"], e["reason"], e["global_step"]) for e in read_lines(journal.path)]
    assert events == [("gate.waiting", "restarting", 7), ("gate.answered", "", 7)]


def test_one_that_waits_is_stopped_and_may_be_asked_again(journal):
    asked = threading.Event()
    is_back = threading.Event()

    def ask(report):
        asked.set()
        if not is_back.is_set():
            raise MonitorAway("gone")
        return YES

    gate = gate_of(journal, ask)
    ended = []

    def wait():
        try:
            admitted(gate)
        except Stopped:
            ended.append("stopped")

    waiting = threading.Thread(target=wait)
    waiting.start()
    asked.wait()
    assert gate.is_waiting
    gate.stop()
    waiting.join()
    assert ended == ["stopped"]
    assert not gate.check(spoiled(BATCH, reward=None), **NOW).admitted, "rejected without an answer too"
    is_back.set()
    gate.allow()
    assert admitted(gate) == YES


def test_the_monitor_hears_of_each_batch_with_its_known_answers_and_whose_tokens_are_how_far(journal):
    heard, scored_for = [], []

    def score(step):
        scored_for.append(step)
        scoring = Future()
        scoring.set_result((KNOWN,))
        return scoring

    def ask(report):
        heard.append(report)
        return YES

    server = ServerInfo(name="server-0", index=0, generation=0, state=ServerState.READY, url=URL, weight_version=7)
    gate = gate_of(journal, ask, score=score, servers=lambda: (server,))
    assert not gate.check(spoiled(BATCH, reward=None), **NOW).admitted
    assert admitted(gate, Figures(mean=2e-7)) == YES
    rejected, trained_on = heard
    assert (rejected.without_reward, rejected.logprob_distance) == (1, None)
    assert (trained_on.logprob_distance, trained_on.distances) == (2e-7, {"server-0": 2e-7})
    assert rejected.canaries == trained_on.canaries == (KNOWN,)
    assert scored_for == [7, 7]


@pytest.mark.parametrize(
    ("figures", "mean", "is_of_older", "older"),
    [
        ({"current": 2e-7, "older": {(URL, 6): 0.02}}, 2e-7, False, (("server-0", 6, 0.02),)),
        ({"older": {(URL, 6): 0.02}}, 0.02, True, (("server-0", 6, 0.02),)),
    ],
)
def test_older_tokens_are_told_apart_with_their_distance_from_the_weights_of_today(
    journal, figures, mean, is_of_older, older
):
    heard = []
    server = ServerInfo(name="server-0", index=0, generation=0, state=ServerState.READY, url=URL, weight_version=7)
    gate = gate_of(journal, lambda report: heard.append(report) or YES, servers=lambda: (server,))
    assert admitted(gate, Figures(mean=0.02, **figures)) == YES
    (report,) = heard
    assert report.logprob_distance == pytest.approx(mean)
    assert (report.is_of_older, report.older) == (is_of_older, older)
    gate = GateRules(settings=GateConfig(), is_exact=True, versions_behind=2)
    report = dataclasses.replace(report, weight_versions=(5, 6, 7), blank=0)
    assert admit(report, gate).admitted


@pytest.mark.parametrize(
    ("cause", "doubted"),
    [(Cause.SERVER_CORRUPT, ["server-1"]), (Cause.SERVER_STALE, ["server-1"]), (Cause.REWARD_COLLAPSE, [])],
)
def test_a_server_that_is_rejected_for_its_weights_loses_its_traffic_before_the_next_batch(journal, cause, doubted):
    no = Admission(admitted=False, reason="far", cause=cause, subjects=("server-1",))
    told, servers = [], []

    def answer(report):
        servers[0] = dataclasses.replace(servers[0], generation=4)  # it was restarted while the monitor was asked
        return no

    servers.append(ServerInfo(name="server-1", index=1, generation=3, state=ServerState.READY, url=URL))
    gate = gate_of(
        journal, answer, servers=lambda: tuple(servers), doubt=lambda key, reason: told.append((key, reason))
    )
    assert admitted(gate, Figures(mean=0.2)) == no
    assert told == [((name, 3), "far") for name in doubted], "the one that made the batch, not its successor"


def test_without_a_monitor_the_rules_that_need_no_history_decide(journal):
    gate = gate_of(journal, None)
    assert admitted(gate).admitted
    assert not gate.check(spoiled(BATCH, weight_version=6), **NOW).admitted


@pytest.mark.slow
@pytest.mark.parametrize(("spoilt", "admits"), [({"logprobs": -1e38}, True), ({"reward": math.nan}, True), ({}, False)])
def test_each_rejected_batch_is_told_to_the_runs_own_record(tmp_path, monkeypatch, spoilt, admits):
    """By the check, by the gradients, by the monitor: what was being scored meanwhile may be spoilt too."""
    monkeypatch.setattr(in_memory_checkpoints, "MEMORY_BACKED", tmp_path)
    told = []

    class Record:
        is_enough = False

        def note(self, batch, step):
            told.append(step)

        def distrust(self):
            told.append("distrust")

    def ask(report):
        return Admission(admitted=admits or told != [0, 1, 2], reason="the monitor says no")

    trial = Trial(tmp_path, steps=5, ask=ask, rollouts=Replay(prompts(N_PROMPTS), SAMPLES, spoil=poison(3, **spoilt)))
    trial.loop._gate._record_of_run = Record()
    assert trial.run()
    assert told == [0, 1, 2, "distrust", 3, 4]
