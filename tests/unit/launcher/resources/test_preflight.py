"""Each thing a machine or a folder can lack: found before anything is started, named, and nothing left behind."""

import copy
import json
import os
import re
import socket
import subprocess
from dataclasses import replace

import pytest

from launcher.base.errors import (
    ConfigError,
    DataError,
    EmptyData,
    ResourceError,
    RewardImportError,
    StorageError,
    UnsupportedSetting,
    UsageError,
)
from launcher.resources.memory_estimate import GIB
from launcher.resources.missing_files import find_shape
from launcher.resources.missing_machine import missing_ports, nearest_existing
from launcher.resources.preflight import ARGUMENTS_OF_SGLANG, PROBE_SERVER, _ask, find_missing, preflight
from launcher.resources.run_plan import make_plan
from tests.support.preflight_parts import ARITHMETIC, NO_GPU, WITH_GPU, missing, the_one, tree


def test_nothing_is_missing_and_nothing_was_made(config, tmp_path):
    before = tree(tmp_path)
    preflight(config, NO_GPU, make_plan(config, NO_GPU, find_shape(config)))
    assert tree(tmp_path) == before


def test_adapters_without_peft(config, monkeypatch):
    config.actor.use_lora = True
    monkeypatch.setattr("launcher.resources.preflight.importlib.util.find_spec", lambda name: None)
    assert "actor.use_lora=true needs PEFT, which is not installed" in the_one(config, ConfigError)


# ── data and reward ──


def test_no_data_set(config, tmp_path):
    config.train_dataset.path = str(tmp_path / "train.jsonl")
    assert f"train_dataset.path={tmp_path / 'train.jsonl'} does not exist" in the_one(config, DataError)


def test_an_empty_path_is_not_the_folder_of_the_command(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.jsonl").write_text('{"question": "?", "answer": "#### 1"}')
    config.train_dataset.path = ""
    assert "the data set train_dataset.path= does not exist" in the_one(config, DataError)


def test_an_empty_data_set(config, tmp_path):
    (tmp_path / "empty.jsonl").touch()
    config.valid_dataset.path = str(tmp_path / "empty.jsonl")
    assert "valid_dataset.path=" in the_one(config, EmptyData)
    (tmp_path / "folder").mkdir()
    config.valid_dataset.path = str(tmp_path / "folder")
    assert "holds no records" in the_one(config, EmptyData)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (None, "there is no module 'my_reward'"),
        ("import json\nraise RuntimeError('no key')", "RuntimeError: no key (my_reward.py:2)"),
        ("import sys; sys.exit(4)", "SystemExit: 4"),
        ("import os; os._exit(4)", "ended the process with exit code 4"),
    ],
)
def test_a_reward_function_that_is_not_here(config, tmp_path, monkeypatch, module, said):
    monkeypatch.syspath_prepend(tmp_path)
    if module is not None:
        (tmp_path / "my_reward.py").write_text(module)
    config.reward.fn = "my_reward:score"
    message = the_one(config, RewardImportError)
    assert "my_reward:score" in message
    assert said in message


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("score = 3", "is a int, not a function"),
        ("def score(text): ...", "can't be called"),
        ("def other(): ...", "no 'score'"),
    ],
)
def test_a_reward_function_that_can_be_called_on_no_machine_is_no_missing_one(
    config, tmp_path, monkeypatch, module, said
):
    """A dry run refuses it, as it does an episode's."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_reward.py").write_text(module)
    config.reward.fn = "my_reward:score"
    message = the_one(config, UnsupportedSetting)
    assert "my_reward:score" in message
    assert said in message


@pytest.mark.slow
def test_the_default_reward_function(config):
    config.reward.fn = ARITHMETIC.reward.fn
    assert missing(config) == []


def test_a_reward_function_of_the_users_own(config, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_reward.py").write_text("print('loud')\ndef score(*, completion, **rest): return 0.0")
    config.reward.fn = "my_reward:score"
    assert missing(config) == []


# ── the server's arguments ──


REFUSED = [
    ({"watchdog_timeout": 60, "nosuch": 1}, "extra_args.nosuch=1: SGLang says: unrecognized arguments: --nosuch 1"),
    ({"watchdog-timeout": "soon"}, "extra_args.watchdog-timeout=soon: SGLang says: argument --watchdog-timeout: "),
    ({"enable_metri": True}, "extra_args.enable_metri=True: SGLang says: ambiguous option: --enable-metri could"),
]
TAKEN = {"watchdog_timeout": 60, "tensor-parallel-size": 1, "disable_radix_cache": True, "hos": "127.0.0.1"}
EACH = """
import contextlib, io, json, sys
program, asked = sys.argv[1:]
answers = []
for arguments in json.loads(asked):
    sys.argv[1:] = arguments
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(program, {"__name__": "__main__"})
    answers.append(said.getvalue())
