"""The command line of a server, its environment, and what its log says of its end."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import requests

from actors.serving import group_address
from actors.serving.group_address import LOOPBACK
from actors.serving.server_connection import KEEP_ALIVE_S
from actors.serving.server_log_tail import decisive_lines, last_line, tail
from actors.serving.sglang_command import (
    choose_port,
    command,
    environment,
    memory_limit,
    url,
)
from launcher.base.addresses import ABOVE_RAY, USUALLY_GIVEN
from launcher.base.errors import ResourceError
from launcher.config.schema import SGLangConfig
from tests.support.composed import composed
from tests.support.preflight_parts import changed

CONFIG = SGLangConfig(dtype="float32", random_seed=5, max_total_tokens=20000)


def words(config=CONFIG, *, device="cpu", index=0, generation=0):
    return command(
        config,
        entry=("run",),
        device=device,
        index=index,
        generation=generation,
        model_path="/m",
        weight_version=7,
        port=3000,
    )


def value(words, name):
    return words[words.index(name) + 1]


def test_the_configuration_reaches_the_command():
    given = words(
        dataclasses.replace(CONFIG, context_length=512, max_running_requests=64, log_level="warning", tp_size=2)
    )
    expected = {
        "--model-path": "/m",
        "--weight-version": "7",
        "--host": "127.0.0.1",
        "--port": "3000",
        "--dtype": "float32",
        "--tp-size": "2",
        "--context-length": "512",
        "--max-running-requests": "64",
        "--max-total-tokens": "20000",
        "--log-level": "warning",
    }
    assert given[0] == "run"
    assert {name: value(given, name) for name in expected} == expected
    assert {"--enable-metrics", "--skip-server-warmup"} <= set(given)


def test_what_is_not_set_is_left_to_sglang():
    assert not {"--context-length", "--max-running-requests", "--attention-backend"} & set(words())


def test_the_share_of_memory_is_the_gpus_alone():
    assert "--mem-fraction-static" not in words(device="cpu")
    assert value(words(device="cuda"), "--mem-fraction-static") == "0.8"


def test_no_two_lives_draw_the_same_samples():
    seeds = {value(words(index=i, generation=g), "--random-seed") for i in range(4) for g in range(4)}
    assert len(seeds) == 16
    assert value(words(), "--random-seed") == "5"


def test_extra_arguments_are_passed_on_and_win():
    extra = {
        "watchdog_timeout": 60,
        "disable_radix_cache": True,
        "show_time_cost": False,
        "dtype": "half",
        "cuda_graph_bs": [1, 2],
    }
    given = words(dataclasses.replace(CONFIG, extra_args=extra))
    assert value(given, "--watchdog-timeout") == "60"
    assert value(given, "--dtype") == "half"
    assert given.count("--dtype") == 1
    assert "--disable-radix-cache" in given
    assert "--show-time-cost" not in given
    assert given[given.index("--cuda-graph-bs") + 1 :][:2] == ["1", "2"]


def test_the_environment_of_a_cpu_server(tmp_path):
    inherited = {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "8", "HOME": "/home/me"}
    config = dataclasses.replace(CONFIG, num_cpus=2.0)
    given = environment(config, inherited, device="cpu", gpu_ids=(), scratch=Path("/s"), model_path=str(tmp_path))
    assert "PYTHONDONTWRITEBYTECODE" not in given
    assert (given["OMP_NUM_THREADS"], given["TMPDIR"], given["HOME"]) == ("2", "/s", "/home/me")
    assert given["HF_HUB_OFFLINE"] == given["TRANSFORMERS_OFFLINE"] == "1"
    assert float(given["SGLANG_TIMEOUT_KEEP_ALIVE"]) > 2 * KEEP_ALIVE_S, "no connection is reused while it is closed"
    threads = environment(
        dataclasses.replace(config, threads=1), {}, device="cpu", gpu_ids=(), scratch=Path("/s"), model_path="Org/Model"
    )
    assert threads["OMP_NUM_THREADS"] == "1"
    assert "HF_HUB_OFFLINE" not in threads, "a hub name may have to be downloaded"


@pytest.fixture
def two_interfaces(monkeypatch):
    lan = SimpleNamespace(address="10.9.0.1")
    named = {"lo": [SimpleNamespace(address=LOOPBACK)], "lan7": [SimpleNamespace(address="fe80::1%lan7"), lan]}
    monkeypatch.setattr(group_address.psutil, "net_if_addrs", lambda: named)


def test_a_server_asks_itself_and_no_proxy(monkeypatch):
    """SGLang's start ends with a request to itself, which a proxy of the company's network can't answer."""
    config = dataclasses.replace(CONFIG, host="10.0.0.7")
    inherited = {"http_proxy": "http://proxy:3128", "no_proxy": "intranet"}
    given = environment(config, inherited, device="cpu", gpu_ids=(), scratch=Path("/s"), model_path="Org/Model")
    for name in ("http_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, given[name])
    for host in ("127.0.0.1", "10.0.0.7", "intranet"):
        assert requests.utils.should_bypass_proxies(f"http://{host}:30000/health", no_proxy=None)
    assert not requests.utils.should_bypass_proxies("http://huggingface.co/", no_proxy=None)


@pytest.mark.parametrize(
    ("device", "meets_at", "inherited", "expected"),
    [
        ("cpu", LOOPBACK, {}, {"GLOO_SOCKET_IFNAME": "lo"}),
        ("cpu", "10.9.0.1", {}, {"GLOO_SOCKET_IFNAME": "lan7"}),
        ("cuda", LOOPBACK, {}, {}),
        ("cuda", "10.9.0.1", {}, {"NCCL_SOCKET_IFNAME": "lan7"}),
        ("cuda", "10.9.0.1", {"NCCL_SOCKET_IFNAME": "ib0"}, {"NCCL_SOCKET_IFNAME": "ib0"}),
        ("cuda", "203.0.113.9", {}, {}),
    ],
)
@pytest.mark.usefixtures("two_interfaces")
def test_a_group_with_the_trainer_is_met_on_the_interface_of_the_nodes_address(device, meets_at, inherited, expected):
    given = environment(
        CONFIG, inherited, device=device, gpu_ids=("0",), scratch=Path("/s"), model_path="", meets_at=meets_at
    )
    assert {name: value for name, value in given.items() if name.endswith("_SOCKET_IFNAME")} == expected


def test_servers_and_trainer_meet_on_loopback_but_in_a_running_cluster(monkeypatch):
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "10.9.0.1")
    cluster, over = composed("conf=gsm8k_h200_cluster"), {"actor__weight_update_mode": "xccl"}
    assert group_address.group_address(cluster) == LOOPBACK, "no group at all"
    own = {"cluster__address": "local", "cluster__n_nodes": 1}
    assert group_address.group_address(changed(cluster, **over, **own)) == LOOPBACK
    one = changed(cluster, **over, cluster__n_nodes=1)
    assert group_address.group_address(one) == "10.9.0.1", "it is placed on as many nodes as it needs"
    assert group_address.group_address(changed(cluster, **over)) == "10.9.0.1"


