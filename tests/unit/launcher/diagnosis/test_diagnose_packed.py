"""Packed logs tell the same as the plain one; wrapped lines are refused, and what is not read is named."""

import bz2
import errno
import gzip
import io
import json
import lzma
import os
import shutil
import tarfile
import time
import zipfile

import pyarrow as pa
import pytest

from launcher.base.errors import DataError, StorageError
from launcher.diagnosis.judging.verdict import RunCondition
from launcher.diagnosis.reading import unpacked
from scripts import diagnose
from tests.support.made_logs import Made, RunMaker
from tests.support.worlds.diagnosis import diagnosis_of

MADE = Made(fails="crash", onset=30, steps=60, plain=True)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The folder of a plain run, and its trainer's log."""
    return RunMaker(MADE).write(tmp_path_factory.mktemp("plain") / "run")


FORMS = {
    "trainer.log.gz": gzip.compress,
    "trainer.log.xz": lzma.compress,
    "trainer.log.bz2": bz2.compress,
    "trainer.log.zst": lambda data: pa.compress(data, "zstd", asbytes=True),
}


def in_json(text):
    return "".join(json.dumps({"log": line, "stream": "stdout"}) + "\n" for line in text.splitlines()).encode()


WRAPPED = {
    "UTF-16": (lambda text: text.encode("utf-16"), "iconv -f UTF-16 -t UTF-8"),
    "a container's": (in_json, "jq -rj .log"),
    "journald's JSON": (lambda text: json.dumps({"__CURSOR": "s=1", "MESSAGE": text}).encode(), "journalctl -o cat"),
    "journald's export": (lambda text: f"__CURSOR=s=1\nMESSAGE={text}\n".encode(), "-k -o short-iso"),
}


@pytest.mark.parametrize("name", FORMS)
def test_it_tells_the_same_as_the_plain_log(tmp_path, plain, name):
    expected = diagnosis_of(plain / "trainer.log")
    path = tmp_path / name
    path.write_bytes(FORMS[name]((plain / "trainer.log").read_bytes()))
    found = diagnosis_of(path)
    assert (found.condition, found.onset, found.headline) == (RunCondition.FELL, expected.onset, expected.headline)
    assert [source.path for source in found.contents.sources] == [str(path)]
    assert found.losses == expected.losses


@pytest.mark.parametrize("form", WRAPPED)
def test_wrapped_lines_are_refused_with_the_command_that_unwraps_them(tmp_path, plain, form):
    """Beside other files the log counts as one that may hold steps, and no run is called fine."""
    wrap, command = WRAPPED[form]
    RunMaker(Made(steps=60)).write(tmp_path)
    path = tmp_path / "older.log"
    path.write_bytes(wrap((plain / "trainer.log").read_text()))
    with pytest.raises(DataError) as refused:
        diagnosis_of(path)
    assert str(path) in refused.value.message
    assert form in refused.value.message
    assert command in refused.value.hint
    assert diagnosis_of(tmp_path).condition is RunCondition.UNCLEAR


LOGS = ("llm_server.log", "trainer.log")


def archive_of(path, files, mode="w"):
    """`files`: the content of each by its name; `mode`: "zip", or tarfile's."""
    if mode == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in files.items():
                archive.writestr(name, content)
        return path
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            one = tarfile.TarInfo(name)
            one.size = len(content)
            one.mtime = int(time.time())
            archive.addfile(one, io.BytesIO(content))
    return path


@pytest.mark.parametrize("mode", ["w:gz", "w:xz", "w", "zip"])
def test_an_archive_of_a_whole_run_is_read(tmp_path, plain, mode):
    files = {f"logs/me/exp/t0/{name}": (plain / name).read_bytes() for name in LOGS}
    path = archive_of(tmp_path / "run.packed", files, mode)
    found, expected = diagnosis_of(path), diagnosis_of(plain)
    assert (found.headline, found.onset) == (expected.headline, expected.onset)
    assert {source.path for source in found.contents.sources} == {f"{path}/{name}" for name in files}


@pytest.mark.parametrize("name", ["../../elsewhere.log", "{tmp}/elsewhere.log"])
@pytest.mark.parametrize("mode", ["w", "zip"])
def test_an_archive_that_would_write_elsewhere_is_refused(tmp_path, name, mode):
    path = archive_of(tmp_path / "run.packed", {name.format(tmp=tmp_path): b"x"}, mode)
    with pytest.raises(DataError, match=r"run\.packed would write elsewhere: .*elsewhere\.log"):
        diagnosis_of(path)
    assert not (tmp_path / "elsewhere.log").exists()


def test_of_a_zip_links_are_not_followed_and_a_password_is_named(tmp_path, plain):
    log = (plain / "trainer.log").read_bytes()
    path = archive_of(tmp_path / "run.zip", {"trainer.log": log}, "zip")
    link = zipfile.ZipInfo("llm_server.log")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(link, "/etc/passwd")
    assert [source.path for source in diagnosis_of(path).contents.sources] == [f"{path}/trainer.log"]
    data = bytearray(archive_of(tmp_path / "locked.zip", {"trainer.log": log}, "zip").read_bytes())
    for mark, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.find(mark) + flags] |= 1
    (tmp_path / "locked.zip").write_bytes(data)
    with pytest.raises(DataError, match=r"locked\.zip is no archive that can be read: .*password"):
        diagnosis_of(tmp_path / "locked.zip")


