"""What a person may give a tool that is wrong: each time the documented exit code, one message that names it and says
what to do, and no traceback. Settings that can't be read are in tests/unit/launcher/test_command_words.py."""

import contextlib
import importlib
import logging
import os
import sys
import tempfile
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from launcher import __main__ as command_line
from launcher.run_files.run_paths import RunPaths
from scripts import run_processes
from tests.support.hostile_text import CLEAR, TITLE, obeyed
from tests.support.long_run import LongRun

NOBODY = 65534
HOSTILE = f"t{TITLE}{CLEAR}"
LONG = "x" * 5000
TRIALS = ("ended", "never_began", "torn", "binary", "folders", "closed")
URL = "http://127.0.0.1:9"
NO_KEYS = {"no_key": "", "two_keys": "two\nlines", "key_json": '{"api": "one", "admin": "other"}'}


@pytest.fixture(scope="module")
def base():
    """Runs of the fileroots `ended`, `torn`, …, and what is no run: a folder, a file, and nothing. Below folders that
    everybody may pass: those of pytest are closed."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        Path(folder).chmod(0o755)
        yield fill(Path(folder))


def fill(base):
    for fileroot in TRIALS:
        paths = RunPaths(fileroot=base / fileroot, user="me", experiment_name="e", trial_name="t")
        if fileroot == "never_began":
            paths.prepare()
        else:
            LongRun(paths, steps=30, incidents=0).write()
        damage(fileroot, paths)
    (base / "no_run").mkdir()
    (base / "no_run/notes.txt").write_text("mine")
    (base / "empty").mkdir()
    (base / "file").write_text("x\n")
    (base / "other.csv").write_text("a,b\n1,2\n")
    for name, content in NO_KEYS.items():
        (base / name).write_text(content)
    return base


def damage(fileroot, paths):
    lines = paths.events.read_text().splitlines() if paths.events.exists() else []
    if fileroot == "torn":
        paths.events.write_text("\n".join([*lines[:3], lines[3][:20], *lines[4:]]) + "\n")
    if fileroot == "binary":
        for file in paths.logs.glob("*.jsonl"):
            file.write_bytes(bytes(range(256)) * 50)
    if fileroot == "folders":
        for file in (paths.events, paths.metrics):
            file.unlink()
            file.mkdir()
    if fileroot == "closed":
        paths.events.chmod(0)


@pytest.fixture
def tool(base, capfd, monkeypatch, tmp_path):
    """Run a tool on words in which {base} is that folder: its exit code, and what it printed on each stream."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.root, "handlers", [])  # Hydra adds one
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setattr(run_processes, "BEAT_S", 0.05)  # how long a live run is waited for

    def run(name, *words):
        words = [word.replace("{base}", str(base)) for word in words]
        monkeypatch.setattr(sys, "argv", [name, *words])
        GlobalHydra.instance().clear()
        module = command_line if name == "launcher" else importlib.import_module(f"scripts.{name}")
        takes_words = module.main.__code__.co_varnames[:1] == ("arguments",)
        try:
            code = module.main(words) if takes_words else module.main()
        except SystemExit as ended:  # argparse's
            code = ended.code
        sys.stdout.flush()
        said = capfd.readouterr()
        assert "Traceback" not in said.out + said.err
        assert not obeyed(said.out + said.err)
        return code, said.out, said.err

    return run


def run_of(fileroot, trial="t"):
    return ["--fileroot", f"{{base}}/{fileroot}", "--user", "me", "--experiment-name", "e", "--trial-name", trial]


def by_folder(*before):
    """What names no run, to a tool that takes the folder of its logs."""
    return {
        (*before, "{base}/nowhere"): "{base}/nowhere",
        (*before, "{base}/no_run"): "{base}/no_run",
        (*before, "{base}/file"): "{base}/file",
        (*before, LONG): LONG,
        (*before, "{base}/ended/logs/me/e/t", *run_of("ended")): "give one of them",
    }


