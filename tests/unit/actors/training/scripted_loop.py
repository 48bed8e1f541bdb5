"""A step loop that is driven call by call: what it asks of model, gate, servers and disk is written down."""

import time
from types import SimpleNamespace

from actors.data.prompt_queue import PromptQueue
from actors.model.update_stats import LogprobDistance
from actors.training import step_loop
from actors.training.step_loop import GrpoLoop
from launcher.base.messages import EvalReport
from launcher.base.rollouts import RolloutBatch
from launcher.config.schema import DatasetConfig, RunConfig
from launcher.policy.admission import Admission
from launcher.run_files.journal import Journal, read_lines
from tests.support.replay import group, prompts

PROMPTS = prompts(6)
BATCH = 2
FINE = SimpleNamespace(finite=True, logprob_distance=LogprobDistance(mean=1e-7, max=1e-7))
ADMITTED = Admission(admitted=True, reason="")


class ScriptedLoop:
    """A loop, and in one object all that it drives: each call is in `log`, each takes its time, and each may be made to
    do something else once (`then`)."""

    def __init__(self, tmp_path, monkeypatch, *, steps=3, epochs=2, save_at=(), evaluate_at=(), filtered=0, lock=None):
        self.log = []
        self.phases = []
        self.reports = []
        self.ends = []
        self.now = 0.0
        self.policy_version = 0
        self.is_sound = True
        self.is_due = self.evaluation_is_due = self.is_saving = False
        self.then = {}
        self.save_at = save_at
        self.evaluate_at = evaluate_at
        self.filtered = filtered
        self.queue = PromptQueue([*PROMPTS], seed=1, shuffle=False)
        self.events = tmp_path / "events.jsonl"
        monkeypatch.setattr(step_loop, "time", SimpleNamespace(monotonic=lambda: self.now, time=lambda: 50.0))
        monkeypatch.setattr(step_loop, "gradients_of", lambda model, batch: self.does("gradients", 2.0, FINE, said=()))
        monkeypatch.setattr(step_loop, "batch_metrics", lambda batch, stats: {"rollout/reward": 0.5})
        self.loop = GrpoLoop(
            RunConfig(
                experiment_name="loop",
                total_train_epochs=epochs,
                total_train_steps=steps,
                train_dataset=DatasetConfig(path="none", batch_size=BATCH),
            ),
            model=self,
            queue=self.queue,
            rollouts=self,
            publish=lambda version: self.does("publish", 16.0),
            checkpointer=self,
            record=self.record,
            journal=Journal(self.events, 1, time.time),
            attempt=7,
            gate=self,
            weights_lock=lock,
        )
        assert self.loop.phase.name == "start"
        self.loop.phase = SimpleNamespace(enter=self.phases.append)

    def does(self, name, seconds=0.0, answer=None, *, said=None):
        if said is None:
            self.log.append(name)
        self.now += seconds
        if self.then.get(name):
            answer = self.then[name].pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer() if callable(answer) else answer

    # the rollouts
    def collect(self, queue, *, want, weight_version):
        assert weight_version == self.policy_version
        self.does("collect", 1.0)
        groups = [group(PROMPTS[name], 1, weight_version) for name in queue.take_prompts(want + self.filtered)]
        return RolloutBatch(
            groups=tuple(groups[:want]),
            filtered=tuple(groups[want:]),
            failed=3,
            retried=4,
            generated_tokens=1,
            seconds=1.0,
        )

    def evaluate(self, version):
        self.log.append(f"evaluate {version}")
        return self.does("", answer=EvalReport(policy_version=version, prompts=1, sampled=0.5, greedy=0.5), said=())

    # the model
    def discard(self):
        self.does("discard")

    def step_ahead(self):
        return self.does("step", answer=FINE)

    def commit(self):
        self.does("weights")
        self.policy_version += 1

    def weights_are_finite(self):
        return self.is_sound

    # the gate
    def check(self, batch, *, policy_version, global_step):
        assert (policy_version, global_step) == (self.policy_version, self.loop.next_step)
        return self.does("check", answer=ADMITTED, said=())

    def admit(self, batch, stats):
        return self.does("admit", answer=ADMITTED, said=())

    def rejected(self):
        self.does("rejected")

    # the checkpointer
    def conclude(self, *, required):
        return self.does("conclude, required" if required else "conclude")

    def wait_to_step(self):
        self.does("wait", 4.0, said=())
        return 4.0

    def stalls(self):
        return {"timeperf/save_s": 8.0}

    def step_done(self, *, ended_epoch):
        self.ends.append(ended_epoch)
        self.is_due = self.loop.next_step in self.save_at
        self.evaluation_is_due = self.loop.next_step in self.evaluate_at

    def keep(self, position, report, record):
        assert position.next_step == report.global_step + 1
        self.log.append("keep")
        self.reports.append(report)
        record()

    def record(self, report, batch):
        return self.does("record", said=())

    def save(self, position):
        self.is_due = False
        self.does(f"save {position.next_step}")

    def settle(self):
        self.does("settle")

    def forget(self, position):
        self.does(f"forget {position.next_step}")

    def steps(self):
        return [name for name in self.log if name != "conclude"]

    def event(self, name):
        return [line for line in read_lines(self.events) if line["event"] == name]
