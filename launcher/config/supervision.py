"""The settings of supervision: when something is wrong, how much evidence that needs, how often a repair is tried.

The same rules as in `launcher/config/schema.py`, of which these are parts.
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher.config.settings import COUNT, DEADLINE, NATURAL, POSITIVE, SHARE, Between, Duration, Matching, setting


@dataclass
class HealthConfig:
    """When a server or the trainer is hung. Time counts only while it was observed and was given the CPU."""

    look_interval_s: float = setting(0.25, "between two observations of a process, its probes and its tokens", POSITIVE)
    probe_interval_s: float = setting(1.0, "between two probes of a server: a generation of one token", POSITIVE)
    probe_busy_interval_s: float = setting(5.0, "the same while it makes tokens for others", POSITIVE)
    stopped_s: float = setting(
        1.2, "a server with a process stopped (SIGSTOP) for so long is hung; longer, to stop one on purpose", POSITIVE
    )
    silence_s: float = setting(3.0, "without an answer, a token or CPU time: one of three votes for a hang", POSITIVE)
    silence_factor: float = setting(10.0, "or so many of its usual answer times, where that is longer", POSITIVE)
    silence_max_s: float = setting(60.0, "but not longer than this", DEADLINE)
    lone_probe_factor: float = setting(5.0, "patience, times silence, where no client is known to wait", Between(1))
    proof_s: float = setting(10.0, "an answer, a token or an observation older than that is no evidence", POSITIVE)
    slow_factor: float = setting(2.5, "times slower than it used to be, and than its peers are: slow", Between(1))
    trainer_silence_s: float = setting(10.0, "a stopped trainer that doesn't answer for so long is hung", POSITIVE)
    trainer_factor: float = setting(10.0, "median steps without progress after which a trainer is hung", Between(1))
    trainer_min_s: float = setting(60.0, "but not before", POSITIVE)
    trainer_first_s: float = setting(
        1800.0, "the same before there is a median, in a checkpoint, and while servers load weights", DEADLINE
    )
    supervisor_silence_s: float = setting(30.0, "a supervisor that answers no call for so long is replaced", POSITIVE)
    monitor_silence_s: float = setting(
        600.0, "without a HealthMonitor, however often it is started: another attempt", DEADLINE
    )


@dataclass
class RewardHealthConfig:
    """When rewards show that something broke. Drops are in shares of the range of the rewards seen."""

    zero_alert_steps: int | None = setting(
        5, "steps of zeros in a row (more where they are usual): alert; null: never", COUNT
    )
    zero_breaker_steps: int | None = setting(10, "and: stop training and find the cause; null: never", COUNT)
    fall_threshold: float | None = setting(5.0, "standard errors of a fall that stops training; null: never", POSITIVE)
    fall_min_drop: float = setting(0.05, "no fall is smaller", Between(0, 1))
    baseline_steps: int = setting(50, "steps before a suspected onset that it is compared with", COUNT)
    warmup_steps: int = setting(15, "at least so many of them", Between(2))
    window_steps: int = setting(60, "how long ago an onset may lie", COUNT)
    noise_floor: float = setting(0.05, "least standard deviation that a step's mean reward is credited with", POSITIVE)
    outlier_clip: float = setting(4.0, "standard deviations that one step counts at most", POSITIVE)
    probation_steps: int = setting(50, "after a restore, with tighter thresholds", NATURAL)
    probation_factor: float = setting(0.8, "by which they are tighter", SHARE)
    canary_tolerance: float = setting(1e-6, "difference of a known answer's reward that is none", NATURAL)
    canary_silent_rounds: int = setting(2, "in a row in which one is not scored: broken", COUNT)
    canary_clear_rounds: int = setting(5, "in a row, all sound, after which a broken one is believed again", COUNT)
    verifier_patience_s: float = setting(600.0, "that a broken reward function may take to be repaired", DEADLINE)
    mend_wait_s: float = setting(
        60.0,
        "before another project's trainer, whose rewards fell for a cause outside its weights, is tried again; doubles "
        "with each try",
        POSITIVE,
    )
    mend_patience_s: float = setting(7200.0, "that the mend of such a cause may take; then the run halts", DEADLINE)


@dataclass
class GateConfig:
    """Which batches reach the optimizer. What is missing, not finite or of other weights never does, whatever is set.

    Distances are means of |server's - trainer's log-prob| over a batch, in nats. Measured at lr 3e-4 in float32:
    1e-7 for the same weights, 8e-4 and more for one version behind; in bfloat16 up to 2e-3 for the same, 4e-3 and
    more for ten behind, 0.2 and more for the first weights after 40 steps.
    """

    max_failed_share: float | None = setting(
        0.5, "of the requests: what comes through then is no fair sample; null: any", Between(0, 1)
    )
    distance_float32: float | None = setting(
        1e-5, "largest, where server and trainer both are float32; null: not checked", POSITIVE
    )
    distance_bfloat16: float | None = setting(3e-3, "largest, where one isn't; null: not checked", POSITIVE)
    distance_factor: float = setting(4.0, "or, in bfloat16, so many of the run's usual distances", Between(1))
    distance_unknown: float = setting(0.1, "largest before a usual one is known; twice it of older weights", POSITIVE)
    older_weights: bool | None = setting(
        None,
        "with rollout.max_head_offpolicyness, the weights of so many versions are kept in the host's memory, and "
        "tokens are compared with those of their own; null: where the trainer is on a CPU; "
        "false, or several trainer ranks: by gate.distance_unknown only",
    )
    max_reward_jump: float | None = setting(
        0.5, "of the mean reward, as a share of the range of rewards; null: not checked", Between(0, 1)
    )
    reward_jump_noise: float = setting(
        5.0, "and so many standard deviations of a step's mean, as the run has them: small batches vary", NATURAL
    )
    max_share_jump: float | None = setting(
        0.5, "rise of the share of completions cut at the limit, or blank; null: not checked", Between(0, 1)
    )
    compared_rejections: int = setting(
        2, "batches in a row that a jump alone turns away; a change that stays is no accident", NATURAL
    )
    usual_steps: int = setting(20, "last steps whose medians are usual", COUNT)
    usual_min_steps: int = setting(5, "before which nothing is compared", COUNT)
    canaries: int = setting(6, "known answers scored with each batch; 0: none", NATURAL)
    recorded: int = setting(
        48, "completions of healthy steps kept, to be scored and answered again when rewards are low; 0: none", NATURAL
    )


@dataclass
class AlertsConfig:
    """One message when an incident begins, one when it ends."""

    webhook: str | None = setting(
        None,
        "URL that gets each as JSON, recorded nowhere; null: none",
        Matching(r"https?://\S+|env:[A-Za-z_]\w*", "a URL, or env:NAME, the environment variable that holds it"),
    )
    wandb: bool = setting(True, "as a WandB alert too, where WandB is on")
    timeout: float = setting(10.0, "of one message", DEADLINE)


@dataclass
class RestartConfig:
    """How often a repair is tried before the next larger one; a step further than ever before refills all."""

    window_s: float = setting(3600.0, "without a failure, after which earlier ones are forgotten", POSITIVE)
    wait_initial_s: float = setting(1.0, "before the second try; doubles with each", POSITIVE)
    wait_max_s: float = setting(60.0, "longest wait between two tries", POSITIVE)
    retry: int = setting(3, "tries of the smallest repair: weights loaded again, a batch dropped", COUNT)
    server: int = setting(3, "restarts of one server", COUNT)
    fleet: int = setting(2, "restarts of all servers", COUNT)
    restore: int = setting(3, "restores of the trainer; then the run halts", COUNT)
    cluster: int = setting(3, "new local Ray clusters in place of one that was lost; then the run halts", NATURAL)
    driver: int = setting(3, "new drivers in place of one that was killed (keep_alive); then the run halts", NATURAL)
    attempt: int = setting(
        6, "new attempts of a run that halted for what may pass by itself; then it stays halted", NATURAL
    )
    attempt_wait_s: float = setting(30.0, "before the first of them; doubles with each, up to window_s / 2", POSITIVE)


@dataclass
class RecoveryConfig:
    """What stands ready for a failure (checkpoints to resume from: `recover`)."""

    standby_servers: int | None = setting(
        None,
        "started servers without traffic, which hold every version and take the place of a lost one; "
        "null: 1 where memory allows",
        NATURAL,
    )
    standby_trainers: int | None = setting(
        None,
        "processes with everything imported, and on a CPU the model and the prompts loaded, which take over when the "
        "trainer or one of its ranks ends; of each rank one. null: 1 where memory allows",
        Between(0, 1, why="as the one that ended is the next to stand by"),
    )
    quarantine_gpus: bool = setting(
        True,
        "a GPU whose fault ended a server is used no more by this run where another one is free, nor after a resume; "
        "false: it is, also what was set aside before",
    )


@dataclass
class DeadlineConfig:
    """When the machine is taken away: the run saves before, and ends with exit code 75; the same command resumes it."""

    walltime: str | None = setting(None, "from the start of the command to the end of its job; null: none", Duration())
    notice_s: float = setting(
        120.0, "left after SIGUSR1 (Slurm's --signal=B:USR1@120), or after a preemption notice", POSITIVE
    )
    preemption_notice: str | None = setting(
        None,
        "a file that is there, or a URL that says so, once the machine is to be taken away; null: none",
        Matching(r"https?://[^\s/]\S*|(?!\w+:)\S.*", "an http or https URL, or a file's path"),
    )
    notice_interval_s: float = setting(5.0, "between two looks for that notice", POSITIVE)
    margin_s: float = setting(30.0, "beyond twice the last save and the last update, to end all processes in", NATURAL)


@dataclass
class RestoreConfig:
    """Which checkpoint is good enough to go back to."""

    good_after_steps: int = setting(10, "healthy steps after which a checkpoint is certified good", COUNT)
    onset_margin_steps: int = setting(2, "before the estimated onset that are not trusted either", NATURAL)
    same_place_steps: int = setting(20, "onsets no further apart are at the same place", NATURAL)
    same_place_collapses: int = setting(3, "this many at the same place halt the run", COUNT)
    begin_anew: bool = setting(
        True, "from the first weights, where no checkpoint is from before the onset and the run had learned nothing yet"
    )


@dataclass
class DiskConfig:
    """When a disk that is full, read-only, broken or stalled pauses the run, and when the run resumes."""

    probe_interval_s: float = setting(1.0, "between two probes of each disk: a file of 4 KiB, synced", POSITIVE)
    stall_s: float = setting(30.0, "a probe that does not return for so long: the disk is stalled", DEADLINE)
    settle_s: float = setting(2.0, "in which a disk must work again before the run resumes", POSITIVE)
    settle_max_s: float = setting(60.0, "the same doubles with each trouble that follows at once, up to this", POSITIVE)
    forget_s: float = setting(300.0, "after which the next trouble does not follow at once", POSITIVE)
    patience_s: float = setting(86_400.0, "that a person may take to repair it; then the run halts", DEADLINE)


@dataclass
class MemoryConfig:
    """Which settings are lowered when memory runs out, rung by rung; kept for the host and for later attempts."""

    give_way: bool = setting(True, "false: a run that runs out of memory ends under the settings that it was given")
    mem_fraction_static: list[float] = setting([0.8, 0.7, 0.6, 0.5, 0.4], "of a GPU server, from the top down")
    min_concurrent_rollouts: int = setting(2, "max_concurrent_rollouts is halved down to it", COUNT)
    change_learning: bool = setting(False, "then max_new_tokens and n_samples too, which changes what is learned")
    min_new_tokens: int = setting(64, "max_new_tokens is halved down to it", COUNT)
    sample_interval_s: float = setting(10.0, "between two samples of how much memory is used", POSITIVE)
    remember: bool = setting(True, "what gave way is kept below cluster.fileroot, and used by the next attempt")
