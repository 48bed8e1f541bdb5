"""Ten attacks from another account of the same machine on a run that is under way: none gets through.

Each is made twice, by the same code: by nobody, and by the owner with key, token or rights, who must get through. The
run is real but for SGLang, whose door has a test of its own (tests/e2e/test_sglang_server.py).
"""

import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch

from actors.model.model_folder import load_model
from actors.model.stored_tensors import open_tensors
from actors.model.training_state import FACTS_FILE, TENSORS_FILE, read_facts
from actors.supervision.coordinator_actor import COORDINATOR
from launcher.base.errors import CheckpointError, ConfigError, ModelError, StorageError
from launcher.checkpoints.checkpoint_folder import verify_checkpoint
from launcher.checkpoints.checkpoint_store import CheckpointStore
from launcher.checkpoints.in_memory_checkpoints import memory_folder
from launcher.checkpoints.manifest import MANIFEST_NAME, WEIGHTS_FILE, Manifest, record_files
from launcher.run_files.run_keys import RAY_TOKEN, ServerKeys
from launcher.run_files.run_paths import RunLock, RunPaths
from tests.programs.supervised_run import SupervisedRun, command_of
from tests.support.machine import scaled

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another account to attack from"),
]


def strangers(*steps):
    """What each step came to: (got through, what it saw)."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.programs.stranger"],
        input=json.dumps(steps),
        capture_output=True,
        text=True,
        check=False,
        timeout=scaled(300),
    )
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(answers) == len(steps), done.stderr[-3000:]
    return [(answer["got_through"], answer["saw"]) for answer in answers]


def only_the_owner_gets_through(attack, owner, stranger):
    """`owner` and `stranger`: their arguments. Returns what the stranger saw."""
    ours, theirs = strangers({"attack": attack, "as_owner": True, **owner}, {"attack": attack, **stranger})
    assert ours[0], f"the attack fails for everybody: {ours[1]}"
    assert not theirs[0], theirs[1]
    return theirs[1]


class Victim:
    """A run under way, and where its parts are."""

    def __init__(self, run, folder):
        self.run = run
        self.paths = run.paths
        self.folder = folder
        self.keys = ServerKeys.read(run.paths.keys)
        self.token = (run.paths.keys / RAY_TOKEN).read_text()
        self.secrets = [self.keys.api, self.keys.admin, self.token]
        (server,) = run.server_pids().values()
        words = psutil.Process(server).cmdline()
        self.server = f"http://127.0.0.1:{words[words.index('--port') + 1]}"
        raylet = run.of_ray("raylet").cmdline()
        self.gcs = next(word.partition("=")[2] for word in raylet if word.startswith("--gcs-address="))
        session = next(word.partition("=")[2] for word in raylet if word.startswith("--session_dir="))
        self.session = Path(session)


@pytest.fixture(scope="module")
def victim():
    """pytest's own folders are closed to others, and would keep a stranger out by themselves."""
    with tempfile.TemporaryDirectory(prefix="victim-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        umask = os.umask(0o022)
        try:
            # nothing is pruned: a checkpoint that a test has listed is still there when it is copied
            with SupervisedRun(folder, steps=3000, servers=1, settings=["recover.keep_last=3000"]) as run:
                run.wait_until(lambda: run.events("checkpoint.committed"), "a checkpoint")
                yield Victim(run, folder)
                run.wait_steps(run.steps_done() + 2)
                assert not run.incidents(), "no attack has even disturbed it"
        finally:
            os.umask(umask)


GENERATE = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2, "min_new_tokens": 0}, "return_logprob": True}


def test_1_generate_without_the_key(victim):
    url = f"{victim.server}/generate"
    request = {"url": url, "body": GENERATE}
    assert only_the_owner_gets_through("http", request | {"key": victim.keys.api}, request) == "401"
    wrong = strangers(
        {"attack": "http", **request, "key": "0" * 64}, {"attack": "http", "url": victim.server + "/health"}
    )
    assert wrong == [(False, "401"), (False, "401")]


