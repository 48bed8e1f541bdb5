"""The command: what a user types and reads, and the exit code. Nothing here starts a run."""

import copy
import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hydra.core.config_store import ConfigStore

import launcher.__main__
from launcher.__main__ import main, options_of_each_trial, ordered_arguments
from launcher.cli import keeper
from launcher.config.compose import register
from launcher.resources.fitting import fit
from tests.support.worlds.command import PYTHONPATH, QUICK


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Run the command in a folder of its own; returns (exit code, stdout, stderr)."""
    monkeypatch.setattr(logging.root, "handlers", list(logging.root.handlers))  # Hydra adds one to this test's stdout
    monkeypatch.setattr(logging.Logger, "callHandlers", only_of_this_thread(logging.Logger.callHandlers))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    register()  # a process that runs one command forgets the presets of its folder with it
    monkeypatch.setattr(ConfigStore.instance(), "repo", copy.deepcopy(ConfigStore.instance().repo))

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["launcher", *arguments])
        try:
            code = main()
        except SystemExit as ended:  # argparse's errors, and Hydra's help
            code = int(ended.code or 0)
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        assert "HYDRA_FULL_ERROR" not in out + err
        return code, out, err

    return run


def only_of_this_thread(call_handlers):
    """What threads that other tests left behind have to say is no output of this command."""
    here = threading.get_ident()

    def call(logger, record):
        if record.thread == here:
            call_handlers(logger, record)

    return call


@pytest.mark.slow
def test_a_dry_run_prints_the_plan_and_makes_nothing(command, tmp_path):
    code, out, err = command("conf=arithmetic_cpu", "dry_run=true", QUICK)
    assert (code, err) == (0, "")
    for part in ("plan of arithmetic_cpu/trial0", "server-0: on the CPU", "trainer: on the CPU", "headroom"):
        assert part in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_on_a_terminal_something_is_said_before_the_plan(command, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    code, _, err = command("conf=arithmetic_cpu", "dry_run=true", QUICK)
    assert (code, err) == (0, "reading the model, the data and this machine …\n")


@pytest.mark.slow
def test_a_plan_of_which_nobody_reads_more(tmp_path):
    """`… dry_run=true | head -1`: the plan was made, so the code is 0, and no line calls it a failed job."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "launcher", "conf=arithmetic_cpu", "dry_run=true", QUICK]
    environment = os.environ | {"PYTHONPATH": PYTHONPATH}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, stdout=writing, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("arguments", [["--version"], ["--help"]])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_what_a_full_disk_does_not_take(arguments, unbuffered, tmp_path):
    environment = os.environ | {"PYTHONPATH": PYTHONPATH, "PYTHONUNBUFFERED": unbuffered}
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "launcher", *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert "standard output can't be written: No space left on device" in done.stderr


@pytest.mark.slow
def test_a_run_begins_with_its_plan(command, monkeypatch):
    monkeypatch.setattr(keeper, "begin", lambda config: print("the keeper") or 0)
    code, out, _ = command("conf=arithmetic_cpu", QUICK)
    assert code == 0
    assert 0 == out.index("plan of arithmetic_cpu/trial0") < out.index("headroom") < out.index("the keeper")


@pytest.mark.slow
def test_several_nodes_are_planned_where_there_is_no_gpu(command):
    code, out, _ = command("conf=gsm8k_h200_cluster", "dry_run=true", QUICK)
    assert code == 0
    for part in ("server-0 … server-7: on GPU 0-7 of node 1", "trainer … trainer-7 (8 ranks): on GPU 0-7 of node 0"):
        assert part in out
    more = ("hardware.gpu_name=NVIDIA H100", "hardware.gpu_memory_gib=79", "cluster.n_gpus_per_node=16")
    code, out, err = command("conf=gsm8k_h200_cluster", "dry_run=true", QUICK, *more)
    assert code == 0
    assert "node 0 GPU 0-7 (NVIDIA H100)" in out
    assert "note: too small: node 0 GPU 8-15 (NVIDIA H100): 81.7 GiB are planned and 79.0 GiB are there" in out
    assert "missing here: memory: node 0 GPU 8-15 (NVIDIA H100)" in err