print(json.dumps(answers))
"""
"""One process for what are several in a run: SGLang's import takes nearly all of their time."""


@pytest.fixture(scope="module")
def probed():
    """What the probe of SGLang's arguments prints, by the arguments that it is given."""
    asked = [json.dumps(arguments) for arguments in (*(arguments for arguments, _ in REFUSED), TAKEN)]
    answers = _ask(EACH, PROBE_SERVER, json.dumps([[one, ARGUMENTS_OF_SGLANG] for one in asked]))
    return dict(zip(asked, answers, strict=True))


@pytest.fixture
def sglang(probed, monkeypatch):
    run = subprocess.run

    def known(command, **how):
        if PROBE_SERVER not in command:
            return run(command, **how)
        *_, arguments, hint = command
        assert hint == ARGUMENTS_OF_SGLANG
        return subprocess.CompletedProcess(command, 0, probed[arguments], "")

    monkeypatch.setattr(subprocess, "run", known)


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "said"), REFUSED)
def test_an_argument_that_sglang_does_not_know_or_take(config, sglang, arguments, said):
    config.sglang.extra_args = arguments
    assert said in the_one(config, UnsupportedSetting)


@pytest.mark.slow
def test_arguments_that_sglang_takes_under_any_of_their_names(config, sglang):
    config.sglang.extra_args = TAKEN
    assert missing(config) == []


@pytest.mark.parametrize("error", ["ImportError('sglang')", "OSError('libnuma.so.1')"])
def test_where_sglang_can_not_be_imported_its_arguments_are_not_asked_of_it(config, tmp_path, monkeypatch, error):
    (tmp_path / "sglang.py").write_text(f"raise {error}")
    monkeypatch.syspath_prepend(tmp_path)
    config.sglang.extra_args = {"nosuch": 1}
    assert missing(config) == []


def test_a_machine_on_which_sglang_takes_long_to_import_refuses_no_argument(config, monkeypatch):
    """It took 59 s on two cores at a load of 15."""
    run = subprocess.run

    def slow(command, **how):
        if PROBE_SERVER in command:
            raise subprocess.TimeoutExpired(command, how["timeout"])
        return run(command, **how)

    monkeypatch.setattr(subprocess, "run", slow)
    config.sglang.extra_args = {"watchdog_timeout": 60}
    assert missing(config) == []


# ── the machine ──


def test_a_gpu_is_asked_for_and_there_is_none(config):
    config.sglang.device = config.actor.device = "cuda"
    message = the_one(config, ResourceError)
    assert re.match(
        r"a GPU with \d+ GiB of memory: sglang.device=cuda and actor.device=cuda, but NVML finds no", message
    )


def test_fewer_gpus_than_are_booked(config):
    config.sglang.device = config.actor.device = "cuda"
    config.sglang.n_servers = 2
    assert "3 GPUs and 3 CPUs are asked for: " in the_one(config, ResourceError, WITH_GPU)


def test_devices_that_are_found_may_leave_no_way_for_tensors(config):
    """With auto nothing was said, and a handle's device number means another GPU in the server."""
    two = replace(WITH_GPU, gpus=WITH_GPU.gpus * 2)
    config.sglang.device = config.actor.device = "auto"
    config.sglang.gpu_fraction = config.actor.gpu_fraction = 1.0
    assert missing(config, two) == []
    config.actor.weight_update_mode = "tensor"
    said = the_one(config, ConfigError, two)
    assert "actor.weight_update_mode=tensor: disk or xccl with sglang.gpu_fraction=1 and actor.gpu_fraction=1" in said
    assert missing(config) == [], "both are on the CPU"
    config.sglang.gpu_fraction = config.actor.gpu_fraction = 0.5
    assert missing(config, two) == []


def test_too_little_memory_on_the_gpu(config):
    config.sglang.device = config.actor.device = "cuda"
    config.sglang.gpu_fraction = config.actor.gpu_fraction = 0.5
    assert missing(config, WITH_GPU) == []
    config.sglang.mem_fraction_static = 0.99
    config.sglang.max_total_tokens = None
    assert "memory: GPU 0 (NVIDIA H200): " in the_one(config, ResourceError, WITH_GPU)


