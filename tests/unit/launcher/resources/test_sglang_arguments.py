"""SGLang takes an argument under several names: each name of one of ours is refused."""

import dataclasses
import json
import subprocess
import sys

import pytest

from launcher.resources.config_checks import find_problems
from launcher.resources.sglang_arguments import (
    ARGUMENTS_OF_OURS,
    BYPASSES,
    GPU_ARGUMENTS,
    MAY_BE_CUT,
    OTHER_NAMES,
    SECRET_ARGUMENTS,
    meant,
)
from tests.support.composed import composed
from tests.support.machine import scaled

OURS = ARGUMENTS_OF_OURS | GPU_ARGUMENTS | SECRET_ARGUMENTS | BYPASSES.keys()
ASK = """
import argparse, json
from actors.serving import sglang_cpu
sglang_cpu.prepare()  # else SGLang isn't imported without a GPU; its arguments are the same
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
print("\\n" + json.dumps([[option, action.dest] for action in parser._actions for option in action.option_strings]))
"""


@pytest.fixture(scope="module")
def names():
    """Every name that the installed SGLang has for an argument, and the argument."""
    done = subprocess.run(
        [sys.executable, "-c", ASK], capture_output=True, text=True, timeout=scaled(200.0), check=False
    )
    assert done.returncode == 0, done.stderr
    listed = [(option.strip("-").replace("-", "_"), dest) for option, dest in json.loads(done.stdout.splitlines()[-1])]
    assert {dest for _, dest in listed} >= OURS
    return dict(listed)


@pytest.mark.slow
@pytest.mark.timeout(300)  # SGLang's import took 59 s on two cores at a load of 15
def test_the_names_are_those_of_sglangs_own_parser(names):
    assert {name: dest for name, dest in names.items() if dest in OURS and name != dest} == OTHER_NAMES
    others = {name for name, dest in names.items() if dest not in OURS}
    assert {name: taken for name in others if (taken := meant(name))} == {}, "these are the user's to give"


def problems(**extra):
    config = composed("conf=arithmetic_cpu")
    config.sglang = dataclasses.replace(config.sglang, extra_args=extra)
    return [str(problem) for problem in find_problems(config)]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tensor_parallel_size", "set sglang.tp_size instead"),
        ("tensor-parallel-size", "set sglang.tp_size instead"),
        ("--tensor-parallel-size", "set sglang.tp_size instead"),
        ("tp", "set sglang.tp_size instead"),
        ("tensor", "set sglang.tp_size instead"),
        ("tp-size=2", "set sglang.tp_size instead"),
        ("data_parallel", "set sglang.dp_size instead"),
        ("model", "set sglang.model_path instead"),
        ("nccl_init_addr", "the launcher sets it itself"),
        ("nccl-init", "the launcher sets it itself"),
        ("cuda_graph_max_bs", "set sglang.cuda_graph_max_bs_decode instead"),
        ("context", "set sglang.context_length instead"),
    ],
)
def test_another_name_of_an_argument_of_ours_is_refused(name, said):
    (problem,) = problems(**{name: 2})
    assert problem == f"sglang.extra_args.{name}=2: {said}"


@pytest.mark.parametrize(
    "name",
    [
        *("pp_size", "--pp-size", "pp-s", "pipeline_parallel_size", "pipeline-parallel", "pp_size=2"),
        *("base_gpu_id", "base-gpu", "gpu_id_step", "gpu"),
    ],
)
def test_what_takes_gpus_that_the_plan_does_not_count_is_refused(name):
    """SGLang takes tp_size × pp_size of those that Ray gave the server, from base_gpu_id on, each gpu_id_step-th."""
    (problem,) = problems(**{name: 2})
    assert problem == (
        f"sglang.extra_args.{name}=2: nothing: a server has the first sglang.tp_size × sglang.dp_size GPUs that Ray "
        "gives it, and the plan counts no others; for more of them raise sglang.tp_size"
    )


@pytest.mark.parametrize("name", ["api_key", "--api-key", "api-k", "admin", "ssl-keyfile-password"])
def test_no_name_of_a_secret_shows_it(name):
    (problem,) = problems(**{name: "SECRET"})
    assert "each run makes its own keys" in problem
    assert "SECRET" not in problem


@pytest.mark.parametrize(
    "name", ["watchdog_timeout", "cuda_graph_bs_decode", "ep", "pp-max-micro-batch-size", "ssl-keyfile", "hos"]
)
def test_other_arguments_are_the_users(name):
    assert problems(**{name: 2}) == []


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        *((name, True, "unpickle") for name in ("enable_dp_attention", "--enable-dp-attention", "enable-dp-att")),
        ("tokenizer_worker_num", 2, "would serve without keys"),
        ("trust_remote_code", True, "runs code from the model's folder"),
        ("disaggregation_mode", "prefill", "knows no keys"),
    ],
)
def test_what_would_bypass_the_keys_is_refused_before_a_server_starts(name, value, why):
    """A dry run accepted it, and planned without the change of the plan; each server then ended at its start."""
    (problem,) = problems(**{name: value})
    assert problem.startswith(f"sglang.extra_args.{name}=")
    assert why in problem


@pytest.mark.parametrize(("name", "value"), [("enable_dp_attention", False), ("tokenizer_worker_num", 1)])
def test_the_value_that_such_an_argument_must_have_is_taken(name, value):
    assert problems(**{name: value}) == []


def test_only_the_host_may_be_cut():
    assert [name for name in ARGUMENTS_OF_OURS if not meant(name[:-1])] == [MAY_BE_CUT]