@pytest.mark.slow
def test_what_can_not_be_placed_is_refused_with_and_without_a_dry_run(command):
    for more in ([], ["dry_run=true"]):
        code, out, err = command("conf=gsm8k_h200_cluster", "actor.dp_size=9", *more)
        assert (code, out) == (2, "")
        assert (
            "17 GPUs and 136 CPUs are asked for: 9 × 1 GPU and 8 CPUs (1 trainer rank), 8 × 1 GPU and 8 CPUs (1 server)"
            in err
        )


@pytest.mark.slow
def test_a_dry_run_without_the_machine_says_what_is_missing_and_succeeds(command, monkeypatch, tmp_path):
    code, out, err = command("conf=gsm8k_h200", "dry_run=true", f"actor.path={tmp_path / 'nowhere'}", "reward.fn=no:fn")
    assert code == 0
    assert "planned for NVIDIA H200" in out
    assert "missing here: the model actor.path" in err
    assert "missing here: reward.fn='no:fn'" in err


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("train_dataset.path=empty.jsonl", "empty.jsonl holds no records"),
        ("reward.fn=own_rewards:score", "module 'own_rewards' has no 'score'"),
        ("reward.fn=torn_rewards:score", "importing 'torn_rewards' raised SyntaxError"),
    ],
)
def test_what_is_there_and_can_be_used_nowhere_is_refused_by_a_dry_run(command, tmp_path, monkeypatch, setting, told):
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "own_rewards.py").write_text("def scores(completion):\n    return 1.0\n")
    (tmp_path / "torn_rewards.py").write_text("def score(completion:\n")
    monkeypatch.syspath_prepend(tmp_path)
    code, _, err = command("conf=arithmetic_cpu", "dry_run=true", QUICK, setting)
    assert (code, err.count("error: "), err.count("missing here")) == (2, 1, 0)
    assert told in err


@pytest.mark.slow
def test_a_model_that_is_trained_on_no_machine_is_refused_by_a_dry_run_too(command, tmp_path):
    folder = tmp_path / "gpt2"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    code, _, err = command("conf=arithmetic_cpu", "dry_run=true", QUICK, f"actor.path={folder}")
    assert code == 2
    assert err.count("error: ") == err.count("model_type='gpt2'") == 1
    assert "model_type" not in "".join(line for line in err.splitlines() if line.startswith("missing here"))


@pytest.mark.slow
def test_a_dry_run_reads_the_records_and_measures_the_prompts(command, tmp_path):
    question = {"question": "1+" * 500 + "1=?", "answer": "#### 501"}
    lines = [json.dumps({"question": "1+1=?", "answer": "#### 2"}), json.dumps(question)]
    (tmp_path / "long.jsonl").write_text("\n".join(lines))
    held_out = ("valid_dataset=null", "evaluator.freq_steps=null")
    data = (f"train_dataset.path={tmp_path / 'long.jsonl'}", "train_dataset.batch_size=1", *held_out)
    asked = ("conf=arithmetic_cpu", "dry_run=true", QUICK, *data)
    code, _, err = command(*asked, "train_dataset.max_length=null")
    assert code == 2
    assert "long.jsonl:2: the prompt ('1+1+1+" in err
    code, _, err = command(*asked, "train_dataset.answer_key=goal")
    assert code == 2
    assert "long.jsonl:1: the record has no goal; its fields are ['answer', 'question']" in err
    code, out, err = command(*asked, "train_dataset.max_length=20")
    assert "\ntrain_dataset: 2 records read; the longest prompt has 13 tokens; the first answer" in out
    assert (code, err) == (0, "note: train_dataset: 1 prompt left out, over train_dataset.max_length\n")


