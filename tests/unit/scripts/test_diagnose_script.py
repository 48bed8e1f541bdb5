"""`scripts/diagnose.py` as an operator runs it: exit codes, text, JSON, its flags, bad input."""

import gzip
import json
import re
from pathlib import Path

import pytest

from launcher.base.own_python import python
from launcher.config.compose import REPOSITORY
from launcher.run_files.journal import append_line
from scripts import diagnose
from scripts.ending import WRONG
from tests.support.made_logs import Made, RunMaker
from tests.support.worlds.diagnosis import export, made_run

DOCS = REPOSITORY / "docs" / "troubleshooting.md"
KEYS = {
    "format",
    "verdict",
    "is_failure",
    "headline",
    "onset",
    "other_falls",
    "cause",
    "cause_where",
    "cause_is_sure",
    "causes",
    "last_good_checkpoint",
    "trusted_until_step",
    "change",
    "settings",
    "commands",
    "timeline",
    "notes",
    "files",
    "lost",
    "passed_over",
}


def run(capsys, *arguments):
    code = diagnose.main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.fixture
def crashed(tmp_path):
    return made_run(tmp_path, Made(fails="crash", onset=60), steps=(19, 39, 79))


def own_run(folder, *, rewards, events=()):
    """metrics.jsonl and events.jsonl as this launcher writes them."""
    logs = folder / "logs" / "me" / "mine" / "t0"
    logs.mkdir(parents=True)
    for step, reward in enumerate(rewards):
        line = {"global_step": step, "attempt": 1, "time": 1.8e9 + 10 * step, "grpo_actor/task_reward/avg": reward}
        append_line(logs / "metrics.jsonl", line)
    for event in events:
        append_line(logs / "events.jsonl", event)
    return logs


# ── what it says ──


def test_a_file_of_another_kind_in_the_folder_does_not_keep_the_rest_from_being_read(capsys, crashed):
    """A rotated log that is packed, a core dump, another program's log."""
    (crashed / "trainer.log.1.gz").write_bytes(gzip.compress(b"of last week"))
    (crashed / "trainer.log.2.zip").write_bytes(b"PK\x03\x04 of the week before")
    (crashed / "core.log").write_bytes(bytes(4096))
    (crashed / "install.log").write_text("hello world\n")
    code, out, err = run(capsys, crashed)
    assert (code, err) == (diagnose.FAILURE, "")
    assert out.startswith("FELL: since global step 60 ")
    said = " ".join(out.split())
    assert f"{crashed}/trainer.log.1.gz is no log of" in said
    assert "trainer.log.2.zip is no archive that can be read" in said
    assert "core.log is no text" in said
    assert "install.log is no log of" in said


def test_a_folder_of_nothing_but_other_files_says_what_they_are(capsys, tmp_path):
    (tmp_path / "trainer.log.zip").write_bytes(b"PK\x03\x04 all")
    code, _, err = run(capsys, tmp_path)
    assert code == WRONG
    assert "is no archive that can be read" in err
    assert "unpack it" in err
    (tmp_path / "trainer.log.zip").unlink()
    (tmp_path / "install.log").write_text("hello world\n")
    code, _, err = run(capsys, tmp_path)
    assert code == WRONG
    assert "is no log of" in err


def test_a_beginning_is_no_resume_and_a_return_to_the_first_weights_is(capsys, tmp_path):
    restored = {"event": "trainer.restored", "subject": "trainer", "reason": "to the first weights", "global_step": -1}
    rewards = [0.5] * 20
    logs = own_run(tmp_path, rewards=rewards, events=[restored | {"time": 1.8e9 - 5}])
    _, out, _ = run(capsys, logs)
    assert "resumed" not in out
    append_line(logs / "events.jsonl", restored | {"time": 1.8e9 + 10 * len(rewards)})
    _, out, _ = run(capsys, logs)
    assert out.count("resumed") == 1


