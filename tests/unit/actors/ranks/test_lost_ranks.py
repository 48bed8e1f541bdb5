"""Which rank is told to be lost, and when, where several end or fail at once."""

import errno
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError, RayTaskError

from actors.ranks import rank_controller
from actors.ranks.rank_controller import SETTLE_S, RankController
from actors.supervision.trainer_handle import finding_of
from launcher.base.errors import TrainerError
from launcher.base.messages import LoopFailure
from launcher.base.rank_location import RankLocation
from launcher.policy.exit_cause import RanOut
from tests.support.machine import scaled

RANKS = (1, 2)
DEAD = RayActorError(error_msg="its worker died")
FAILED = RayTaskError("stay", "…", TrainerError("the connection was reset"), pid=1, ip="127.0.0.1")


class FakeRay:
    """What `stay` came to, by rank; `later`: what it comes to while one waits."""

    def __init__(self, now, later):
        self.ended = dict(now)
        self.later = later
        self.waits = []

    def wait(self, stays, timeout):
        return [stay for stay in stays if stay in self.ended], [stay for stay in stays if stay not in self.ended]

    def get(self, stay):
        raise self.ended[stay]

    def sleep(self, seconds):
        self.waits.append(seconds)
        self.ended |= self.later


def controller(monkeypatch, fake, errors=(), ranks=RANKS):
    """That of rank 0, and what the journal has of it."""
    told = []
    monkeypatch.setattr(rank_controller, "ray", fake)
    monkeypatch.setattr(rank_controller, "time", SimpleNamespace(sleep=fake.sleep, monotonic=lambda: 0.0))
    made = object.__new__(RankController)
    made._ranks = [SimpleNamespace(stay=SimpleNamespace(remote=lambda rank=rank: rank)) for rank in ranks]
    made.where = [RankLocation(node="0123456789", pid=10 + rank) for rank in ranks]
    made._errors = errors or [None] * len(ranks)
    made.lost = ""
    made._is_begun = True
    made._working_since = None
    made._is_lost = threading.Event()
    made._is_closed = threading.Event()
    made._losing = threading.Lock()
    made._kills = SimpleNamespace(risen=lambda: 0)
    made._journal = SimpleNamespace(record=lambda event, subject, reason: told.append((event, reason)))
    return made, told


def watched(monkeypatch, fake, errors=(), ranks=RANKS):
    """What the journal has of it."""
    made, told = controller(monkeypatch, fake, errors, ranks)
    made._watch()
    return told


@pytest.mark.parametrize(
    ("now", "later", "reason", "waits"),
    [
        ({1: DEAD}, {}, "trainer rank 1 (process 11 of node 01234567) ended: its worker died", []),
        ({1: FAILED, 2: DEAD}, {}, "trainer rank 2 (process 12 of node 01234567) ended: its worker died", []),
        ({1: FAILED}, {2: DEAD}, "trainer rank 2 (process 12 of node 01234567) ended: its worker died", [SETTLE_S]),
        ({1: FAILED}, {}, "trainer rank 1 failed: the connection was reset", [SETTLE_S]),
    ],
    ids=["ended", "beside one that failed for it", "told after the one that failed for it", "failed by itself"],
)
def test_an_end_is_told_at_once_and_a_failure_when_no_end_explains_it(monkeypatch, now, later, reason, waits):
    fake = FakeRay(now, later)
    assert watched(monkeypatch, fake) == [("trainer.rank_lost", reason)]
    assert fake.waits == waits


@pytest.mark.parametrize("ended", [1, 32, 63])
def test_of_64_ranks_the_one_that_ended_is_named_although_all_others_failed_for_it(monkeypatch, ended):
    others = range(1, 64)
    fake = FakeRay({rank: DEAD if rank == ended else FAILED for rank in others}, {})
    ((_, reason),) = watched(monkeypatch, fake, ranks=others)
    assert reason == f"trainer rank {ended} (process {10 + ended} of node 01234567) ended: its worker died"


def test_what_a_rank_printed_as_it_aborted_is_its_reason(monkeypatch, tmp_path):
    """The restart then gives it less: its own process's end says nothing of memory."""
    errors = tmp_path / "worker.err"
    thrown = "terminate called after throwing an instance of 'std::bad_alloc'"
    errors.write_text(f"{thrown}\n  what():  std::bad_alloc\n***\n")
    ((_, reason),) = watched(monkeypatch, FakeRay({1: FAILED, 2: DEAD}, {}), (None, errors))
    assert reason.endswith(f"its worker died; it printed: {thrown}   what():  std::bad_alloc")
    failure = LoopFailure(kind="TrainerError", message=reason, global_step=3)
    assert finding_of(failure).ran_out is RanOut.TRAINER_HOST


