"""Records from real files, prompts from a real tokenizer, and every way in which a data set can't be used."""

import json
import os
import shutil
import socketserver
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from actors.data import record_sources
from tests.support.worlds.data import RECORDS, load, questions, refused, write

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize("name", ["d.jsonl", "d.json", "d.parquet"])
def test_every_format_holds_the_same_records(tmp_path, name):
    records = load(write(tmp_path / name))
    assert [dict(record.record) for record in records] == RECORDS
    assert [(record.question, record.answer) for record in records] == [(r["question"], r["answer"]) for r in RECORDS]


def test_json_lines_under_the_ending_json_with_a_bom_and_empty_lines(tmp_path):
    lines = "\n\n".join(json.dumps(record) for record in RECORDS)
    (tmp_path / "d.json").write_bytes(b"\xef\xbb\xbf" + lines.encode())
    assert len(load(tmp_path / "d.json")) == 5


def test_a_path_below_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "d.jsonl")
    assert len(load("~/d.jsonl")) == 5


def test_an_id_is_the_contents_wherever_the_record_stands(tmp_path):
    ids = {record.question: record.id for record in load(write(tmp_path / "a.jsonl"))}
    other = load(write(tmp_path / "b.parquet", [{**record, "level": 0} for record in RECORDS[::-1]]))
    assert {record.question: record.id for record in other} == ids
    assert len(set(ids.values())) == 5
    assert load(write(tmp_path / "c.jsonl", RECORDS[:1]))[0].id == "a06fe4d59d371523"  # of every version


def test_exact_copies_have_ids_of_their_own_that_do_not_depend_on_the_order(tmp_path):
    copies = [RECORDS[0], RECORDS[1], RECORDS[0], RECORDS[0]]
    ids = [record.id for record in load(write(tmp_path / "a.jsonl", copies))]
    assert ids[2:] == [f"{ids[0]}-2", f"{ids[0]}-3"]
    assert {record.id for record in load(write(tmp_path / "b.jsonl", copies[::-1]))} == set(ids)


def test_max_items_reads_no_further(tmp_path):
    path = write(tmp_path / "d.jsonl")
    with path.open("a") as file:
        file.write("not json\n")
    assert questions(load(path, max_items=3)) == ["0+1?", "1+1?", "2+1?"]
    assert len(load(path, max_items=5)) == 5
    assert f"{path}:6 is not valid JSON" in refused(path, max_items=6)


def test_a_folders_files_in_the_order_of_their_names(tmp_path):
    write(tmp_path / "b.jsonl", RECORDS[2:])
    write(tmp_path / "a.parquet", RECORDS[:2])
    (tmp_path / "README.md").write_text("about")
    assert questions(load(tmp_path)) == questions(load(write(tmp_path / "elsewhere" / "all.jsonl")))


def test_a_copy_of_a_hub_repository(tmp_path):
    write(tmp_path / "main" / "train-00000-of-00002.parquet", RECORDS[:2])
    write(tmp_path / "main" / "train-00001-of-00002.parquet", RECORDS[2:3])
    write(tmp_path / "main" / "test-00000-of-00001.parquet", RECORDS[3:])
    assert questions(load(tmp_path, name="main")) == ["0+1?", "1+1?", "2+1?"]
    assert questions(load(tmp_path, name="main", split="test")) == ["3+1?", "4+1?"]
    message = refused(tmp_path, name="main", split="validation")
    assert "train_dataset.split='validation'" in message
    assert "one of: test, train" in message


# --- what can't be used ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/nowhere/d.jsonl", "nowhere.parquet", "./nowhere", "a/b/c"])
def test_a_path_that_does_not_exist(path):
    assert f"train_dataset.path='{path}' does not exist" in refused(path)


def test_a_name_too_long_for_the_file_system():
    assert "train_dataset.path=" in refused("/" + "x" * 5000)


@pytest.mark.parametrize("name", ["d.jsonl", "d.json"])
@pytest.mark.parametrize("text", ["", "\n \n"])
def test_an_empty_file(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert f"train_dataset.path='{tmp_path / name}' holds no records" in refused(tmp_path / name)


def test_an_empty_list_and_an_empty_table(tmp_path):
    assert "holds no records" in refused(write(tmp_path / "d.json", []))
    pq.write_table(pa.table({"question": pa.array([], pa.string())}), tmp_path / "d.parquet")
    assert "holds no records" in refused(tmp_path / "d.parquet")


def test_a_folder_without_a_data_file(tmp_path):
    (tmp_path / "data.npy").touch()
    message = refused(tmp_path)
    assert f"{tmp_path} holds no .parquet, .jsonl, .json, .csv, .arrow file, but data.npy" in message
    (tmp_path / "data.npy").unlink()
    assert "but nothing" in refused(tmp_path)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "d.jsonl")
    assert "d.jsonl is neither a file nor a folder" in refused(tmp_path / "d.jsonl")


