"""A run under way as a panel and as a line, and the view that both show."""

import dataclasses
import io
import math

import pytest
from rich.cells import cell_len
from rich.console import Console

from launcher.base.messages import EvalReport, ServerState, TrainerStatus
from launcher.reporting.formats import duration
from launcher.reporting.run_view import RunProgress
from launcher.reporting.terminal_panel import render_line, render_panel, sparkline
from tests.support.run_views import server, view


def drawn(run_view, width):
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(render_panel(run_view, width))
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 100, 120])
def test_the_panel_says_everything_in_a_few_whole_rows(width):
    lines = drawn(view(), width)
    text = "\n".join(lines)
    for words in (
        "arithmetic_cpu / trial0",
        "37/200",
        "18%   epoch 1/2",
        "0.660   last 10: 0.615",
        "train 0.4 s   1,843 tokens/s   policy version 37",
        "0 READY v37",
        "1:35   about 5:26 left",
        "checkpoint.committed epoch0epochstep19globalstep19",
    ):
        assert words in text
    assert len(lines) == 8
    assert {cell_len(line) for line in lines} == {min(width, 110)}


def test_the_height_does_not_depend_on_how_much_there_is_to_say():
    dead = server(0, ServerState.DEAD, reason="y\n" * 250)
    long = view(last_event="x\n" * 250, servers=(dead,), rewards=(0.5,) * 100)
    assert len(drawn(long, 80)) == len(drawn(view(), 80))
    assert {cell_len(line) for line in drawn(long, 80)} == {80}


@pytest.mark.parametrize("width", [20, 30, 40])
def test_a_narrow_terminal_loses_words_not_the_frame(width):
    assert {cell_len(line) for line in drawn(view(), width)} == {width}


def test_markup_in_a_reason_is_text():
    assert any("[/red] [bold]" in line for line in drawn(view(last_event="[/red] [bold]"), 80))


def test_before_the_first_step():
    early = view(steps_done=0, rewards=(), step_seconds=(), tokens_per_s=None, servers=(), last_event="")
    text = "\n".join(drawn(early, 80))
    assert "none yet" in text
    assert "left" not in text
    assert "servers: none yet" in render_line(early)


def test_accuracy_on_held_out_problems_before_and_after():
    before = EvalReport(policy_version=0, prompts=256, sampled=0.341, greedy=0.5)
    after = EvalReport(policy_version=200, prompts=256, sampled=0.812, greedy=0.9)
    assert "held-out  sampled 0.341   greedy 0.500   (256 problems, version 0 alone)" in "\n".join(
        drawn(view(evals=(before,)), 80)
    )
    both = "\n".join(drawn(view(evals=(before, after)), 80))
    assert "sampled 0.341 → 0.812 (+0.471)   greedy 0.500 → 0.900 (+0.400)" in both
    short = dataclasses.replace(after, unscored=3)
    assert "(256 problems, 3 not scored, version 200 alone)" in "\n".join(drawn(view(evals=(short,)), 100))


def test_many_servers_are_counted_and_the_unwell_are_not_lost():
    servers = [server(index, ServerState.READY, 3) for index in range(62)]
    servers += [server(62, ServerState.STARTING), server(63, ServerState.DEAD)]
    assert "1 STARTING · 62 READY · 1 DEAD" in "\n".join(drawn(view(servers=tuple(servers)), 80))


def test_why_a_server_is_not_ready():
    assert "0 SUSPECT v3 (no token for 12 s)" in render_line(
        view(servers=(server(0, ServerState.SUSPECT, 3, "no token for 12 s"),))
    )


@pytest.mark.parametrize(("phase", "state"), [("publish", "LOADING"), ("rollout", "STALE")])
@pytest.mark.parametrize(("count", "said"), [(1, "server-0 {} v3"), (4, "servers: 4 {}")])
def test_a_server_that_loads_the_weights_of_each_step_is_not_called_stale(phase, state, count, said):
    stale = view(servers=tuple(server(index, ServerState.STALE, 3) for index in range(count)))
    stale = dataclasses.replace(stale, status=dataclasses.replace(stale.status, phase=phase))
    assert said.format(state) in render_line(stale)


def test_a_long_reason_is_cut():
    said = render_line(view(servers=(server(0, ServerState.DEAD, 3, "did not become ready: " + "x" * 300),)))
    assert "0 DEAD v3 (did not become ready: xxx" in said
    assert "…)" in said
    assert len(said) < 250


def test_a_line_for_a_log():
    assert render_line(view()) == (
        "step 37/200  epoch 1/2  reward 0.660  last 10: 0.615  1843 tokens/s  now: train (0.4 s)  "
        "llm_server-0 READY v37  5:26 left"
    )


