"""Both directions of a reward process have their own deadlines, though two threads use them at once."""

import os
import signal
import threading
import time

import pytest

from actors.reward.reward_process import ProcessGone, RewardProcess
from launcher.config.schema import RewardConfig
from tests.support.machine import wait_until

AN_HOUR_S = 3600.0


class AsItIsWritten:
    """A message during whose making the other thread begins to wait for an answer."""

    def __init__(self, begin):
        self.begin = begin

    def __reduce__(self):
        self.begin()
        return str, ("x" * 2**22,)  # more than a socket takes without a reader


def test_a_message_to_a_process_that_reads_nothing_has_its_own_deadline_while_another_thread_waits_an_hour():
    process = RewardProcess(RewardConfig(fn="tests.support.rewards:by_text", timeout=30.0, setup_timeout=60.0))
    try:
        process.wait_ready()
        os.kill(process.pid, signal.SIGSTOP)
        ended = []

        def wait_for_an_answer():
            with pytest.raises(ProcessGone):
                process.receive(time.monotonic() + AN_HOUR_S)
            ended.append(True)

        reader = threading.Thread(target=wait_for_an_answer)

        def begin():
            reader.start()
            wait_until(lambda: (process._socket.gettimeout() or 0) > AN_HOUR_S / 2)

        with pytest.raises(TimeoutError):
            process.send(AsItIsWritten(begin), time.monotonic() + 0.5)
        process.kill()
        reader.join()
        assert ended == [True]
    finally:
        process.bury()
