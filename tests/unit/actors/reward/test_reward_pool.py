"""Scoring in processes: limits, failures, deaths, and what outlives what. Real processes throughout."""

import asyncio
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from actors.processes.loop_thread import LoopThread
from actors.reward import user_process
from actors.reward.reward_pool import RewardPool, Score
from launcher.base.errors import RewardError, RewardImportError
from launcher.config.schema import RewardConfig
from tests.support.machine import scaled, wait_until
from tests.support.worlds.reward import PROMPT, config, deadline_s, score

ROOT = Path(__file__).parents[4]

REWARDS = """
    import ctypes, os, signal, subprocess, sys, time
    from pathlib import Path

    def score(*, completion, answer, prompt_id, record):
        word, _, rest = completion.partition(" ")
        return globals()[word](rest, answer, prompt_id, record)

    def number(text, *_): return float(text)
    def length(text, answer, prompt_id, record): return len(text + answer + prompt_id) + record.pop("level")
    def pid(*_): return os.getpid()
    def wait(text, *_): time.sleep(float(text)); return float(text)
    def say(text, *_): print(text, flush=True); sys.stderr.write(text); return 1
    def fail(text, *_): raise KeyError(text)
    def leave(*_): sys.exit(1)
    def answer(text, *_): return eval(text)
    def loop(*_):
        while True: pass
    def hang_loudly(*_): print("hanging", flush=True); hang()
    def hang(*_): ctypes.PyDLL(None).pause()  # in C, with the interpreter's lock held
    def fork(text, *_):
        os.fork()  # and the child comes back, as this process does
        return float(text)
    def die(*_): os.kill(os.getpid(), signal.SIGKILL)
    def die_once(path, *_):
        if not Path(path).exists():
            Path(path).touch()
            die()
        return 5
    def leave_child(path, *_):
        with open(path, "a") as file:
            print(subprocess.Popen(["sleep", "1000"]).pid, file=file)
        die()
"""


@pytest.fixture
def rewards(tmp_path, monkeypatch):
    """A reward function of the user's own, which does as the completion says."""
    (tmp_path / "user_rewards.py").write_text(textwrap.dedent(REWARDS))
    monkeypatch.syspath_prepend(tmp_path)
    return "user_rewards:score"


def gone(pid):
    """Whether the process ends within the deadline, whoever reaps it."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with os.fdopen(handle):
        return bool(select.select([handle], [], [], deadline_s())[0])


@pytest.mark.slow
def test_the_default_reward_in_order():
    with RewardPool(RewardConfig()) as pool:
        assert pool.check(PROMPT) == 1.0
        scores = score(pool, ["#### 41", "#### 42", "no idea", "\\boxed{\\frac{84}{2}}"])
    assert scores == [Score(value=0.0), Score(value=1.0), Score(value=0.0), Score(value=1.0)]


def test_the_function_gets_all_of_the_record_each_time_anew(rewards):
    with RewardPool(config(rewards)) as pool:
        expected = len("ab" + str(PROMPT.record["answer"]) + "p1") + 2
        assert score(pool, ["length ab", "length ab"]) == [Score(value=expected)] * 2


def test_many_groups_at_once_on_two_processes(rewards):
    async def all_of(pool):
        groups = [pool.score([f"number {10 * i + j}" for j in range(8)], PROMPT) for i in range(16)]
        return await asyncio.gather(*groups)

    with RewardPool(config(rewards, workers=2)) as pool:
        groups = asyncio.run(asyncio.wait_for(all_of(pool), deadline_s()))
    assert [[s.value for s in group] for group in groups] == [[10 * i + j for j in range(8)] for i in range(16)]


def test_a_process_that_the_function_forked_answers_nothing(rewards):
    """Its answer was taken for that to the next completion: the next prompt was trained on with this one's rewards."""
    with RewardPool(config(rewards)) as pool:
        for n in range(4):
            said = [f"fork {n}", *(f"number {n + i / 10}" for i in range(1, 4))]
            assert [one.value for one in score(pool, said)] == [n, n + 0.1, n + 0.2, n + 0.3]


@pytest.mark.slow
@pytest.mark.parametrize("stuck", ["loop", "hang"])
def test_one_that_never_returns_costs_only_its_own_reward(rewards, stuck):
    soon_s = round(scaled(1.0), 1)
    with RewardPool(config(rewards, timeout=soon_s)) as pool:
        before, late, after = score(pool, ["number 1", stuck, "number 3"])
    assert (before.value, after.value) == (1.0, 3.0)
    why = f"took longer than reward.timeout={soon_s:g} s (user_rewards:score, the completion {stuck!r})"
    assert late == Score(value=None, error=why)