def test_where_the_steps_of_an_epoch_are_not_known_no_epoch_is_told():
    foreign = view()
    foreign = dataclasses.replace(foreign, status=dataclasses.replace(foreign.status, steps_per_epoch=0))
    assert render_line(foreign).startswith("step 37/200  reward 0.660")
    text = "\n".join(drawn(foreign, 80))
    assert "37/200" in text
    assert "epoch " not in text


@pytest.mark.parametrize(
    ("values", "width", "bars"),
    [
        ([], 5, ""),
        ([math.nan], 5, ""),
        ([0.0, 1.0], 5, "▁█"),
        ([0.0, 0.5, 1.0, 0.0], 2, "█▁"),
        ([0.0, math.nan, 1.0], 5, "▁ █"),
        ([0.50, 0.51, 0.49], 5, "▁▂▁"),  # noise looks like noise
        ([0.5] * 3, 5, "▁▁▁"),
        ([0.0, 1.0], 0, ""),
    ],
)
def test_the_trend_as_bars(values, width, bars):
    assert sparkline(values, width) == bars


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0.0 s"), (4.23, "4.2 s"), (59.4, "59 s"), (60, "1:00"), (187.2, "3:07"), (7387, "2:03:07")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def report(step, reward, **metrics):
    rewards = {} if reward is None else {"rollout/reward": reward}
    return {"global_step": step, "attempt": 1, "timeperf/step_s": 2.0} | rewards | metrics


def status(next_step, *, total_steps=20):
    return TrainerStatus(
        phase="rollout",
        next_step=next_step,
        total_steps=total_steps,
        steps_per_epoch=10,
        policy_version=next_step,
        pid=1,
        seconds_in_phase=0.0,
    )


def progress():
    return RunProgress("exp / t0", 1, started=100.0)


def test_a_view_is_gathered_from_reports():
    gathered = progress()
    gathered.add([report(0, 0.2, **{"rollout/tokens_per_s": 900.0}), report(1, None), report(2, 0.4)])
    gathered.last_event = "server.ready"
    shown = gathered.view(status(3), servers=[], now=160.0)
    assert repr(shown.rewards) == "(0.2, nan, 0.4)"
    assert shown.recent_reward == pytest.approx(0.3)
    assert (shown.steps_done, shown.epochs, shown.elapsed_s, shown.left_s) == (3, "1/2", 60.0, 34.0)
    assert (shown.tokens_per_s, shown.last_event) == (900.0, "server.ready")


def test_a_step_is_shown_with_its_own_reward_not_with_that_of_the_step_before():
    """The trainer counts a step a moment before it tells of it."""
    gathered = progress()
    gathered.add([report(8, 0.3), report(9, 0.4)])
    assert render_line(gathered.view(status(11), servers=[], now=160.0)).startswith(
        "step 10/20  epoch 2/2  reward 0.400"
    )
    gathered.add([report(10, 0.5)])
    assert render_line(gathered.view(status(11), servers=[], now=160.0)).startswith(
        "step 11/20  epoch 2/2  reward 0.500"
    )
    late = render_line(gathered.view(status(10), servers=[], now=160.0))
    assert late.startswith("step 10/20  epoch 2/2  reward 0.400"), "the status is older than the lines"
    restored = gathered.view(status(7), servers=[], now=160.0)
    assert (restored.steps_done, restored.rewards) == (7, ())


def test_a_restore_takes_the_later_rewards_back():
    gathered = progress()
    gathered.add([report(step, 0.1 * step) for step in range(4)])
    gathered.add([report(2, 0.9)])
    assert gathered.view(status(3), servers=[], now=100.0).rewards == (0.0, 0.1, 0.9)


def test_what_is_no_step_takes_nothing_back():
    """A line of another program in metrics.jsonl took all rewards from the screen, as did one whose step is a text."""
    gathered = progress()
    gathered.add([report(0, 0.1), report(1, 0.2)])
    for line in ({"of": "another program"}, report("1", 0.9), report(True, 0.9), report(2**60, 0.9), report(None, 0.9)):
        gathered.add([line])
    gathered.add([report(2, [0.9], **{"timeperf/step_s": "soon", "rollout/tokens_per_s": 10**400})])
    shown = gathered.view(status(3), servers=[], now=100.0)
    assert repr(shown.rewards) == "(0.1, 0.2, nan)"
    assert (shown.step_seconds, shown.tokens_per_s) == ((2.0, 2.0), None)


@pytest.mark.parametrize(("next_step", "epoch"), [(0, 1), (9, 1), (10, 2), (19, 2), (20, 2)])
def test_the_epoch_of_the_step_under_way(next_step, epoch):
    assert progress().view(status(next_step), servers=[], now=100.0).epochs == f"{epoch}/2"