def test_an_archive_without_a_log_says_what_it_holds(tmp_path):
    path = archive_of(tmp_path / "run.tar", {"weights/a.bin": b"x"})
    with pytest.raises(DataError, match=r"run\.tar holds no log[\s\S]*weights/a\.bin"):
        diagnosis_of(path)


def test_an_archive_with_a_file_in_place_of_a_folder_is_refused(tmp_path):
    path = archive_of(tmp_path / "run.tar", {"logs.log": b"x", "logs.log/trainer.log": b"x"})
    with pytest.raises(DataError, match=r"run\.tar is no archive that can be read"):
        diagnosis_of(path)


def test_a_packed_log_that_ends_too_early_is_read_up_to_there_and_is_no_fine_run(tmp_path):
    logs = RunMaker(Made(steps=60, payload_tokens=5)).write(tmp_path / "run")
    data = gzip.compress((logs / "trainer.log").read_bytes())
    path = tmp_path / "trainer.log.gz"
    path.write_bytes(data[: len(data) * 2 // 3])
    found = diagnosis_of(path)
    assert found.condition is RunCondition.UNCLEAR
    assert 20 < len(found.contents.steps) < 60
    assert "only its first" in found.contents.sources[0].note


def test_a_table_with_semicolons_and_commas_in_numbers_is_read(tmp_path):
    rows = [f"{step};{'0,5' if step < 40 else '0,0'}" for step in range(80)]
    (tmp_path / "export.csv").write_text("Step;run - ppo_actor/task_reward/avg\n" + "\n".join(rows) + "\n")
    assert diagnosis_of(tmp_path / "export.csv").onset.step == 40


def test_every_file_that_was_not_read_is_in_the_last_line_with_the_reason(tmp_path, plain, capsys):
    logs = shutil.copytree(plain, tmp_path / "run")
    (logs / "notes.docx").write_bytes(b"x")
    (logs / "weights.log").write_bytes(bytes(range(256)) * 40)
    (logs / "old.log.gz").write_bytes(b"\x1f\x8bnot gzip at all")
    (logs / "ray.log").write_text("x")
    (logs / "none.log").write_text("")
    (logs / "config.yaml").write_text("seed: 1\n")  # it is read
    diagnose.main([str(logs)])
    last = " ".join(capsys.readouterr().out.split("not read")[-1].split())
    assert last.startswith("5 files; ")
    assert "none.log (empty); ray.log (Ray's own); " in last
    assert "weights.log is no text" in last
    assert "old.log.gz can't be unpacked" in last
    assert last.endswith("notes.docx: not named as a log")


def test_a_full_disk_is_one_message(tmp_path, monkeypatch):
    (tmp_path / "trainer.log.gz").write_bytes(gzip.compress(b"20251111-09:00:00.000 StatsLogger INFO: hello\n"))

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(unpacked, "_written", full)  # the disk itself refuses
    with pytest.raises(StorageError, match=r"no room left to unpack .*trainer\.log\.gz[\s\S]*TMPDIR"):
        diagnosis_of(tmp_path / "trainer.log.gz")


def test_room_on_the_disk_is_left_to_others(tmp_path, monkeypatch):
    (tmp_path / "trainer.log.gz").write_bytes(gzip.compress(b"20251111-09:00:00.000 StatsLogger INFO: hello\n"))
    monkeypatch.setattr(unpacked, "LEFT_FREE", 2**60)
    with pytest.raises(StorageError, match=r"no room left to unpack"):
        diagnosis_of(tmp_path / "trainer.log.gz")


def test_of_an_archive_only_the_logs_are_unpacked_and_the_rest_is_named(tmp_path, plain):
    files = {"t0/trainer.log": (plain / "trainer.log").read_bytes(), "t0/model.safetensors": bytes(5000)}
    contents = diagnosis_of(archive_of(tmp_path / "run.tar", files)).contents
    assert [source.path for source in contents.sources] == [f"{tmp_path}/run.tar/t0/trainer.log"]
    assert contents.passed_over == (f"{tmp_path}/run.tar/t0/model.safetensors",)


@pytest.mark.parametrize(("name", "mode"), [("logs.tar", "w"), ("logs.tgz", "w:gz")])
@pytest.mark.parametrize(
    "line", ["[Sat Nov 28 06:00:00 2026] all is well\n", "Nov 28 06:00:00 host kernel: all is well\n"]
)
def test_an_archive_that_begins_with_a_kernels_log_is_read_to_its_end(tmp_path, plain, name, mode, line):
    """The archive itself was dated anew, line by line: what lay behind that log was lost, without a word."""
    files = {"dmesg.log": line.encode() * 20, "trainer.log": (plain / "trainer.log").read_bytes()}
    path = archive_of(tmp_path / name, files, mode)
    found = diagnosis_of(path)
    assert found.condition is RunCondition.FELL
    assert [source.path for source in found.contents.sources] == [f"{path}/dmesg.log", f"{path}/trainer.log"]
