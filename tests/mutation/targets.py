"""The modules that are mutated, and the test files that may notice."""

from __future__ import annotations

POLICY = "tests/unit/launcher/policy"
RECORDS = "tests/unit/launcher/run_files"
REPORTING = "tests/unit/launcher/reporting"
ROLLOUT = "tests/unit/actors/rollout"
EPISODES = "tests/unit/actors/episodes"
QUEUE = ("prompt_queue", "kept_answers", "training_data")
POOL = ("server_pool", "pool_news", "pool_probes", "pool_rules")
ENGINE = ("live_rollouts", "scripted_answers", "unanswered")
STEPS = ("scripted_steps",)
CHECKPOINTS = "tests/unit/launcher/checkpoints"
STORE = (
    "checkpoint_pruning",
    "checkpoint_store",
    "checkpoints",
    "reinstating",
    "restore_request",
    "retention",
    "unread_disk",
    "verification",
)
SCALING = "tests/unit/actors/supervision/test_fleet_scaling.py"
OF_THE_PLAN = (
    *("disk_pause", "may_pass", "node_policy", "plan", "plan_borders", "plan_of_a_command"),
    *("run_state", "servers", "standby_trainer", "states", "trainer", "undone_restore"),
)
PLAN = [*(f"{POLICY}/plan/test_{name}.py" for name in OF_THE_PLAN), SCALING]

TARGETS: dict[str, list[str]] = {
    "launcher/policy/admission.py": [f"{POLICY}/test_admission.py", f"{POLICY}/test_distance_by_server.py"],
    "launcher/policy/canary_policy.py": [
        *(f"{POLICY}/test_{name}.py" for name in ("canary_policy", "rescored")),
        f"{POLICY}/test_borne_out.py",
    ],
    "launcher/policy/change_point.py": [
        *(f"{POLICY}/test_{name}.py" for name in ("change_point", "reward_health")),
        f"{POLICY}/test_borne_out.py",
    ],
    "launcher/policy/checkpoint_status.py": [
        *(f"{POLICY}/test_{name}.py" for name in ("checkpoint_status", "restore")),
        f"{CHECKPOINTS}/test_retention.py",
    ],
    "launcher/policy/disk_health.py": [f"{POLICY}/test_disk_health.py", f"{POLICY}/plan/test_disk_pause.py"],
    "launcher/policy/exit_cause.py": [f"{POLICY}/test_exit_cause.py", f"{POLICY}/test_exit_messages.py"],
    "launcher/policy/incident_policy.py": [f"{POLICY}/test_incident_policy.py"],
    "launcher/policy/liveness.py": [f"{POLICY}/test_liveness.py"],
    "launcher/policy/memory_backoff.py": [f"{POLICY}/test_memory_backoff.py"],
    "launcher/policy/observation_history.py": [f"{POLICY}/test_liveness.py", f"{POLICY}/test_stopped_servers.py"],
    "launcher/policy/observed.py": PLAN,
    "launcher/policy/plan.py": [*PLAN, f"{POLICY}/test_restore.py", f"{POLICY}/test_standstill.py"],
    "launcher/policy/restart_budget.py": [f"{POLICY}/test_restart_budget.py", *PLAN],
    "launcher/policy/restore.py": [
        *(f"{POLICY}/test_{name}.py" for name in ("restore", "borne_out")),
        f"{POLICY}/plan/test_trainer.py",
    ],
    "launcher/policy/reward_health.py": [
        *(f"{POLICY}/test_{name}.py" for name in ("change_point", "reward_health")),
        *(f"{POLICY}/test_{name}.py" for name in ("borne_out", "sharp_falls")),
    ],
    "launcher/policy/routing.py": [
        f"{POLICY}/test_routing.py",
        *(f"{ROLLOUT}/test_{name}.py" for name in ("stream_pace", "dynamic_sampling")),
    ],
    "launcher/policy/standstill.py": [f"{POLICY}/test_standstill.py"],
    "launcher/policy/trainer_liveness.py": [f"{POLICY}/test_trainer_liveness.py", f"{POLICY}/test_trainer_bounds.py"],
    "launcher/base/prompt_order.py": [f"tests/unit/actors/data/test_{name}.py" for name in QUEUE],
    "launcher/reporting/ledger_audit.py": [
        f"{REPORTING}/test_{name}.py" for name in ("ledger_audit", "ledger_losses", "ledger_ends")
    ],
    "actors/episodes/transcript.py": [f"{EPISODES}/test_transcript.py"],
    "actors/data/prompt_queue.py": [f"tests/unit/actors/data/test_{name}.py" for name in QUEUE],
    "actors/rollout/request_loop.py": [
        f"{ROLLOUT}/test_{name}.py" for name in ("group_progress", "request_loop", "scripted_answers", "stream_pace")
    ],
    "actors/rollout/rollout_engine.py": [f"{ROLLOUT}/test_{name}.py" for name in ENGINE],
    "actors/rollout/rollout_stream.py": [
        f"{ROLLOUT}/test_{name}.py" for name in ("rollout_stream", "dynamic_sampling", "failed_groups")
    ],
    "actors/rollout/server_pool.py": [f"{ROLLOUT}/test_{name}.py" for name in POOL],
    "actors/training/step_loop.py": [f"tests/unit/actors/training/test_{name}.py" for name in STEPS],
    "launcher/checkpoints/checkpoint_store.py": [f"{CHECKPOINTS}/test_{name}.py" for name in STORE],
    "launcher/run_files/journal.py": [f"{RECORDS}/test_journal.py", f"{RECORDS}/test_journal_bounds.py"],
}