@pytest.mark.slow
def test_of_a_group_that_is_scored_whole_or_not_at_all_the_rest_is_not_tried(rewards):
    soon_s = round(scaled(1.0), 1)
    with RewardPool(config(rewards, timeout=soon_s)) as pool:
        asked = pool.score(["number 1", "hang", "number 3"], PROMPT, whole_or_none=True)
        scores = asyncio.run(asyncio.wait_for(asked, deadline_s()))
        why = f"took longer than reward.timeout={soon_s:g} s (user_rewards:score, the completion 'hang')"
        late = Score(value=None, error=why)
        assert scores == [Score(value=1.0), late, late]
        assert score(pool, ["number 4"]) == [Score(value=4.0)]


@pytest.mark.parametrize(
    ("completion", "why"),
    [
        ("fail spoon", "KeyError: 'spoon' (user_rewards.py:14)"),
        ("leave", "SystemExit: 1 (user_rewards.py:15)"),
        ("answer 'high'", "score answered 'high', a str and not a number"),
        ("answer [1.0]", "score answered [1.0], a list and not a number; it answers one number, for one completion"),
        ("answer {}", "score answered an empty dict"),
        ("answer {'a': 1.0, 'b': 'x'}", "score, part b, answered 'x', a str and not a number"),
        ("answer 1+2j", "score answered (1+2j), a complex and not a number"),
        ("answer float('nan')", "score answered nan, which is not finite"),
        ("answer -float('inf')", "score answered -inf, which is not finite"),
        ("answer 10**400", "OverflowError: int too large to convert to float"),
    ],
)
def test_a_failure_is_no_reward_and_never_0(rewards, completion, why):
    with RewardPool(config(rewards)) as pool:
        assert score(pool, ["number 1", completion, "number 0"]) == [
            Score(value=1.0),
            Score(value=None, error=why),
            Score(value=0.0),
        ]


@pytest.mark.parametrize(("text", "value"), [("True", 1.0), ("3", 3.0), ("__import__('numpy').float32(0.5)", 0.5)])
def test_any_real_number_is_a_reward(rewards, text, value):
    with RewardPool(config(rewards)) as pool:
        assert score(pool, [f"answer {text}"]) == [Score(value=value)]


def test_a_process_killed_while_it_scores_is_replaced_and_the_item_tried_again(rewards, tmp_path):
    with RewardPool(config(rewards)) as pool:
        values = [s.value for s in score(pool, ["number 1", f"die_once {tmp_path / 'mark'}", "number 3"])]
    assert values == [1.0, 5.0, 3.0]


def test_an_item_that_kills_its_process_twice_has_no_reward(rewards):
    with RewardPool(config(rewards)) as pool:
        first, deadly, last = score(pool, ["number 1", "die", "number 3"])
    assert (first.value, last.value) == (1.0, 3.0)
    why = "the scoring process ended 2 times: killed by SIGKILL (user_rewards:score, the completion 'die')"
    assert deadly == Score(value=None, error=why)


def test_a_process_killed_while_idle_is_replaced(rewards):
    with RewardPool(config(rewards)) as pool:
        (before,) = score(pool, ["pid"])
        os.kill(int(before.value), signal.SIGKILL)
        (after,) = score(pool, ["pid"])
    assert after.value not in (None, before.value)


@pytest.mark.slow
def test_a_process_stopped_while_idle_is_replaced(rewards):
    with RewardPool(config(rewards, timeout=scaled(1.0))) as pool:
        (before,) = score(pool, ["pid"])
        os.kill(int(before.value), signal.SIGSTOP)
        late, after = score(pool, ["pid", "pid"])
        assert gone(int(before.value))
    assert late.value is None
    assert after.value not in (None, before.value)


def test_what_the_function_started_is_killed_with_it(rewards, tmp_path):
    with RewardPool(config(rewards)) as pool:
        assert score(pool, [f"leave_child {tmp_path / 'pids'}"])[0].value is None
        left = (tmp_path / "pids").read_text().split()
        assert len(left) == 2
        assert all(gone(int(pid)) for pid in left)


def test_what_the_function_prints_is_not_taken_for_its_answer(rewards, capfd):
    with RewardPool(config(rewards)) as pool:
        assert score(pool, ['say {"value": 9}', "number 2"]) == [Score(value=1.0), Score(value=2.0)]
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err == '{"value": 9}\n{"value": 9}'


