"""The ladder on a run: what a life ran with, what is written down, and what an attempt begins with."""

import asyncio
import time

from actors.supervision.oom_backoff import OomBackoff
from launcher.base.messages import Health, ServerState, Verdict
from launcher.config.schema import RunConfig
from launcher.policy.actions import RestartServer
from launcher.policy.exit_cause import RanOut
from launcher.policy.memory_backoff import CONCURRENCY, MICRO_BATCH, POOL_TOKENS, Lengths
from launcher.policy.observed import ServerFacts
from launcher.resources.hardware import Hardware
from launcher.resources.memory_history import MemoryHistory
from launcher.run_files.journal import Journal, read_lines
from tests.support.run_memory import history_of

HERE = Hardware(gpus=(), cpus=2, memory=24 * 2**30, memory_free=2**30)


class Attempt:
    """One attempt on a host; a second one of the same folder begins with what the first has learnt."""

    def __init__(self, folder, number=1, *, remember=True):
        self.config = RunConfig(experiment_name="x")
        self.config.actor.path = "model"
        self.config.sglang.max_total_tokens = 20000
        self.config.memory.remember = remember
        self.events = folder / f"events-{number}.jsonl"
        self.number = number
        self.book = MemoryHistory.of(self.config, folder, HERE)
        self.come_back()

    def come_back(self):
        """As a Coordinator does that was killed."""
        journal = Journal(self.events, self.number, time.time)
        self.history = history_of(self.events, self.number, journal=journal)
        self.ladder = OomBackoff(self.config, self.history, self.book, on_gpu=False, shares_gpu=False)
        asyncio.run(self.ladder.begin())

    def give_way(self, name, rung, where=RanOut.SERVER_HOST):
        self.history.begun(RestartServer(name=name, reason="", overrides=rung))
        asyncio.run(self.ladder.ran_out(name, where, Lengths(longest_sequence=40), rung))

    def names(self):
        return [event["event"] for event in read_lines(self.events)] if self.events.exists() else []


def dead(name):
    verdict = Verdict(health=Health.DEAD, reason="out of memory")
    return ServerFacts(name=name, state=ServerState.DEAD, verdict=verdict, ran_out=RanOut.SERVER_HOST)


def test_memory_ran_out_under_the_settings_of_the_life_that_ended(tmp_path):
    attempt = Attempt(tmp_path)
    attempt.history.started_server("server-0", 0, 0, 1)
    attempt.give_way("server-0", {POOL_TOKENS: 10000})
    (tried,) = attempt.history.memory.tried
    assert tried.settings.max_total_tokens == 20000, "not the ones that were just chosen"
    assert attempt.ladder.settings(Lengths(longest_sequence=40)).max_total_tokens == 10000
    attempt.come_back()
    assert attempt.history.memory.tried == [tried]
    assert attempt.history.memory.started_with == {"server-0": {}}


def test_a_second_server_that_met_the_same_end_costs_no_second_rung(tmp_path):
    attempt = Attempt(tmp_path)
    for name in ("server-0", "server-1"):
        attempt.history.started_server(name, 0, 0, 1)
    assert attempt.ladder.as_due(dead("server-1")).ran_out is RanOut.SERVER_HOST
    attempt.give_way("server-0", {POOL_TOKENS: 10000})
    assert attempt.ladder.as_due(dead("server-1")).ran_out is None, "its next life has the new settings anyway"
    attempt.history.started_server("server-1", 1, 0, 1)
    assert attempt.ladder.as_due(dead("server-1")).ran_out is RanOut.SERVER_HOST


def test_what_the_trainer_gave_way_changes_nothing_for_a_server(tmp_path):
    attempt = Attempt(tmp_path)
    attempt.history.started_server("server-0", 0, 0, 1)
    attempt.give_way("trainer", {MICRO_BATCH: 512}, RanOut.TRAINER_HOST)
    assert attempt.ladder.as_due(dead("server-0")).ran_out is RanOut.SERVER_HOST


def test_the_next_attempt_begins_with_what_was_learnt_and_says_how_to_forget(tmp_path):
    first = Attempt(tmp_path)
    assert first.names() == []
    first.history.started_server("server-0", 0, 0, 1)
    first.give_way("server-0", {POOL_TOKENS: 10000})
    second = Attempt(tmp_path, 2)
    assert second.history.started_server("server-0", 0, 0, 1) == {POOL_TOKENS: 10000}
    assert second.history.memory.tried == first.history.memory.tried
    (event,) = [e for e in read_lines(second.events) if e["event"] == "memory.remembered"]
    assert str(second.book.path) in event["reason"]
    assert "memory.remember=false" in event["reason"]
    second.come_back()
    assert second.names().count("memory.remembered") == 1, "read once in an attempt"
    assert second.history.memory.overrides == {POOL_TOKENS: 10000}


def test_whoever_forgets_or_wants_nothing_remembered_begins_as_configured(tmp_path):
    first = Attempt(tmp_path)
    first.give_way("server-0", {POOL_TOKENS: 10000})
    assert Attempt(tmp_path, 2, remember=False).history.memory.overrides == {}
    first.book.path.unlink()
    assert Attempt(tmp_path, 3).history.memory.overrides == {}
    Attempt(tmp_path, 4, remember=False).give_way("server-0", {POOL_TOKENS: 10000})
    assert not first.book.path.exists()


def test_a_damaged_book_costs_one_event(tmp_path):
    first = Attempt(tmp_path)
    first.book.path.parent.mkdir()
    first.book.path.write_text("{")
    second = Attempt(tmp_path, 2)
    (event,) = read_lines(second.events)
    assert event["event"] == "memory.book_damaged"
    assert str(first.book.path) in event["reason"]
    assert second.history.memory.overrides == {}


def test_a_book_that_can_not_be_written_costs_the_memory_of_later_attempts_alone(tmp_path):
    (tmp_path / "memory").write_text("in the way")
    attempt = Attempt(tmp_path)
    attempt.give_way("server-0", {POOL_TOKENS: 10000})
    assert "memory.not_kept" in attempt.names()
    assert attempt.history.memory.overrides == {POOL_TOKENS: 10000}


def test_the_limit_of_rollouts_is_there_for_whoever_runs(tmp_path):
    attempt = Attempt(tmp_path)
    assert attempt.ladder.concurrency is None
    attempt.give_way("server-0", {CONCURRENCY: 8})
    assert attempt.ladder.concurrency == 8


def test_where_the_trainer_never_said_how_long_its_sequences_are_the_context_bounds_them(tmp_path):
    """Else an empty process, which follows one that was killed, would let the ladder go below the longest sequence."""
    attempt = Attempt(tmp_path)
    attempt.config.sglang.context_length = 256
    assert attempt.ladder.settings(Lengths()).longest_sequence == 256
    assert attempt.ladder.settings(Lengths(longest_sequence=40)).longest_sequence == 40
