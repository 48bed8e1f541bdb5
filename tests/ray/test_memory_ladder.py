"""Where memory is short a run finds the settings that fit, and the next attempt begins with them."""

import pytest

from launcher.policy.memory_backoff import POOL_TOKENS
from tests.programs.memory_run import MemoryRun

pytestmark = pytest.mark.timeout(600)


def test_a_server_that_finds_no_memory_starts_smaller_and_the_next_attempt_knows(tmp_path):
    room = ("--out-of-memory-above", "6000")
    with MemoryRun(tmp_path, steps=2, tokens=20000, room=room) as run:
        said = run.finish()
        assert run.overrides() == [{POOL_TOKENS: 10000}, {POOL_TOKENS: 5000}]
        assert [e["ran_out"] for e in run.events("memory.ran_out")] == ["server_host"] * 2
        assert [e["settings"]["max_total_tokens"] for e in run.events("memory.ran_out")] == [20000, 10000]
        repairs = run.events("repair.begun", "server-0")
        assert {e["cause"] for e in repairs if e["rung"] == "server"} == {"server_oom"}
        assert "server-0 ran out of memory (server_host): sglang.max_total_tokens=10000" in said
    with MemoryRun(tmp_path, steps=3, tokens=20000, room=room) as run:
        said = run.finish()
        assert len(run.overrides()) == 2, "the second attempt restarted nothing"
        assert "this attempt begins with sglang.max_total_tokens=5000" in said
        assert run.events("server.starting")[-1]["with_overrides"] == {POOL_TOKENS: 5000}
        run.check_ledger()


def test_too_little_room_for_the_cache_at_the_start_needs_the_opposite(tmp_path):
    with MemoryRun(tmp_path, steps=2, tokens=1000, room=("--too-small-below", "3000")) as run:
        run.finish()
        assert run.overrides() == [{POOL_TOKENS: 2000}, {POOL_TOKENS: 4000}]
        assert [e["ran_out"] for e in run.events("memory.ran_out")] == ["server_pool_too_small"] * 2