def test_an_unknown_ending(tmp_path):
    (tmp_path / "d.xlsx").write_text("question,answer\n")
    message = refused(tmp_path / "d.xlsx")
    assert "unknown ending '.xlsx'" in message
    assert "allowed: .parquet, .jsonl, .json, .csv, .arrow" in message


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"question": "1+1?"}, "the record has no answer; its fields are ['question']"),
        ({"question": "1+1?", "answer": None}, "the record has no answer: it is null"),
        ({"question": None, "answer": "#### 2"}, "the record has no question: it is null"),
        ({"answer": "#### 2"}, "the record has no question"),
        ({"question": " ", "answer": "#### 2"}, "the record has the question ' '"),
        ({"prompt": "1+1?", "solution": "#### 2"}, "its fields are ['prompt', 'solution']"),
        ({"question": "\ud800", "answer": "#### 2"}, "not valid Unicode"),
        (["1+1?", "#### 2"], "is a list, not a record"),
    ],
    ids=str,
)
def test_a_record_that_can_not_be_used_is_named_by_file_and_line(tmp_path, broken, said):
    path = write(tmp_path / "d.jsonl", [*RECORDS[:2], broken])
    message = refused(path)
    assert f"{path}:3" in message
    assert said in message
    listed = write(tmp_path / "d.json", [*RECORDS[:2], broken])
    assert f"{listed} row 2" in refused(listed)


@pytest.mark.parametrize("broken", [{"question": "1+1?"}, {"answer": "2"}, {"question": " ", "answer": "2"}])
def test_how_a_record_that_lacks_a_column_is_left_out_is_said(tmp_path, broken):
    path = write(tmp_path / "d.jsonl", [*RECORDS[:2], broken])
    assert "train_dataset.bad_records=skip leaves such records out" in refused(path)


@pytest.mark.parametrize(
    ("column", "said"), [("gold", "gold, as columns are read whole"), ("target", "the column to read")]
)
def test_a_column_inside_another_is_named_by_the_outer_one(tmp_path, column, said):
    path = write(tmp_path / "d.jsonl", [{"question": "1+1?", "gold": {"value": "2"}, "target": 2}])
    assert f"train_dataset.answer_key: {said}" in refused(path, answer_key=f"{column}.value")


def test_a_record_of_a_table_is_named_by_its_row(tmp_path):
    path = write(tmp_path / "d.parquet", [*RECORDS, {"question": "?", "answer": None, "level": 0}])
    assert f"{path} row 5: the record has no answer" in refused(path)


@pytest.mark.parametrize("line", [b'{"question": "1', b"\xff\xfe\x00", b"[" * 100_000])
def test_a_line_that_is_no_json(tmp_path, line):
    path = write(tmp_path / "d.jsonl")
    path.write_bytes(path.read_bytes() + line)
    assert f"{path}:6 is not valid JSON" in refused(path)


@pytest.mark.parametrize("line", [b'{"question": "1+1?", "answer": ', b'{"question": "1+1?", "ans'])
def test_a_place_in_a_bad_line_is_given_by_its_column(tmp_path, line):
    path = write(tmp_path / "d.jsonl")
    path.write_bytes(line + b"\r\n" + path.read_bytes())
    message = refused(path)
    assert f"{path}:1 is not valid JSON" in message
    assert "column" in message
    assert "line" not in message.replace(str(path), "")


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_a_file_in_another_encoding_is_called_so(tmp_path, encoding):
    (tmp_path / "d.jsonl").write_text('{"question": "fünf?", "answer": 5}\n', encoding=encoding)
    message = refused(tmp_path / "d.jsonl")
    assert f"{tmp_path / 'd.jsonl'}:1 is not valid JSON: no UTF-8" in message
    assert "as UTF-8" in message


def test_a_list_that_is_no_json(tmp_path):
    (tmp_path / "d.json").write_text('[{"question": "1+1?"')
    assert f"{tmp_path / 'd.json'} is not valid JSON" in refused(tmp_path / "d.json")


