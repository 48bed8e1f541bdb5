"""What speaks for and against each cause, in sentences with the figures and the line that they come from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from launcher.diagnosis.clock import say_duration
from launcher.diagnosis.onset import Shape
from launcher.diagnosis.records import (
    ENTROPY,
    GRAD_NORM,
    KL,
    LOSS,
    N_SEQS,
    NO_EOS,
    ROLLOUT_REWARD,
    ROLLOUT_S,
    SEQ_LEN,
    UPDATED,
    Happening,
    Kind,
    Role,
)
from launcher.diagnosis.scene import Scene
from launcher.diagnosis.words import without_head
from launcher.policy.exit_cause import RanOut, find_server_cause, find_trainer_cause

SHARP_STEPS = 3
"""A fall within fewer steps is a drop."""
CONNECTION = (Kind.REFUSED, Kind.LOST, Kind.TIMEOUT, Kind.REQUEST_FAILED, Kind.ROLLOUT_FAILED)
PAUSE_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One thing that speaks for (weight > 0) or against a cause. `where`: file and line, where there is one."""

    weight: int
    text: str
    where: str = ""


def of_server_crash(scene: Scene) -> Iterator[Evidence]:
    yield from _incidents(scene, "server_crash", "server_corrupt")
    if exits := scene.near(Kind.SERVER_EXITED):
        code = exits[0].facts.get("exit_code")
        yield _from(3, exits, f"a server's process ended{'' if code is None else f' with exit code {code}'}")
    if raised := scene.near(Kind.SERVER_EXCEPTION):
        yield _from(3, raised, "an exception ended a server")
    yield from _refusals(scene, 3)
    if (lost := scene.near(Kind.LOST)) and not scene.earlier(Kind.LOST):
        yield _from(1, lost, f"{_times(lost)} a connection broke, never before")
    change = scene.change(ROLLOUT_S)
    if change is not None and change.is_clear and change.ratio < 0.5:
        yield Evidence(
            weight=1, text=f"rollouts failed fast: {change.before:.3g} s a step before, {change.after:.3g} s after"
        )
    yield from _explained_by_memory(scene)
    yield from _still_generating(scene)
    if scene.has_log(Role.TRAINER) and not scene.near(Kind.REFUSED, Kind.LOST, Kind.SERVER_EXITED):
        yield Evidence(weight=-2, text="no refused or broken connection around the onset")
    yield from _no_server_words(scene)


def of_server_hang(scene: Scene) -> Iterator[Evidence]:
    yield from _incidents(scene, "server_hang")
    yield from _pauses(scene)
    if fired := scene.near(Kind.SERVER_WATCHDOG):
        yield _from(3, fired, "its own watchdog fired")
    if unwell := scene.near(Kind.SERVER_UNHEALTHY):
        yield _from(2, unwell, f"{_times(unwell)} its health check failed")
    refused = scene.near(Kind.REFUSED)
    slow = scene.near(Kind.TIMEOUT, Kind.REQUEST_FAILED)
    if slow and not refused and not scene.earlier(Kind.TIMEOUT, Kind.REQUEST_FAILED):
        yield _from(2, slow, f"{_times(slow)} a request got no answer in time, never before")
    change = scene.change(ROLLOUT_S)
    if change is not None and change.is_clear and change.ratio >= 4:
        yield Evidence(
            weight=2, text=f"rollouts take {change.after:.3g} s a step, {change.before:.3g} s before: they wait"
        )
    elif change is not None and change.ratio < 1.5:
        yield Evidence(weight=-1, text=f"rollouts take no longer ({change.before:.3g} → {change.after:.3g} s a step)")
    if refused:
        yield _from(-2, refused, "connections are refused: a process that hangs still accepts them")
    if exits := scene.near(Kind.SERVER_EXITED):
        yield _from(-2, exits, "the server's process ended")
    yield from _explained_by_memory(scene)
    yield from _still_generating(scene)
    yield from _no_server_words(scene)


