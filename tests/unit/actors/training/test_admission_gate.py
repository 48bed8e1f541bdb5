"""P7: while the monitor can't be asked the trainer waits, and can still be stopped."""

import threading

import pytest

from actors.rollout.live_rollouts import Stopped
from actors.training import admission_gate as gate_module
from actors.training.admission_gate import MonitorAway, MonitorGate
from launcher.policy.admission import Admission, BatchReport

REPORT = BatchReport(
    policy_version=1,
    weight_versions=(1,),
    completions=4,
    without_reward=0,
    empty=0,
    nonfinite_logprobs=0,
    uneven_groups=0,
)
YES = Admission(admitted=True, reason="sound")


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(gate_module, "ASK_AGAIN_S", 0.001)


def test_it_asks_until_it_is_answered_and_says_so_once():
    answers = [MonitorAway("restarting"), MonitorAway("restarting"), YES]
    told = []

    def ask(report):
        answer = answers.pop(0)
        if isinstance(answer, MonitorAway):
            raise answer
        return answer

    assert MonitorGate(ask, away=told.append)(REPORT) == YES
    assert told == ["restarting", ""]


def test_one_that_waits_is_stopped_and_may_be_asked_again():
    asked = threading.Event()
    is_back = threading.Event()

    def ask(report):
        asked.set()
        if not is_back.is_set():
            raise MonitorAway("gone")
        return YES

    gate = MonitorGate(ask, away=lambda why: None)
    ended = []

    def wait():
        try:
            gate(REPORT)
        except Stopped:
            ended.append("stopped")

    waiting = threading.Thread(target=wait)
    waiting.start()
    asked.wait()
    gate.stop()
    waiting.join()
    assert ended == ["stopped"]
    is_back.set()
    gate.allow()
    assert gate(REPORT) == YES
