"""A run on two trainer ranks, each of which is killed, one while it starts and one stopped: all begin anew together,
where they were. Where ranks are parked, those that are take over, whichever rank it was."""

import contextlib
import os
import signal

import psutil
import pytest

from launcher.base.messages import Cause
from tests.programs.supervised_run import SupervisedRun

STEPS = 9
RANKS = 2
PARKED = "recovery.standby_trainers=1"
FAULTS = [(1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP)]
"""The rank that is lost, and how. The first of them also with parked ranks, below."""
KILLS = 5
"""At most, until two were followed by a takeover: ranks that do not answer in time are left for a cold start of all."""


class Ranks:
    """The ranks of a run, life after life."""

    def __init__(self, run: SupervisedRun) -> None:
        self._run = run

    def lives(self) -> list[list[int]]:
        """The pids of each life, rank 0 first."""
        return [event["pids"] for event in self._run.events("trainer.ranks_met")]

    def starting(self) -> list[int]:
        """Ranks beside the first, known by the names that Ray gives its processes."""
        found = []
        for process in self._run.family():
            with contextlib.suppress(psutil.Error):  # ended since
                if "TrainerRank" in " ".join(process.cmdline()):
                    found.append(process.pid)
        return found

    def parked(self) -> list[int]:
        """The pids of those that wait to take over, rank 0 first, once they are all there."""
        found: list[int] = []

        def are_parked() -> bool:
            begun, done = self._run.events("trainer.parking"), self._run.events("trainer.parked")
            others = set(self.starting()) - set(self.lives()[-1])
            if done and done[-1]["time"] > begun[-1]["time"] and done[-1]["pid"] != self.lives()[-1][0]:
                found[:] = [done[-1]["pid"], *others]
            return len(found) == RANKS

        self._run.wait_until(are_parked, "they are parked")
        return found

    def wait_life(self, number: int) -> list[int]:
        self._run.wait_until(lambda: len(self.lives()) >= number, f"life {number} of the ranks")
        return self.lives()[number - 1]

    def hit(self, pid: int, how: signal.Signals, *, life: int) -> int:
        """Returns the steps that were done; back when the next life has taken one more."""
        done = self._run.steps_done()
        os.kill(pid, how)
        self.wait_life(life + 1)
        self._run.wait_steps(done + 1)
        return done


def told_of(run: SupervisedRun, pid: int) -> str:
    """Why this process, of rank 1, was lost."""
    told = [event["reason"] for event in run.events("trainer.rank_lost")]
    (found,) = [reason for reason in told if f"trainer rank 1 (process {pid} " in reason]
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "faults", [FAULTS[1:], pytest.param(FAULTS, marks=pytest.mark.long)], ids=["one of each", "each of both"]
)
def test_a_lost_rank_costs_no_step_whichever_it_is(tmp_path, faults):
    with SupervisedRun(tmp_path, steps=STEPS, servers=1, ranks=RANKS) as run:
        ranks = Ranks(run)
        run.wait_until(ranks.starting, "a rank that starts")
        run.kill(ranks.starting()[0])
        run.wait_steps(2)
        assert len(set(ranks.wait_life(1))) == RANKS
        for life, (rank, how) in enumerate(faults, 1):
            ranks.hit(ranks.wait_life(life)[rank], how, life=life)
        *before, last = ranks.lives()
        assert not any(psutil.pid_exists(pid) for life in before for pid in life), "an old rank lives"
        run.finish()
        run.wait_gone()

        run.check_ledger()
        steps = [line["global_step"] for line in run.ledger()]
        assert steps == list(range(STEPS)), "no step was taken back and none twice"
        for pids, (rank, how) in zip(before, faults, strict=True):
            if rank:
                assert (" ended: " if how is signal.SIGKILL else "does not answer") in told_of(run, pids[rank])
        causes = {signal.SIGKILL: Cause.TRAINER_CRASH, signal.SIGSTOP: Cause.TRAINER_HANG}
        after_the_start = [causes[how] for _, how in faults]
        assert [cause for cause, _, _ in run.incidents().values()] == [Cause.TRAINER_CRASH, *after_the_start]
        assert all(mended for _, _, mended in run.incidents().values())
        assert ranks.lives() == [*before, last]
        assert len(last) == RANKS


@pytest.mark.timeout(900)
def test_parked_ranks_take_over_from_whichever_rank_is_lost_and_others_are_parked_next(tmp_path):
    with SupervisedRun(tmp_path, steps=3000, servers=1, ranks=RANKS, settings=(PARKED,)) as run:
        ranks = Ranks(run)
        first = ranks.wait_life(1)
        parked = ranks.parked()
        run.kill(parked[1])
        run.wait_until(lambda: len(run.events("trainer.parked")) == 2, "a parked rank that ended is replaced")
        again = ranks.parked()
        assert again[0] == parked[0], "the first of them stayed"
        assert again[1] != parked[1], "the first of them stayed"
        assert ranks.lives() == [first], "the trainer is not touched"
        assert run.events("trainer.rank_lost") == [], "the trainer is not touched"
        life, to_lose = 1, [1, 0]
        while to_lose:
            assert life <= KILLS, run.tail()
            waiting, takeovers = ranks.parked(), len(run.events("trainer.took_over"))
            lost = ranks.wait_life(life)[to_lose[0]]
            ranks.hit(lost, signal.SIGKILL, life=life)
            assert to_lose[0] == 0 or " ended: " in told_of(run, lost)
            life += 1
            now, took_over = ranks.wait_life(life), len(run.events("trainer.took_over")) > takeovers
            assert (now[0] == waiting[0]) == took_over
            if now == waiting:  # no process was started for it
                to_lose.pop(0)
            else:
                assert not set(now[1:]) & set(waiting), "all start cold"
        actors = [event["actor"] for event in run.events("trainer.took_over")]
        assert len(actors) >= 2
        assert actors == (["trainer-standby", "trainer"] * KILLS)[: len(actors)]
        run.stop()
        run.wait_gone()
        run.check_ledger()
        assert [line["global_step"] for line in run.ledger()] == list(range(run.steps)), "no step was taken twice"
        assert [cause for cause, _, _ in run.incidents().values()] == [Cause.TRAINER_CRASH] * (life - 1)
