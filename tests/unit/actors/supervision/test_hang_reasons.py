"""A server that hangs because memory ran out says so in its log, and nowhere else."""

import asyncio

import pytest

from actors.supervision.server_handle import HangReasons, part_of
from launcher.base.messages import Cause, Health, ServerState, Verdict
from launcher.policy.exit_cause import RanOut
from launcher.policy.observed import ServerFacts

BEGIN = "==== generation {}, 2026-11-21T03:40:00+00:00: python -m actors.serving.sglang_cpu"
AS_SEEN = "Exception ignored in thread started by: <object repr() failed>\nMemoryError: \n"


def hung(cause=Cause.SERVER_HANG, health=Health.DEAD):
    verdict = Verdict(health=health, reason="loading weights for 60.0 s, more than 60 s", cause=cause)
    return ServerFacts(name="server-0", state=ServerState.STALE, verdict=verdict)


def words(tmp_path, *lives):
    log = tmp_path / "log"
    log.write_text("".join(f"{BEGIN.format(number)}\n{said}" for number, said in enumerate(lives)))
    return HangReasons(lambda name: log)


def explain(reasons, facts, generation):
    """As seen once its log has been read."""
    reasons.explain(facts, generation)
    asyncio.run(reasons.read())
    assert not reasons.has_unread
    return reasons.explain(facts, generation)


def test_memory_that_ran_out_in_one_thread_is_the_cause(tmp_path):
    facts = explain(words(tmp_path, AS_SEEN), hung(), 0)
    assert facts.verdict.cause is Cause.SERVER_OOM
    assert facts.ran_out is RanOut.SERVER_HOST
    assert facts.verdict.reason == "loading weights for 60.0 s, more than 60 s; its log says: MemoryError:"


def test_what_an_earlier_life_said_is_no_cause(tmp_path):
    assert explain(words(tmp_path, AS_SEEN, "all is well\n"), hung(), 1) == hung()


@pytest.mark.parametrize("facts", [hung(Cause.SERVER_CRASH), hung(health=Health.SUSPECT)])
def test_only_who_is_condemned_for_a_hang_is_explained(tmp_path, facts):
    assert explain(words(tmp_path, AS_SEEN), facts, 0) == facts


def test_a_hang_without_words_is_a_hang(tmp_path):
    assert explain(HangReasons(lambda name: tmp_path / "none"), hung(), 0) == hung()


def test_a_log_is_read_once_for_a_life(tmp_path):
    said = words(tmp_path, "all is well\n")
    explain(said, hung(), 0)
    (tmp_path / "log").write_text(f"{BEGIN.format(0)}\n{AS_SEEN}")
    assert explain(said, hung(), 0) == hung()
    assert explain(said, hung(), 1).ran_out is RanOut.SERVER_HOST


def test_the_part_of_a_life_ends_the_log():
    text = f"{BEGIN.format(1)}\none\n{BEGIN.format(11)}\neleven\n"
    assert part_of(text, 11).endswith("eleven\n")
    assert "one\n" not in part_of(text, 11).partition("\n")[2]
    assert part_of("no beginning left", 3) == "no beginning left"
