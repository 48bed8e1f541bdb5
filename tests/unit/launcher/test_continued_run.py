"""A further attempt that the launcher begins has the settings of the first, and ends the run where it can't begin."""

import dataclasses
import json
import sys
import time

import pytest

from actors.cluster.cluster_restarts import AttemptLost, Continuation
from launcher import __main__ as command
from launcher import driver
from launcher.__main__ import main
from launcher.base.messages import KilledDriver
from launcher.cli.continuation import Successor
from launcher.cli.interrupts import NoInterrupts
from launcher.cli.keep_alive import KILLED
from launcher.cli.run_screen import write_config
from launcher.cli.unattended import CONTINUES
from launcher.config.compose import compose
from launcher.driver import RunLaunch
from launcher.run_files.journal import Journal, read_lines
from launcher.run_files.run_paths import RunPaths

LOST = Continuation(incident=1, attempt=2, lost_at=1.0, begun=(1.0,), furthest=3, progress_at=None)
DEAD = KilledDriver(how="SIGKILL", at=1.0, began=0.0, times=1, mark="")
PRESET = """# @package _global_
defaults:
  - arithmetic_cpu
seed: {seed}
"""


class Begun:
    """A run of a preset of the user's own, which has begun and whose attempt an incident has ended."""

    def __init__(self, folder, monkeypatch):
        self.presets = folder / "presets"
        (self.presets / "conf").mkdir(parents=True)
        self.preset = self.presets / "conf" / "mine.yaml"
        self.config = compose(["conf=arithmetic_cpu", "seed=5", f"cluster.fileroot={folder / 'root'}"])
        self.paths = RunPaths.of(self.config)
        self.paths.prepare()
        self.settings = write_config(dataclasses.asdict(self.config), self.paths, 1)
        journal = Journal(self.paths.events, 1, time.time)
        journal.record("run.started", reason="fresh", settings=self.settings.name)
        journal.record("incident.began", subject="cluster", reason="lost", incident=1, cause="cluster_lost", at=1.0)
        monkeypatch.setattr(sys, "argv", ["launcher", f"--config-dir={self.presets}", "conf=mine"])

    def continues(self, monkeypatch, how):
        name, known = (CONTINUES, LOST) if how == "lost" else (KILLED, DEAD)
        facts = dataclasses.asdict(dataclasses.replace(known, settings=str(self.settings)))
        monkeypatch.setenv(name, json.dumps(facts))

    def events(self, name):
        return [event for event in read_lines(self.paths.events) if event["event"] == name]


@pytest.fixture
def begun(tmp_path, monkeypatch):
    return Begun(tmp_path, monkeypatch)


@pytest.mark.parametrize("how", ["lost", "killed"])
@pytest.mark.parametrize("edited", [PRESET.format(seed=6), PRESET.format(seed="none of it: ["), None])
def test_a_preset_that_is_edited_or_removed_meanwhile_changes_nothing(begun, monkeypatch, edited, how):
    if edited is not None:
        begun.preset.write_text(edited)
    begun.continues(monkeypatch, how)
    ran = []

    def run(config, *, successor, plan):
        ran.append((config, successor.known, successor.killed))
        return 0

    monkeypatch.setattr(driver, "run", run)
    assert main() == 0
    ((config, known, killed),) = ran
    assert config == begun.config
    assert (known is not None, killed is not None) == (how == "lost", how == "killed")


@pytest.mark.parametrize("how", ["lost", "killed"])
def test_one_that_is_refused_before_it_begins_ends_the_run_with_a_status(begun, monkeypatch, capsys, how):
    begun.settings.write_text("seed: [")
    begun.continues(monkeypatch, how)
    assert main() == 3
    said = capsys.readouterr().err
    assert said.count("error:") == 1 and "ERRORED, as no further attempt can begin" in said and "config.yaml" in said
    (ended,) = begun.events("run.errored")
    assert (ended["exit_code"], ended["attempt"]) == (3, 2 if how == "lost" else 1)
    (incident,) = begun.events("incident.ended")
    assert (incident["incident"], incident["is_mended"], incident["cause"]) == (1, False, "cluster_lost")
    assert "config.yaml" in begun.paths.report.read_text()


def test_ctrl_c_before_it_begins_ends_the_run_with_a_status(begun, monkeypatch, capsys):
    def interrupted(config):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "check", interrupted)
    begun.continues(monkeypatch, "killed")
    assert main() == 130
    assert capsys.readouterr().err == "ended by Ctrl-C\n"
    (ended,) = begun.events("run.aborted")
    assert (ended["exit_code"], ended["reason"]) == (130, "ended by the user, before another attempt was begun")
    assert [event["is_mended"] for event in begun.events("incident.ended")] == [False]


@pytest.mark.parametrize("how", ["first", "lost", "killed"])
def test_each_attempt_hands_on_the_settings_of_the_first(begun, monkeypatch, how):
    """Also where its own are written elsewhere, since an earlier command had others."""
    first = begun.paths.logs / "config.attempt7.yaml"
    if how != "first":
        first.write_text(begun.settings.read_text())
        begun.settings = first
        begun.continues(monkeypatch, how)
    successor, handed = Successor(), []

    def begin(known, interrupts, *, screen_began, lock):
        handed.append(known.settings)
        raise SystemExit

    def lost(_):
        raise AttemptLost({"reason": "lost"}, LOST, not_before=0.0)

    monkeypatch.setattr(Successor, "begin", staticmethod(begin))
    monkeypatch.setattr(RunLaunch, "run", lost)
    monkeypatch.setattr(driver, "Interrupts", NoInterrupts)
    monkeypatch.setattr(driver, "check_data", lambda config: [])
    if successor.known is not None:
        monkeypatch.setattr(successor, "known", dataclasses.replace(successor.known, lock=None))
    config = dataclasses.replace(begun.config, seed=8)
    with pytest.raises(SystemExit):
        driver.run(config, successor=successor)
    written = begun.paths.logs / "config.attempt2.yaml"
    assert handed == [str(written if how == "first" else first)]
    assert begun.events("run.started")[-1]["settings"] == written.name