def test_a_dry_run_refuses_what_the_model_takes_on_no_machine(command):
    asked = ("conf=arithmetic_cpu", "dry_run=true", QUICK, "actor.use_lora=true", "actor.lora_rank=129")
    code, _, err = command(*asked)
    assert (code, err.count("actor.lora_rank"), err.count("error: ")) == (2, 1, 1)
    assert "missing here" not in err


def test_a_dry_run_still_refuses_a_contradiction(command):
    code, out, _ = command("conf=arithmetic_cpu", "dry_run=true", "gconfig.n_samples=1")
    assert (code, out) == (2, "")


@pytest.mark.slow
def test_what_the_machine_lacks_is_one_message(command, tmp_path):
    code, out, err = command(
        *(
            "conf=arithmetic_cpu",
            f"actor.path={tmp_path / 'a'}",
            f"train_dataset.path={tmp_path / 'b'}",
            "reward.fn=no:fn",
        )
    )
    assert (code, out) == (2, "")
    assert err.count("error:") == 1
    assert "3 things are missing" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_settings_are_found_for_a_card_and_what_was_typed_stays(command):
    auto = ("conf=gsm8k_h200", "hardware=auto", "dry_run=true", "hardware.gpu_memory_gib=79")
    code, out, _ = command(*auto, "actor.mb_spec.max_tokens_per_mb=5000")
    assert code == 0
    assert "note: hardware=auto: sglang.mem_fraction_static=" in out
    assert "actor.mb_spec.max_tokens_per_mb as typed" in out
    assert "5,000 tokens" in out
    code, _, err = command(*auto[:-1], "hardware.gpu_memory_gib=23.5")
    assert code == 2
    assert "does not fit GPUs of 23.5 GiB" in err
    assert "take more or larger GPUs (actor.dp_size), " in err


@pytest.mark.slow
def test_a_presets_memory_settings_are_fitted_and_what_is_typed_anywhere_stays(command, tmp_path):
    """A preset of one's own counts as typed, whether it has the value that the preset below it has or another."""
    code, out, _ = command("conf=gsm8k_h200", "dry_run=true", "hardware.gpu_memory_gib=79")
    assert (code, "note: fitted: sglang.mem_fraction_static=" in out, "as typed" in out) == (0, True, False)
    own = "# @package _global_\ndefaults: [gsm8k_h200, _self_]\nsglang: {mem_fraction_static: 0.6}\n"
    (tmp_path / "mine.yaml").write_text(own)
    larger = ("dry_run=true", "hardware.gpu_memory_gib=150")  # beside a server's 0.6 it has room for a trainer
    code, out, _ = command("conf=mine", *larger, "actor.gradient_checkpointing=true")
    assert code == 0
    assert "note: fitted: rollout.max_concurrent_rollouts=" in out
    assert "; sglang.mem_fraction_static, actor.gradient_checkpointing as typed; a tenth" in out
    assert command("init", "fresh.yaml", "conf=gsm8k_h200")[0] == 0
    code, out, _ = command("conf=fresh", "dry_run=true")
    assert (code, "note: fitted: sglang.mem_fraction_static=" in out) == (0, True)
    code, out, _ = command("conf=gsm8k_h200", "dry_run=true", "actor.path=Qwen/Qwen9-1B")
    assert (
        "note: not fitted, the sizes of Qwen/Qwen9-1B are unknown until it is on this machine; as the preset has "
        in out
    )


@pytest.mark.slow
def test_a_sweeps_plans_are_fitted_as_its_trials_are(command):
    code, out, _ = command("-m", "conf=gsm8k_h200", "dry_run=true", "seed=1,2")
    assert (code, out.count("note: fitted: sglang.mem_fraction_static=")) == (0, 2)


LONG = ("conf=gsm8k_one_24gb", "gconfig.max_new_tokens=4096", "sglang.context_length=8192")
"""A completion of it is longer than the preset's micro-batch, in whose place a larger one is fitted."""