def of_memory(scene: Scene) -> Iterator[Evidence]:
    yield from _incidents(scene, "server_oom", "trainer_oom")
    ran_out = scene.near(Kind.OUT_OF_MEMORY)
    if ran_out:
        yield _from(6, ran_out, f"{where_memory_ran_out(scene)}: {_shown(ran_out[0])}")
    if killed := scene.near(Kind.KILLED_FOR_MEMORY):
        yield _from(2, killed, f"a process was killed by SIGKILL: {_shown(killed[0])}")
    if [h for h in scene.near(Kind.SERVER_EXITED) if h.facts.get("exit_code") in (-9, 137)] and not ran_out:
        yield Evidence(weight=1, text="a server ended by SIGKILL, as the kernel does for memory (dmesg would say so)")
    if not ran_out and any(source.what == "log" for source in scene.contents.sources):
        yield Evidence(weight=-3, text="no log has a word of it around the onset")


def of_degradation(scene: Scene) -> Iterator[Evidence]:
    yield from _incidents(scene, "reward_collapse", "nonfinite")
    if scene.found is None:
        yield Evidence(weight=-2, text="the rewards did not fall")
        return
    yield from _shape_of_degradation(scene)
    yield from _not_finite(scene)
    for name, words, factor in ((GRAD_NORM, "gradient norm", 3.0), (KL, "KL to the old policy", 4.0)):
        peak = scene.peak_before(name)
        if peak is not None and peak[1] > 0 and peak[0] > factor * peak[1] and not scene.count(*CONNECTION):
            yield Evidence(weight=2, text=f"{words} {peak[0]:.3g} at step {peak[2]}, usually {peak[1]:.3g}")
    yield from _changed_completions(scene)
    if scene.count(*CONNECTION):
        yield _from(-2, scene.near(*CONNECTION), "connections failed at the same time")
    if scene.count(Kind.REWARD_TIMEOUT, Kind.REWARD_ERROR):
        yield Evidence(weight=-1, text="rewards could not be computed at the same time")


def of_reward_function(scene: Scene) -> Iterator[Evidence]:
    yield from _incidents(scene, "verifier_broken")
    late = scene.near(Kind.REWARD_TIMEOUT)
    if late and sum(h.count for h in late) > 3 * _mean_count(scene.earlier(Kind.REWARD_TIMEOUT)):
        yield _from(3, late, f"{_times(late)} a reward timed out and counted as 0")
    if raised := scene.near(Kind.REWARD_ERROR):
        yield _from(3, raised, f"{_times(raised)} the reward function failed: {_shown(raised[0])}")
    if scene.found is None:
        if not late and not raised:
            yield Evidence(weight=-2, text="the rewards did not fall")
        return
    fall = scene.found.fall
    if fall.shape is Shape.NEVER:
        yield Evidence(weight=3, text="not one reward of the run was above 0")
    elif fall.shape is Shape.DECAY:
        yield Evidence(weight=-1, text="the rewards fell slowly; a function breaks from one step to the next")
    same = _same_completions(scene)
    if same and fall.bottom - fall.onset < SHARP_STEPS and not scene.count(*CONNECTION):
        yield Evidence(weight=3, text=f"the rewards dropped at once while completions stayed as they were: {same}")
    if scene.count(*CONNECTION):
        yield _from(-2, scene.near(*CONNECTION), "connections failed at the same time")
    changed = [one.text for one in _changed_completions(scene) if one.weight > 0]
    if changed:
        yield Evidence(weight=-1, text=f"the completions changed too: {changed[0]}")


def of_trainer_crash(scene: Scene) -> Iterator[Evidence]:
    yield from _incidents(scene, "trainer_crash", "trainer_hang")
    if failed := scene.near(Kind.TRAINER_FAILED):
        yield _from(3, failed, f"the trainer failed: {_shown(failed[0])}")
        if scene.near(Kind.OUT_OF_MEMORY, role=Role.TRAINER):
            yield Evidence(weight=-2, text="it ran out of memory first")


def missing_from(scene: Scene) -> Iterator[str]:
    """Which files would have told more."""
    if not scene.has_server_log:
        yield "no server log was given (llm_server.log): a hang and a crash can't be told apart by it"
    if not scene.has_log(Role.TRAINER) and not scene.near(Kind.INCIDENT, Kind.RUN_ENDED):
        yield "no trainer log was given (trainer.log): failed connections can't be seen"


def where_memory_ran_out(scene: Scene) -> str:
    """`server, at start-up`; "" where it did not."""
    ran_out = scene.near(Kind.OUT_OF_MEMORY)
    if not ran_out:
        return ""
    who, place = place_of(ran_out[0])
    return f"{who}, in {place}" if place not in ("startup", "") else f"{who}, at start-up" if place else who


