"""How attempts began and ended, from their events."""

import json

from launcher.run_files.run_ends import last_end, last_start_or_end
from launcher.run_files.run_paths import RunPaths


def ended(folder, *events):
    paths = RunPaths(fileroot=folder, user="me", experiment_name="e", trial_name="t")
    paths.logs.mkdir(parents=True)
    paths.events.write_text("".join(json.dumps({"event": event, "at": at}) + "\n" for at, event in enumerate(events)))
    return paths


def test_the_last_attempts_end_counts(tmp_path):
    assert last_end(ended(tmp_path / "1", "run.started", "run.errored", "run.started")) is None
    assert last_end(ended(tmp_path / "2", "run.started", "run.errored"))["at"] == 1
    assert last_start_or_end(ended(tmp_path / "3", "run.finished", "recovery.taken"))["at"] == 0
    assert last_start_or_end(ended(tmp_path / "4", "run.finished", "other"), or_event="other")["at"] == 1


def test_a_foreign_line_is_passed_over(tmp_path):
    paths = ended(tmp_path, "run.started", "run.finished", ["run.started"], {"of": "another program"}, None)
    assert last_end(paths)["at"] == 1
