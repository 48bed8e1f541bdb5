"""P8 and P9: whichever process of a run is killed, the run goes on or ends within its deadline, and leaves nobody.

`pytest tests/chaos/test_every_process.py --kills 30` makes the claim; without the option a few are tried.
"""

import contextlib
import random
import signal
import time
from functools import partial

import psutil
import pytest

from launcher.base.exit_codes import EXIT_CODES
from launcher.base.messages import TerminalStatus
from launcher.run_files.journal import read_lines
from scripts.check_ledger import audited_facts
from tests.programs.supervised_run import SupervisedRun
from tests.support.machine import scaled
from tests.support.worlds.chaos import role_of

pytestmark = pytest.mark.timeout(3600)

goes_on_s = partial(scaled, 120.0)
"""For a trainer or a server to be there again, and two steps; on a machine that does other things too."""
LEAVES_S = 10.0
STEPS = 4000


def test_whichever_process_dies_the_run_goes_on_or_ends_and_leaves_nobody(tmp_path, kills):
    draw, victims = random.Random(7), []
    wanted = kills(5)
    while len(victims) < wanted:
        with SupervisedRun(tmp_path, steps=STEPS, servers=1) as run:
            ended_before = len(endings(run))
            run.wait_steps(run.steps_done() + 2)
            while len(victims) < wanted:
                role, process = choose(run.family(), victims, draw)
                victims.append(role)
                print(f"kill {len(victims)}: {role} (pid {process.pid})", flush=True)
                if not goes_on_without(run, process):
                    break
            else:
                run.stop()
                role = "nobody"
            run.process.wait(goes_on_s())
            run.wait_gone(goes_on_s() if role == "keeper" else LEAVES_S)  # without a keeper the driver saves and ends
            check_end(run, role, endings(run)[ended_before:])
        check_ledger(run, role)


def endings(run):
    """Of all attempts, the newest last."""
    names = {f"run.{status.lower()}": status for status in TerminalStatus}
    found = [event for event in read_lines(run.paths.events) if event["event"] in names]
    return [(names[event["event"]], event["exit_code"]) for event in found]


def check_ledger(run, role):
    """A trainer that dies with its run may leave its last step without metrics, which the next resume writes."""
    if role == "nobody":
        run.check_ledger(is_whole=False)
        return
    found, last = audited_facts(run.paths).audit, run.ledger()[-1]["global_step"]
    assert set(found.problems) <= {f"steps without metrics: [{last}]"}, f"without {role}"


def check_end(run, role, ended):
    """The run has one terminal status at most, and its exit code; only a keeper that was killed has no exit code."""
    if role == "keeper":
        assert run.process.returncode == -signal.SIGKILL
        assert len(ended) <= 1, ended
        return
    status = TerminalStatus.ABORTED if role == "nobody" else TerminalStatus.ERRORED
    assert run.process.returncode == EXIT_CODES[status], f"without {role}: {run.said()[-3000:]}\n{run.tail()}"
    assert ended == [(status, EXIT_CODES[status])], f"without {role}: {run.tail()}"


def choose(family, victims, draw):
    """A process of the role that was killed least often so far, so that each has its turn."""
    roles = {}
    for process in family:
        if role := role_of(process):
            roles.setdefault(role, []).append(process)
    fewest = min(victims.count(role) for role in roles)
    role = draw.choice(sorted(role for role in roles if victims.count(role) == fewest))
    return role, draw.choice(roles[role])


def goes_on_without(run, process):
    """False where the run ended. Fails where it does neither within the deadline."""
    before = run.steps_done()
    with contextlib.suppress(psutil.NoSuchProcess):  # some end by themselves
        process.kill()
    deadline = time.monotonic() + goes_on_s()
    while run.process.poll() is None:
        if run.steps_done() >= before + 3:
            return True
        assert time.monotonic() < deadline, f"neither goes on nor ends\n{run.tail()}"
        time.sleep(0.05)
    return False
