"""Logs are read whole and in bounded memory: steps, figures, what happened; colours, roles, torn ends, wrong files."""

import math
from pathlib import Path

import numpy as np
import pytest

from launcher.base.errors import DataError, StorageError, UsageError
from launcher.diagnosis.judging.step_history import falls_of, passes_of
from launcher.diagnosis.reading import line_reader
from launcher.diagnosis.reading.inputs import find_inputs, read_inputs
from launcher.diagnosis.reading.log_file import read_log
from launcher.diagnosis.reading.log_patterns import phase_of, plain, without_head
from launcher.diagnosis.reading.log_records import (
    GRAD_NORM,
    REWARD,
    ROLLOUT_REWARD,
    ROLLOUT_S,
    FigureNames,
    Kind,
    Role,
)
from tests.support.made_logs import Made, RunMaker, table

REAL_STEP = Path(__file__).parent / "data" / "areal_trainer_step.log"


def read(*paths, **kwargs):
    return read_inputs(find_inputs(paths), **kwargs)


def write(folder, name, text):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def counts(contents):
    found = {}
    for event in contents.log_events:
        found[event.kind] = found.get(event.kind, 0) + event.count
    return found


# ── steps ──


def test_a_real_step_of_areal_is_read():
    contents = read(REAL_STEP)
    steps = contents.steps
    assert steps.steps.tolist() == [1]  # "Train step 2/160", from 0
    assert steps.column(REWARD)[0] == pytest.approx(0.11328)
    assert steps.column(ROLLOUT_REWARD)[0] == pytest.approx(0.10586)
    assert steps.column(GRAD_NORM)[0] == pytest.approx(1.0397)
    assert steps.column(ROLLOUT_S)[0] == pytest.approx(1.6512)
    pairs = sum(line.count("│") // 2 for line in REAL_STEP.read_text().splitlines())
    assert (contents.total_steps, len(contents.keys)) == (160, pairs)
    assert contents.sources[0].role is Role.TRAINER


@pytest.mark.parametrize("made", [Made(), Made(old=True, minibatches=4), Made(plain=True)], ids=["new", "old", "plain"])
@pytest.mark.parametrize("merged", [False, True])
def test_every_version_gives_the_same_rewards(tmp_path, made, merged):
    contents = read(RunMaker(made).write(tmp_path / "run", merged=merged))
    assert contents.steps.steps.tolist() == list(range(120))
    rewards = contents.steps.column(REWARD)
    assert np.isfinite(rewards).all()
    assert rewards[:10].mean() < 0.5 < rewards[-10:].mean()
    if made.old:
        assert contents.steps.column(GRAD_NORM)[5] == pytest.approx(
            0.2, abs=0.1
        )  # the mean over the tables that have it


@pytest.mark.slow
@pytest.mark.parametrize("block", [300, 4096, 65536])
@pytest.mark.parametrize("minibatches", [1, 3])
def test_blocks_may_end_anywhere(tmp_path, monkeypatch, block, minibatches):
    folder = RunMaker(Made(fails="crash", onset=10, steps=20, minibatches=minibatches)).write(tmp_path / "run")
    whole = read(folder)
    monkeypatch.setattr(line_reader, "BLOCK_BYTES", block)
    in_parts = read(folder)
    assert in_parts.steps.steps.tolist() == whole.steps.steps.tolist()
    assert np.array_equal(in_parts.steps.column(REWARD), whole.steps.column(REWARD))
    assert counts(in_parts) == counts(whole)
    assert [h.where for h in in_parts.log_events][:3] == [h.where for h in whole.log_events][:3]


def test_a_line_is_where_it_is_said_to_be(tmp_path, monkeypatch):
    monkeypatch.setattr(line_reader, "BLOCK_BYTES", 5000)
    folder = RunMaker(Made(fails="crash", onset=10, steps=20)).write(tmp_path / "run")
    refused = next(h for h in read(folder).log_events if h.kind is Kind.REFUSED)
    name, number = refused.where.split(":")
    assert "ConnectionRefusedError" in (folder / name).read_text().splitlines()[int(number) - 1]


def test_a_torn_last_table_keeps_what_is_whole(tmp_path):
    text = "".join(RunMaker(Made(steps=5)).trainer())
    path = write(tmp_path, "trainer.log", text[: text.rindex("task_reward/avg") - 200])
    contents = read(path)
    assert contents.steps.steps.tolist() == [0, 1, 2, 3, 4]
    assert np.isfinite(contents.steps.column(REWARD)[:4]).all()


def test_a_log_that_ends_within_a_line_is_read(tmp_path):
    text = "".join(RunMaker(Made(steps=5)).trainer())
    path = write(tmp_path, "trainer.log", text + "20251111-09:00:00.000 StatsLogger INFO: Epoch 1/1 Step 6/5 Train st")
    assert len(read(path).steps) == 5


def test_nan_and_inf_are_figures(tmp_path):
    line = "20251111-09:00:00.000 StatsLogger INFO: Epoch 1/1 Step 1/9 Train step 1/9 done.\n"
    path = write(tmp_path, "t.log", line + table({"ppo_actor/task_reward/avg": math.nan, "ppo_actor/n_seqs": math.inf}))
    steps = read(path).steps
    assert math.isnan(steps.column(REWARD)[0])
    assert math.isinf(steps.column("n_seqs")[0])


def test_a_step_without_a_reward_is_no_step_of_reward_0(tmp_path):
    contents = read(RunMaker(Made(fails="hang", onset=60)).write(tmp_path / "run"))
    column = contents.steps.column(ROLLOUT_REWARD)
    assert np.isfinite(column[:60]).all()
    assert np.isnan(column[60:]).all()


def test_numbers_that_go_back_are_passes(tmp_path):
    made = Made(fails="crash", onset=60, steps=150, recovers_at=90, back_to=50)
    contents = read(RunMaker(made).write(tmp_path / "run"))
    passes = passes_of(contents.steps)
    assert [(one.begin, one.end) for one in passes] == [(0, 90), (90, 190)]
    assert contents.steps.steps[passes[-1].rows].tolist() == list(range(150))
    (fall,) = falls_of(contents.steps, passes)
    assert contents.steps.steps[fall.rows[fall.fall.onset]] == 60
    assert not fall.is_current


def test_logs_that_follow_one_another_are_one_run_and_copies_are_not_two(tmp_path):
    text = "".join(RunMaker(Made(fails="crash", onset=60)).trainer())
    middle = text.index("\n", text.index("Train step 41/120")) - 200
    middle = text.rindex("\n", 0, middle) + 1
    write(tmp_path, "trainer.log.1", text[:middle])
    write(tmp_path, "trainer.log", text[middle:])
    assert read(tmp_path).steps.steps.tolist() == list(range(120))
    write(tmp_path, "copy.log", text)
    contents = read(tmp_path)
    assert contents.steps.steps.tolist() == list(range(120))
    assert sum("not used" in source.note for source in contents.sources) == 2


# ── what happened ──


def test_an_hour_of_failures_is_one_record_for_each_step(tmp_path):
    contents = read(RunMaker(Made(fails="crash", onset=10, steps=20, groups=50)).write(tmp_path / "run"))
    refused = [h for h in contents.log_events if h.kind is Kind.REFUSED]
    assert len(refused) == 10
    assert sum(h.count for h in refused) == 10 * 50  # the request's line; the traceback above it is of the same one
    assert [h.after_step for h in refused] == list(range(9, 19))


def test_in_merged_log_each_line_has_its_role(tmp_path):
    contents = read(RunMaker(Made(fails="server_oom", onset=20, steps=30)).write(tmp_path / "run", merged=True))
    (ran_out,) = [h for h in contents.log_events if h.kind is Kind.OUT_OF_MEMORY]
    assert ran_out.role is Role.SERVER
    assert {h.role for h in contents.log_events if h.kind is Kind.REFUSED} == {Role.TRAINER}


def test_merged_log_alone_is_read_where_it_is(tmp_path):
    folder = RunMaker(Made(steps=20)).write(tmp_path / "run", merged=True)
    RunMaker(Made(steps=20)).write(folder)
    assert [Path(source.path).name for source in read(folder).sources] == ["merged.log"]
    assert len(read(folder).steps) == 20


def test_a_servers_pause_is_found_wherever_it_lies(tmp_path):
    times = [f"{9 + s // 3600:02}:{s // 60 % 60:02}:{s % 60:02}" for s in range(4000)]
    lines = [f"[2025-11-11 {time}] Decode batch, #running-req: 4, #queue-req: 0, \n" for time in times]
    path = write(tmp_path, "llm_server.log", "".join(lines[:1234] + lines[1634:]))
    pauses = [h for h in read(path).log_events if h.kind is Kind.NO_TOKENS and not h.facts["is_last"]]
    assert [round(float(str(h.facts["seconds"]))) for h in pauses] == [401]
    silent = [h for h in read(path).log_events if h.kind is Kind.SILENCE]
    assert len(silent) == 1


def test_a_server_that_talks_and_makes_no_tokens_is_not_silent(tmp_path):
    def line(second, text):
        return f"[2025-11-11 09:{second // 60:02}:{second % 60:02}] {text}\n"

    made = [line(s, "Decode batch, #running-req: 4, #queue-req: 0, ") for s in range(100)]
    talk = [line(s, "POST /health_generate HTTP/1.1 503") for s in range(100, 900)]
    contents = read(write(tmp_path, "llm_server.log", "".join(made + talk)))
    (last,) = [h for h in contents.log_events if h.kind is Kind.NO_TOKENS]
    assert (last.facts["is_last"], round(float(str(last.facts["seconds"])))) == (True, 800)
    assert not [h for h in contents.log_events if h.kind is Kind.SILENCE]


@pytest.mark.parametrize(
    ("frame", "line", "phase"),
    [
        (
            "in event_loop_overlap\n result = self.run_batch(batch)",
            "torch.OutOfMemoryError: CUDA out of memory.",
            "generation",
        ),
        ("in capture\n self.capture_cuda_graphs()", "Capture cuda graph failed: CUDA out of memory.", "startup"),
        (
            "in update_weights_from_distributed\n model.load()",
            "torch.OutOfMemoryError: CUDA out of memory.",
            "transfer",
        ),
        ("in train_batch\n loss.backward()", "torch.OutOfMemoryError: CUDA out of memory.", "training"),
        ("in something", "torch.OutOfMemoryError: CUDA out of memory.", ""),
        ("", "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", "startup"),
        ("", "Decode out of memory. Try to lower your batch size.", "generation"),
    ],
)
def test_where_memory_ran_out_is_read_off_the_traceback(frame, line, phase):
    before = "in train_batch, of an older one\nTraceback (most recent call last):\n"
    assert phase_of(f"{before}  {frame}\n{line}", line) == phase


def test_colours_and_heads_go():
    line = b"\x1b[92m\x1b[1;38;2;180;140;80m(AReaL)\x1b[0m \x1b[92m20261120-18:14:23.037 StatsLogger INFO: it\x1b[0m"
    assert plain(line) == "(AReaL) 20261120-18:14:23.037 StatsLogger INFO: it"
    assert without_head(plain(line)) == "INFO: it"
    assert without_head("[2025-11-11 09:00:00 TP0] Decode") == "Decode"


# ── memory ──


def test_a_line_of_any_length_is_read_in_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(line_reader, "BLOCK_BYTES", 10_000)
    monkeypatch.setattr(line_reader, "LONGEST_CARRY", 40_000)
    largest = []
    make = line_reader._block

    def noting(data, *arguments, **more):
        largest.append(len(data))
        return make(data, *arguments, **more)

    monkeypatch.setattr(line_reader, "_block", noting)
    text = "".join(RunMaker(Made(steps=3)).trainer()) + "x" * 300_000 + "\nConnection refused\n"
    contents = read_log(write(tmp_path, "trainer.log", text), FigureNames())
    assert max(largest) <= 60_000
    assert len(contents.steps) == 3
    assert counts(contents)[Kind.REFUSED] == 1


def test_progress_is_told_to_the_end(tmp_path):
    folder = RunMaker(Made(steps=20)).write(tmp_path / "run")
    said = []
    read(folder, on_progress=said.append)
    assert said == sorted(said)
    assert said[-1] == sum(path.stat().st_size for path in folder.iterdir())


# ── what can't be read ──


def test_a_log_without_a_step_is_no_error(tmp_path):
    contents = read(RunMaker(Made(fails="startup_oom")).write(tmp_path / "run"))
    assert len(contents.steps) == 0
    assert counts(contents)[Kind.OUT_OF_MEMORY] >= 1


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("trainer.log", b"", ("trainer.log is empty",)),
        ("trainer.log", b"hello\nworld\n" * 50, ("no log of AReaL", "600 bytes", "trainer.log")),
        ("weights.log", bytes(range(256)) * 40, ("is no text",)),
        ("trainer.log.gz", b"\x1f\x8bnot gzip at all", ("can't be unpacked", "copy it again")),
        ("trainer.zip", b"PK\x03\x04" + b"x" * 100, ("is no archive that can be read", "unpack it")),
        ("run.wandb", b"nonsense at its beginning", ("not a .wandb file",)),
        ("export.csv", b"a,b\n1,2\n", ("no column of steps", "a, b")),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong(tmp_path, name, content, words):
    path = write(tmp_path, name, content)
    with pytest.raises(DataError) as caught:
        read(path)
    assert all(word in str(caught.value) for word in words)


def test_a_path_that_is_not_there_says_what_is(tmp_path):
    write(tmp_path, "trainer.log", "x")
    with pytest.raises(StorageError, match=r"trainer\.lgo does not exist[\s\S]*holds trainer\.log"):
        read(tmp_path / "trainer.lgo")


def test_a_folder_of_runs_names_them(tmp_path):
    RunMaker(Made(steps=2)).write(tmp_path / "logs" / "me" / "exp" / "t0")
    with pytest.raises(DataError, match=r"holds no log[\s\S]*exp/t0"):
        read(tmp_path)
    with pytest.raises(UsageError, match="holds no log"):
        read(tmp_path / "logs" / "me")


def test_empty_logs_of_a_folder_are_passed_over_unless_all_are(tmp_path):
    write(tmp_path, "llm_server.log", b"")
    with pytest.raises(DataError, match=r"every log in .* is empty"):
        read(tmp_path)
    RunMaker(Made(steps=2)).write(tmp_path)
    write(tmp_path, "llm_server.log", b"")
    assert len(read(tmp_path).steps) == 2


def test_a_metric_that_is_nowhere_names_those_that_are(tmp_path):
    folder = RunMaker(Made(steps=2)).write(tmp_path / "run")
    with pytest.raises(DataError, match=r"--metric accuracy is in none[\s\S]*ppo_actor/task_reward/avg"):
        read(folder, metric="accuracy")
    assert read(folder, metric="timeperf/train_step").steps.column(REWARD)[0] == pytest.approx(20, abs=2)