@pytest.mark.parametrize("end", [DEAD, FAILED], ids=["killed", "failed"])
def test_a_collective_that_a_lost_rank_holds_up_for_ever_ends_with_the_process(monkeypatch, end):
    """As LoRA's export may: no exception reaches a thread that waits in it."""
    is_waiting, is_over, codes = threading.Event(), threading.Event(), []
    made, told = controller(monkeypatch, FakeRay({1: end}, {}), ranks=[1])
    made._ranks[0].call = SimpleNamespace(remote=lambda *_: None)
    made._joining = []

    def exit_process(code):
        codes.append(code)
        is_over.set()
        made._is_closed.set()

    def gather_weights(dtype):
        is_waiting.set()
        is_over.wait()
        raise RuntimeError("the test has let it go")

    learner = SimpleNamespace(gather_weights=gather_weights)
    now = itertools.count(step=rank_controller.GRACE_S)
    monkeypatch.setattr(rank_controller.os, "_exit", exit_process)
    monkeypatch.setattr(rank_controller.time, "monotonic", lambda: next(now))
    with ThreadPoolExecutor() as threads:
        exporting = threads.submit(made.call, learner, "gather_weights", [[0], [0]])
        assert is_waiting.wait(scaled(30.0))
        made._watch()
        with pytest.raises(TrainerError, match="trainer rank 1"):
            exporting.result()
    assert codes == [rank_controller.RANK_LOST]
    assert [event for event, _ in told] == ["trainer.rank_lost"]


class Asked:
    """One rank's answer, or what it raises; `log` has in which order things were done."""

    def __init__(self, answer, log):
        self.answer = answer
        self.log = log
        self.is_slow = False
        self.ask = SimpleNamespace(remote=lambda order, arguments, named: self)


class AnswersOfRay:
    """A rank that is slow has not answered at the first look."""

    def wait(self, asked, num_returns, timeout):
        slow = [one for one in asked if one.is_slow]
        for one in slow:
            one.is_slow = False
        asked[0].log.append("looked" if slow else "waited")
        return [one for one in asked if one not in slow], slow

    def get(self, asked):
        for one in asked:
            if isinstance(one.answer, Exception):
                raise one.answer
        return [one.answer for one in asked]


def asked_of(monkeypatch, answer, own=lambda folder: "own"):
    log = []
    monkeypatch.setattr(rank_controller, "ray", AnswersOfRay())
    monkeypatch.setattr(rank_controller, "EXPLAIN_S", 0.0)
    made = object.__new__(RankController)
    made._ranks = [Asked(answer, log)]
    made._joining = []
    made.lost = ""
    made._is_lost = threading.Event()
    return made, log, SimpleNamespace(write=own)


def test_each_rank_answers_for_itself(monkeypatch):
    made, _, learner = asked_of(monkeypatch, "theirs")
    assert made.ask_each(learner, "write", "folder") == ["own", "theirs"]


def test_a_disk_that_refuses_a_rank_is_told_as_the_disk_s_and_loses_no_rank(monkeypatch):
    full = OSError(errno.ENOSPC, "No space left on device")
    made, _, learner = asked_of(monkeypatch, RayTaskError("ask", "…", full, pid=1, ip="127.0.0.1"))
    with pytest.raises(OSError, match="No space left") as refused:
        made.ask_each(learner, "write", "folder")
    assert (refused.value.errno, made.lost) == (errno.ENOSPC, "")


def test_want_of_memory_where_a_rank_writes_loses_no_rank(monkeypatch):
    made, log, learner = asked_of(monkeypatch, RayTaskError("ask", "…", MemoryError(), pid=1, ip="127.0.0.1"))
    with pytest.raises(MemoryError):
        made.ask_each(learner, "write", "folder")
    assert (made.lost, log) == ("", ["waited"])


def test_of_a_rank_that_ended_meanwhile_the_reason_is_told(monkeypatch):
    made, _, learner = asked_of(monkeypatch, DEAD)
    with pytest.raises(TrainerError, match="a trainer rank did not answer: write: its worker died"):
        made.ask_each(learner, "write", "folder")


def test_where_rank_0_fails_the_others_have_ended_before_it_is_told(monkeypatch):
    """Else one would still write into a folder that is removed, or written again."""

    def refuse(folder):
        log.append("refused")
        raise OSError(errno.EIO, "Input/output error")

    made, log, learner = asked_of(monkeypatch, "theirs", refuse)
    with pytest.raises(OSError, match="Input/output error"):
        made.ask_each(learner, "write", "folder")
    assert log == ["refused", "waited"]


def test_where_one_rank_fails_a_slow_one_has_ended_before_it_is_told(monkeypatch):
    """It still wrote its rows while the next step changed them, and into the slot that was written again."""
    full = OSError(errno.ENOSPC, "No space left on device")
    made, log, learner = asked_of(monkeypatch, RayTaskError("ask", "…", full, pid=1, ip="127.0.0.1"))
    made._ranks.append(Asked("theirs", log))
    made._ranks[1].is_slow = True
    with pytest.raises(OSError, match="No space left"):
        made.ask_each(learner, "write", "folder")
    assert log == ["looked", "waited"]


def test_a_rank_that_could_not_join_is_lost_also_where_it_is_asked_first(monkeypatch):
    """The first weights are written before the first order to all; its own error came out, and no loss was told."""
    failed = RuntimeError("out of memory")
    made, log, learner = asked_of(monkeypatch, "theirs")
    made._losing = threading.Lock()
    made._is_begun = False
    made._joining = [Asked(RayTaskError("join", "…", failed, pid=1, ip="127.0.0.1"), log)]
    with pytest.raises(TrainerError, match="the trainer's ranks did not meet: out of memory"):
        made.ask_each(learner, "write", "folder")
    assert made.lost
