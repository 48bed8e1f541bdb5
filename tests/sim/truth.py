"""What is true of a simulated run; the project sees only what a real one shows. `breaches`: of its promises."""

from dataclasses import dataclass

import torch

from actors.model.policy_model import PolicyModel
from launcher.base.messages import Cause, ServerState
from launcher.policy.admission import OF_WEIGHTS
from launcher.run_files.journal import read_lines
from tests.sim.sim_servers import digest_of_weights

CONDEMNED_AND_BACK = ("checkpoint.condemned", "checkpoint.reinstated")


class FalseReward(float):
    """Given by a broken judge."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What weights write. `quality`: the share of their tokens that are as they should be. `text`: the tokens with
    which they answer whatever they are asked, None where they draw them."""

    quality: float = 1.0
    text: tuple[int, ...] | None = None


SOUND = Policy()


class Truth:
    """`policy_of` weights: it goes with them into each checkpoint, and comes back with them. `learns`: that of the next
    weights, from that of the last and their step."""

    def __init__(self, run):
        self.run = run
        self.breaches = []
        self.causes = set()
        self.made_by = {}
        self.admitted = None
        self.furthest = 0
        self.learns = lambda policy, step: policy
        self._policies = {}
        self._digest = (None, "")

    def befell(self, cause):
        self.causes.add(cause)

    def damage(self, learns):
        """From now on `learns` decides what becomes of the weights."""
        self.befell(Cause.REWARD_COLLAPSE)
        self.learns = learns

    def breach(self, promise, what):
        self.breaches.append(f"{promise}: {what}")

    def policy_of(self, digest):
        return self._policies.get(digest, SOUND)

    def digest_of_trainer(self):
        training, model = self.run.trainer.training, self.run.parts.model
        lineage = None if training is None else training.servers.publisher.lineage
        key = (self.run.trainer.incarnation, lineage, model.policy_version)
        if self._digest[0] != key:
            self._digest = (key, digest_of_weights(model.named_weights(torch.float32)))
        return self._digest[1]

    def quality_of_trainer(self):
        return self.policy_of(self.digest_of_trainer()).quality

    # ── what each act is checked for ──

    def watch_steps(self, patch):
        commit = PolicyModel.commit

        def watched(model):
            before, step = self.digest_of_trainer(), model.policy_version
            self._check_step(model, before, step)
            commit(model)
            self.furthest = max(self.furthest, step + 1)
            policy = self.learns(self.policy_of(before), step)
            if policy != SOUND:
                self._policies[self.digest_of_trainer()] = policy

        patch.setattr(PolicyModel, "commit", watched)

    def _check_step(self, model, digest, step):
        if self.admitted != step:
            self.breach("P7", f"step {step} was taken, and no monitor had admitted it")
        self.admitted = None
        known = {line["global_step"] for line in read_lines(self.run.paths.ledger)}
        if step > 0 and step - 1 not in known:
            self.breach("P2", f"step {step} was taken, and the line of the one before it is not in the ledger")
        for rollout in (one for group in model._groups for one in group.rollouts):
            completion = rollout.completion
            if rollout.reward is None or isinstance(rollout.reward, FalseReward):
                self.breach("P1", f"step {step} was trained on the reward of a broken judge")
            if self.made_by.get((completion.token_ids, completion.logprobs), digest) != digest:
                self.breach("P1", f"step {step} was trained on what other weights made")

    def check_traffic(self, server):
        if server.lies_at is None and server.digest != self.digest_of_trainer():
            self.breach("P3", f"{server.name} is asked, and holds other weights than the trainer")

    def check_restore(self, step, incident):
        """`incident`: what the monitor named."""
        if incident is not None and incident.cause is Cause.REWARD_COLLAPSE and self.quality_of_trainer() < 1.0:
            self.breach("P4", f"step {step} was restored, whose weights are damaged")

    def check_disks(self, who):
        if self.run.disks.have_long_failed():
            self.breach("P5", f"{who} was restarted, and would meet the disk that refuses everybody")

    def check_restart_of_server(self, server):
        self.check_disks(server.name)
        works = server.state in (ServerState.READY, ServerState.STARTING)
        if works and server.hung_at is None and server.lies_at is None:
            self.breach("P6", f"{server.name} worked, or was about to, and was restarted")

    def check_resume(self):
        known = {one.cause for one in self.run.coordinator.history.incidents.open.values()}
        if self.run.is_judge_broken and Cause.VERIFIER_BROKEN in known:
            self.breach("P7", "the trainer was resumed, and what it was paused for has not passed")

    def check_restart_of_trainer(self, trainer):
        self.check_disks("the trainer")
        if trainer.training is not None and trainer.training.view().failure is None:
            self.breach("P5", "the trainer worked, and was restarted")

    def _has_befallen(self, cause):
        return cause in self.causes or (cause in OF_WEIGHTS and bool(self.causes & OF_WEIGHTS))

    def check_end(self, outcome, events):
        for line in events:
            if line["event"] == "incident.began" and not self._has_befallen(cause := Cause(line["cause"])):
                self.breach("P11", f"{cause} was reported, which did not befall the run: {line['reason']}")
        began, ended = (
            [line["incident"] for line in events if line["event"] == f"incident.{which}"]
            for which in ("began", "ended")
        )
        if not sorted(began) == sorted(ended) == [*range(1, len(began) + 1)]:
            self.breach("P11", f"incidents {began} began, and {ended} ended: each has one number, and its end")
        set_aside = [line["event"] for line in events if line["event"] in CONDEMNED_AND_BACK]
        if Cause.OUTSIDE_WEIGHTS in self.causes and set_aside[-1:] == ["checkpoint.condemned"]:
            self.breach("P12", "checkpoints stay condemned for what was no fault of the weights")
        if not outcome.reason or self.run.coordinator.history.state.name != outcome.status.name:
            self.breach("P9", f"the run ended as {outcome.status} ({outcome.reason!r})")
        if self.run.trainer.training is not None and self.quality_of_trainer() < 1.0:
            self.breach("P4", "the run ended with damaged weights")
        for server in self.run.servers.values():
            if server.state in (ServerState.READY, ServerState.STARTING):
                self.breach("P8", f"{server.name} outlived the run")
