"""The settings of another project's trainer, run as a command under this launcher's supervision (docs/adapters.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from launcher.config.settings import DEADLINE, NATURAL, setting

OWN = "own"
COMMAND: Final = "command"
SERVERS: Final = "servers"


@dataclass
class ForeignTrainerConfig:
    """Another project's trainer in place of this launcher's. Paths are below `cwd`; `*` stands for the step in
    `checkpoints`, and for the checkpoint's path in `resume`. When it hangs: `health.trainer_*`; how often it is
    restarted: `restart.*`; when its rewards show damage: `reward_health.*`."""

    adapter: str = setting(
        OWN,
        "trainer of the run; own: this launcher's; command, trl, areal, or an adapter that an installed package "
        "registers",
    )
    command: str | None = setting(
        None, "command that starts the trainer, split into words as a shell would; no shell runs it"
    )
    python: str | None = setting(
        None, "interpreter that replaces a `python` at the beginning of the command; null: as the command says"
    )
    config: str | None = setting(
        None, "areal: path of AReaL's YAML file, from which names, folders and frequencies are taken"
    )
    overrides: list[str] = setting(
        [], "areal: overrides of AReaL's YAML file; on the command line they can follow `--` unchanged"
    )
    rung: Literal["command", "servers"] = setting(
        COMMAND,
        "whose servers the trainer uses; command: its own; servers: the launcher's (`sglang.*`), which start from "
        "actor.path",
    )
    addresses_env: str = setting(
        "LLM_SERVER_ADDRS",
        "servers: environment variable that gives the trainer the servers' addresses, as host:port,host:port",
    )
    cwd: str = setting(".", "working directory of the trainer's command; relative paths of `trainer` are below it")
    env: dict[str, Any] = setting(
        {}, "environment variables added for the command, by name, e.g. `+trainer.env.WANDB_MODE=offline`"
    )
    metrics: str | None = setting(
        None, "JSONL file to which the trainer appends its steps; null: its output is read with trainer.pattern"
    )
    step_key: str = setting("step", "key of the step's number in each object of trainer.metrics")
    reward_key: str = setting("reward", "key of the step's mean reward in each object of trainer.metrics")
    time_key: str = setting(
        "time",
        "key of the time (unix seconds) in each object of trainer.metrics; where it is missing, before the last "
        "step's or in the future, the time of reading counts",
    )
    finite_keys: list[str] = setting(
        ["loss", "grad_norm"], "keys in trainer.metrics whose figures must be finite, where they are present"
    )
    pattern: str | None = setting(
        None,
        "regular expression for a line of the trainer's output that reports a step, with the group (?P<step>…) "
        "and, where the line has the reward, (?P<reward>…)",
    )
    reward_pattern: str | None = setting(
        None,
        "regular expression for a later line with the reward of the step found by trainer.pattern, with the group "
        "(?P<reward>…); the step counts from that line on; null: the reward is in the step's own line",
    )
    checkpoints: str | None = setting(
        None, "pattern of the paths of the trainer's checkpoints, e.g. out/checkpoint-*; null: it writes none"
    )
    checkpoint_file: str | None = setting(
        None,
        "file that the trainer writes last into a checkpoint; null: a checkpoint is complete once a later step "
        "was seen after its last change",
    )
    resume: str | None = setting(
        None,
        "words added to the command to resume, e.g. `--resume *`; null: the trainer resumes from its newest "
        "checkpoint by itself",
    )
    tracker: str | None = setting(
        None,
        "file in which the trainer looks up its checkpoint, e.g. out/latest; it is written before a resume and "
        "removed before a new beginning; null: there is none",
    )
    tracker_text: str = setting("*", "content of trainer.tracker; * is replaced by the step")
    reward_check: str | None = setting(
        None,
        "command, run in trainer.cwd with the trainer's environment, that ends with exit code 0 if the reward "
        "function scores known answers correctly; it runs before the first start, and before a restore when "
        "rewards fell; null: none",
    )
    stop_s: float = setting(
        10.0,
        "time between SIGTERM and SIGKILL when the trainer is stopped, in seconds; it may save meanwhile",
        DEADLINE,
    )
    num_cpus: float = setting(
        1.0, "number of CPUs that Ray reserves for the trainer; bookkeeping, not a limit", NATURAL
    )
    num_gpus: float = setting(
        0.0,
        "number of GPUs that Ray reserves for the trainer; 0: none is reserved, and it sees all GPUs of its node",
        NATURAL,
    )