def test_2_a_weight_update_without_the_key(victim):
    body = {"model_path": "/nowhere", "weight_version": "0", "abort_all_requests": False, "flush_cache": False}
    request = {"url": f"{victim.server}/update_weights_from_disk", "body": body}
    assert only_the_owner_gets_through("http", request | {"key": victim.keys.admin}, request) == "401"
    assert strangers({"attack": "http", **request, "key": victim.keys.api}) == [(False, "401")], "generation's key"


@pytest.fixture(scope="module")
def dashboard(tmp_path_factory):
    """A cluster as the run's, with what takes jobs."""
    folder = tmp_path_factory.mktemp("locked")
    command = [sys.executable, "-m", "tests.programs.locked_cluster", str(folder / "keys")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        started = json.loads(process.stdout.readline())
        yield started | {"token": (folder / "keys" / RAY_TOKEN).read_text()}
        process.stdin.close()
        process.wait(scaled(60))


def test_3_a_job_without_the_token(dashboard):
    assert dashboard["dashboard"].startswith("127.0.0.1:")
    request = {"url": f"http://{dashboard['dashboard']}/api/jobs/", "body": {"entrypoint": "true"}}
    seen = only_the_owner_gets_through("http", request | {"key": dashboard["token"]}, request)
    assert seen in {"401", "403"}


def test_4_an_actor_call_without_the_token(victim):
    """All at once: a stranger waits for Ray's retries."""
    call = {"address": victim.gcs, "name": COORDINATOR, "namespace": victim.paths.namespace}
    gcs, sockets = {"address": victim.gcs}, {"folder": str(victim.session)}
    attacks = (
        ("actor_call", call | {"token": victim.token}, call),
        ("cluster_state", gcs | {"token": victim.token}, gcs),
        ("cluster_state", gcs | {"token": victim.token}, gcs | {"token": "0" * 64}),
        ("unix_sockets", sockets, sockets),
    )
    with ThreadPoolExecutor() as pool:
        for made in [pool.submit(only_the_owner_gets_through, *attack) for attack in attacks]:
            made.result()


class Bomb:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def explode(call, error):
    with pytest.raises(error):
        call()


def test_5_a_pickle_in_a_checkpoint(victim, tmp_path):
    (first, *_) = CheckpointStore(victim.paths.default_checkpoints).list()
    assert not strangers({"attack": "write", "folders": [str(first.path)]})[0][0]

    mark = tmp_path / "it ran"
    bomb = pickle.dumps(Bomb(mark))
    pickle.loads(bomb)
    assert mark.exists(), "the bomb works"
    mark.unlink()
    folder = tmp_path / first.path.name
    shutil.copytree(first.path, folder)
    (folder / WEIGHTS_FILE).write_bytes(bomb)
    explode(lambda: verify_checkpoint(folder), CheckpointError)
    # By one who can write a manifest too, as whoever hands on a whole checkpoint can:
    for name in (TENSORS_FILE, FACTS_FILE, "pytorch_model.bin", "optimizer.pt", "rng_state.pth", "tokenizer.pkl"):
        (folder / name).write_bytes(bomb)
    told = json.loads((folder / MANIFEST_NAME).read_bytes())
    told["files"] = sealed(folder)
    (folder / MANIFEST_NAME).write_text(json.dumps(told))
    verify_checkpoint(folder)
    for _ in ("with safetensors that are none", "with none"):
        explode(lambda: load_model(folder, dtype=torch.float32, attn_implementation="eager", key="x"), ModelError)
        explode(lambda: read_facts(folder), CheckpointError)
        explode(lambda: open_tensors(folder / TENSORS_FILE).__enter__(), CheckpointError)
        (folder / WEIGHTS_FILE).unlink(missing_ok=True)
    assert not mark.exists()


def sealed(folder):
    return {name: {"bytes": r.bytes, "checksum": r.checksum} for name, r in record_files(folder).items()}


def test_6_links_and_dots_in_names_and_paths(victim, tmp_path):
    everywhere = [str(victim.folder), *(str(memory_folder(victim.paths, kind)) for kind in ("weights", "state"))]
    everywhere += [str(victim.session.parents[1])]
    ((got_through, saw),) = strangers({"attack": "write", "folders": everywhere})
    assert not got_through, saw

    (first, *_) = CheckpointStore(victim.paths.default_checkpoints).list()
    folder = tmp_path / first.path.name
    shutil.copytree(first.path, folder)
    told = json.loads((folder / MANIFEST_NAME).read_bytes())
    for name in ("../secret", "/etc/passwd", "a/../../secret"):
        (folder / MANIFEST_NAME).write_text(
            json.dumps(told | {"files": told["files"] | {name: {"bytes": 1, "checksum": "sha256:"}}})
        )
        with pytest.raises(CheckpointError, match="leads out of the checkpoint"):
            Manifest.read(folder)
    (folder / MANIFEST_NAME).write_text(json.dumps(told))
    (folder / WEIGHTS_FILE).unlink()
    (folder / WEIGHTS_FILE).symlink_to(first.path / WEIGHTS_FILE)
    with pytest.raises(CheckpointError, match="is not a plain file"):
        verify_checkpoint(folder)
    for name in ("..", "../x", "a/b", ""):
        for key in ("experiment_name", "trial_name", "user"):
            names = {"experiment_name": "e", "trial_name": "t", "user": "u"} | {key: name}
            with pytest.raises(ConfigError, match=f"{key}={name!r} can't name a folder"):
                RunPaths(fileroot=tmp_path, **names)


def test_7_a_key_in_the_process_list(victim):
    owner = {"needles": ["--model-path"]}
    saw = only_the_owner_gets_through("find_in_processes", owner, {"needles": victim.secrets})
    ((can_look, _), (found, where)) = strangers(
        {"attack": "find_in_processes", "needles": ["--model-path"]},
        {"attack": "find_in_processes", "needles": victim.secrets},
    )
    assert can_look, f"{saw}, {where}"
    assert not found, f"{saw}, {where}"
    commands = [command_of(process) for process in victim.run.family()]
    assert not [command for command in commands if any(secret in command for secret in victim.secrets)]


def test_8_a_key_in_a_log(victim):
    """Not for the owner either: logs are copied and shown."""
    logs = [str(victim.paths.logs), str(victim.folder / "console.log"), str(victim.session.parents[1])]
    looked, found = strangers(
        {
            "attack": "find_in_files",
            "as_owner": True,
            "folders": logs,
            "needles": ["==== generation 0", "--model-path"],
        },
        {"attack": "find_in_files", "as_owner": True, "folders": logs, "needles": victim.secrets},
    )
    assert looked[0], found[1]
    assert not found[0], found[1]


def test_9_a_key_in_the_file_system(victim):
    everything = [str(victim.folder), "/dev/shm", str(victim.session.parents[1])]
    only_the_owner_gets_through(
        "find_in_files",
        {"folders": everything, "needles": victim.secrets},
        {"folders": everything, "needles": victim.secrets},
    )
    ((can_look, _),) = strangers({"attack": "find_in_files", "folders": everything, "needles": ["==== generation 0"]})
    assert can_look, "the stranger reads the logs, and would have found a key there"
    assert [path.stat().st_mode & 0o077 for path in [victim.paths.keys, *victim.paths.keys.iterdir()]] == 4 * [0]


def test_10_a_second_run_with_the_same_name(victim):
    names = {"experiment": victim.paths.experiment_name, "trial": victim.paths.trial_name, "user": victim.paths.user}
    ((got_through, saw),) = strangers({"attack": "start_a_run", "fileroot": str(victim.paths.fileroot), **names})
    assert not got_through
    assert "can't be written" in saw
    lock = {"path": str(victim.paths.lock)}
    only_the_owner_gets_through("lock", lock, lock)
    with pytest.raises(StorageError, match="is already running: pid"):
        RunLock(victim.paths)
