"""What the command says and how it ends, asked of a stand-in that holds the weights of the asset's model."""

import http.server
import json
import shutil
import socket
import threading

import pytest
from safetensors.torch import load_file, save_file

from launcher.base.addresses import free_port
from launcher.run_files.run_keys import ServerKeys
from scripts.check_weights import main
from tests.programs import stand_in_server
from tests.support.real_server import MODEL


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return ServerKeys.make(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def server(keys):
    words = ("--truthful", "--model-path", str(MODEL), "--weight-version", "7")
    with stand_in_server.running(*words, keys=keys) as url:
        yield url


@pytest.fixture
def key(keys):
    return ["--api-key-file", str(keys.parent / "api_key")]


@pytest.fixture
def copy(tmp_path):
    return shutil.copytree(MODEL, tmp_path / "model")


def refused(capsys, *words):
    """The one message of a command that could not say."""
    assert main([str(word) for word in words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("error: ") == 1
    assert "\n  → " in said.err
    assert "Traceback" not in said.err
    return said.err


@pytest.mark.slow
def test_the_same_weights(server, key, capsys):
    assert main([server + "/", str(MODEL), *key]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"same weights: {server} and {MODEL}\n  rounding in float32 explains up to 1e-05\n")
    assert " % of noise; below about " in said
    assert "weight_version 7\n" in said


@pytest.mark.slow
def test_other_weights(server, key, copy, capsys):
    weights = load_file(copy / "model.safetensors")
    weights["model.layers.0.self_attn.o_proj.weight"].mul_(1.01)
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    assert main([server, str(copy), *key, "--dtype", "float32", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["format"] == "grpo-served-weights/1"
    assert found["verdict"] == "other weights"
    assert found["distance"] > found["limit"] == 1e-5
    assert found["as_noise"] > found["hidden_noise"] > 0
    assert main([server, str(copy), *key]) == 2, "this stand-in does not tell in which format it computes"
    assert "bfloat16 would explain it, float32 would not" in capsys.readouterr().out


@pytest.mark.slow
def test_prompts_of_ones_own(server, key, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("4+5+4=\n\n 1+2+3=\n" * 20)
    assert main([server, str(MODEL), *key, "--prompts", str(tmp_path / "prompts.txt"), "--tokens", "60"]) == 0
    assert main([server, str(MODEL), *key, "--prompts", str(empty(tmp_path / "none"))]) == 2
    assert "0 tokens are too few" in capsys.readouterr().out


def empty(file):
    file.touch()
    return file


def test_nobody_listens(capsys):
    url = f"http://127.0.0.1:{free_port()}"
    said = refused(capsys, url, MODEL)
    assert url in said
    assert "start the server" in said


def test_the_key_is_missing(server, capsys):
    said = refused(capsys, server, MODEL)
    assert "HTTP 401" in said
    assert "--api-key-file" in said


@pytest.mark.parametrize(
    ("status", "said"), [(404, "HTTP 404"), (200, "answered 200 with something else: not JSON"), (500, "HTTP 500")]
)
def test_something_else_than_sglang_answers(status, said, capsys):
    class Other(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever, args=[0.01], daemon=True).start()
        url = f"http://127.0.0.1:{other.server_port}"
        found = refused(capsys, url, MODEL)
        other.shutdown()
    assert url in found
    assert said in found


def test_a_server_that_hangs(capsys):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        said = refused(capsys, url, MODEL, "--timeout", "0.2")
    assert url in said
    assert "no answer within 0.2 s" in said
    assert "--timeout" in said


def test_no_gpu(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "torch finds no GPU here" in refused(capsys, "http://127.0.0.1:1", MODEL, "--device", "cuda")


def test_a_folder_of_a_model_that_is_not_known(server, copy, capsys):
    facts = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(facts | {"model_type": "bert"}))
    assert "a bert model is not supported" in refused(capsys, server, copy)


def test_a_folder_that_is_half_written(server, copy, capsys):
    content = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(content[: len(content) // 2])
    assert str(copy / "model.safetensors") in refused(capsys, server, copy)


@pytest.mark.slow
def test_a_folder_whose_weights_are_not_finite(server, key, copy, capsys):
    weights = load_file(copy / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    assert "is damaged: model.norm.weight holds numbers that are not finite" in refused(capsys, server, copy, *key)