def test_gpus_are_given_in_their_order():
    """Ray's is any, and tensor-parallel ranks follow it."""
    given = environment(
        CONFIG, {}, device="cuda", gpu_ids=("10", "2", "GPU-b", "GPU-a"), scratch=Path("/s"), model_path=""
    )
    assert given["CUDA_VISIBLE_DEVICES"] == "2,10,GPU-a,GPU-b"
    assert given["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID", "the numbers are NVML's, whatever the GPUs' kinds"
    assert "OMP_NUM_THREADS" not in given


def test_a_free_port_and_a_foreign_address():
    assert ABOVE_RAY <= choose_port(CONFIG, 0) < USUALLY_GIVEN, "nobody's connection takes it meanwhile"
    with pytest.raises(ResourceError, match=r"can't listen on 203\.0\.113\.1:any port") as caught:
        choose_port(dataclasses.replace(CONFIG, host="203.0.113.1"), 0)
    assert "sglang.host" in caught.value.hint


def test_where_a_server_is_reached():
    assert url(CONFIG, 80) == "http://127.0.0.1:80"
    assert url(dataclasses.replace(CONFIG, host="::1"), 80) == "http://[::1]:80"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "0", ""])
def test_no_server_listens_on_every_interface(host):
    with pytest.raises(ResourceError, match="is every interface of this machine") as caught:
        choose_port(dataclasses.replace(CONFIG, host=host), 0)
    assert "sglang.host to 127.0.0.1" in caught.value.hint


SCHEDULER_DIED = """\
[2026-11-20 23:54:43] Load weight begin. avail mem=20.97 GB
[2026-11-20 23:54:43 TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "/site-packages/sglang/srt/managers/scheduler.py", line 3000, in run_scheduler_process
    scheduler = Scheduler(
safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge

[2026-11-20 23:54:44] Received sigquit from a child process. It usually means the child failed.
"""


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (
            SCHEDULER_DIED,
            [
                "Scheduler hit an exception: Traceback (most recent call last):",
                "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge",
            ],
        ),
        (
            "[2026-11-20 23:54:43 TP0] Prefill out of memory. Try to lower your batch size.\n",
            ["Prefill out of memory. Try to lower your batch size."],
        ),
        ("x\nKeyError\ny\n", ["KeyError"]),
        (
            "actors.serving.sglang_cpu serves on the CPU and was given --device cuda: use actors.serving.sglang_gpu\n",
            ["actors.serving.sglang_cpu serves on the CPU and was given --device cuda: use actors.serving.sglang_gpu"],
        ),
        (
            "[2026-11-20 23:54:43] Subprocess scheduler_0 (pid=5) crashed with exit code -9. Triggering SIGQUIT...\n"
            * 3,
            ["Subprocess scheduler_0 (pid=5) crashed with exit code -9. Triggering SIGQUIT..."],
        ),
        ("[2026-11-20 23:54:43] KV cache pool is full. Retract requests. #retracted_reqs: 1\n", []),
        ("[2026-11-20 23:54:43] The server is fired up and ready to roll!\n", []),
        ("Error handling is described in the manual: see there\n", []),
        ("", []),
    ],
)
def test_the_lines_that_decide(text, lines):
    assert decisive_lines(text) == lines


def test_the_last_words_are_kept_of_many():
    text = "".join(f"ValueError: {number}\n" for number in range(50))
    assert decisive_lines(text)[-1] == "ValueError: 49"
    assert len(decisive_lines(text)) < 10


def test_only_this_lifes_part_of_a_log_is_read(tmp_path):
    log = tmp_path / "log"
    log.write_text("ValueError: of an earlier life\n")
    since = log.stat().st_size
    with log.open("a") as file:
        file.write("now\n\n")
    assert tail(log, since) == "now\n\n"
    assert last_line(tail(log, since)) == "now"
    assert last_line("") == tail(tmp_path / "none", 0) == ""


def test_no_memory_limit_where_none_is_asked_for_or_on_a_gpu():
    assert memory_limit(SGLangConfig(memory_limit_gib=0.25), device="cpu") == 2**28
    assert memory_limit(SGLangConfig(), device="cpu") is None
    assert memory_limit(SGLangConfig(memory_limit_gib=1.0), device="cuda") is None
