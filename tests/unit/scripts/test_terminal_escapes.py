"""What others wrote into reasons, logs and files does not command the terminal of whoever looks at it."""

import contextlib
import json
import os
import pty
import shutil
import subprocess
import sys

import pytest

from launcher.__main__ import main as launch
from launcher.config.compose import REPOSITORY
from launcher.run_files.run_paths import RunPaths
from scripts import diagnose, inject_fault, report, resume_training, run_control, setup_recovery
from tests.support.checkpoint_makers import write_rewards
from tests.support.hostile_text import BIDI, FROM_RICH, HOSTILE, MARKUP, TITLE, obeyed
from tests.support.long_run import LongRun
from tests.support.made_logs import Made
from tests.support.trial_names import trial_paths
from tests.support.worlds.checkpoints import HEALTHY
from tests.support.worlds.diagnosis import made_run

SHOWN = r"\u001b]0;owned"
SPOKEN = HOSTILE.replace(MARKUP, "")
MODULE = f"raise ImportError({HOSTILE!r})\n"


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A run of ours that a server, a reward function and the driver's end fill with hostile text."""
    paths = RunPaths(fileroot=tmp_path_factory.mktemp("ended"), user="me", experiment_name="e", trial_name="t")
    LongRun(paths, steps=60, incidents=2).write()
    events = [json.loads(line) for line in paths.events.read_text().splitlines()]
    events[-1] |= {"event": "run.errored", "exit_code": 3}
    for event in events:
        event |= {"reason": HOSTILE}
        event |= {key: HOSTILE for key in ("doing", "actions", "subject") if key in event}
    paths.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    (paths.logs / "config.yaml").write_text(json.dumps({"experiment_name": HOSTILE}))
    paths.summary.write_text(HOSTILE)
    paths.lock.touch()  # free: without one a tool waits eight seconds for a beat of the run
    for name in ("trainer.log", "llm_server-0.log"):
        (paths.logs / name).write_text(f"Traceback (most recent call last):\n  in x\nValueError: {HOSTILE}\n")
    return paths


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """AReaL's logs of a server that died, each of its errors with hostile text behind it."""
    logs = made_run(tmp_path_factory.mktemp("foreign"), Made(fails="crash", onset=60), steps=(19, 39, 79))
    for log in logs.glob("*.log"):
        log.write_text(log.read_text().replace("failed", f"{TITLE}{BIDI}failed").replace("exits,", f"{TITLE}exits,"))
    return logs


@pytest.fixture(scope="module")
def trial(made_trial, tmp_path_factory):
    """Checkpoints, one of them with a manifest and a name that nobody expects."""
    root = shutil.copytree(made_trial, tmp_path_factory.mktemp("trial") / "root")
    write_rewards(trial_paths(root), HEALTHY)
    (manifest,) = root.rglob("*globalstep15/manifest.json")
    facts = json.loads(manifest.read_text())
    facts["files"][f"{HOSTILE.replace('/', '|')}.safetensors"] = next(iter(facts["files"].values()))
    manifest.write_text(json.dumps(facts))
    return root


def names_of(paths):
    return [
        "--experiment-name",
        paths.experiment_name,
        "--trial-name",
        paths.trial_name,
        "--user",
        paths.user,
        "--fileroot",
        str(paths.fileroot),
    ]