def by_names(*before):
    """What names no run, to a tool that finds it by its names."""
    return {
        (*before, "--fileroot", "{base}/nowhere"): "{base}/nowhere",
        (*before, "--fileroot", "{base}/empty"): "{base}/empty",
        (*before, "--fileroot", "{base}/file"): "{base}/file",
        (*before, *run_of("ended", "tt")): "--trial-name tt: there is no such folder",
        (*before, *run_of("ended", HOSTILE)): r"--trial-name t\u001b]0;owned",
        (*before, *run_of("ended", LONG)): LONG,
        (*before, *run_of("ended"), "--experiment"): "did you mean --experiment-name?",
        (*before, *run_of("ended"), "--nonsense"): "unrecognized arguments: --nonsense",
    }


UNREAD = "events.jsonl can't be read: Is a directory"
ENDED = "{base}/ended/logs/me/e/t"
WRONG = {
    "check_health": {
        **by_folder(),
        **by_names(),
        ("{base}/ended/logs",): "is not …/logs/<user>/<experiment>/<trial>\n  → give a run below it: {base}/ended",
        (ENDED, "--timeout", "x"): "argument --timeout: invalid float value: 'x'",
        (ENDED, "--timeout", "nan"): "--timeout nan",
        (ENDED, "--recent", "-1"): "--recent -1",
        (ENDED, "--server", "x y"): "'x y' is no address of a server",
        (*run_of("folders"),): UNREAD,
    },
    "check_ledger": {
        **by_folder(),
        **by_names(),
        (*run_of("never_began"),): "has no ledger to check",
        (*run_of("binary"),): "ledger.jsonl can't be checked",
        (*run_of("folders"),): UNREAD,
    },
    "report": {
        **by_folder(),
        **by_names(),
        (*run_of("never_began"),): "has neither events.jsonl nor metrics.jsonl",
    },
    "run_control": {
        **by_folder("status"),
        **by_names("status"),
        (): "the following arguments are required: what",
        ("explode",): "invalid choice: 'explode'",
        ("status", *run_of("folders")): UNREAD,
        ("pause", *run_of("ended")): "e/t is not running: FINISHED",
        ("stacks", *run_of("never_began")): "e/t is not running",
        ("scale", *run_of("ended"), "--servers", "x"): "argument --servers: invalid int value: 'x'",
        ("pause", *run_of("ended"), "--timeout", "inf"): "--timeout: 'inf' is no number of seconds",
        ("pause", *run_of("ended"), "--timeout", "soon"): "--timeout: invalid seconds value: 'soon'",
    },
    "diagnose": {
        **by_names(),
        **{words: said for words, said in by_folder().items() if said != "give one of them"},
        (ENDED, *run_of("ended")): "PATH and --experiment-name exclude each other",
        (*run_of("never_began"),): "holds no log",
        (*run_of("folders"),): "holds no log",
        ("{base}/other.csv",): "no column of steps",
        (ENDED, "--metric", "nope"): "--metric nope is in none of the files\n  → keys: grpo_actor/task_reward/avg",
        (ENDED, "--checkpoints", "{base}/nowhere"): "--checkpoints {base}/nowhere is no folder",
    },
    "list_checkpoints": {
        **by_names(),
        ("--max-step", "x"): "--max-step: 'x' is no step",
        ("--max-step", "-1"): "--max-step: '-1' is no step",
        ("--max-step", "1", "--before-step", "2"): "--before-step: not allowed with argument --max-step",
        (*run_of("ended"), "--url", "nope://x"): "--url: recover.url=nope://x can't be used",
        ("--url", "file:///x"): "give --experiment-name and --trial-name too",
        (*run_of("ended", "../t"),): "trial_name='../t' can't name a folder",
    },
    "setup_recovery": {
        **by_names("--good"),
        (*run_of("ended"),): "one of the arguments --before-step --checkpoint-path --good --undo is required",
        (*run_of("ended"), "--good", "--before-step", "3"): "--before-step: not allowed with argument --good",
        (*run_of("ended"), "--before-step", "-1"): "--before-step: '-1' is no step",
        (*run_of("ended"), "--checkpoint-path", "{base}/nowhere"): "there is no folder {base}/nowhere",
        (*run_of("ended"), "--checkpoint-path", "{base}/file"): "there is no folder {base}/file",
        (*run_of("ended"), "--checkpoint-path", "{base}/no_run"): "no_run is no checkpoint's name",
        (*run_of("ended"), "--undo"): "nothing is set up",
    },
    "resume_training": {
        **by_names("--yes"),
        (*run_of("never_began"), "--yes"): "events.jsonl is not there, and no log of AReaL's",
        (*run_of("binary"), "--yes"): "events.jsonl does not say it",
        (*run_of("ended"), "--yes", "--command", "'x"): "can't be read: no closing quotation",
        (*run_of("ended"), "--yes", "--before-step", "x"): "--before-step: 'x' is no step",
    },
    "inject_fault": {
        ("--fileroot", "{base}/ended"): "no fault was named",
        ("C1", "--fileroot", "{base}/nowhere"): "live runs below {base}/nowhere: none",
        ("C1", "--fileroot", "{base}/file"): "live runs below {base}/file: none",
        ("C1", "--fileroot", "{base}/ended", "--run", "e"): "--run e names no run",
        ("C1", "--fileroot", "{base}/ended", "--run", "e/tt", "--user", "me"): "no run e/tt below {base}/ended",
        ("C1", "--fileroot", "{base}/ended", "--run", f"{LONG}/t"): LONG,
        ("C99",): "'C99' is no kind of fault\n  → one of C1, ",
        (HOSTILE,): "is not a fault",
        ("C1:server=x",): "server=x is not a number",
        ("C1:nope=1",): "C1 has no option 'nope'\n  → its options: part, server",
        ("C1@x",): "'C1@x' is not a fault",
        ("--storm", "C1"): "--steps (not given) is no range of steps",
        ("--storm", "C1", "--steps", "5"): "--steps 5 is no range of steps",
        ("C1", "--seed", "x"): "argument --seed: invalid int value: 'x'",
        ("C1", "--within", "-1"): "--within: '-1' is no number of seconds",
        ("C1", "--dry_run"): "did you mean --dry-run?",
    },
    "storm": {
        ("--faults", "C99", "--fileroot", "{base}/storm"): "'C99' is no kind of fault",
        ("--faults", "C1x999", "--fileroot", "{base}/storm"): "has no room for 999 faults",
        ("--conf", "nope", "--fileroot", "{base}/storm"): "unknown preset conf=nope",
        ("--fileroot", "{base}/storm", "nope=1"): "unknown key nope=1",
        ("--seed", "x"): "argument --seed: invalid int value: 'x'",
        ("--fileroots", "x"): "did you mean --fileroot?",
    },
    "watch": {
        ("--fileroot", "{base}/nowhere"): "{base}/nowhere/logs is not there",
        ("--fileroot", "{base}/file"): "{base}/file/logs is not there",
        ("--fileroot", "{base}/never_began"): "has written anything",
        ("--fileroot", "{base}/ended", "--port", "70000"): "--port 70000 is no port",
        ("--port", "x"): "argument --port: invalid int value: 'x'",
        ("--fileroot", "{base}/ended", "--keys", "{base}/nowhere"): "{base}/nowhere/watch_token is not there",
        ("--ports", "1"): "did you mean --port?",
    },
    "check_weights": {
        (): "the following arguments are required: URL, MODEL_FOLDER",
        **{
            (url, "{base}/no_run"): f"{url!r} is no address of a server"
            for url in ("localhost:30000", "ftp://host:1", "http://", "http://host:port", "http://host:99999")
        },
        (URL, "{base}/nowhere"): "there is no folder {base}/nowhere",
        (URL, "{base}/file"): "there is no folder {base}/file",
        (URL, "{base}/no_run"): "{base}/no_run/config.json is missing",
        (URL, "{base}/no_run", "--tokens", "0"): "--tokens 256 --timeout 60",
        (URL, "{base}/no_run", "--timeout", "0"): "--tokens 256 --timeout 60",
        (URL, "{base}/no_run", "--dtype", "int3"): "invalid choice: 'int3'",
        (URL, "{base}/no_run", "--prompts", "{base}/nowhere"): "{base}/nowhere can't be read",
        (URL, "{base}/no_run", "--api-key-file", "{base}/nowhere"): "{base}/nowhere can't be read",
        **{
            (URL, "{base}/no_run", "--api-key-file", f"{{base}}/{name}"): f"{{base}}/{name} does not hold one key"
            for name in NO_KEYS
        },
        (URL, "{base}/no_run", "--api_key_file", "x"): "did you mean --api-key-file?",
    },
    "compare_checkpoints": {
        (): "the following arguments are required: A, B",
        ("{base}/nowhere", "{base}/no_run"): "{base}/nowhere has no model.safetensors",
        ("{base}/file", "{base}/file"): "{base}/file has no model.safetensors",
        ("{base}/no_run", "{base}/no_run", "--answers", "3"): "--answers K and the run's settings belong together",
        ("{base}/no_run", "{base}/no_run", "--answers", "x"): "argument --answers: invalid int value: 'x'",
        ("{base}/no_run", "{base}/no_run", "--answers", "3", "seed"): "'seed' is no setting",
    },
    "ray_environment": {
        (): "the following arguments are required: FOLDER",
        ("{base}/file",): "{base}/file is not a folder of this user's",
        ("{base}/file/below",): "{base}/file/below/ray_token can't be written",
    },
    "make_arithmetic": {("--out", "{base}/file"): "--out {base}/file can't be made", ("-o", "x"): "-o x"},
    "make_calculator": {("--out", "{base}/file"): "--out {base}/file can't be made", ("-o", "x"): "-o x"},
    "document_settings": {("--nonsense",): "unrecognized arguments: --nonsense"},
    "document_flags": {("--nonsense",): "unrecognized arguments: --nonsense"},
    "launcher": {
        (): "no preset named; presets: areal, arithmetic_cpu, arithmetic_dapo,",
        ("conf=nope",): "unknown preset conf=nope; presets: areal, arithmetic_cpu, arithmetic_dapo,",
        ("conf=arithmetic_cpu", "actor.lr=0.1"): "did you mean actor.optimizer.lr?",
        ("conf=arithmetic_cpu", "seed=x"): "seed=x",
        ("conf=arithmetic_cpu", "train_dataset.path=???"): "no value for train_dataset.path",
        ("conf=arithmetic_cpu", "sglang.mem_fraction_static=1.5"): "allowed: more than 0 and less than 1",
        ("conf=arithmetic_cpu", "rollout.request_timeout=inf"): "would never fire",
        ("conf=command", "dry_run=true"): "trainer.command=null: nothing to run",
        ("conf=arithmetic_cpu", "hardware=aut"): "unknown hardware=aut; allowed: auto\n  → did you mean hardware=auto?",
        ("conf=arithmetic_cpu", "gconfig.n_samples=1"): "gconfig.n_samples=1",
        ("conf=arithmetic_cpu", "cluster.fileroot={base}/file", "trial_name=../x"): "trial_name",
        ("conf=arithmetic_cpu", "trial_name=" + LONG): LONG,
        ("conf=arithmetic_cpu", f"recover.mode='{HOSTILE}'"): r"\u001b]0;owned",
        ("conf=arithmetic_cpu", "--config-dir=nowhere"): "--config-dir: there is no folder ",
        ("conf=arithmetic_cpu", "--nonsense"): "--nonsense",
        ("conf=arithmetic_cpu", "--resolve"): "--resolve flag can only be used",
        ("doctor", "conf=gsm8k_h200"): "usage: python -m launcher doctor",
        ("doctor", "address=x", "y"): "address=x y can't be understood",
        ("init",): "init needs the name of one file",
        ("init", "a.yaml", "b.yaml"): "init needs the name of one file",
        ("init", "run.txt"): "run.txt is no name of a preset",
        ("init", "../run.yaml"): "../run.yaml is no name of a preset",
        ("init", "areal.yaml"): "areal is a preset of the launcher",
        ("init", "run.yaml", "conf=nope"): "conf=nope: there is no such preset",
        ("init", f"{LONG}.yaml"): LONG,
    },
}


