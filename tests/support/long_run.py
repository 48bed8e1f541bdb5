"""The files of a run that never was: `python -m tests.support.long_run FILEROOT --steps 10000 --incidents 50 --attempts
3`.

As the trainer, the Coordinator and the HealthMonitor write them, from a seed: rewards that rise, servers that die,
a trainer that goes back, a night between two attempts. `onsets` are where rewards collapsed.
"""

import argparse
import json
import math
import random
from pathlib import Path

from launcher.run_files.run_paths import RunPaths

BATCH, EPOCH = 4, 200
BEGAN = 1_790_000_000.0
CAUSES = ("server_crash", "server_hang", "server_oom", "trainer_crash", "reward_collapse")
GIB = 2.0**30
SERVERS, SAMPLES, LR = ("server-0", "server-1"), 4, 1.7e-5


class LongRun:
    def __init__(self, paths: RunPaths, *, steps: int, incidents: int, attempts: int = 1, seed: int = 1) -> None:
        self.paths = paths
        self._seed = seed
        self._random = random.Random(seed)
        self._steps = steps
        self._attempts = attempts
        self._due = sorted(self._random.sample(range(20, steps - 5), incidents))
        self._now = BEGAN
        self._attempt = 0
        self._step = 0
        self._sampled = 0.0
        self._number = 0
        self._checkpoint = -1
        self._lines = {"metrics": [], "ledger": [], "events": [], "memory": [], "samples": []}
        self._other = random.Random(seed)  # what is drawn for a picture alone changes nothing else
        self.onsets: list[int] = []

    def write(self) -> None:
        self.paths.prepare()
        starts = {self._steps * k // self._attempts for k in range(self._attempts)}
        while self._step < self._steps:
            if self._step in starts:
                starts.discard(self._step)
                self._begin()
            if self._due and self._step >= self._due[0]:
                self._due.pop(0)
                self._fail()
            self._take_step()
        self._event("run.finished", reason=f"all {self._steps} steps", global_step=self._steps - 1)
        for name, lines in self._lines.items():
            path = self.paths.logs / f"{name}.jsonl"
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        settings = {
            "experiment_name": self.paths.experiment_name,
            "actor": {"optimizer": {"lr": LR}},
            "seed": self._seed,
        }
        self.paths.config.write_text(json.dumps(settings))

    def _begin(self) -> None:
        if self._attempt:
            self._event("run.aborted", reason="ended by the user", global_step=self._step - 1)
            self._now += 8 * 3600
        self._attempt += 1
        self._event("run.started", reason="resumed" if self._step else "fresh")
        self._now += 30
        self._event("trainer.started", subject="trainer", prompts=EPOCH * BATCH, total_steps=self._steps)
        before = f"to step {self._step - 1}" if self._step else "to the first weights"
        self._event("trainer.restored", subject="trainer", reason=before, global_step=self._step - 1)
        self._event("run.running", reason="nothing to do", state="RUNNING")
        for server in SERVERS:
            self._event("server.ready", subject=server, url=f"http://127.0.0.1:3000{server[-1]}")
        if not self._step:
            self._event("eval.done", policy_version=0, prompts=64, sampled=0.3, greedy=0.1, global_step=-1)

    def _fail(self) -> None:
        cause = self._random.choice(CAUSES)
        self._number += 1
        onset = None
        subject = {"trainer_crash": "trainer", "reward_collapse": "policy"}.get(cause, f"server-{self._number % 2}")
        if cause == "reward_collapse":
            onset = self._step
            self.onsets.append(onset)
            for _ in range(4):
                self._take_step(collapsed=True)
        began = self._now
        self._now += 0.3
        self._event(
            "incident.began",
            subject=subject,
            reason="ended by SIGKILL",
            incident=self._number,
            cause=cause,
            onset_step=onset,
            doing="it is being restarted",
            at=began - BEGAN,
        )
        self._event("run.repairing", reason=f"{subject} is restarted", state="REPAIRING")
        if subject in SERVERS:
            self._event("server.died", subject=subject, reason="ended by SIGKILL")
        self._now += self._random.uniform(4, 12)
        if subject in ("trainer", "policy"):
            back = self._checkpoint if onset is None else onset // 10 * 10 - 1
            self._event(
                "trainer.restored", subject="trainer", reason=f"to step {back}", global_step=back, incident=self._number
            )
            self._step = back + 1
        self._event(
            "incident.ended",
            subject=subject,
            reason="it works again",
            incident=self._number,
            cause=cause,
            is_mended=True,
            seconds=self._now - began,
            actions=[f"{subject}: restarted in 3.1 s"],
        )
        self._event("run.running", reason="nothing to do", state="RUNNING")
        if subject in SERVERS:
            self._event("server.ready", subject=subject, url=f"http://127.0.0.1:3000{subject[-1]}")

    def _take_step(self, *, collapsed: bool = False) -> None:
        step_s = self._random.uniform(0.9, 1.4)
        self._now += step_s
        mean = 0.3 + 0.6 * (1 - math.exp(-4 * self._step / self._steps))
        reward = 0.02 if collapsed else min(max(self._random.gauss(mean, 0.07), 0.0), 1.0)
        first = self._step * BATCH % (EPOCH * BATCH)
        self._lines["ledger"].append(
            {
                "global_step": self._step,
                "attempt": self._attempt,
                "prompt_ids": [f"{first + index:016x}" for index in range(BATCH)],
                "weight_versions": [self._step],
                "rollouts_failed": 0,
                "rollouts_retried": int(collapsed),
            }
        )
        self._lines["metrics"].append(
            {
                "global_step": self._step,
                "attempt": self._attempt,
                "policy_version": self._step + 1,
                "time": self._now,
                "rollout/reward": reward,
                "grpo_actor/task_reward/avg": reward,
                "rollout/tokens_per_s": self._random.gauss(2600, 200),
                "grpo_actor/logprob_distance/avg": 3e-8,
                "timeperf/rollout_s": 0.7 * step_s,
                "timeperf/train_s": 0.2 * step_s,
                "timeperf/step_s": step_s,
                **{f"grpo_actor/other_figure_{index}": self._random.random() for index in range(8)},
                **self._figures(),
            }
        )
        self._lines["samples"] += [self._sample(index, mean) for index in range(SAMPLES)]
        if self._step and self._step % (self._steps // 10) == 0:
            sampled = self._other.gauss(mean, 0.02)
            greedy = self._other.gauss(mean * 1.05, 0.01)
            version = self._step
            figures = {"policy_version": version, "sampled": sampled, "greedy": greedy, "global_step": version}
            self._event("eval.done", prompts=64, unscored=2, **figures)
        if self._step % 10 == 9:
            self._checkpoint = self._step
            name = f"epoch0epochstep{self._step}globalstep{self._step}"
            self._event("checkpoint.committed", subject=name, global_step=self._step, seconds=0.2)
        if self._now - self._sampled > 10:
            self._sampled = self._now
            used = (6 + 4 * self._random.random()) * GIB
            self._lines["memory"].append({"time": self._now, "in_use": {"host memory": [used, 24 * GIB]}})
        self._step += 1

    def _figures(self) -> dict[str, float]:
        draw, share = self._other, self._step / self._steps
        return {
            "grpo_actor/approx_kl/avg": abs(draw.gauss(4e-4, 1e-4)) * (1 + share),
            "grpo_actor/entropy/avg": 0.05 + 0.4 * math.exp(-3 * share) + draw.gauss(0, 0.01),
            "grpo_actor/grad_norm": abs(draw.gauss(0.25, 0.05)) + (2.0 if draw.random() < 0.002 else 0.0),
            "grpo_actor/lr": LR * min(1.0, self._step / 50),
            "grpo_actor/clip_ratio/low": abs(draw.gauss(0.002, 0.001)),
            "grpo_actor/clip_ratio/high": abs(draw.gauss(0.004, 0.001)),
            "grpo_actor/seq_len/avg": 180 + 60 * share + draw.gauss(0, 8),
            "grpo_actor/seq_len/max": 512.0,
            "grpo_actor/no_eos_ratios/avg": max(0.0, draw.gauss(0.08 * (1 - share), 0.01)),
            "grpo_actor/flat_groups/avg": max(0.0, draw.gauss(0.2 + 0.3 * share, 0.04)),
            "grpo_actor/loss": draw.gauss(0, 0.01),
        }

    def _sample(self, index: int, mean: float) -> dict[str, object]:
        first, second = self._other.randrange(10, 90), self._other.randrange(10, 90)
        is_right = self._other.random() < mean
        total = first + second + (0 if is_right else 10)
        return {
            "global_step": self._step,
            "attempt": self._attempt,
            "time": self._now,
            "prompt_id": f"{index:016x}",
            "prompt": f"<|im_start|>user\n{first}+{second}=?<|im_end|>\n<|im_start|>assistant\n",
            "completion": f"{first}+{second}={total}\n#### {total}",
            "tokens": 14,
            "finish_reason": "stop",
            "reward": float(is_right),
            "parts": {},
            "weight_version": self._step,
            "server": "http://127.0.0.1:30000",
        }

    def _event(self, event: str, **facts: object) -> None:
        head = {"time": self._now, "monotonic": self._now - BEGAN, "event": event, "attempt": self._attempt}
        self._lines["events"].append(
            head | {"subject": "", "reason": "", "global_step": None, "incident": None} | facts
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("fileroot", type=Path)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--incidents", type=int, default=50)
    parser.add_argument("--attempts", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--trial-name", default="run")
    given = parser.parse_args()
    paths = RunPaths(fileroot=given.fileroot, user="ann", experiment_name="long", trial_name=given.trial_name)
    LongRun(paths, steps=given.steps, incidents=given.incidents, attempts=given.attempts, seed=given.seed).write()
    print(paths.logs)


if __name__ == "__main__":
    main()
