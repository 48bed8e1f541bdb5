"""The settings of another project's trainer, run as a command under this launcher's supervision (docs/adapters.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from launcher.config.settings import DEADLINE, NATURAL, OneOf, setting

OWN = "own"
COMMAND, SERVERS = "command", "servers"


@dataclass
class ForeignTrainerConfig:
    """Another project's trainer in place of this launcher's. Paths are below `cwd`; `*` stands for the step in
    `checkpoints`, and for the checkpoint's path in `resume`. When it hangs: `health.trainer_*`; how often it is
    restarted: `restart.*`; when its rewards show damage: `reward_health.*`."""

    adapter: str = setting(
        OWN, "own: this launcher's trainer; command, trl, areal, or one that an installed package registers"
    )
    command: str | None = setting(None, "what to run, its words as a shell would split them; no shell runs it")
    python: str | None = setting(None, "interpreter in place of a `python` that begins the command; null: as it says")
    config: str | None = setting(None, "areal: its YAML; names, folders and frequencies are taken from there")
    overrides: list[str] = setting(
        [], "areal: overrides of that YAML; on the command line they can follow `--`, as they are"
    )
    rung: str = setting(
        COMMAND,
        "command: its servers are its own; servers: it asks the launcher's (`sglang.*`), which start from actor.path",
        OneOf((COMMAND, SERVERS)),
    )
    addresses_env: str = setting(
        "LLM_SERVER_ADDRS", "servers: the variable that gives it their addresses, as host:port,host:port"
    )
    cwd: str = setting(".", "the folder that it runs in")
    env: dict[str, Any] = setting({}, "variables added to its environment, e.g. `+trainer.env.WANDB_MODE=offline`")
    metrics: str | None = setting(None, "JSONL file that it appends steps to; null: its output is read by `pattern`")
    step_key: str = setting("step", "in each object of `metrics`: the step")
    reward_key: str = setting("reward", "in each object of `metrics`: the step's mean reward")
    time_key: str = setting(
        "time",
        "in each object of `metrics`: unix seconds; where it is missing, before the last step's, or still to come, "
        "when it was read",
    )
    finite_keys: list[str] = setting(
        ["loss", "grad_norm"], "in `metrics`, where they are there: figures that must be finite"
    )
    pattern: str | None = setting(
        None,
        "regular expression for a line of its output, with groups (?P<step>…) and, where it has one, (?P<reward>…)",
    )
    reward_pattern: str | None = setting(
        None,
        "the same for a later line of the step that `pattern` has found, with a group (?P<reward>…): the step counts "
        "from then on; null: its reward is in its own line",
    )
    checkpoints: str | None = setting(None, "where its checkpoints appear, e.g. out/checkpoint-*; null: it writes none")
    checkpoint_file: str | None = setting(
        None,
        "file that is the last one written into a checkpoint; null: it is whole once a later step was seen after "
        "its last change",
    )
    resume: str | None = setting(
        None, "words added to the command to resume, e.g. `--resume *`; null: it resumes from its newest by itself"
    )
    tracker: str | None = setting(
        None,
        "file in which it looks up what to resume from, e.g. out/latest: written before it resumes, and removed before "
        "it begins anew; null: it has none",
    )
    tracker_text: str = setting("*", "what is written there; * is the step")
    reward_check: str | None = setting(
        None,
        "a command, run in cwd with its environment, that ends with exit code 0 where the reward function scores known "
        "answers as it should: asked before the first start, and where rewards fell before anything is restored",
    )
    stop_s: float = setting(10.0, "from SIGTERM to SIGKILL where it is stopped; it may save meanwhile", DEADLINE)
    num_cpus: float = setting(1.0, "CPUs that Ray reserves for it (bookkeeping, not a limit)", NATURAL)
    num_gpus: float = setting(0.0, "GPUs that Ray reserves for it; 0: none, and it sees those of its node", NATURAL)