def rows():
    for name, wrong in WRONG.items():
        for words, said in wrong.items():
            composes = name == "storm" or words[:1] == ("conf=arithmetic_cpu",)  # seconds
            yield pytest.param(
                name, words, said, id=f"{name} {' '.join(words)[:60]}", marks=[pytest.mark.slow] * composes
            )


@pytest.mark.parametrize(("name", "words", "said"), [*rows()])
def test_what_is_wrong_is_one_message_with_exit_code_2(tool, base, name, words, said):
    code, out, err = tool(name, *words)
    assert (code, out) == (2, ""), err
    assert err.startswith("error: ")
    assert err.count("error: ") == 1
    assert err.count("\n  → ") == 1, err
    assert said.replace("{base}", str(base)) in err


GOES_ON = {
    ("check_health", *run_of("never_began")): (1, "has no events.jsonl of a run"),
    ("check_health", *run_of("binary")): (1, "has no events.jsonl of a run"),
    ("check_health", *run_of("torn")): (1, "1 line of events.jsonl is no record of a run"),
    ("check_ledger", *run_of("torn")): (3, "not known: "),
    ("report", *run_of("torn")): (0, "not read: 1 line of events.jsonl is no record of a run"),
    ("report", *run_of("binary")): (0, "lines of events.jsonl are no record of a run"),
    ("report", *run_of("folders")): (0, "not read: events.jsonl can't be read: Is a directory; metrics.jsonl can't"),
    ("run_control", "status", *run_of("never_began")): (1, "e/t is not running"),
    ("run_control", "status", *run_of("binary")): (1, "its driver is gone and did not write how it ended"),
    ("run_control", "status", *run_of("torn")): (1, "e/t is not running: FINISHED"),
    ("diagnose", *run_of("binary")): (3, "UNCLEAR: no step was understood in these files"),
    ("diagnose", *run_of("torn")): (0, "1 line of events.jsonl is no record of a run"),
    ("list_checkpoints", *run_of("never_began")): (1, "there is none at all"),
    ("list_checkpoints", *run_of("torn")): (1, "1 line of events.jsonl is no record of a run"),
    ("list_checkpoints", *run_of("binary")): (1, "lines of events.jsonl are no record of a run"),
}


