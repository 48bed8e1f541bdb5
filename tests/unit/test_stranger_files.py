"""A model, a tokenizer, a data set, a checkpoint or a log from a stranger executes nothing, and nothing asks."""

import json
import os
import pickle
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from actors.data.dataset import load_records
from actors.data.prompts import build_prompts
from actors.model.model_folder import load_model, load_tokenizer
from launcher.base.errors import LauncherError, ModelError
from launcher.checkpoints.model_files import refuse_own_code
from launcher.config.compose import REPOSITORY
from launcher.config.schema import DatasetConfig
from launcher.run_files.run_paths import RunPaths
from scripts import check_health, diagnose, list_checkpoints, report, run_control, setup_recovery
from tests.support.checkpoint_makers import EXPERIMENT, TRIAL, USER, learned, make_trial, trial_paths, write_rewards
from tests.support.long_run import LongRun

MODEL = REPOSITORY / "assets" / "arithmetic" / "model"
RECORD = {"question": "1+1?", "answer": "#### 2"}


class Bomb:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (os.mkdir, (str(self.mark),))


@pytest.fixture
def mark(tmp_path):
    """A folder that appears where something was executed."""
    return tmp_path / "executed"


@pytest.fixture
def pickled(mark):
    """Bytes that make it appear; tried, since a trap that never closes shows nothing."""
    payload = pickle.dumps(Bomb(mark))
    pickle.loads(payload)
    mark.rmdir()
    return payload


@pytest.fixture
def unsafe_yaml(mark):
    text = f"!!python/object/apply:os.mkdir ['{mark}']\n"
    yaml.unsafe_load(text)
    mark.rmdir()
    return text


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A copy of a model folder; whoever asks a question fails."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks"))
    return shutil.copytree(MODEL, tmp_path / "model")


@pytest.fixture
def run(tmp_path):
    paths = RunPaths(fileroot=tmp_path / "runs", user="me", experiment_name="e", trial_name="t")
    LongRun(paths, steps=60, incidents=1).write()
    names = ["--experiment-name", "e", "--trial-name", "t", "--user", "me", "--fileroot", str(paths.fileroot)]
    return paths, names


def loaded(folder):
    return load_model(folder, dtype=torch.float32, attn_implementation="sdpa", key="actor.path")


def edited(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.safetensors"])
def test_weights_that_are_a_pickle(model, mark, pickled, name):
    (model / "model.safetensors").unlink()
    (model / name).write_bytes(pickled)
    with pytest.raises(ModelError):
        loaded(model)
    assert not mark.exists()


@pytest.mark.parametrize("kind", ["qwen2", "its_own"])
def test_a_model_with_code_of_its_own(model, mark, kind):
    code = f"import os\nos.mkdir({str(mark)!r})\nclass Own: pass\n"
    (model / "modeling_own.py").write_text(code)
    names = {"AutoConfig": "modeling_own.Own", "AutoModelForCausalLM": "modeling_own.Own"}
    edited(model / "config.json", auto_map=names, model_type=kind)
    for look in (loaded, refuse_own_code):
        with pytest.raises(ModelError, match=r"config\.json names code to be run \(auto_map\)"):
            look(model)
    assert not mark.exists()


def test_a_tokenizer_with_code_of_its_own(model, mark):
    (model / "own.py").write_text(f"import os\nos.mkdir({str(mark)!r})\nclass Own: pass\n")
    edited(model / "tokenizer_config.json", auto_map={"AutoTokenizer": ["own.Own", None]}, tokenizer_class="Own")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json names code to be run \(auto_map\)"):
        load_tokenizer(model, key="tokenizer_path")
    assert not mark.exists()


def test_a_chat_template_that_reaches_for_the_system(model, mark, tmp_path):
    template = "{{ cycler.__init__.__globals__.os.mkdir('" + str(mark) + "') }}"
    (model / "chat_template.jinja").write_text(template)
    (tmp_path / "d.jsonl").write_text(json.dumps(RECORD) + "\n")
    records = load_records(DatasetConfig(path=str(tmp_path / "d.jsonl")), key="train_dataset")
    tokenizer = load_tokenizer(model, key="tokenizer_path")
    assert tokenizer.chat_template == template
    with pytest.raises(LauncherError):
        build_prompts(records, tokenizer, max_prompt_tokens=None, max_length=None, key="train_dataset")
    assert not mark.exists()


@pytest.mark.parametrize("name", ["d.pkl", "d.npy", "d.pt", "d.py", "d.parquet", "d.json"])
def test_a_data_set_that_is_a_pickle_or_a_script(tmp_path, mark, pickled, name):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / name).write_bytes(f"import os\nos.mkdir({str(mark)!r})".encode() if name == "d.py" else pickled)
    for path in (folder, folder / name):
        with pytest.raises(LauncherError):
            load_records(DatasetConfig(path=str(path)), key="train_dataset")
    assert not mark.exists()


def test_a_parquet_file_with_a_type_of_its_own(tmp_path, mark, pickled):
    """pyarrow before 14.0.1 unpickled it."""
    kind = {"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": pickled}
    fields = [pa.field(name, pa.string(), metadata=kind) for name in RECORD]
    pq.write_table(pa.table([[text] for text in RECORD.values()], schema=pa.schema(fields)), tmp_path / "d.parquet")
    (record,) = load_records(DatasetConfig(path=str(tmp_path / "d.parquet")), key="train_dataset")
    assert record.record == RECORD
    assert not mark.exists()


@pytest.mark.slow
def test_settings_and_logs_of_a_run(run, mark, unsafe_yaml, pickled):
    paths, names = run
    paths.config.write_text(unsafe_yaml)
    for name in ("offline.wandb", "trainer.log", "llm_server-0.log", "memory.jsonl", "now.json"):
        (paths.logs / name).write_bytes(pickled)
    assert diagnose.main([str(paths.logs)]) in (0, 1)
    assert diagnose.main([str(paths.logs / "offline.wandb")]) == 2
    assert check_health.main(names) == 1
    assert run_control.main(["status", *names]) == 1
    assert report.main(names) == 0
    assert not mark.exists()


@pytest.mark.parametrize("pattern", ["*.safetensors", "*.json"])
def test_a_checkpoint_whose_files_are_pickles(tmp_path, mark, pickled, unsafe_yaml, pattern, capsys):
    root = tmp_path / "root"
    make_trial(root, learned(tmp_path / "learned"), (5,))
    paths = trial_paths(root)
    write_rewards(paths, [0.5] * 20)
    paths.config.write_text(unsafe_yaml)
    (checkpoint,) = {file.parent for file in root.rglob("*globalstep5/manifest.json")}
    for file in [*checkpoint.rglob(pattern)]:
        file.write_bytes(pickled)
    (checkpoint / "optimizer.pt").write_bytes(pickled)
    names = ["--experiment-name", EXPERIMENT, "--trial-name", TRIAL, "--user", USER, "--fileroot", str(root)]
    assert list_checkpoints.main(["--verify", *names]) == 1
    assert setup_recovery.main(["--checkpoint-path", str(checkpoint), *names]) in (1, 2)
    assert not mark.exists()