def test_a_value_in_whose_place_another_is_fitted_is_refused_where_none_is(command):
    """It was checked before it was fitted, and a run that would have fitted was refused."""
    code, out, err = command(*LONG, "dry_run=true")
    assert (code, "note: fitted: " in out, "max_tokens_per_mb" in err) == (0, True, False), err
    for more in ("actor.path=Qwen/Qwen9-1B", "actor.mb_spec.max_tokens_per_mb=4096"):
        code, _, err = command(*LONG, more, "dry_run=true")
        assert (code, "actor.mb_spec.max_tokens_per_mb=4096: at least 4608" in err) == (2, True), err


@pytest.mark.parametrize(("swept", "code"), [("seed=1,2", 0), ("sglang.mem_fraction_static=0.2,0.3", 2)])
def test_a_sweeps_values_are_refused_where_none_are_fitted_in_their_place(command, swept, code):
    """With memory settings that are swept none is fitted."""
    assert command("-m", *LONG, swept, "dry_run=true")[0] == code


@pytest.mark.parametrize(("more", "count"), [(("hardware.gpu_memory_gib=null",), 1), ((), 2)])
def test_a_plan_is_fitted_twice_only_for_two_cards(command, gpus, monkeypatch, more, count):
    gpus(gpus=1, memory_gib=24)
    fitted = []
    monkeypatch.setattr(launcher.__main__, "fit", lambda *given: fitted.append(given[1]) or fit(*given))
    command("conf=gsm8k_one_24gb", "dry_run=true", *more)
    assert len(fitted) == len(set(fitted)) == count


def test_what_could_not_be_found_out_of_a_gpu_is_a_note_of_the_plan(command, gpus):
    gpus(gpus=1, silent="0")
    code, out, _ = command("conf=arithmetic_cpu", "dry_run=true", QUICK)
    assert (code, "note: GPU 0: not known: MIG mode (Unknown Error), " in out) == (0, True)


def test_what_this_machine_does_not_tell_is_no_note_of_a_run_on_a_cluster_that_it_joins(command, gpus):
    gpus(gpus=1, silent="0")
    code, out, _ = command("conf=arithmetic_cpu", "dry_run=true", "cluster.address=auto", QUICK)
    assert (code, "plan of " in out, "MIG mode" in out) == (0, True, False)


@pytest.mark.parametrize(
    ("gib", "words", "short"),
    [
        (79, (), ""),
        (79, ("hardware=auto", "hardware.gpu_memory_gib=139"), ""),
        (11, ("hardware=auto", "hardware.gpu_memory_gib=139"), "hardware=auto: Qwen/Qwen2.5-1.5B-Instruct with "),
        (11, (), "memory: GPU 0"),
    ],
)
def test_this_machine_is_judged_with_what_the_command_would_be_fitted_to_here(command, gpus, gib, words, short):
    """The values that fill a larger card, for which the preset is planned, were judged against the smaller one here."""
    gpus(gpus=1, memory_gib=gib)
    _, out, err = command("conf=gsm8k_h200", "dry_run=true", *words)
    assert "planned for " in out
    told = [line for line in err.splitlines() if "GPU" in line and ("memory: " in line or "does not fit" in line)]
    assert [line.startswith(f"missing here: {short}") for line in told] == [True] * bool(short)


def test_notes_are_said(command):
    _, _, err = command("conf=arithmetic_cpu", "dry_run=true", QUICK, "total_train_steps=3", "recover.freq_steps=4")
    assert "note: recover.freq_steps=4 is never due in total_train_steps=3" in err


def test_hydras_own_options_work(command):
    code, out, _ = command("conf=gsm8k_h200", "--cfg", "job", "rollout.request_retries=4")
    assert code == 0
    assert "request_retries: 4" in out
    assert "model_path: ${actor.path}" in out
    code, out, _ = command("conf=gsm8k_h200", "--cfg", "job", "--resolve", "--package", "sglang")
    assert "model_path: Qwen/Qwen2.5-1.5B-Instruct" in out


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["--help", "conf=gsm8k_h200"]])
def test_help_needs_no_preset(command, arguments):
    code, out, _ = command(*arguments)
    assert code == 0
    for part in (
        "python -m launcher conf=<preset>",
        "conf: areal, arithmetic_cpu, arithmetic_dapo",
        "dry_run=true",
        "Exit codes",
    ):
        assert part in out