@pytest.mark.parametrize("words", GOES_ON, ids=lambda words: f"{words[0]} {words[-7]}")
def test_what_is_damaged_in_part_is_read_as_far_as_it_goes_and_said(tool, words):
    code, said = GOES_ON[words]
    found, out, err = tool(*words)
    assert (found, err) == (code, "")
    assert said in " ".join(out.split())


NOTHING_FITS = {
    ("setup_recovery", "--good", *run_of("never_began")): "there is none at all",
    ("setup_recovery", "--good", *run_of("torn")): "there is none at all",
}


@pytest.mark.parametrize("words", NOTHING_FITS, ids=lambda words: words[-7])
def test_nothing_fits_is_exit_code_1(tool, words):
    code, out, err = tool(*words)
    assert (code, out, err.count("error: ")) == (1, "", 1)
    assert NOTHING_FITS[words] in err


@contextlib.contextmanager
def as_nobody():
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


@pytest.mark.parametrize("words", [("check_health",), ("check_ledger",), ("run_control", "status")], ids=" ".join)
def test_a_file_that_may_not_be_read_is_named_and_nothing_is_said_of_the_run(tool, words):
    """`check_ledger` ended with the code of a ledger that has lost something."""
    with as_nobody():
        code, out, err = tool(*words, *run_of("closed"))
    assert (code, out) == (2, "")
    assert "events.jsonl can't be read: Permission denied\n  → check its permissions" in err