READ = {
    "diagnose ours": ("ended", lambda paths: ["scripts.diagnose", str(paths.logs)]),
    "diagnose AReaL": ("foreign", lambda logs: ["scripts.diagnose", str(logs)]),
    "check_health": ("ended", lambda paths: ["scripts.check_health", *names_of(paths)]),
    "run_control": ("ended", lambda paths: ["scripts.run_control", "status", *names_of(paths)]),
    "list_checkpoints": ("trial", lambda root: ["scripts.list_checkpoints", "--verify", *names_of(trial_paths(root))]),
}
"""By name: the files, as a fixture, and the words of the tool that reads them."""
TYPED = {
    "a choice": (run_control, lambda paths: [HOSTILE]),
    "a name": (report, lambda paths: [*names_of(paths)[:-1], HOSTILE]),
    "a path": (diagnose, lambda paths: [HOSTILE]),
    "a fault": (inject_fault, lambda paths: [HOSTILE, "--fileroot", str(paths.fileroot)]),
    "a setting": (resume_training, lambda paths: [*names_of(paths), HOSTILE, "--command", f"python {HOSTILE}"]),
    "a checkpoint": (setup_recovery, lambda paths: [*names_of(paths), "--checkpoint-path", HOSTILE]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", READ)
def test_nothing_of_a_file_commands_the_terminal(name, request):
    fixture, words = READ[name]
    command = [sys.executable, "-m", *words(request.getfixturevalue(fixture))]
    done = subprocess.run(command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    printed = (done.stdout + done.stderr).decode()
    assert SHOWN in printed.replace("\n", ""), printed
    assert not obeyed(printed), printed


@pytest.mark.parametrize("name", TYPED)
def test_nothing_of_an_argument_commands_the_terminal(name, ended, capfd):
    tool, words = TYPED[name]
    with contextlib.suppress(SystemExit):
        tool.main(words(ended))
    sys.stdout.flush()
    said = capfd.readouterr()
    assert "\\u202a" in said.out + said.err
    assert not obeyed(said.out + said.err), said


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [[f"recover.mode='{SPOKEN}'"], [f"+seed{SPOKEN}=1"], [f"reward.fn='{SPOKEN}'", "--cfg=job"]]
)
def test_nothing_of_a_setting_commands_the_terminal(words, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["launcher", "conf=arithmetic_cpu", *words])
    launch()
    said = capfd.readouterr()
    assert "owned" in said.out + said.err
    assert not obeyed(said.out + said.err), said


def on_a_terminal(*words):
    """What `python -m words` printed on a terminal of 80 columns."""
    reader, writer = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color"}
    with subprocess.Popen(
        [sys.executable, "-m", *words], cwd=REPOSITORY, env=environment, stdin=writer, stdout=writer, stderr=writer
    ):
        os.close(writer)
        printed = b""
        try:
            while part := os.read(reader, 65536):
                printed += part
        except OSError:  # its last writer has closed it
            pass
    os.close(reader)
    return printed.decode()


@pytest.mark.slow
def test_on_a_terminal_colours_are_the_tools_own(ended):
    """As a table is laid out that holds it."""
    printed = on_a_terminal("scripts.check_health", *names_of(ended))
    assert "\x1b[1" in printed
    assert SHOWN in "".join(printed.splitlines())
    assert not obeyed(printed), printed


def test_json_is_json_and_holds_what_was_written(ended, capfd):
    diagnose.main(["--json", str(ended.logs)])
    said = capfd.readouterr().out
    assert not obeyed(said)
    assert BIDI in json.dumps(json.loads(said), ensure_ascii=False)


@pytest.mark.slow
def test_a_reward_module_that_cant_be_imported(tmp_path):
    """Its error reaches the person through a process that the pre-flight starts."""
    (tmp_path / "hostile_reward.py").write_text(MODULE)
    command = [sys.executable, "-m", "launcher", "conf=arithmetic_cpu", "dry_run=true", "reward.fn=hostile_reward:f"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{REPOSITORY}"},
        capture_output=True,
        check=False,
    )
    assert SHOWN in done.stderr.decode()
    assert not obeyed((done.stdout + done.stderr).decode())


CONSOLE = """
import sys
from launcher.reporting.event_lines import tell
from launcher.reporting.live_display import Display
from launcher.reporting.terminal_text import speak_anywhere
from launcher.base.messages import ServerState
from tests.support.hostile_text import HOSTILE
from tests.support.run_views import server, view
speak_anywhere()
event = {"event": "incident.began", "incident": 1, "cause": HOSTILE, "subject": HOSTILE, "reason": HOSTILE}
with Display(sys.stdout) as display:
    display.line(tell(event | {"doing": HOSTILE}))
    display.update(view(last_event=HOSTILE, title=HOSTILE, servers=(server(0, ServerState.DEAD, 3, HOSTILE),)))
    print(HOSTILE)
    print(HOSTILE, file=sys.stderr)
    display.line(HOSTILE)
"""


@pytest.fixture
def console(tmp_path, monkeypatch):
    (tmp_path / "console_lines.py").write_text(CONSOLE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{REPOSITORY}")
    return "console_lines"


def test_the_lines_of_a_run(console):
    done = subprocess.run([sys.executable, "-m", console], cwd=REPOSITORY, capture_output=True, check=False)
    printed = (done.stdout + done.stderr).decode()
    assert printed.count(SHOWN) >= 5, done.stderr.decode()
    assert not obeyed(printed)


@pytest.mark.slow
def test_the_panel_of_a_run(console):
    printed = on_a_terminal(console)
    assert "╭" in printed, printed
    assert printed.count(r"\u001b]0;owned") >= 4, printed
    assert not obeyed(printed, allowed=FROM_RICH), obeyed(printed, allowed=FROM_RICH)
    assert MARKUP in "".join(printed.splitlines())
