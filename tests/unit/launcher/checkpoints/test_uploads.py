"""Checkpoints at a URL: whole or not there at all, set back with the run, and fetched only where they prove whole."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading

import pytest

from launcher.base.errors import CheckpointError, ConfigError
from launcher.checkpoints.checkpoint_store import CheckpointStore
from launcher.checkpoints.remote_store import RemoteStore, without_secrets
from launcher.checkpoints.uploads import Uploader, fetch_if_empty
from launcher.config.compose import compose
from launcher.config.schema import DatasetConfig, RunConfig
from launcher.resources.config_checks import find_problems
from launcher.run_files.journal import Journal, read_lines
from launcher.run_files.run_paths import RunPaths
from scripts import list_checkpoints
from tests.unit.launcher.checkpoints.test_checkpoints import save

DEADLINE_S = 60


class Machine:
    """A disk of its own, and the URL that it shares with others."""

    def __init__(self, root, url, *, keep_last=3):
        self.config = RunConfig(experiment_name="exp", trial_name="t1")
        self.config.cluster.fileroot = str(root)
        self.config.train_dataset = DatasetConfig(path="unused")
        self.config.recover.url, self.config.recover.keep_last = url, keep_last
        self.paths = RunPaths.of(self.config)
        self.paths.prepare()
        self.store = CheckpointStore(self.paths.default_checkpoints)
        self.remote = RemoteStore(url, experiment_name="exp", trial_name="t1")
        self.uploader = self.new_uploader()

    def new_uploader(self):
        journal = Journal(self.paths.events, 1)
        return Uploader(self.remote, self.store, journal, keep_last=self.config.recover.keep_last)

    def copy(self):
        assert self.uploader.finish(DEADLINE_S) == ""

    def there(self):
        return [one.name.global_step for one in self.remote.list()]

    def fetch(self):
        return fetch_if_empty(self.config, self.paths, self.remote)

    def events(self, name):
        return [event for event in read_lines(self.paths.events) if event["event"] == name]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "far"


@pytest.fixture
def url(folder):
    return f"file://{folder}"


@pytest.fixture
def machine(tmp_path, url):
    return Machine(tmp_path / "here", url)


def far(folder, step):
    (found,) = (folder / "exp" / "t1").glob(f"*globalstep{step}")
    return found


# ── copies ──


def test_every_checkpoint_is_copied_once_and_said(machine):
    save(machine.store, 0)
    save(machine.store, 1, keep=True)
    machine.copy()
    machine.copy()
    assert machine.there() == [0, 1]
    assert [one.keep for one in machine.remote.list()] == [False, True]
    told = machine.events("checkpoint.uploaded")
    assert [event["global_step"] for event in told] == [1, 0], "the newest first"
    assert told[0]["bytes"] > 3000 and told[0]["to"] == machine.remote.where


def test_a_fetched_one_is_the_same_and_goes_on_the_same(machine, tmp_path, url):
    saved = save(machine.store, 4, keep=True)
    machine.copy()
    other = Machine(tmp_path / "elsewhere", url)
    fetched = other.fetch()
    assert fetched.global_step == 4 and fetched.keep
    assert fetched.manifest.files == saved.manifest.files
    assert fetched.manifest.config_fingerprint == saved.manifest.config_fingerprint
    other.store.verify(fetched)
    other.copy()
    assert other.events("checkpoint.uploaded") == [], "what it has from there it does not copy back"


def test_what_a_restore_set_aside_goes_there_too_and_a_retrained_step_takes_its_place(machine):
    for step in (0, 1, 2):
        save(machine.store, step)
    machine.copy()
    machine.store.set_aside_after(0)
    machine.uploader._set_back_to = 0
    machine.copy()
    assert machine.there() == [0]
    save(machine.store, 1, reward=0.9)
    machine.copy()
    assert [one.manifest.reward_mean for one in machine.remote.list()] == [0.5, 0.9]


def test_a_step_of_the_same_name_with_other_content_is_copied_anew(machine):
    save(machine.store, 0)
    machine.copy()
    shutil.rmtree(machine.store.list()[0].path)
    with machine.store.staging(machine.remote.list()[0].name) as staged:
        (staged / "model.safetensors").write_bytes(b"other")
        machine.store.commit(
            staged, global_step=0, policy_version=1, config_fingerprint={"a": 1}, health={}, keep=False
        )
    machine.copy()
    assert list(machine.remote.list()[0].manifest.files) == ["model.safetensors"]


def test_retention_there_follows_the_one_here(machine):
    for step in range(6):
        save(machine.store, step, keep=step == 1)
        machine.copy()
        machine.store.prune(3)
    machine.copy()
    assert machine.there() == [1, 3, 4, 5]


def test_a_disk_that_has_few_of_its_own_removes_nothing_there(machine, tmp_path, url):
    for step in range(3):
        save(machine.store, step)
    machine.copy()
    other = Machine(tmp_path / "elsewhere", url, keep_last=2)
    other.fetch()
    other.copy()
    assert other.there() == [0, 1, 2]


def test_one_that_is_pruned_while_it_is_copied_leaves_nothing(machine, monkeypatch):
    one = save(machine.store, 0)
    whole = machine.remote._fs.put_file

    def put_file(source, target):
        whole(source, target)
        shutil.rmtree(one.path, ignore_errors=True)

    monkeypatch.setattr(machine.remote._fs, "put_file", put_file)
    machine.copy()
    assert machine.there() == []
    assert machine.events("checkpoint.upload_failed") == []


def test_a_failure_is_said_once_tried_again_and_made_up_for(machine, monkeypatch):
    save(machine.store, 0)
    whole, tries = machine.remote._fs.put_file, []

    def put_file(source, target):
        tries.append(source)
        if len(tries) < 3:
            raise PermissionError("denied")
        whole(source, target)

    monkeypatch.setattr(machine.remote._fs, "put_file", put_file)
    monkeypatch.setattr("launcher.checkpoints.uploads.WAIT_FIRST_S", 0.01)
    machine.copy()
    (failed,) = machine.events("checkpoint.upload_failed")
    assert "PermissionError: denied" in failed["reason"] and failed["global_step"] == 0
    assert machine.there() == [0]


def test_what_can_not_be_copied_in_time_is_said_and_ends(machine, monkeypatch):
    save(machine.store, 0)
    monkeypatch.setattr(machine.remote._fs, "put_file", lambda *_: (_ for _ in ()).throw(OSError("no route")))
    assert "no route" in machine.uploader.finish(0.2)


def test_the_thread_copies_beside_the_run_and_not_before_the_run_knows_from_where_it_goes_on(machine):
    save(machine.store, 0)
    machine.uploader.committed()
    assert machine.uploader._thread is None and machine.there() == []
    machine.uploader.set_back(0)
    copied = threading.Event()
    record = machine.uploader._journal.record

    def recorded(event, **facts):
        record(event, **facts)
        if facts.get("global_step") == 1:
            copied.set()

    machine.uploader._journal.record = recorded
    save(machine.store, 1)
    machine.uploader.committed()
    assert copied.wait(DEADLINE_S)
    machine.uploader.close()
    machine.uploader._thread.join(DEADLINE_S)
    assert machine.there() == [0, 1]


KILLED = """
import sys, time
from pathlib import Path
from launcher.checkpoints.remote_store import RemoteStore
from tests.unit.launcher.checkpoints.test_uploads import Machine
machine = Machine(Path(sys.argv[1]), sys.argv[2])
whole, n = machine.remote._fs.put_file, [0]
def put_file(source, target):
    whole(source, target)
    n[0] += 1
    if n[0] == int(sys.argv[3]):
        print("half", flush=True)
        time.sleep(1000)
