"""Whose mutants are drawn: the modules where the user's work lies, of every room but those of benchmarks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

CHOSEN: dict[str, str] = {
    "launcher": "__main__ driver driver_process",
    "launcher/adapters": "areal_adapter command_adapter foreign_health",
    "launcher/base": "addresses durable",
    "launcher/checkpoints": "checkpoint_store onset checkpoint_catalog in_memory_checkpoints restore_request",
    "launcher/cli": "attempt_incidents deadlines interrupts",
    "launcher/config": "compose validation settings schedule",
    "launcher/diagnosis/judging": "rules verdict causes",
    "launcher/diagnosis/output": "as_text",
    "launcher/diagnosis/reading": "inputs log_file log_clock",
    "launcher/html_report": "page_facts lanes",
    "launcher/policy": "plan observed",
    "launcher/reporting": "ledger_audit samples run_reader figures",
    "launcher/resources": "config_checks memory_estimate placement",
    "launcher/run_files": "journal run_paths control_requests run_memory",
    "launcher/run_log": "run_log lost_time incident_facts",
    "launcher/sweep": "sweep_run sweep_report",
    "actors/cluster": "fencing placement_group ray_cluster",
    "actors/data": "prompt_queue record_sources dataset",
    "actors/episodes": "episode_runner episode",
    "actors/foreign": "command_trainer foreign_checkpoints door_requests",
    "actors/model": "objective grpo micro_batches",
    "actors/monitoring": "reward_series disk_watch",
    "actors/processes": "log_drain process_host hosted_process",
    "actors/ranks": "rank_controller",
    "actors/reward": "reward_pool user_process known_answers recorded_answers",
    "actors/rollout": "server_pool rollout_engine rollout_stream",
    "actors/serving": "completions sglang_server sglang_command server_watch",
    "actors/supervision": "coordinator action_executor cluster_observer trainer_handle",
    "actors/training": "step_loop step_memory admission_gate",
    "actors/weights": "weight_publisher weight_consistency_check servers weight_transports",
    "scripts": "run_control list_checkpoints",
    "scripts/checkpoints": "areal_setup choosing",
    "scripts/faults": "schedule",
    "scripts/health": "run_check recorded_run",
    "scripts/watch_page": "watched_run server",
}
"""By room, the weightiest first."""


def in_turn() -> Iterator[str]:
    """One of each room, then the second of each: where the time ends early, each room has been measured."""
    rooms = [[f"{room}/{name}.py" for name in names.split()] for room, names in CHOSEN.items()]
    for of_each in itertools.zip_longest(*rooms):
        yield from (path for path in of_each if path is not None)
