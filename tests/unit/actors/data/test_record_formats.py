"""Records of other files and columns: Arrow, CSV, folders of `datasets`, a hub's layout, chat messages, skipping."""

import csv
import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from actors.data.dataset import BadRecords, load_records
from launcher.base.errors import DataError
from launcher.config.data import DatasetConfig
from launcher.resources.hub import is_hub_name
from tests.support.worlds.data import CHAT, RECORDS, load, questions, refused, write


def messages(path, **changes):
    return load(path, messages_key="messages", **changes)


def write_csv(path, records=RECORDS):
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, records[0])
        table.writeheader()
        table.writerows(records)
    return path


@pytest.mark.parametrize("make", [pa.ipc.new_file, pa.ipc.new_stream])
def test_both_forms_of_arrow(tmp_path, make):
    table = pa.Table.from_pylist(RECORDS)
    with make(tmp_path / "d.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=2)
    assert [dict(record.record) for record in load(tmp_path / "d.arrow")] == RECORDS


def packed(path, data):
    with pa.CompressedOutputStream(str(path), {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}[path.suffix]) as file:
        file.write(data)
    return path


@pytest.mark.parametrize("packing", [".gz", ".zst", ".bz2"])
def test_packed_text_is_read_with_its_lines_and_one_that_is_torn_is_refused(tmp_path, packing):
    lines = "".join(json.dumps(one) + "\n" for one in RECORDS).encode()
    path = packed(tmp_path / f"train-0.jsonl{packing}", lines)
    loaded = load(path)
    assert ([dict(one.record) for one in loaded], loaded[1].where) == (RECORDS, f"{path}:2")
    assert len(load(tmp_path)) == len(RECORDS)
    as_list = packed(tmp_path / f"list.json{packing}", json.dumps(RECORDS).encode())
    table = packed(tmp_path / f"d.csv{packing}", write_csv(tmp_path / "d.csv").read_bytes())
    assert questions(load(as_list)) == questions(load(table)) == questions(loaded)
    path.write_bytes(path.read_bytes()[:-9])
    assert f"{path} can't be read" in (message := refused(path))
    assert "write the file again" in message
    assert "permissions" not in message


def test_what_is_packed_and_no_text_and_a_packed_file_that_is_not_there(tmp_path):
    (tmp_path / "d.parquet.gz").touch()
    assert "unknown ending '.gz'" in refused(tmp_path / "d.parquet.gz")
    assert "does not exist" in refused("missing.jsonl.gz")
    assert (is_hub_name("missing.jsonl.gz"), is_hub_name("openai/gsm8k")) == (False, True)


def test_what_datasets_writes_beside_the_records_is_none(tmp_path):
    write_csv(tmp_path / "train.csv")
    (tmp_path / "dataset_infos.json").write_text("{}")
    assert len(load(tmp_path)) == len(RECORDS)


@pytest.mark.parametrize("mark", [";", "\t"])
def test_a_table_may_have_semicolons_or_tabs_between_its_values(tmp_path, mark):
    text = f'\ufeffquestion{mark}answer\n"1{mark} 2, 3?"{mark}#### 6\n'
    (tmp_path / "d.csv").write_text(text)
    (record,) = load(tmp_path / "d.csv")
    assert record.record == {"question": f"1{mark} 2, 3?", "answer": "#### 6"}


def test_a_torn_arrow_file(tmp_path):
    table = pa.Table.from_pylist(RECORDS)
    with pa.ipc.new_stream(tmp_path / "d.arrow", table.schema) as file:
        file.write_table(table)
    data = (tmp_path / "d.arrow").read_bytes()
    (tmp_path / "d.arrow").write_bytes(data[: len(data) // 2])
    assert f"{tmp_path / 'd.arrow'} is not a sound Arrow file (row 0)" in refused(tmp_path / "d.arrow")
    (tmp_path / "d.arrow").write_bytes(b"")
    assert "is not a sound Arrow file" in refused(tmp_path / "d.arrow")


def test_csv_has_texts_and_keeps_line_breaks_and_commas(tmp_path):
    records = [{"question": 'a, "b"?\nand c', "answer": "#### 1", "level": "007"}, RECORDS[1]]
    loaded = load(write_csv(tmp_path / "d.csv", records))
    assert loaded[0].record == records[0]
    assert loaded[1].record["level"] == "1"
    assert loaded[0].where == f"{tmp_path / 'd.csv'}:3"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("question,answer\na,b,c\n", "d.csv:2 has 3 values for 2 columns (question, answer)"),
        ("question,question\n", "its header names a column twice"),
        ('question,answer\n"a,b\n', "d.csv:3 is no CSV in UTF-8"),
        ("frage,answer\nx,#### 1\n", "d.csv:2: the record has no question; its fields are ['answer', 'frage']"),
        ("", "holds no records"),
    ],
)
def test_csv_that_can_not_be_used(tmp_path, text, said):
    (tmp_path / "d.csv").write_text(text)
    assert said in refused(tmp_path / "d.csv")


def test_a_csv_file_of_another_encoding(tmp_path):
    (tmp_path / "d.csv").write_bytes("question,answer\nwie groß,#### 1\n".encode("latin-1"))
    assert "is no CSV in UTF-8" in refused(tmp_path / "d.csv")


def test_the_same_record_has_the_same_id_in_each_format(tmp_path):
    texts = [{"question": r["question"], "answer": r["answer"]} for r in RECORDS]
    expected = [record.id for record in load(write(tmp_path / "d.jsonl", texts))]
    assert [record.id for record in load(write_csv(tmp_path / "d.csv", texts))] == expected


def test_a_folder_that_datasets_saved(tmp_path):
    both = datasets.DatasetDict(
        {name: datasets.Dataset.from_list(RECORDS[:n]) for name, n in (("train", 3), ("test", 2))}
    )
    both.save_to_disk(tmp_path / "all")
    both["test"].save_to_disk(tmp_path / "one")
    assert questions(load(tmp_path / "all")) == ["0+1?", "1+1?", "2+1?"]
    assert questions(load(tmp_path / "all", split="test")) == ["0+1?", "1+1?"]
    assert questions(load(tmp_path / "one")) == ["0+1?", "1+1?"]


def test_a_copy_of_a_hub_repository_that_keeps_its_files_in_data(tmp_path):
    write(tmp_path / "data" / "train-00000-of-00001.parquet", RECORDS[:3])
    write(tmp_path / "data" / "test-00000-of-00001.parquet", RECORDS[3:])
    (tmp_path / "README.md").write_text("about")
    assert questions(load(tmp_path)) == ["0+1?", "1+1?", "2+1?"]
    assert questions(load(tmp_path, split="test")) == ["3+1?", "4+1?"]


# --- columns ---


def test_other_columns_and_answers_of_any_type(tmp_path):
    rows = [{"problem": "a?", "solution": 7}, {"problem": "b?", "solution": [1, 2]}, {"problem": "c?", "solution": ""}]
    records = load(write(tmp_path / "d.jsonl", rows), prompt_key="problem", answer_key="solution")
    assert [record.answer for record in records] == [7, [1, 2], ""]
    assert len({record.id for record in records}) == 3


def test_without_answers(tmp_path):
    records = load(write(tmp_path / "d.jsonl", [{"question": "a?"}]), answer_key=None)
    assert [(record.question, record.answer) for record in records] == [("a?", None)]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompt_key": "prompt"}, "has no prompt; its fields are ['answer', 'level', 'question']"),
        ({"answer_key": "target"}, "has no target; its fields are ['answer', 'level', 'question']"),
        ({"messages_key": "chat"}, "has no chat; its fields are ['answer', 'level', 'question']"),
        ({"prompt_key": "level"}, "has the level 0; its fields are ['answer', 'level', 'question']"),
    ],
)
def test_a_wrong_column_names_the_setting_and_the_columns_that_are_there(tmp_path, changes, said):
    message = refused(write(tmp_path / "d.jsonl"), **changes)
    assert f"d.jsonl:1: the record {said}" in message
    assert f"train_dataset.{next(iter(changes))}" in message


