"""What differs between versions of SGLang is asked of the installed one, and the client keeps to it."""

import asyncio

import pytest
import torch

from actors.serving import sglang_features
from actors.serving.sglang_client import RequestFailed, SGLangClient
from actors.serving.weight_buckets import in_buckets

ASKED = (sglang_features.updates_in_sessions, sglang_features.streams_by_length)
FOLDER_0517 = {
    sglang_features.ROUTES: '@app.post("/update_weights_from_tensor")',
    sglang_features.STREAMER: "should_output = (len(req.output_ids) % stream_interval == 0)",
}
FOLDER_0523 = {
    sglang_features.ROUTES: '@app.post("/begin_weight_update")',
    sglang_features.STREAMER: "should_output = num_unsent >= stream_interval",
}


@pytest.fixture(autouse=True)
def fresh():
    yield
    for asked in ASKED:
        asked.cache_clear()


@pytest.mark.parametrize(("files", "sessions", "by_length"), [(FOLDER_0517, False, True), (FOLDER_0523, True, False)])
def test_the_source_tells(files, sessions, by_length, tmp_path, monkeypatch):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(sglang_features, "sglang_folder", lambda: tmp_path)
    for asked in ASKED:
        asked.cache_clear()
    assert (sglang_features.updates_in_sessions(), sglang_features.streams_by_length()) == (sessions, by_length)


def updated(monkeypatch, *, is_open, sessions=True):
    """The requests of one update by tensors, to a server that takes one session at a time."""
    asked, opened = [], [is_open]

    async def answer(_, path, *_rest, **_keys):
        name = path.partition("?")[0]
        asked.append(name)
        if name == "/begin_weight_update":
            if opened[0]:
                raise RequestFailed("a weight-update session is already open", kind="http_4xx")
            opened[0] = True
        if name == "/end_weight_update":
            opened[0] = False
        return b'{"model_path": "m", "weight_version": "5"}'

    monkeypatch.setattr(sglang_features, "updates_in_sessions", lambda: sessions)

    async def inside():
        async with SGLangClient() as client:
            monkeypatch.setattr(client, "_answer", lambda _, url, *rest, **keys: answer(url, *rest, **keys))
            buckets = in_buckets([("w", torch.ones(2))])
            await client.update_weights_from_tensor("s", buckets=buckets, weight_version=5, timeout_s=5)

    asyncio.run(inside())
    return asked, opened[0]


UPDATE = ["/update_weights_from_tensor", "/model_info", "/flush_cache"]
BEGIN, END = "/begin_weight_update", "/end_weight_update"


def test_an_update_by_tensors_is_a_session_of_its_own(monkeypatch):
    assert updated(monkeypatch, is_open=False) == ([BEGIN, *UPDATE, END], False)


def test_the_session_of_a_trainer_that_was_killed_is_ended(monkeypatch):
    assert updated(monkeypatch, is_open=True) == ([BEGIN, END, BEGIN, *UPDATE, END], False)


def test_an_sglang_without_sessions_is_asked_for_none(monkeypatch):
    assert updated(monkeypatch, is_open=False, sessions=False) == (UPDATE, False)
