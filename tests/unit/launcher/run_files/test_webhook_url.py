"""The URL of the alerts is in one private file; what is printed and recorded of it tells its host at most."""

import dataclasses
import errno
import stat
import sys
import tempfile

import pytest
import yaml

from launcher.__main__ import main
from launcher.base.errors import UsageError
from launcher.cli.run_screen import write_config
from launcher.cli.unattended import hide_webhook, same_command
from launcher.config.compose import compose
from launcher.run_files.run_keys import keep_webhook, read_webhook, shown_webhook, webhook_url
from launcher.run_files.run_paths import RunPaths

URL = "https://user:pass@chat.test:8443/services/T0/secret?key=secret"
SHOWN = "https://chat.test:8443/__hidden__"


@pytest.mark.parametrize(("given", "shown"), [(URL, SHOWN), ("env:CHAT_URL", "env:CHAT_URL")])
def test_what_is_shown_of_it(given, shown):
    assert shown_webhook(given) == shown == shown_webhook(shown)


@pytest.mark.parametrize("given", [URL, "env:CHAT_URL", "${oc.env:CHAT_URL}"])
def test_neither_the_settings_nor_the_command_have_it_once_the_run_has_begun(given, tmp_path, monkeypatch):
    monkeypatch.setenv("CHAT_URL", URL)
    words = ["conf=arithmetic_cpu", f"cluster.fileroot={tmp_path}", f"alerts.webhook='{given}'"]
    config = compose(words)
    monkeypatch.setattr(sys, "argv", ["launcher", *words])
    paths = RunPaths.of(config)
    paths.prepare()
    hide_webhook(config, paths)
    write_config(dataclasses.asdict(config), paths, 1)
    assert "secret" not in paths.config.read_text() + same_command() + repr(config) + repr(sys.argv)
    assert yaml.safe_load(paths.config.read_text())["alerts"]["webhook"] == (
        "env:CHAT_URL" if given[:4] == "env:" else SHOWN
    )
    assert read_webhook(paths.keys) == URL
    assert stat.S_IMODE((paths.keys / "webhook").stat().st_mode) == 0o600


def test_the_recorded_command_still_means_it(tmp_path, monkeypatch):
    """As a resume types it, and as a detached driver meets it on a machine without the variable."""
    for recorded in (keep_webhook(URL, tmp_path / "keys"), "env:CHAT_URL"):
        monkeypatch.delenv("CHAT_URL", raising=False)
        assert webhook_url(recorded, tmp_path / "keys") == URL
        assert keep_webhook(recorded, tmp_path / "keys") == recorded
    keep_webhook("http://other.test/x", tmp_path / "keys")
    assert read_webhook(tmp_path / "keys") == "http://other.test/x"


@pytest.mark.parametrize(
    "word", ['alerts={webhook:"%s"}', '+alerts={webhook: "%s", timeout: 5}', '++alerts.webhook="%s"']
)
def test_a_command_may_give_it_in_any_form_that_hydra_takes(word, tmp_path, monkeypatch):
    words = ["conf=arithmetic_cpu", f"cluster.fileroot={tmp_path}", word % URL]
    config = compose(words)
    monkeypatch.setattr(sys, "argv", ["launcher", *words])
    hide_webhook(config, RunPaths.of(config))
    assert "secret" not in same_command()
    assert "chat.test:8443/__hidden__" in same_command()


def test_a_full_disk_does_not_take_the_only_copy(tmp_path, monkeypatch):
    """As a detached driver meets one that Ray starts again."""
    recorded = keep_webhook(URL, tmp_path / "keys")

    def refuse(**_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    assert keep_webhook(recorded, tmp_path / "keys") == recorded
    assert read_webhook(tmp_path / "keys") == URL


def test_what_cant_be_found_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv("CHAT_URL", raising=False)
    with pytest.raises(UsageError, match="env:CHAT_URL: the environment variable CHAT_URL is not set"):
        webhook_url("env:CHAT_URL", tmp_path)
    with pytest.raises(UsageError, match="only this of the URL was recorded"):
        webhook_url(SHOWN, tmp_path)
    monkeypatch.setenv("CHAT_URL", "chat.test/secret")
    with pytest.raises(UsageError, match="CHAT_URL holds no URL") as refusal:
        webhook_url("env:CHAT_URL", tmp_path)
    assert "secret" not in str(refusal.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "code", "named"),
    [
        ("env:CHAT_URL", 0, "missing here: alerts.webhook=env:CHAT_URL: the environment variable CHAT_URL is not set"),
        ("${oc.env:CHAT_URL}", 2, "CHAT_URL"),
        ("chat.test/secret", 2, "alerts.webhook=(not shown): allowed: a URL, or env:NAME"),
    ],
)
def test_a_command_that_names_none_gets_one_message(given, code, named, tmp_path, monkeypatch, capfd):
    monkeypatch.delenv("CHAT_URL", raising=False)
    words = ["conf=arithmetic_cpu", "dry_run=true", f"cluster.fileroot={tmp_path}", f"alerts.webhook='{given}'"]
    monkeypatch.setattr(sys, "argv", ["launcher", *words])
    assert main() == code
    said = capfd.readouterr()
    assert named in said.err
    assert "secret" not in said.out + said.err
    assert len([line for line in said.err.splitlines() if "CHAT_URL" in line or "webhook" in line]) <= 2