def test_chat_messages_in_json_lines_parquet_and_as_text(tmp_path):
    chats = [CHAT, [*CHAT, {"role": "assistant", "content": "4"}, {"role": "user", "content": "+1?"}]]
    rows = [{"messages": chat, "answer": "4"} for chat in chats]
    files = [write(tmp_path / name, rows) for name in ("d.jsonl", "d.parquet")]
    files.append(write_csv(tmp_path / "d.csv", [row | {"messages": json.dumps(row["messages"])} for row in rows]))
    for file in files:
        records = messages(file)
        assert [list(record.messages) for record in records] == chats
        assert [record.question for record in records] == ["2+2?", "+1?"]


def test_what_a_table_has_as_null_is_not_given_to_the_template(tmp_path):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": "1"}}}
    chat = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
    ]
    pq.write_table(pa.Table.from_pylist([{"messages": chat, "answer": 1}]), tmp_path / "d.parquet")
    (record,) = messages(tmp_path / "d.parquet")
    assert list(record.messages) == [chat[0], chat[1] | {"content": ""}, chat[2]]


@pytest.mark.parametrize(
    ("chat", "said"),
    [
        ([], "messages is []"),
        ("no json", "messages is 'no json'"),
        (["hello"], "messages[0] is 'hello'"),
        ([{"role": "human", "content": "a"}], "messages[0] has the role 'human'"),
        ([{"role": "user", "content": 3}], "messages[0] has the content 3"),
        ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "messages[0] has the content"),
        ([CHAT[1], CHAT[0]], "messages has the roles ['user', 'system']"),
        ([CHAT[0]], "messages has the roles ['system']"),
        ([{"role": "assistant", "content": "4"}, CHAT[1]], "messages has the roles ['assistant', 'user']"),
        ([*CHAT, {"role": "assistant", "content": "4"}], "messages ends with the assistant's message"),
    ],
)
def test_messages_that_are_none_or_out_of_order(tmp_path, chat, said):
    path = write(tmp_path / "d.jsonl", [{"messages": CHAT, "answer": 4}, {"messages": chat, "answer": 4}])
    assert f"{path}:2: {said}" in refused(path, messages_key="messages")