def test_steps_without_a_number_for_a_reward_are_counted(capsys, tmp_path):
    table = tmp_path / "export.csv"
    table.write_text("Step,e - rollout/reward\n0,0.5\n1,NaN\n2,Infinity\n3,-Infinity\n4,0.5\n")
    code, out, _ = run(capsys, table)
    assert code == diagnose.UNCLEAR
    assert "3 of 5 steps have no reward that is a number, first step 1" in out


def test_the_first_line_is_the_answer(capsys, crashed):
    code, out, _ = run(capsys, crashed)
    assert code == diagnose.FAILURE
    first = out.splitlines()[0]
    assert first.startswith("FELL: since global step 60 ")
    assert first.endswith("Cause: server crash")
    assert "globalstep39(step39,20healthystepsseenafterit,uptostep59)" in "".join(out.split())
    assert 'Train step 61"' in out


def test_commands_are_never_broken_over_lines(capsys, crashed):
    _, out, _ = run(capsys, crashed)
    (line,) = [line for line in out.splitlines() if "scripts.resume_training" in line]
    assert line.endswith("--before-step 40 --command 'the command that started it'")
    assert len(line) > 120


def test_a_healthy_run_is_exit_code_0(capsys, tmp_path):
    code, out, _ = run(capsys, RunMaker(Made()).write(tmp_path / "run"))
    assert code == diagnose.NO_FAILURE
    assert out.startswith("FINE: no failure found in 120 steps")


def test_names_find_the_run(capsys, crashed, tmp_path):
    flags = ("--experiment-name", "exp", "--trial-name", "t0", "--fileroot", tmp_path, "--user", "me")
    assert run(capsys, *flags)[0] == diagnose.FAILURE
    assert run(capsys, *flags[2:])[0] == diagnose.FAILURE, "one name is enough where it is the only run"


def test_json_has_the_keys_that_programs_rely_on(capsys, crashed):
    code, out, _ = run(capsys, crashed, "--json")
    said = json.loads(out)
    assert code == diagnose.FAILURE
    assert set(said) == KEYS
    assert (said["format"], said["verdict"], said["cause"], said["cause_is_sure"]) == (
        "grpo-diagnosis/1",
        "FELL",
        "server crash",
        True,
    )
    assert (said["onset"]["step"], said["onset"]["shape"]) == (60, "to exactly 0")
    assert said["last_good_checkpoint"]["global_step"] == 39
    assert all(set(one) == {"cause", "score", "for", "against"} for one in said["causes"])
    assert {file["role"] for file in said["files"]} == {"trainer", "server"}


def test_a_run_of_ours_is_told_by_its_own_incidents(capsys, tmp_path):
    events = [
        {
            "time": 1.8e9 + 805,
            "event": "incident.began",
            "attempt": 1,
            "subject": "reward",
            "incident": 1,
            "cause": "verifier_broken",
            "reason": "known answers got 0",
            "onset_step": 80,
            "global_step": 80,
        },
        {
            "time": 1.8e9 + 601,
            "event": "checkpoint.committed",
            "attempt": 1,
            "global_step": 59,
            "subject": "epoch0epochstep59globalstep59",
        },
    ]
    logs = own_run(tmp_path, rewards=[0.6] * 80 + [0.0] * 30, events=events)
    code, out, _ = run(capsys, logs, "--json")
    said = json.loads(out)
    assert (code, said["onset"]["step"], said["cause"]) == (diagnose.FAILURE, 80, "reward function")
    assert said["last_good_checkpoint"]["global_step"] == 59
    (command,) = said["commands"]
    assert command.startswith(f"{python()} -m scripts.resume_training --experiment-name mine --trial-name t0")
    assert command.endswith("--before-step 60")


def test_a_run_of_ours_that_ended_in_error_has_stopped(capsys, tmp_path):
    events = [
        {
            "time": 1.8e9 + 400,
            "event": "memory.ran_out",
            "attempt": 1,
            "subject": "server-0",
            "ran_out": "server_device",
            "reason": "0.8 -> 0.7",
            "global_step": None,
        },
        {"time": 1.8e9 + 410, "event": "run.errored", "attempt": 1, "subject": "", "reason": "no setting is left"},
    ]
    logs = own_run(tmp_path, rewards=[0.6] * 40, events=events)
    code, out, _ = run(capsys, logs)
    assert code == diagnose.FAILURE
    assert out.startswith(
        "STOPPED: the run stopped after global step 39 (no setting is left). Cause: out of memory (server)"
    )


