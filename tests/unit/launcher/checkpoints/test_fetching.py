"""Checkpoints fetched from a URL, what is refused before anything starts, and the list of the copies."""

import hashlib
import json
import sys
import threading

import pytest

from launcher.base.errors import CheckpointError, ConfigError
from launcher.checkpoints.checkpoint_store import CheckpointStore
from launcher.checkpoints.remote_store import without_secrets
from launcher.resources.config_checks import find_problems
from scripts import list_checkpoints
from tests.support.composed import composed
from tests.support.remote_machine import Machine, deadline_s, far
from tests.support.worlds.checkpoints import save

# ── on the way back ──


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: (folder / "model.safetensors").write_bytes(b"w" * 3001), "was changed"),
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


def test_a_peer_that_says_nothing_is_refused_before_anything_starts(machine, monkeypatch):
    """The command stood there for ever, and said nothing."""
    over = threading.Event()
    monkeypatch.setattr(machine.remote._fs, "pipe_file", lambda *_: over.wait(deadline_s()))
    machine.config.recover.url_timeout = 0.2
    with pytest.raises(ConfigError, match=r"recover\.url: .* 0\.2 s"):
        machine.fetch()
    over.set()


def test_one_of_the_form_before_is_not_copied_back_to_where_it_was_fetched_from(machine, tmp_path, url, folder):
    """Its checksums were made anew, so it was called another one, removed there, and uploaded again."""
    save(machine.store, 0)
    machine.copy()
    told = json.loads((far(folder, 0) / "manifest.json").read_bytes())
    told["format"] = "grpo-checkpoint/1"
    for name, record in told["files"].items():
        data = (far(folder, 0) / name).read_bytes()
        told["files"][name] = {"bytes": record["bytes"], "sha256": hashlib.sha256(data).hexdigest()}
    (far(folder, 0) / "manifest.json").write_text(json.dumps(told))
    second = Machine(tmp_path / "second", url)
    fetched = second.fetch()
    assert second.store.verify(fetched) == ()
    second.copy()
    assert second.events("checkpoint.uploaded") == []


@pytest.mark.parametrize("name", ["../escape", "/etc/passwd", "a/../../escape"])
def test_a_manifest_that_leads_out_of_the_folder_is_no_manifest(machine, tmp_path, url, folder, name):
    save(machine.store, 0)
    machine.copy()
    path = far(folder, 0) / "manifest.json"
    data = json.loads(path.read_bytes())
    data["files"][name] = {"bytes": 1, "checksum": "sha256:0"}
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
    config = composed("conf=arithmetic_cpu")
    config.recover.url = url
    (problem,) = [problem for problem in find_problems(config) if problem.subject.startswith("recover.url=")]
    assert "secret" not in str(problem)
    assert "not shown" in str(problem)


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
    assert code == 0
    assert "2 complete" in said.out
    assert "kept" in said.out
    code, said = tool("--url", url, "--json")
    assert [copy["global_step"] for copy in json.loads(said.out)["copies"]] == [0, 7]
    assert tool("--url", f"{url}/elsewhere")[0] == 1
    code, said = tool("--url", "s3://key:secretsecret@bucket/a")
    assert code == 2
    assert "secretsecret" not in said.err