def test_too_little_memory_on_the_host(config):
    message = the_one(config, ResourceError, replace(NO_GPU, memory=2 * GIB))
    assert "host memory" in message
    assert "2.0 GiB are there" in message


def test_a_server_that_falls_back_to_the_cpu_needs_a_token_pool(config):
    config.sglang.device = "auto"
    config.sglang.max_total_tokens = None
    assert "sglang.max_total_tokens=null" in the_one(config, ConfigError)


def test_fileroot_cannot_be_written(config, tmp_path):
    if os.geteuid() == 0:  # whom no permission stops
        config.cluster.fileroot = "/proc/runs/grpo"
    else:
        (tmp_path / "locked").mkdir(mode=0o555)
        config.cluster.fileroot = str(tmp_path / "locked/grpo")
    assert f"cluster.fileroot={config.cluster.fileroot} can't be written" in the_one(config, StorageError)


def test_fileroot_below_a_file(config, tmp_path):
    (tmp_path / "file").touch()
    config.cluster.fileroot = str(tmp_path / "file/grpo")
    assert "is a file" in the_one(config, StorageError)


def test_a_disk_that_is_too_small(config, tiny_disk):
    config.cluster.fileroot = str(tiny_disk / "runs")
    message = the_one(config, ResourceError)
    assert f"cluster.fileroot={tiny_disk / 'runs'}: 2 checkpoints need" in message
    assert not (tiny_disk / "runs").exists()


def test_memory_backed_storage_that_is_too_small(config):
    plan = replace(make_plan(config, NO_GPU, find_shape(config)), weight_files_bytes=2**60)
    (error,) = find_missing(config, NO_GPU, plan)
    assert "/dev/shm: weights on their way to the servers" in str(error)
    assert "actor.weight_update_mode=tensor" in error.hint


def test_room_is_asked_for_where_the_folder_will_be(tmp_path):
    assert nearest_existing(tmp_path / "a/b/c") == tmp_path


def test_a_port_in_use(config):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config.sglang.port = listener.getsockname()[1]
        message = the_one(config, ResourceError)
    assert f"sglang.port={config.sglang.port} on 127.0.0.1: Address already in use" in message
    assert missing(config) == []


def test_the_second_servers_port_counts_too(config):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        config.sglang.n_servers = 2
        config.sglang.port = taken - 1
        assert f"sglang.port={taken}" in "".join(map(str, missing(config)))


def test_ports_beyond_the_last_one_are_one_message(config):
    """It ended in an OverflowError: the second server's port was 65536."""
    config.sglang.n_servers = 3
    config.sglang.port = 65535
    beyond = [str(one) for one in missing_ports(config) if "at most" in str(one)]
    assert len(beyond) == 1
    assert beyond[0].startswith("sglang.port=65535: at most 65533, as 3 servers take ports from it on")


def test_an_address_of_another_machine(config):
    config.sglang.host = "192.0.2.1"  # of a range that no machine has (RFC 5737)
    assert "sglang.host=192.0.2.1" in the_one(config, ResourceError)


def test_wandb_online_needs_a_key(config, tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    config.stats_logger.wandb.mode = "online"
    assert "no key for wandb.example.org" in the_one(config, ResourceError)
    (tmp_path / "netrc").write_text("machine wandb.example.org login user password key\n")
    assert missing(config) == []
    (tmp_path / "netrc").unlink()
    monkeypatch.setenv("WANDB_API_KEY", "key")
    assert missing(config) == []


def test_a_cluster_elsewhere_is_not_judged_by_this_machine(config):
    elsewhere = copy.deepcopy(config)
    elsewhere.sglang.device = elsewhere.actor.device = "cuda"
    elsewhere.cluster.address = "10.0.0.1:6379"
    assert missing(elsewhere) == []


def test_everything_is_said_in_one_message(config, tmp_path):
    config.sglang.device = config.actor.device = "cuda"
    config.train_dataset.path = str(tmp_path / "train.jsonl")
    config.reward.fn = "nowhere:score"
    with pytest.raises(UsageError) as error:
        preflight(config, NO_GPU, make_plan(config, NO_GPU, find_shape(config)))
    assert error.value.exit_code == 2
    assert error.value.message.startswith("3 things are missing before this run can start:\n1. a GPU")
    assert "\n2. the data set" in error.value.message
    assert "\n3. reward.fn" in error.value.message
