"""docs/adapters.md, from AReaL's launcher to this one: each command and step of the page, with a stand-in of AReaL."""

import contextlib
import re
import shlex
import subprocess

import pytest

from launcher.__main__ import launch, ordered_arguments
from launcher.base.errors import LauncherError
from launcher.config.compose import REPOSITORY, compose
from launcher.run_files.run_paths import RunPaths, login_name
from scripts import check_health, report
from scripts.lab import adapter_storm
from tests.support.checkpoint_makers import make_areal, snapshot
from tests.support.long_run import LongRun
from tests.support.trial_names import EXPERIMENT, TRIAL
from tests.support.worlds.adapters import YAML, trainer

SECTION = (REPOSITORY / "docs" / "adapters.md").read_text().partition("\n## AReaL\n")[2].partition("\n## ")[0]
BLOCKS = [block.replace("\\\n", "") for block in re.findall(r"^```bash\n(.*?)^```", SECTION, re.MULTILINE | re.DOTALL)]
(BEFORE, NOW), (TEN_MINUTES,), (STORM,) = ([*filter(None, block.splitlines())] for block in BLOCKS)
GIVEN_BEHIND = re.search(r"behind `--`, as\s+`([^`]+)`", SECTION)[1]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of the script, with their YAML as a person has it who relies on nothing of recovery."""
    trainer(tmp_path)
    (tmp_path / "venv" / "bin" / "python").symlink_to("python3")
    off = "freq_epochs: null, freq_steps: null, freq_secs: null}}"
    text = re.sub(r"^saver: .*", "saver: {{" + off, YAML, flags=re.MULTILINE)
    text = re.sub(r"^recover: .*", "recover: {{mode: disabled, " + off, text, flags=re.MULTILINE)
    (tmp_path / "their.yaml").write_text(text.format(experiment=EXPERIMENT, trial=TRIAL, root=tmp_path / "out"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def typed(folder, capsys):
    """Types a line of the page; its exit code, and what it prints."""

    def run(line, *more):
        words = shlex.split(line.replace("/path/to/areals/venv", str(folder / "venv")), comments=True)
        assert words[:3] == ["python", "-m", "launcher"]
        overrides = ordered_arguments([*words[3:], *more])
        try:
            code = launch(compose(overrides), overrides)
        except LauncherError as error:
            return error.exit_code, str(error)
        said = capsys.readouterr()
        return code, said.out + said.err

    return run


def dry(line):
    return line.replace(" -- ", " dry_run=true -- ")


def test_the_command_of_before_is_what_the_command_of_now_starts(typed):
    theirs = shlex.split(BEFORE, comments=True)
    code, said = typed(dry(NOW))
    (started,) = re.findall(r"^rung A, a command \(areal\): (.*)", said, re.MULTILINE)
    assert code == 2
    assert said.count("missing here: ") == 1
    assert "no AReaL is installed there" in said
    assert shlex.split(started)[1:] == theirs[1:]


@pytest.mark.slow
def test_the_first_command_starts_nothing_and_shows_the_plan_with_its_notes(typed, folder):
    before = snapshot(folder)
    code, said = typed(TEN_MINUTES)
    assert code == 0
    assert "missing here" not in said
    assert f"plan of {EXPERIMENT}/t1, in {folder}/out/supervised" in said
    assert "note: their.yaml: recover.mode or recover.freq_* is off" in said
    assert "note: their.yaml: saver.freq_* is off" in typed(TEN_MINUTES, *shlex.split(GIVEN_BEHIND)[:2])[1]
    assert "note: " not in typed(TEN_MINUTES, *shlex.split(GIVEN_BEHIND))[1]
    assert snapshot(folder) == before


def test_what_is_missing_and_what_contradicts_the_yaml_is_one_message_each(typed, folder):
    (folder / "train.py").unlink()
    code, said = typed(TEN_MINUTES)
    assert code == 2
    assert said.count("missing here: ") == 1
    assert "train.py is no file" in said
    code, said = typed(TEN_MINUTES.replace(" -- ", " trial_name=other -- "))
    assert code == 2
    assert said.startswith("trial_name=other, and their.yaml says t1\n")


def test_without_a_dry_run_a_recover_folder_that_is_torn_is_refused_and_nothing_is_moved(typed, folder):
    _, info = make_areal(folder / "out", [], recover_step=9)
    same = TEN_MINUTES.replace("trial_name=t1", f"trial_name={TRIAL} {GIVEN_BEHIND}")
    assert "missing here" not in typed(same)[1]
    (info / "dataloader_info.pkl").unlink()
    before = snapshot(folder)
    code, said = typed(same.replace(" dry_run=true", ""))
    assert code == 2
    assert "dataloader_info.pkl" in said
    assert "this run has not made it" in said
    assert snapshot(folder) == before


@pytest.mark.parametrize("tool", [check_health, report])
def test_the_tools_take_the_folder_of_the_launcher_s_own_files(typed, folder, tool):
    named = re.search(r"want the folder `([^`]+)`", SECTION)[1]
    named = named.replace("$USER", login_name()).replace("<experiment>", EXPERIMENT).replace("<trial>", "t1")
    root = re.search(r"^plan of \S+, in (.*)", typed(TEN_MINUTES)[1], re.MULTILINE)[1]
    paths = RunPaths(fileroot=root, user=login_name(), experiment_name=EXPERIMENT, trial_name="t1")
    assert paths.logs == folder / "out" / named
    paths.prepare()
    LongRun(paths, steps=60, incidents=1).write()
    paths.config.write_text("trainer: {adapter: areal}")
    assert tool.main([str(folder / "out" / named)]) == 0


def test_the_storm_of_the_page_is_of_the_run_of_the_page(folder, monkeypatch):
    found = []

    @contextlib.contextmanager
    def started(words, paths):
        found.append((words, paths))
        with subprocess.Popen(["true"]) as ended:
            yield ended

    monkeypatch.delenv("AREAL_RIG", raising=False)
    monkeypatch.setattr(adapter_storm, "started", started)
    words = shlex.split(STORM)
    assert words[:3] == ["python", "-m", "scripts.lab.adapter_storm"]
    assert adapter_storm.main(words[3:]) == adapter_storm.LOST, "the run that was started here took no step"
    ((settings, paths),) = found
    assert settings == ["conf=areal", "trainer.config=their.yaml", 'trainer.overrides=["trial_name=storm"]']
    assert (paths.experiment_name, paths.trial_name) == (EXPERIMENT, "storm")