def test_tools_of_a_column(tmp_path):
    tool = {"type": "function", "function": {"name": "add"}}
    rows = [{"question": "a?", "answer": 1, "tools": [tool]}, {"question": "b?", "answer": 1, "tools": None}]
    first, second = load(write(tmp_path / "d.jsonl", rows), tools_key="tools")
    assert (first.tools, second.tools) == ((tool,), ())
    message = refused(write(tmp_path / "e.jsonl", [rows[0] | {"tools": "add"}]), tools_key="tools")
    assert "e.jsonl:1: tools is 'add'" in message


# --- records that don't fit ---


def test_bad_records_are_skipped_and_counted_where_asked(tmp_path):
    path = write(tmp_path / "d.jsonl", [RECORDS[0], {"question": ""}, RECORDS[1], ["a"]])
    path.write_text(path.read_text() + "no json\n" + json.dumps(RECORDS[2]) + "\n")
    dataset = DatasetConfig(path=str(path), bad_records="skip")
    bad = BadRecords(dataset)
    assert questions(load_records(dataset, key="train_dataset", bad=bad)) == ["0+1?", "1+1?", "2+1?"]
    assert bad.count == 3
    assert [f"{path}:{line}" in text for line, text in zip((2, 4, 5), bad.examples, strict=True)] == [True] * 3


def test_of_nothing_but_bad_records_the_first_is_told(tmp_path):
    path = write(tmp_path / "d.jsonl", [{"prompt": "a"}] * 5)
    with pytest.raises(DataError, match=rf"holds no record that fits: {path}:1: the record has no question"):
        load(path, bad_records="skip")