def place_of(happening: Happening) -> tuple[str, str]:
    """(server or trainer, phase) of a line that says that memory ran out."""
    ran_out = str(happening.facts.get("ran_out") or ran_out_of(happening) or "")
    who = "server" if ran_out.startswith("server") else "trainer"
    phase = str(happening.facts.get("phase") or "")
    if ran_out == RanOut.SERVER_POOL_TOO_SMALL:
        phase = "startup"
    elif ran_out == RanOut.SERVER_POOL:
        phase = "generation"
    return who, phase


def ran_out_of(happening: Happening) -> RanOut | None:
    """Which memory it was, by the words of exit_cause.py."""
    line = str(happening.facts.get("line") or happening.text)
    said = happening.facts.get("ran_out")
    if said in set(RanOut):
        return RanOut(str(said))
    find = find_server_cause if happening.role is Role.SERVER else find_trainer_cause
    return find([line], None).ran_out or find_server_cause([line], None).ran_out


# ── what several causes ask ──


def _incidents(scene: Scene, *causes: str) -> Iterator[Evidence]:
    """What the run itself found out while it went on."""
    own = [h for h in scene.near(Kind.INCIDENT) if h.facts.get("cause") in causes]
    if own:
        yield _from(6, own, f"the run itself found {own[0].facts.get('cause')}: {own[0].facts.get('reason')}")


def _explained_by_memory(scene: Scene) -> Iterator[Evidence]:
    """A server that ran out of memory crashes or hangs for that reason: the remedy is memory's."""
    ran_out = [h for h in scene.near(Kind.OUT_OF_MEMORY) if place_of(h)[0] == "server"]
    if ran_out:
        yield _from(-6, ran_out, "a server ran out of memory: what else it did came of that")


def _refusals(scene: Scene, weight: int) -> Iterator[Evidence]:
    refused = scene.near(Kind.REFUSED)
    if not refused:
        return
    before = sum(h.count for h in scene.earlier(Kind.REFUSED))
    said = "never before" if not before else f"{before} times before"
    since = f" from step {refused[0].after_step + 1} on" if refused[0].after_step is not None else ""
    is_new = _mean_count(refused) > 3 * _mean_count(scene.earlier(Kind.REFUSED))
    yield _from(weight if is_new else 1, refused, f"{_times(refused)} a connection was refused{since}, {said}")


def _pauses(scene: Scene) -> Iterator[Evidence]:
    """The server made no tokens while the trainer waited for some."""
    pauses = [h for h in scene.near(Kind.NO_TOKENS) if not h.facts.get("is_last")]
    usual = [_seconds(h) for h in scene.earlier(Kind.NO_TOKENS) if not h.facts.get("is_last")]
    limit = max(PAUSE_S, 5 * float(np.median(usual)) if usual else 0.0)
    long = [h for h in pauses if _seconds(h) >= limit]
    if long:
        longest = max(long, key=_seconds)
        yield _from(3, [longest], f"a server made no tokens for {say_duration(_seconds(longest))}")
    for last in (h for h in scene.contents.happenings if h.kind is Kind.NO_TOKENS and h.facts.get("is_last")):
        end = _trainer_end(scene)
        if last.time is None or end is None or scene.until is None:
            continue
        if last.time <= scene.until and end - last.time >= max(PAUSE_S, limit):
            yield _from(
                4,
                [last],
                f"a server made its last tokens {say_duration(end - last.time)} before the trainer's log ends",
            )


def _still_generating(scene: Scene) -> Iterator[Evidence]:
    """A server that makes tokens long after the onset neither hangs nor is gone."""
    if scene.found is None or scene.until is None:
        return
    lasts = [h for h in scene.contents.happenings if h.kind is Kind.NO_TOKENS and h.facts.get("is_last")]
    if not lasts or scene.near(Kind.SERVER_READY, Kind.SERVER_LAUNCHED):
        return
    after = max((h.time for h in lasts if h.time is not None), default=None)
    if after is None or after <= scene.until:
        return
    if not [h for h in scene.near(Kind.NO_TOKENS) if not h.facts.get("is_last") and _seconds(h) >= PAUSE_S]:
        yield _from(-3, lasts, "the servers went on making tokens after the onset")