@pytest.mark.slow
def test_several_runs_one_after_the_other(command, tmp_path):
    code, out, err = command("conf=arithmetic_cpu", "-m", "dry_run=true", QUICK, "seed=1,-2,3")
    assert code == 2
    assert out.count("plan of arithmetic_cpu") == 2
    assert "seed=-2" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_of_several_runs_one_that_can_not_be_composed_keeps_no_other_from_being_planned(command):
    code, out, err = command("conf=arithmetic_cpu", "-m", "dry_run=true", QUICK, "seed=x,1,y")
    assert code == 2
    assert out.count("plan of arithmetic_cpu") == 1
    assert "seed=x" in err
    assert "seed=y" in err


@pytest.mark.slow
def test_a_sweep_of_wrong_values_barren_starts_nothing(command, tmp_path):
    code, _, err = command("conf=arithmetic_cpu", "-m", "seed=x,-1")
    assert code == 2
    assert err.count("error:") == 2
    assert list(tmp_path.iterdir()) == []


def test_what_a_trial_is_given_beside_its_overrides():
    given = ["-m", "--config-dir", "/mine", "conf=a", "~x", "seed=1,2", "hydra.searchpath=[file:///b]"]
    assert options_of_each_trial(ordered_arguments(given)) == ["--config-dir", "/mine", "hydra.searchpath=[file:///b]"]


def test_completion(command, monkeypatch):
    monkeypatch.setenv("COMP_LINE", "launcher conf=")
    assert command("-sc", "query=bash")[1].split() == [
        "conf=areal",
        "conf=arithmetic_cpu",
        "conf=arithmetic_dapo",
        "conf=arithmetic_dr_grpo",
        "conf=arithmetic_gspo",
        "conf=arithmetic_tool_cpu",
        "conf=command",
        "conf=gsm8k_h200",
        "conf=gsm8k_h200_cluster",
        "conf=gsm8k_node_80gb",
        "conf=gsm8k_one_24gb",
        "conf=gsm8k_one_80gb",
        "conf=nemo_rl",
        "conf=openrlhf",
        "conf=slime",
        "conf=trl",
        "conf=verl",
    ]
    monkeypatch.setenv("COMP_LINE", "launcher conf=arithmetic_cpu actor.optimizer.wei")
    assert command("-sc", "query=bash")[1].split() == ["actor.optimizer.weight_decay="]


@pytest.mark.slow
def test_a_preset_of_the_users_own(command, tmp_path):
    folder = tmp_path / "mine/conf"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("# @package _global_\ndefaults: [/conf/arithmetic_cpu]\nexperiment_name: mine\n")
    code, out, err = command("--config-dir", str(tmp_path / "mine"), "conf=mine", "dry_run=true", QUICK)
    assert (code, err) == (0, "")
    assert "plan of mine/trial0" in out


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (["conf=a", "--cfg", "job", "seed=1"], ["--cfg", "job", "conf=a", "seed=1"]),
        (["conf=a", "-m", "~x", "+y=1"], ["-m", "conf=a", "~x", "+y=1"]),
        (["--config-dir=/a", "conf=a"], ["--config-dir=/a", "conf=a"]),
        (["-h", "conf=a"], ["-h", "conf=a"]),
        (["-m", "trial_name=1_0,x", "seed=1_0"], ["-m", 'trial_name="1_0",x', "seed=1_0"]),
        (["conf=a", "--", "x=${y}", 'z="1"'], ["conf=a", r'trainer.overrides=["x=\${y}","z=\"1\""]']),
    ],
)
def test_options_and_overrides_may_stand_in_any_order(given, read):
    assert ordered_arguments(given) == read
