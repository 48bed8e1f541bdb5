"""The settings of supervision: when something is wrong, how much evidence that needs, how often a repair is tried.

The same rules as in `launcher/config/schema.py`, of which these are parts.
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher.config.settings import COUNT, DEADLINE, DURATION, NATURAL, POSITIVE, SHARE, between, matching, setting


@dataclass
class HealthConfig:
    """When a server or the trainer is hung. Time counts only while it was observed and was given the CPU."""

    look_interval_s: float = setting(
        0.25, "interval between two observations of a process, its probes and its tokens, in seconds", POSITIVE
    )
    probe_interval_s: float = setting(
        1.0, "interval between two probes of an idle server, in seconds; a probe generates one token", POSITIVE
    )
    probe_busy_interval_s: float = setting(
        5.0, "interval between two probes of a server that generates for others, in seconds", POSITIVE
    )
    stopped_s: float = setting(
        1.2,
        "time that a process of a server may be stopped (SIGSTOP) before the server counts as hung, in seconds; "
        "raise it to stop one on purpose",
        POSITIVE,
    )
    silence_s: float = setting(
        3.0,
        "least silence of a server that counts as a sign of a hang, in seconds; the signs are a missing answer, "
        "no token while requests wait, and no CPU time, and two of them must agree",
        POSITIVE,
    )
    silence_factor: float = setting(
        10.0,
        "allowed silence of a server as a multiple of its usual answer time, where that is longer than "
        "health.silence_s",
        POSITIVE,
    )
    silence_max_s: float = setting(
        60.0, "upper limit of the silence allowed by health.silence_factor, in seconds", DEADLINE
    )
    proof_s: float = setting(
        10.0, "age after which an answer, a token or an observation no longer counts as evidence, in seconds", POSITIVE
    )
    trainer_silence_s: float = setting(
        10.0,
        "time that a stopped trainer may leave questions unanswered before it counts as hung, in seconds",
        POSITIVE,
    )
    trainer_factor: float = setting(
        10.0,
        "time without progress after which a trainer counts as hung, as a multiple of its median step time; "
        "health.trainer_min_s is the least",
        between(1),
    )
    trainer_min_s: float = setting(
        60.0, "least time without progress before a trainer counts as hung, in seconds", POSITIVE
    )
    trainer_first_s: float = setting(
        1800.0,
        "time without progress after which a trainer counts as hung while no median step time is known, in a "
        "checkpoint, and while servers load weights, in seconds",
        DEADLINE,
    )
    supervisor_silence_s: float = setting(
        30.0, "time that a supervisor may leave calls unanswered before it is replaced, in seconds", POSITIVE
    )
    monitor_silence_s: float = setting(
        600.0,
        "time without a working HealthMonitor, or door of a command's servers, restarts included, after which the "
        "run begins another attempt, in seconds",
        DEADLINE,
    )


@dataclass
class RewardHealthConfig:
    """When rewards show that something broke. Drops are in shares of the range of the rewards seen."""

    zero_alert_steps: int | None = setting(
        5,
        "steps in a row with only zero rewards after which an alert is sent, more where such steps are usual; "
        "null: never",
        COUNT,
    )
    zero_breaker_steps: int | None = setting(
        10,
        "steps in a row with only zero rewards after which training stops and the cause is searched, more where "
        "such steps are usual; null: never",
        COUNT,
    )
    fall_threshold: float | None = setting(
        5.0, "size of a fall of the rewards that stops training, in standard errors; null: never", POSITIVE
    )
    fall_min_drop: float = setting(
        0.05, "smallest fall of the rewards that counts, as a share of the range of the rewards seen", between(0, 1)
    )
    baseline_steps: int = setting(50, "number of steps before a suspected onset that form the baseline", COUNT)
    warmup_steps: int = setting(15, "least number of baseline steps before a fall can be found", between(2))
    window_steps: int = setting(60, "upper limit of how far back the onset of a fall is searched, in steps", COUNT)
    noise_floor: float = setting(
        0.05,
        "least standard deviation that is assumed for a step's mean reward, as a share of the range of the "
        "rewards seen",
        POSITIVE,
    )
    outlier_clip: float = setting(
        4.0, "largest deviation that one step adds to the evidence for a fall, in standard deviations", POSITIVE
    )
    probation_steps: int = setting(
        50, "number of steps after a restore in which the thresholds for falls and zeros are tighter", NATURAL
    )
    probation_factor: float = setting(
        0.8, "factor by which these thresholds are multiplied during reward_health.probation_steps", SHARE
    )
    canary_tolerance: float = setting(
        1e-6, "difference of a known answer's score from the expected one that is still accepted", NATURAL
    )
    canary_clear_rounds: int = setting(
        5, "rounds in a row with correct scores after which a broken reward function is trusted again", COUNT
    )
    verifier_patience_s: float = setting(
        600.0, "longest pause while a reward function is broken, in seconds; then the run halts", DEADLINE
    )


@dataclass
class GateConfig:
    """Which batches reach the optimizer. What is missing, not finite or of other weights never does, whatever is set.

    Distances are means of |server's - trainer's log-prob| over a batch, in nats. Measured at lr 3e-4 in float32:
    1e-7 for the same weights, 1.6e-5 for the same after a hundred steps on rewards that were chance, 8e-4 and more for
    one version behind; in bfloat16 up to 2e-3 for the same, 4e-3 and more for ten behind, 0.2 and more for the first
    weights after 40 steps.
    """

    max_failed_share: float | None = setting(
        0.5,
        "upper limit of the share of a batch's requests, one for each prompt, that may fail; beyond it the rest is no "
        "fair sample and the batch is rejected; null: any",
        between(0, 1),
    )
    distance_float32: float | None = setting(
        1e-5,
        "upper limit of the distance between the server's and the trainer's log-probs where both are float32, in "
        "nats; the run's usual distance may raise it, to ten times as much at most; null: not checked",
        POSITIVE,
    )
    distance_bfloat16: float | None = setting(
        3e-3,
        "upper limit of the same distance where one of the two is not float32, in nats; the run's usual distance "
        "may raise it; null: not checked",
        POSITIVE,
    )
    distance_unknown: float = setting(
        0.1,
        "upper limit of the distance of log-probs in bfloat16 before a usual one is known, in nats; doubled for "
        "older weights",
        POSITIVE,
    )
    max_reward_jump: float | None = setting(
        0.5,
        "upper limit of a batch's deviation from the usual mean reward, as a share of the range of rewards; null: "
        "not checked",
        between(0, 1),
    )
    reward_jump_noise: float = setting(
        5.0,
        "least deviation of a batch's mean reward that can reject it, in the run's own standard deviations of a "
        "step's mean",
        NATURAL,
    )
    max_share_jump: float | None = setting(
        0.5,
        "upper limit of the rise in the share of completions that are cut at the length limit, or blank; null: "
        "not checked",
        between(0, 1),
    )
    canaries: int = setting(6, "number of known answers that are scored with each batch; 0: none", NATURAL)
    recorded: int = setting(
        48,
        "number of completions of healthy steps that are kept, to be scored and generated again when rewards are "
        "low; 0: none",
        NATURAL,
    )


@dataclass
class AlertsConfig:
    """One message when an incident begins, one when it ends."""

    webhook: str | None = setting(
        None,
        "URL that each message is sent to as JSON; it is written to no file; null: none",
        matching(r"https?://\S+|env:[A-Za-z_]\w*", "a URL, or env:NAME, the environment variable that holds it"),
    )
    wandb: bool = setting(True, "send each message as a WandB alert too, where WandB is on")
    timeout: float = setting(10.0, "deadline of sending one message, in seconds", DEADLINE)


@dataclass
class RestartConfig:
    """How often each repair is tried; a step further than ever before refills all."""

    window_s: float = setting(
        3600.0, "time without a failure after which earlier failures are forgotten, in seconds", POSITIVE
    )
    wait_initial_s: float = setting(
        1.0, "wait before the second attempt of a repair, in seconds; it doubles with each further attempt", POSITIVE
    )
    wait_max_s: float = setting(60.0, "longest wait between two attempts of a repair, in seconds", POSITIVE)
    retry: int = setting(
        3,
        "attempts of the smallest repair, such as loading weights again or dropping a batch, before a larger one",
        COUNT,
    )
    server: int = setting(3, "restarts of one server before the run goes on without it, or halts", COUNT)
    restore: int = setting(3, "restores of the trainer before the run halts", COUNT)
    cluster: int = setting(3, "new local Ray clusters in place of lost ones before the run halts", NATURAL)
    driver: int = setting(3, "new drivers in place of killed ones before the run ends", NATURAL)
    attempt: int = setting(
        6, "further attempts of a run that halted for a cause that may pass by itself, before it stays halted", NATURAL
    )
    attempt_wait_s: float = setting(
        30.0,
        "wait before the first further attempt of a run that halted, in seconds; it doubles with each one, up to "
        "half of restart.window_s",
        POSITIVE,
    )


@dataclass
class RecoveryConfig:
    """What stands ready for a failure (checkpoints to resume from: `recover`)."""

    standby_trainers: int | None = setting(
        None,
        "number of parked trainer processes for each rank, which have everything imported (on a CPU also the "
        "model and the prompts loaded) and take over when the trainer or a rank ends; null: 1 where memory allows",
        between(0, 1, why="since the process that ended is the next one to be parked"),
    )


@dataclass
class DeadlineConfig:
    """When the machine is taken away: the run saves before, and ends with exit code 75; the same command resumes it."""

    walltime: str | None = setting(
        None, "time from the start of the command to the end of its job; null: no limit", DURATION
    )
    notice_s: float = setting(
        120.0,
        "time that is left after SIGUSR1 (Slurm's --signal=B:USR1@120) or after a preemption notice, in seconds",
        POSITIVE,
    )
    preemption_notice: str | None = setting(
        None,
        "file whose existence, or URL whose answer, announces that the machine will be taken away; null: none",
        matching(r"https?://[^\s/]\S*|(?!\w+:)\S.*", "an http or https URL, or a file's path"),
    )
    notice_interval_s: float = setting(
        5.0, "interval between two checks for the preemption notice, in seconds", POSITIVE
    )
    margin_s: float = setting(
        30.0,
        "time to end all processes before a deadline, in seconds; twice the last save and the last weight update "
        "are added",
        NATURAL,
    )


@dataclass
class RestoreConfig:
    """Which checkpoint is good enough to go back to."""

    good_after_steps: int = setting(10, "number of healthy steps after which a checkpoint is certified good", COUNT)
    onset_margin_steps: int = setting(
        2, "number of steps before the estimated onset of a damage that are not trusted either", NATURAL
    )
    same_place_steps: int = setting(
        20, "largest distance of two onsets that count as the same place, in steps", NATURAL
    )
    begin_anew: bool = setting(
        True,
        "begin again from the first weights where no checkpoint is older than the onset and the run had learned "
        "nothing yet",
    )


@dataclass
class DiskConfig:
    """When a disk that is full, read-only, broken or stalled pauses the run, and when the run resumes."""

    probe_interval_s: float = setting(
        1.0, "interval between two probes of each disk, in seconds; a probe writes and syncs a file of 4 KiB", POSITIVE
    )
    stall_s: float = setting(
        30.0,
        "time without return of a probe after which the disk counts as stalled, in seconds; ten times that while a "
        "checkpoint is written, for which the probe may wait",
        DEADLINE,
    )
    settle_s: float = setting(2.0, "time that a disk must work again before the run resumes, in seconds", POSITIVE)
    settle_max_s: float = setting(
        60.0,
        "upper limit of disk.settle_s, which doubles with each trouble that comes back before a step is committed, "
        "in seconds",
        POSITIVE,
    )
    patience_s: float = setting(
        86_400.0, "longest pause until a person has repaired the disk, in seconds; then the run halts", DEADLINE
    )


@dataclass
class MemoryConfig:
    """Which settings are lowered when memory runs out, rung by rung; kept for the host and for later attempts."""

    give_way: bool = setting(
        True,
        "lower memory settings after an out-of-memory error; false: the run ends and keeps the settings that it "
        "was given",
    )
    mem_fraction_static: list[float] = setting(
        [0.8, 0.7, 0.6, 0.5, 0.4],
        "values of sglang.mem_fraction_static that a GPU server is lowered to, from high to low",
    )
    change_learning: bool = setting(
        False,
        "after the other memory settings, lower gconfig.max_new_tokens and gconfig.n_samples too, which changes "
        "what is learned",
    )
    min_new_tokens: int = setting(64, "lower limit to which gconfig.max_new_tokens is halved, in tokens", COUNT)
    remember: bool = setting(
        True, "keep lowered memory settings below cluster.fileroot and use them in the next attempt"
    )