def _no_server_words(scene: Scene) -> Iterator[Evidence]:
    fall = scene.found.fall if scene.found else None
    if fall is not None and (scene.vanished(ROLLOUT_REWARD) or fall.shape is Shape.MISSING):
        yield Evidence(weight=1, text="from the onset on no rollout finished (no rollout/reward)")


def _shape_of_degradation(scene: Scene) -> Iterator[Evidence]:
    assert scene.found is not None
    fall = scene.found.fall
    slope = fall.bottom - fall.onset
    if fall.shape is Shape.DECAY:
        yield Evidence(weight=3, text=f"the rewards fell slowly, over {slope} steps")
    elif fall.shape is Shape.PLATEAU:
        yield Evidence(weight=1, text="the rewards fell to a lower level, not to 0")
    elif fall.shape in (Shape.ZERO, Shape.MISSING) and slope < SHARP_STEPS:
        yield Evidence(weight=-2, text="the rewards were exactly 0 from one step to the next")
    elif fall.shape is Shape.SPIKES and fall.zeros > fall.steps / 3:
        yield Evidence(weight=-2, text="the rewards jump between 0 and the old level: the policy still can")


def _not_finite(scene: Scene) -> Iterator[Evidence]:
    assert scene.found is not None
    rows, onset = scene.found.rows, scene.found.fall.onset
    for name, words in ((LOSS, "loss"), (GRAD_NORM, "gradient norm")):
        column = scene.contents.steps.column(name)
        had = np.isfinite(column[rows[:onset]]).any()
        lost = [int(row) for row in rows[max(0, onset - 20) : onset + 3] if not np.isfinite(column[row])]
        if had and lost and np.isfinite(column[rows[:onset]]).mean() > 0.9:
            step = int(scene.contents.steps.steps[lost[0]])
            yield Evidence(weight=3, text=f"the {words} was not finite at step {step}")
    change = scene.change(UPDATED)
    if change is not None and change.before > 0.5 > change.after:
        yield Evidence(weight=1, text="updates no longer succeed (update_successful)")


def _changed_completions(scene: Scene) -> Iterator[Evidence]:
    """Entropy, lengths and cut ends, where they moved with the rewards."""
    if scene.count(*CONNECTION):
        return
    for name, words in ((ENTROPY, "entropy"), (SEQ_LEN, "length of sequences")):
        change = scene.change(name)
        if change is not None and change.is_clear and not 0.7 <= change.ratio <= 1.4:
            weight = 2 if name == ENTROPY else 1
            yield Evidence(weight=weight, text=f"{words} {change.before:.3g} → {change.after:.3g}")
    cut = scene.change(NO_EOS)
    if cut is not None and cut.is_clear and abs(cut.after - cut.before) > 0.15:
        yield Evidence(weight=1, text=f"share of completions that don't end {cut.before:.2f} → {cut.after:.2f}")


def _same_completions(scene: Scene) -> str:
    """How completions stayed as they were; "" where that can't be seen, or they did not."""
    said = []
    for name, words in ((SEQ_LEN, "length"), (N_SEQS, "number"), (ENTROPY, "entropy"), (NO_EOS, "cut share")):
        change = scene.change(name)
        if change is None:
            continue
        if change.is_clear and not 0.8 <= change.ratio <= 1.25:
            return ""
        said.append(f"{words} {change.before:.3g} → {change.after:.3g}")
    return ", ".join(said)


def _trainer_end(scene: Scene) -> float | None:
    """When the trainer's log ends, or the last step was done."""
    ends = [s.last_time for s in scene.contents.sources if s.role is not Role.SERVER and s.last_time is not None]
    return max(ends, default=None)


def _seconds(happening: Happening) -> float:
    seconds = happening.facts.get("seconds")
    return float(seconds) if isinstance(seconds, int | float) else 0.0


def _mean_count(happenings: Sequence[Happening]) -> float:
    return sum(h.count for h in happenings) / len(happenings) if happenings else 0.0


def _times(happenings: Sequence[Happening]) -> str:
    count = sum(h.count for h in happenings)
    return "once" if count == 1 else f"{count:,} times"


def _from(weight: int, happenings: Sequence[Happening], text: str) -> Evidence:
    return Evidence(weight=weight, text=text, where=happenings[0].where)


def _shown(happening: Happening) -> str:
    line = without_head(str(happening.facts.get("line") or happening.text))
    return line if len(line) <= 160 else f"{line[:159]}…"