def test_a_later_attempt_that_goes_on_has_not_stopped(capsys, tmp_path):
    """At night a live, healthy run was told to have stopped, for what had ended the attempt before it."""
    events = [
        {
            "time": 1.8e9 + 1,
            "event": "run.errored",
            "attempt": 1,
            "subject": "",
            "reason": "the reward function is broken",
        },
        {"time": 1.8e9 + 2, "event": "run.started", "attempt": 2, "subject": "", "reason": "resumed"},
    ]
    code, out, _ = run(capsys, own_run(tmp_path, rewards=[0.6] * 40, events=events))
    assert (code, out.partition(":")[0]) == (0, "FINE"), out


def test_what_the_run_said_to_change_is_what_to_change(capsys, tmp_path):
    said = "d.jsonl:3: the prompt has 900 tokens\n  → leave such prompts out with train_dataset.max_length=96"
    events = [{"time": 1.8e9 + 1, "event": "run.errored", "attempt": 1, "subject": "", "reason": said}]
    _, out, _ = run(capsys, own_run(tmp_path, rewards=[], events=events))
    assert "before its first step (d.jsonl:3: the prompt has 900 tokens). Cause" in out
    assert "what the run itself said: leave such prompts out with train_dataset.max_length=96" in " ".join(out.split())


# ── bad input ──


def test_json_lines_of_another_program_are_no_metrics_of_ours(capsys, tmp_path):
    (tmp_path / "data.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    code, out, err = run(capsys, tmp_path / "data.jsonl")
    assert (code, out) == (WRONG, "")
    assert "data.jsonl is JSON without a step (global_step)" in err


def test_without_a_name_the_only_run_is_read(capsys, crashed, tmp_path):
    where = ("--fileroot", tmp_path, "--user", "me")
    assert run(capsys, *where) == run(capsys, crashed)
    (tmp_path / "logs/me/exp/t1").mkdir()
    code, _, err = run(capsys, *where)
    assert (code, "--trial-name is not given" in err) == (WRONG, True)
    assert all(f"--experiment-name exp --trial-name {trial}" in err for trial in ("t0", "t1"))
    code, _, err = run(capsys, "--fileroot", tmp_path / "none")
    assert (code, f"{tmp_path / 'none/logs'} is not there" in err) == (WRONG, True)


def test_checkpoints_elsewhere_are_found_where_they_are_said_to_be(capsys, tmp_path):
    logs = RunMaker(Made(fails="crash", onset=60)).write(tmp_path / "run")
    export(tmp_path / "kept", 39)
    _, out, _ = run(capsys, logs, "--checkpoints", tmp_path / "kept", "--json")
    assert json.loads(out)["last_good_checkpoint"]["path"].endswith("globalstep39")


# ── the command ──


def test_exit_codes_in_the_help_and_in_the_docs_agree():
    section = DOCS.read_text().partition("\n## What happened to my run\n")[2]
    (told,) = re.findall(r"^Exit codes: (.+)$", section, re.M)
    assert re.findall(r"\b\d+\b", told) == re.findall(r"\b\d+\b", diagnose.EXIT_CODES) == ["0", "1", "2", "3", "130"]


@pytest.mark.slow
def test_the_example_in_the_docs_is_what_it_prints(capsys, tmp_path):
    logs = made_run(tmp_path, Made(fails="crash", onset=188, steps=320, seed=3), steps=range(19, 320, 40))
    (Path(tmp_path) / "checkpoints/me/exp/t0/default/epoch0epochstep179globalstep179/tokenizer_config.json").unlink()
    _, out, _ = run(capsys, logs)
    said = (
        "".join(out.split()).replace(str(tmp_path), "/data").replace(python(), "python")
    )  # long paths are folded elsewhere
    assert said in "".join(DOCS.read_text().split()), out