def test_where_its_output_goes_to_a_log_each_kind_of_failure_has_one_traceback_there(rewards, tmp_path, monkeypatch):
    monkeypatch.setattr(user_process, "_prints_to", user_process.STDERR)
    with (tmp_path / "log").open("wb") as log:
        user_process.print_to(log.fileno())
        with RewardPool(config(rewards)) as pool:
            score(pool, ["fail spoon", "fail spoon", "fail fork", "answer 'no number'"])
    text = (tmp_path / "log").read_text()
    assert text.count("Traceback (most recent call last)") == 2
    assert text.count("\nKeyError: 'spoon'\n") == text.count("\nKeyError: 'fork'\n") == 1
    assert 'user_rewards.py", line 14, in fail' in text


def test_where_its_output_goes_to_the_terminal_a_failure_is_its_message_alone(rewards, capfd):
    with RewardPool(config(rewards)) as pool:
        assert score(pool, ["fail spoon"])[0].error == "KeyError: 'spoon' (user_rewards.py:14)"
    assert capfd.readouterr().err == ""


def test_completions_larger_than_a_socket_holds(rewards):
    with RewardPool(config(rewards)) as pool:
        long = "x" * 3_000_000
        expected = len(long) + len(str(PROMPT.record["answer"]) + "p1") + 2
        assert score(pool, [f"length {long}", f"length {long}"]) == [Score(value=expected)] * 2


def unready(pool):
    with pytest.raises(RewardImportError) as error:
        pool.check(PROMPT)
    return str(error.value)


