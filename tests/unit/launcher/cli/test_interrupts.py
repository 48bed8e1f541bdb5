"""Signals that ask a run to end."""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from launcher.cli.interrupts import Interrupts, NoInterrupts


@pytest.fixture(autouse=True)
def as_before():
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests too may run under nohup
    yield
    signal.signal(signal.SIGHUP, before)


def test_a_terminal_that_is_closed_asks_the_run_to_end_however_often_it_is_told():
    """It ended the driver at once, and the run without a status (P9)."""
    with Interrupts() as interrupts:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGHUP)
        assert interrupts.asked
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_while_nothing_has_begun_the_first_signal_ends_it_and_a_notice_is_noted(number):
    with Interrupts(ends_at_once=True) as interrupts:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert (interrupts.asked, interrupts.notified_at is not None) == (False, True)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)


def test_a_signal_that_was_held_back_is_heard():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)  # another thread of the test's process would end it
    with Interrupts() as interrupts:
        assert interrupts.asked


def test_under_nohup_it_goes_on():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Interrupts() as interrupts:
        interrupts.listen_again()
        os.kill(os.getpid(), signal.SIGHUP)
        assert not interrupts.asked
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_who_ends_a_run_while_ray_starts_is_told_at_once(capfd):
    """Nothing was said until Ray was up."""
    with Interrupts() as interrupts:
        interrupts.spare_children()
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.asked
        assert "ends when Ray has started" in capfd.readouterr().err
    with Interrupts() as interrupts:
        interrupts.spare_children()
        interrupts.listen_again()
        os.kill(os.getpid(), signal.SIGINT)
        assert (interrupts.asked, capfd.readouterr().err) == (True, "")


def test_what_is_started_before_it_listens_hears_of_no_closed_terminal():
    """The kernel tells Ray's processes too, and a run without them can't be saved."""
    with Interrupts() as interrupts:
        interrupts.spare_children()
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        signal.pthread_kill(threading.get_ident(), signal.SIGHUP)  # another thread of the test's process might hear it
        assert not interrupts.asked
        interrupts.listen_again()
        assert interrupts.asked, "it had waited"
    blocked = re.search(r"SigBlk:\s*(\w+)", Path(f"/proc/{child.pid}/status").read_text())
    child.communicate(b"\n")
    assert blocked is not None
    assert int(blocked[1], 16) >> (signal.SIGHUP - 1) & 1


def test_a_killed_command_is_not_called_the_users_wish():
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert Interrupts(keeper=gone.pid).reason == "the command's own process was killed"
    for one in (Interrupts(keeper=os.getppid()), Interrupts(), NoInterrupts()):
        assert one.reason == "ended by the user"