machine.remote._fs.put_file = put_file
machine.uploader.turn()
print("whole", flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("files", [1, 2, 3])
def test_a_kill_in_the_middle_leaves_nothing_that_is_listed_and_the_next_copies_it(tmp_path, url, folder, files):
    machine = Machine(tmp_path / "here", url)
    save(machine.store, 0)
    killed_after(files, tmp_path / "here", url)
    assert far(folder, 0).is_dir() and machine.there() == []
    assert Machine(tmp_path / "elsewhere", url).fetch() is None
    machine.copy()
    assert machine.there() == [0]


def killed_after(files, root, url, environment=None):
    command = [sys.executable, "-c", KILLED, str(root), url, str(files)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment or os.environ) as process:
        assert process.stdout.readline() == "half\n"
        process.send_signal(signal.SIGKILL)


# ── on the way back ──


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: (folder / "model.safetensors").write_bytes(b"w" * 3001), "SHA-256"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"w"), "has 1 bytes"),
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
    ],
)
def test_a_damaged_one_is_passed_over_and_where_all_are_nothing_is_begun_anew(
    machine, tmp_path, url, folder, damage, says
):
    save(machine.store, 0)
    save(machine.store, 1)
    machine.copy()
    damage(far(folder, 1))
    assert Machine(tmp_path / "second", url).fetch().global_step == 0
    damage(far(folder, 0))
    with pytest.raises(ConfigError, match=rf"no complete checkpoint at file://[\s\S]*{says}"):
        Machine(tmp_path / "third", url).fetch()
    third = CheckpointStore(Machine(tmp_path / "third", url).paths.default_checkpoints)
    assert list(third.root.iterdir()) == [], "nothing of it stays on the disk"


