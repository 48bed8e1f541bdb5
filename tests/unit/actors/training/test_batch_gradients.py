"""A server whose groups are all left out (actor.dynamic_sampling) is compared with the trainer all the same."""

from dataclasses import dataclass, replace

import pytest

from actors.model.update_stats import LogprobDistance
from actors.training.admission_gate import AdmissionGate
from actors.training.batch_gradients import gradients_of
from launcher.base.messages import Cause, ServerInfo, ServerState
from launcher.base.rollouts import RolloutGroup
from launcher.config.schema import RunConfig
from launcher.policy.admission import GateRules, admit
from launcher.run_files.journal import Journal
from tests.support.replay import Replay, prompts
from tests.support.worlds.policy import OneTake

GOOD, BAD = "http://server-0", "http://server-1"
SERVERS = tuple(
    ServerInfo(name=f"server-{n}", index=n, generation=0, state=ServerState.READY, url=url)
    for n, url in enumerate((GOOD, BAD))
)
MADE = Replay(prompts(4), 2).collect(OneTake(), want=4, weight_version=7)


def by(server, group, reward=None):
    rollouts = [replace(one, completion=replace(one.completion, server=server)) for one in group.rollouts]
    rollouts = rollouts if reward is None else [replace(one, reward=reward) for one in rollouts]
    return RolloutGroup(prompt=group.prompt, rollouts=tuple(rollouts))


def batch(left_out=(BAD, BAD)):
    first, second, *others = MADE.groups
    filtered = tuple(by(server, group, reward=0.0) for server, group in zip(left_out, others, strict=False))
    return replace(MADE, groups=(by(GOOD, first), by(GOOD, second)), filtered=filtered)


@dataclass(frozen=True)
class Stats:
    logprob_distance: LogprobDistance


class Model:
    """`far`: how far each server is; `versions`: of older weights, those that are compared only with today's."""

    def __init__(self, **far):
        self.far, self.asked = {GOOD: far["good"], BAD: far["bad"]}, []

    def compute_gradients(self, groups):
        self.asked.append(groups)
        (server,) = {one.completion.server for group in groups for one in group.rollouts}
        return Stats(LogprobDistance(mean=self.far[server], max=self.far[server]))


def decide(made, model, tmp_path):
    config = RunConfig(experiment_name="exp")
    config.gconfig.n_samples = 2
    rules, heard = GateRules.of(config), []

    def ask(report):
        heard.append(report)
        return admit(report, rules)

    gate = AdmissionGate(config, Journal(tmp_path / "events.jsonl", attempt=1), ask=ask, servers=lambda: SERVERS)
    assert gate.check(made, policy_version=7, global_step=7).admitted
    return gate.admit(made, gradients_of(model, made)), heard[-1]


def test_a_damaged_server_whose_groups_are_all_flat_is_found_by_its_log_probs(tmp_path):
    """Its garbage earned 0 throughout, so none of it was ever compared: it used up half of the prompts unseen."""
    made, model = batch(), Model(good=1e-7, bad=9.0)
    decision, heard = decide(made, model, tmp_path)
    assert (decision.admitted, decision.cause, decision.accused) == (False, Cause.SERVER_CORRUPT, ("server-1",))
    assert heard.distances == {"server-0": 1e-7, "server-1": 9.0}
    assert model.asked == [made.filtered[:1], made.groups], "one group of it, and what is trained on last"


def test_a_sound_one_is_admitted_and_the_batch_keeps_its_own_figures(tmp_path):
    made, model = batch(), Model(good=2e-7, bad=1e-7)
    decision, heard = decide(made, model, tmp_path)
    assert decision.admitted
    assert (heard.logprob_distance, heard.distances) == (2e-7, {"server-0": 2e-7, "server-1": 1e-7})


def test_nothing_more_is_computed_where_each_server_made_something_that_is_trained_on(tmp_path):
    for made in (batch(left_out=(GOOD, GOOD)), batch(left_out=(f"{GOOD} {BAD}",)), batch(left_out=())):
        model = Model(good=1e-7, bad=9.0)
        assert decide(made, model, tmp_path)[0].admitted
        assert model.asked == [made.groups]


OLD = {(BAD, 6): 0.3}


@pytest.mark.parametrize(
    ("mine", "others", "current", "by_server", "older"),
    [
        ({}, {"older": OLD, "by_server": {BAD: 0.3}}, 0.1, {GOOD: 0.1}, OLD),
        ({"older": {(GOOD, 6): 0.1}, "by_server": {GOOD: 0.1}}, {}, 0.5, {BAD: 0.5}, {(GOOD, 6): 0.1}),
        (
            {"older": {(GOOD, 6): 0.1}, "by_server": {GOOD: 0.1}},
            {"older": OLD},
            None,
            {GOOD: 0.1},
            {(GOOD, 6): 0.1, **OLD},
        ),
        (
            {"older": {(GOOD, 6): 0.2}, "current": 0.1, "by_server": {GOOD: 0.1}},
            {},
            0.1,
            {GOOD: 0.1, BAD: 0.5},
            {(GOOD, 6): 0.2},
        ),
    ],
)
def test_what_older_weights_made_stays_apart_from_what_the_present_ones_did(mine, others, current, by_server, older):
    """As of one batch that has them all: `current` and `by_server` are of the present weights, where those made any."""
    mine, others = LogprobDistance(mean=0.1, max=0.1, **mine), LogprobDistance(mean=0.5, max=0.5, **others)
    both = mine.beside(others, makers=[GOOD], other_makers=[BAD])
    assert (both.mean, both.current, both.by_server, both.older) == (0.1, current, by_server, older)
