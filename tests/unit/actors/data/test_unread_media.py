"""Images, videos and sounds beside the text, or marks for them in it, are told: no model is given them."""

import pytest

from actors.data.unread_media import media_note
from launcher.base.errors import DataError
from tests.unit.actors.data.test_dataset import load, write

GOOD = {"question": "2+2?", "answer": "#### 4"}


def note_of(tmp_path, *rows, **more):
    return media_note(load(write(tmp_path / "d.jsonl", list(rows)), **more), key="train_dataset")


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
    ],
)
def test_a_column_of_images_videos_or_sounds_is_told(tmp_path, more):
    (column,) = more
    said = f"train_dataset: 1 of 2 records have {column!r} beside the text: only texts are given to the model"
    assert note_of(tmp_path, GOOD | more, GOOD).startswith(said)


@pytest.mark.parametrize("mark", ["<image>", "<video>", "<audio>", "<image_1>", "<|image_pad|>", "<|vision_start|>"])
def test_a_mark_in_the_text_is_told(tmp_path, mark):
    said = note_of(tmp_path, GOOD, GOOD | {"question": f"{mark}What is it?"})
    assert said.startswith(f"train_dataset: 1 of 2 records have {mark} in their text: only texts")
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


def test_texts_and_numbers_are_no_media(tmp_path):
    rows = [
        GOOD | {"images": [], "video": None, "frames": 24, "figure": "", "imagery": "vivid"},
        GOOD | {"question": "What does <img src='a.png'> do, and <section>?", "image": False},
    ]
    assert note_of(tmp_path, *rows) == ""