@pytest.mark.parametrize("name", ["../escape", "/etc/passwd", "a/../../escape"])
def test_a_manifest_that_leads_out_of_the_folder_is_no_manifest(machine, tmp_path, url, folder, name):
    save(machine.store, 0)
    machine.copy()
    path = far(folder, 0) / "manifest.json"
    data = json.loads(path.read_bytes())
    data["files"][name] = {"bytes": 1, "sha256": "0" * 64}
    path.write_text(json.dumps(data))
    assert machine.there() == []


def test_a_disk_that_is_behind_does_not_throw_away_what_is_there(machine, tmp_path, url):
    save(machine.store, 0)
    other = Machine(tmp_path / "elsewhere", url)
    for step in range(3):
        save(other.store, step)
    other.copy()
    with pytest.raises(ConfigError, match=r"holds step 2, this disk only step 0[\s\S]*another recover.url"):
        machine.fetch()
    other.store.set_aside_after(0)  # its own restore, killed before it could take them away there
    assert other.fetch() is None


def test_a_run_that_is_to_begin_anew_is_refused_where_the_url_holds_its_trial(machine, tmp_path, url):
    save(machine.store, 0)
    machine.copy()
    other = Machine(tmp_path / "elsewhere", url)
    other.config.recover.mode = "off"
    with pytest.raises(ConfigError, match=r"recover.mode=off[\s\S]*another trial_name"):
        other.fetch()


# ── what is told before anything starts ──


@pytest.mark.parametrize(
    "url", ["bucket/folder", "s3://key:secretsecret@bucket/a", "s3://b/a?token=secretsecret", "a::s3://b"]
)
def test_a_url_with_credentials_or_without_a_protocol_is_refused_and_not_shown(url):
    config = compose(["conf=arithmetic_cpu"])
    config.recover.url = url
    (problem,) = [problem for problem in find_problems(config) if problem.key == "recover.url"]
    assert "secret" not in str(problem) and "not shown" in str(problem)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("nosuch://bucket/a", r"recover\.url=nosuch://bucket/a"),
        ("gs://bucket/a", r"recover\.url=gs://bucket/a[\s\S]*gcsfs"),
    ],
)
def test_a_protocol_that_is_not_there_names_the_key_and_what_to_install(tmp_path, url, says):
    with pytest.raises(ConfigError, match=says):
        Machine(tmp_path, url)


def test_a_place_that_can_not_be_written_is_said_before_anything_starts(tmp_path):
    (tmp_path / "far").write_text("a file, not a folder")
    with pytest.raises(ConfigError, match=r"recover\.url: file://.* can't be written, read and removed from"):
        Machine(tmp_path / "here", f"file://{tmp_path}/far").fetch()


def test_no_error_tells_a_key():
    error = PermissionError("for wJalrXUtnFEMI with AKIA7EXAMPLE")
    told = without_secrets(
        error, {"AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI", "AWS_ACCESS_KEY_ID": "AKIA7EXAMPLE", "HOME": "for"}
    )
    assert told == "PermissionError: for (not shown) with (not shown)"


def test_an_operation_that_fails_is_a_checkpoint_error(machine, monkeypatch):
    monkeypatch.setattr(machine.remote._fs, "ls", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("throttled")))
    with pytest.raises(CheckpointError, match="throttled"):
        machine.there()


# ── listed ──


def test_the_tool_lists_the_copies(machine, url, monkeypatch, capsys):
    save(machine.store, 0)
    save(machine.store, 7, keep=True)
    machine.copy()

    def tool(*flags):
        monkeypatch.setattr(sys, "argv", ["list_checkpoints", "--experiment-name", "exp", "--trial-name", "t1", *flags])
        with pytest.raises(SystemExit) as ended:
            sys.exit(list_checkpoints.main())
        return ended.value.code, capsys.readouterr()

    code, said = tool("--url", url)
    assert code == 0 and "2 complete" in said.out and "kept" in said.out
    code, said = tool("--url", url, "--json")
    assert [copy["global_step"] for copy in json.loads(said.out)["copies"]] == [0, 7]
    assert tool("--url", f"{url}/elsewhere")[0] == 1
    code, said = tool("--url", "s3://key:secretsecret@bucket/a")
    assert code == 2 and "secretsecret" not in said.err
