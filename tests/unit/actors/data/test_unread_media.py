"""Images, videos and sounds beside the text, or marks for them in it, are told: no model is given them."""

from types import SimpleNamespace

import pytest

from actors.data.unread_media import media_note
from launcher.base.errors import DataError
from tests.support.worlds.data import load, write

GOOD = {"question": "2+2?", "answer": "#### 4"}


def note_of(tmp_path, *rows, **more):
    records = load(write(tmp_path / "d.jsonl", list(rows)), **more)
    return media_note(records, key="train_dataset", read=("question", "answer", "tools"))


@pytest.mark.parametrize(
    "more",
    [
        {"images": [{"bytes": "iVBOR", "path": None}]},
        {"image": "a.png"},
        {"videos": ["a.mp4"]},
        {"audio": {"array": [0.1], "sampling_rate": 16000}},
        {"image_url": "http://x/a.png"},
        {"multi_modal_data": {"image": ["a.png"]}},
        {"clip": {"bytes": "RIFF", "path": "a.wav"}},
        {"image_1": "a.png"},
        {"question_image": "imgs/a b.png"},
        {"decoded_image": "iVBORw0KGgoAAAANSUhEUgAAAAEAAAAB"},
        {"query_images": ["http://x/1"]},
        {"image_filename": "a.png"},
        {"clip": {"array": [0.1], "sampling_rate": 16000}},
        {"source": "data:image/png;base64,iVBO"},
        {"media": ["b/a.mp4"]},
        {"extra_info": {"images": ["a.png"]}},
        {"videos": [{"video": "a.mp4", "nframes": 3}]},
        {"pixel_values": [[0.1]]},
    ],
)
def test_a_column_of_images_videos_or_sounds_is_told(tmp_path, more):
    (column,) = more
    said = f"train_dataset: 1 of 2 records have {column!r} beside the text: only texts are given to the model"
    assert note_of(tmp_path, GOOD | more, GOOD).startswith(said)


MORE_MARKS = ("<image 1>", "<start_of_image>", "<image_soft_token>", "<|audio_bos|>", "[image]")


@pytest.mark.parametrize(
    "mark", ["<image>", "<video>", "<audio>", "<image_1>", "<|image_pad|>", "<|vision_start|>", *MORE_MARKS]
)
def test_a_mark_in_the_text_is_told(tmp_path, mark):
    said = note_of(tmp_path, GOOD, GOOD | {"question": f"{mark}What is it?"})
    assert said.startswith(f"train_dataset: 1 of 2 records have {mark} in their text: where that stands for an image")
    chat = [
        {"role": "user", "content": [{"type": "text", "text": f"{mark}2+2?"}]},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "And 3+3?"},
    ]
    assert mark in note_of(tmp_path, {"messages": chat, "answer": 6}, messages_key="messages")


@pytest.mark.parametrize("kind", ["image", "image_url", "video", "input_audio"])
def test_a_part_of_a_message_that_is_no_text_is_refused(tmp_path, kind):
    chat = [{"role": "user", "content": [{"type": kind, kind: "a.png"}, {"type": "text", "text": "2+2?"}]}]
    with pytest.raises(DataError, match=r"(?s)d.jsonl:1: .*only texts are trained on"):
        note_of(tmp_path, {"messages": chat, "answer": 4}, messages_key="messages")


@pytest.mark.parametrize(
    "more",
    [
        {"images": [], "video": None, "frames": 24, "figure": "", "imagery": "vivid"},
        {"images": [None], "image": {"bytes": None, "path": None}, "multi_modal_data": {"image": []}},
        {"speech": "Friends, Romans", "figure": "Figure 1 shows it", "frame": "A story", "picture": "a cat"},
        {
            "has_image": "False",
            "num_images": "0",
            "image": "N/A",
            "video": "3.25",
            "image_caption": "A cat. It sleeps.",
        },
        {"note": "Save it as out.png", "image": "A cat and a dog. They sleep."},
        {"tools": [{"function": {"parameters": {"properties": {"image_url": {"type": "a/bc"}}}}}]},
        {"other": {"parameters": {"image_url": {"type": "a/bc"}}}},
        {"question": "a.png", "image": False},
        {"question": "What does <img src='a.png'> do, and <section>?", "image": False},
    ],
)
def test_texts_and_numbers_are_no_media(tmp_path, more):
    assert note_of(tmp_path, GOOD | more) == ""


def test_files_in_bytes_are_media_under_any_name():
    def said(column, value):
        record = SimpleNamespace(record={column: value}, messages=())
        return bool(media_note([record], key="train_dataset"))

    assert said("shown", b"\x89PNG\r\n")
    assert said("image", b"any")
    assert not said("hash", b"any")
    assert not said("image", b"")