def test_a_file_without_line_breaks_is_not_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(record_sources, "MAX_LINE_BYTES", 1000)
    (tmp_path / "d.jsonl").write_text('{"question": "' + "x" * 5000)
    assert "d.jsonl:1 is longer than 1000 bytes" in refused(tmp_path / "d.jsonl")


def test_a_list_too_large_for_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(record_sources, "MAX_LIST_BYTES", 100)
    assert "JSON list of over 100 bytes" in refused(write(tmp_path / "d.json"))


@pytest.mark.parametrize("damage", [lambda data: data[:-20], lambda data: b"no parquet", lambda data: b""])
def test_a_damaged_parquet_file(tmp_path, damage):
    path = write(tmp_path / "d.parquet")
    path.write_bytes(damage(path.read_bytes()))
    assert f"{path} is not a sound parquet file" in refused(path)


def test_a_parquet_file_with_a_flipped_page(tmp_path):
    path = write(tmp_path / "d.parquet", [{**r, "question": r["question"] * 500} for r in RECORDS])
    data = bytearray(path.read_bytes())
    data[10:60] = bytes(50)
    path.write_bytes(data)
    assert str(path) in refused(path)


def test_a_folder_named_like_a_file(tmp_path):
    (tmp_path / "d.jsonl").mkdir()
    assert "holds no" in refused(tmp_path / "d.jsonl")


# --- the hub --------------------------------------------------------------------------------------------------------


@dataclass
class DeadHub:
    """Hangs up on whoever calls."""

    cache: Path
    calls: int = 0


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub that can't be reached, and an empty cache."""
    from datasets import config

    dead = DeadHub(tmp_path / "cache")

    class HangUp(socketserver.BaseRequestHandler):
        def handle(self):
            dead.calls += 1

    with socketserver.TCPServer(("127.0.0.1", 0), HangUp) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setattr(config, "HF_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
        monkeypatch.setattr(config, "HF_DATASETS_CACHE", dead.cache)
        yield dead
        server.shutdown()
        thread.join()


def cache(folder, tmp_path):
    """openai/gsm8k (main), as `load_dataset` leaves it in its cache."""
    import datasets

    source = write(tmp_path / "train.jsonl")
    datasets.load_dataset("json", data_files={"train": str(source)}, cache_dir=str(tmp_path / "build"))
    (arrow,) = (tmp_path / "build").rglob("*-train.arrow")
    target = folder / "openai___gsm8k" / "main" / "0.0.0" / arrow.parent.name
    shutil.copytree(arrow.parent, target)
    (target / arrow.name).rename(target / "gsm8k-train.arrow")
    info = json.loads((target / "dataset_info.json").read_text())
    (target / "dataset_info.json").write_text(json.dumps(info | {"dataset_name": "gsm8k", "config_name": "main"}))


@pytest.mark.slow
def test_a_hub_name_that_is_not_cached_without_network(hub):
    from datasets import config

    message = refused("openai/gsm8k", name="main")
    assert "train_dataset: the data set openai/gsm8k (main, train) can't be loaded: the hub can't be reached" in message
    assert "the local cache does not have it" in message
    assert "train_dataset.path" in message
    assert hub.calls == 1, "asking again and again delays the message by 23 s"
    assert not config.HF_HUB_OFFLINE, "the library was left offline"


@pytest.mark.slow
def test_a_hub_name_from_the_cache_without_network(hub, tmp_path):
    cache(hub.cache, tmp_path)
    records = load("openai/gsm8k", name="main")
    assert [record.record for record in records] == RECORDS
    assert questions(load("openai/gsm8k", name="main", max_items=2)) == ["0+1?", "1+1?"]
    message = refused("openai/gsm8k", name="main", split="nowhere")
    assert "Unknown split \"nowhere\". Should be one of ['train']" in message
    assert "train_dataset.split" in message


@pytest.mark.slow
def test_reading_data_imports_neither_torch_nor_ray(tmp_path):
    """The driver does it before anything is started."""
    path = write(tmp_path / "d.parquet")
    code = (
        "import sys; from actors.data.dataset import load_records; from launcher.config.schema import DatasetConfig;"
        f"load_records(DatasetConfig(path={str(path)!r}), key='d');"
        "assert not {'torch', 'ray', 'transformers', 'datasets', 'sympy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


# --- prompts --------------------------------------------------------------------------------------------------------