def test_a_process_that_is_killed_while_it_imports_is_begun_once_more(tmp_path, monkeypatch):
    """One kill from outside, for want of memory, ended the run as if the function could not be imported."""
    tries = tmp_path / "tries"
    module = f"""
import os, signal
with open({str(tries)!r}, "a") as file:
    file.write("x")
if os.path.getsize({str(tries)!r}) == 1:
    os.kill(os.getpid(), signal.SIGKILL)
def score(*, completion, **_): return len(completion)
"""
    (tmp_path / "killed_once.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    with RewardPool(config("killed_once:score")) as pool:
        assert score(pool, ["abc"]) == [Score(value=3.0)]
    assert tries.read_text() == "xx"


def test_a_function_that_can_not_be_imported_is_said_by_check_and_by_score():
    with RewardPool(config("no_such_rewards:score")) as pool:
        assert "reward.fn='no_such_rewards:score': there is no module 'no_such_rewards'" in unready(pool)
        with pytest.raises(RewardImportError, match="there is no module"):
            score(pool, ["a"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "within_s", "expected"),
    [
        (
            "import os; os._exit(3)",
            None,
            "importing reward.fn='bad_rewards:score' ended the process: exit code 3",
        ),
        ("import os; os.kill(os.getpid(), 11)", None, "ended the process: killed by SIGSEGV"),
        ("while True: pass", 1.0, "reward.fn='bad_rewards:score' was not imported within reward.setup_timeout=1 s"),
    ],
    ids=["exits", "is killed", "hangs"],  # not by a deadline, which each process measures for itself
)
def test_a_module_that_ends_or_never_returns(tmp_path, monkeypatch, text, within_s, expected):
    (tmp_path / "bad_rewards.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with RewardPool(config("bad_rewards:score", setup_timeout=within_s or deadline_s())) as pool:
        assert expected in unready(pool)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("does", "within_s", "expected"),
    [
        ("raise KeyError('spoon')", 30.0, "can't score the answer of prompt p1 itself: KeyError: 'spoon'"),
        ("while True: pass", 1.0, "can't score the answer of prompt p1 itself: took longer than reward.timeout=1 s"),
    ],
)
def test_check_finds_a_function_that_raises_or_never_returns(tmp_path, monkeypatch, does, within_s, expected):
    (tmp_path / "bad_rewards.py").write_text(f"def score(**everything):\n    {does}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with RewardPool(config("bad_rewards:score", timeout=within_s)) as pool:
        message = unready(pool)
    assert "reward.fn='bad_rewards:score' " + expected in message


def test_closing_ends_what_hangs_and_tells_who_waits(rewards, tmp_path):
    async def close_meanwhile(pool):
        waiting = [asyncio.ensure_future(pool.score([word], PROMPT)) for word in ("pid", "hang", "number 1")]
        pid = int((await waiting[0])[0].value)
        await asyncio.to_thread(pool.close)
        return pid, await asyncio.gather(*waiting[1:], return_exceptions=True)

    pool = RewardPool(config(rewards))
    pid, (hanging, queued) = asyncio.run(asyncio.wait_for(close_meanwhile(pool), deadline_s()))
    assert gone(pid)
    assert isinstance(hanging, RewardError)
    assert isinstance(queued, RewardError)
    with pytest.raises(RewardError, match="closed"):
        score(pool, ["number 1"])


PARENT = """
    import asyncio, sys
    from actors.reward.reward_pool import RewardPool
    from launcher.config.schema import RewardConfig
    from launcher.base.rollouts import Prompt

    # no `if __name__ == "__main__"`: imported again in the child, as multiprocessing does, this would never end
    sys.path.append(sys.argv[1])
    pool = RewardPool(RewardConfig(fn="user_rewards:score"))
    prompt = Prompt(id="p", token_ids=(), record={"answer": "#### 1"})
    (score,) = asyncio.run(pool.score(["pid"], prompt))
    print(int(score.value), flush=True)
    if sys.argv[2] == "busy":
        asyncio.run(pool.score(["hang_loudly"], prompt))
    elif sys.argv[2] == "idle":
        sys.stdin.read()
"""


@pytest.mark.parametrize("parent_is", ["busy", "idle", "ending"])
def test_no_process_outlives_its_parent(rewards, tmp_path, parent_is):
    """The parent is killed; or ends without having closed the pool."""
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(PARENT))
    with subprocess.Popen(
        [sys.executable, script, tmp_path, parent_is],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if parent_is == "busy" else None,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as parent:
        child = int(parent.stdout.readline())
        if parent_is == "busy":
            assert parent.stderr.readline() == b"hanging\n"
        if parent_is == "ending":
            parent.wait(deadline_s())
        else:
            parent.kill()
        assert gone(child)


@pytest.mark.slow
def test_a_job_that_arrives_while_the_pool_closes_is_answered(rewards):
    pool = RewardPool(config(rewards))
    assert score(pool, ["number 1"])  # its process has started, and is not killed within its import
    submit, closing = pool._thread.submit, threading.Thread(target=pool.close)
    pool._submitting = lock = NotedLock()

    def close_before_it_is_submitted(work):
        pool._thread.submit = submit
        closing.start()
        # either closing waits until the job was submitted, or the job comes after everything was answered
        wait_until(lambda: lock.is_wanted.is_set() or not closing.is_alive())
        return submit(work)

    async def answered():
        async with asyncio.timeout(deadline_s()):
            return await pool.score(["number 1"], PROMPT)

    pool._thread.submit = close_before_it_is_submitted
    try:
        assert [one.value for one in asyncio.run(answered())] == [1.0], "a process was free before the pool was closed"
    except RewardError as error:
        assert "closed" in str(error)
    closing.join(deadline_s())
    assert not closing.is_alive()


async def test_on_a_loop_that_goes_on_the_pool_takes_its_processes_along_alone(rewards):
    thread = LoopThread("rollouts")
    pool = RewardPool(config(rewards), thread=thread)
    asked = asyncio.wrap_future(thread.submit(pool.score(["pid", "number 2"], PROMPT)))
    first, second = await asyncio.wait_for(asked, deadline_s())
    assert second.value == 2.0
    hanging = asyncio.wrap_future(thread.submit(pool.score(["hang"], PROMPT)))
    await asyncio.to_thread(pool.close)
    with pytest.raises(RewardError, match="closed"):
        await asyncio.wait_for(hanging, deadline_s())
    assert gone(int(first.value))
    assert await asyncio.wrap_future(thread.submit(asyncio.sleep(0, "it goes on"))) == "it goes on"
    thread.close()


@pytest.mark.slow
def test_a_score_that_nobody_waits_for_any_more_takes_no_time_of_the_next(rewards):
    """The next one's limit would begin while the process is still busy with it."""
    half_s = scaled(1.0)

    async def scored(pool):
        left = asyncio.ensure_future(pool.score([f"wait {half_s}"], PROMPT))
        queued = asyncio.ensure_future(pool.score(["number 1"], PROMPT))
        await asyncio.sleep(0.1)
        left.cancel()
        queued.cancel()
        return await pool.score([f"wait {half_s}"], PROMPT)

    with RewardPool(config(rewards, timeout=1.5 * half_s)) as pool:
        score(pool, ["number 1"])
        assert [one.value for one in asyncio.run(scored(pool))] == [half_s]


class NotedLock:
    """`is_wanted`: somebody waits for it."""

    def __init__(self):
        self._lock = threading.Lock()
        self.is_wanted = threading.Event()

    def __enter__(self):
        if not self._lock.acquire(blocking=False):
            self.is_wanted.set()
            self._lock.acquire()

    def __exit__(self, *_):
        self._lock.release()
