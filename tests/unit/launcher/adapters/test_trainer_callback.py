"""The callback in a real Trainer of transformers, on the CPU: steps are reported, and no step is taken in a pause."""

import ast
import inspect
import json
import runpy
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from launcher.adapters import trainer_callback
from launcher.adapters.trainer_adapter import adapter_of
from launcher.adapters.trainer_callback import LauncherCallback
from launcher.config.compose import REPOSITORY
from launcher.config.foreign import ForeignTrainerConfig
from launcher.run_files.control_requests import ControlRequest, RequestEntry, ask
from launcher.run_files.run_paths import RunPaths

STEPS = 6


class Model(torch.nn.Module):
    """One number, and what happened in which order."""

    def __init__(self, happened):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.happened = happened
        self.before_step = {}

    def forward(self, x):
        self.happened.append(sum(isinstance(one, int) for one in self.happened) + 1)
        self.before_step.get(self.happened[-1], lambda: None)()
        return {"loss": (self.weight * x.sum()).abs().sum()}


class Rewards(TrainerCallback):
    """As TRL's trainers add them to what is logged."""

    def on_log(self, args, state, control, logs=None, **_):
        if "loss" in logs:
            logs |= {"reward": state.global_step / 10, "reward_std": 0.25}


@pytest.fixture
def paths(tmp_path):
    made = RunPaths(fileroot=tmp_path / "runs", user="u", experiment_name="e", trial_name="t")
    made.keys.mkdir(parents=True)
    return made


@pytest.fixture
def steps(tmp_path, paths, monkeypatch):
    """The file of steps; named as the launcher names it."""
    monkeypatch.setenv("GRPO_TRAINER_STEPS", str(tmp_path / "out" / "steps.jsonl"))
    monkeypatch.setenv("GRPO_TRAINER_REQUESTS", str(paths.keys / "request.json"))
    return tmp_path / "out" / "steps.jsonl"


def wish(paths, wanted):
    ask(paths, RequestEntry(wish=wanted, by="a person"))


def trained(tmp_path, model, callbacks):
    arguments = TrainingArguments(
        output_dir=str(tmp_path / "out"),
        max_steps=STEPS,
        per_device_train_batch_size=1,
        use_cpu=True,
        report_to=[],
        logging_steps=100,
        save_strategy="no",
        disable_tqdm=True,
    )
    data = [{"x": torch.ones(1)}] * STEPS
    Trainer(model=model, args=arguments, train_dataset=data, callbacks=callbacks).train()


def seen_in(tmp_path, text):
    made = adapter_of(
        ForeignTrainerConfig(adapter="trl", command="python t.py", cwd=str(tmp_path), checkpoints="o/c-*", metrics="m")
    )
    return made.read(text)[0]


@pytest.mark.slow
def test_each_step_is_reported_whatever_is_logged_otherwise(tmp_path, steps):
    steps.parent.mkdir()
    steps.write_text('{"step": 1, "rew')  # a trainer was killed as it wrote
    began = time.time()
    trained(tmp_path, Model([]), [Rewards(), LauncherCallback()])
    first, *seen = seen_in(tmp_path, steps.read_text())
    assert (first.step, first.is_paused) == (0, False)
    assert [(one.step, one.reward, one.spread, one.is_paused) for one in seen] == [
        (number, number / 10, 0.25, None) for number in range(1, STEPS + 1)
    ]
    assert all(began <= one.at <= time.time() and not one.nonfinite for one in seen)


@pytest.mark.slow
def test_no_step_is_taken_in_a_pause_which_holds_until_it_is_over(tmp_path, paths, steps, monkeypatch):
    happened = []
    model = Model(happened)
    model.before_step[3] = lambda: wish(paths, ControlRequest.PAUSE)

    def looked(seconds):
        happened.append("waits")
        if happened.count("waits") == 3:
            wish(paths, ControlRequest.RUN)

    monkeypatch.setattr(trainer_callback.time, "sleep", looked)
    trained(tmp_path, model, [Rewards(), LauncherCallback()])
    assert happened == [1, 2, 3, "waits", "waits", "waits", 4, 5, 6]
    reported = [(one.step, one.is_paused) for one in seen_in(tmp_path, steps.read_text())]
    assert reported == [
        (0, False),
        *((n, None) for n in (1, 2, 3)),
        (3, True),
        (3, False),
        *((n, None) for n in (4, 5, 6)),
    ]


@pytest.mark.slow
def test_without_the_launcher_it_does_nothing(tmp_path, monkeypatch):
    monkeypatch.delenv("GRPO_TRAINER_STEPS", raising=False)
    monkeypatch.delenv("GRPO_TRAINER_REQUESTS", raising=False)
    model = Model([])
    trained(tmp_path, model, [LauncherCallback()])
    assert model.happened == list(range(1, STEPS + 1))
    assert not (tmp_path / "out" / "steps.jsonl").exists()


def begun(paths, steps, callback, arguments):
    callback.on_step_begin(arguments, TrainerState(global_step=3), TrainerControl())
    return [json.loads(line).get("grpo_paused") for line in steps.read_text().splitlines()] if steps.exists() else []


def test_a_request_that_can_not_be_read_changes_nothing(tmp_path, paths, steps, monkeypatch, capsys):
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    callback, request, waits = LauncherCallback(), paths.keys / "request.json", []
    request.mkdir()  # where a file is expected: it can't be read
    assert begun(paths, steps, callback, arguments) == []
    request.rmdir()
    wish(paths, ControlRequest.PAUSE)

    def looked(seconds):
        waits.append(seconds)
        if len(waits) == 1:
            request.unlink()
            request.mkdir()
        if len(waits) == 3:
            request.rmdir()  # the run begins anew: nothing is asked any more

    monkeypatch.setattr(trainer_callback.time, "sleep", looked)
    assert begun(paths, steps, callback, arguments) == [True, False]
    assert len(waits) == 3
    assert "request.json can't be read" in capsys.readouterr().out


RANK = """
import sys, time, torch
from types import SimpleNamespace
from launcher.adapters.trainer_callback import LauncherCallback
rank, folder, other = int(sys.argv[1]), *sys.argv[2:]
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
callback = LauncherCallback(f"{folder}/steps", other if rank else f"{folder}/request")
for step in range(3):
    state = SimpleNamespace(global_step=step, is_world_process_zero=rank == 0)
    callback.on_step_begin(SimpleNamespace(device="cpu"), state, None)
    torch.distributed.barrier()
    print(step, flush=True)
"""


@pytest.mark.slow
def test_all_ranks_wait_as_rank_0_has_it(tmp_path):
    """The second rank reads a file that never asks for a pause: alone, it would go on."""
    (tmp_path / "request").write_text('{"wish": "pause"}')
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path), str(tmp_path / "none")], stdout=-1, text=True
        )
        for rank in range(2)
    ]
    try:
        give_up_at = time.monotonic() + 300
        while not (tmp_path / "steps").exists():
            assert time.monotonic() < give_up_at
            assert all(one.poll() is None for one in ranks)
            time.sleep(0.05)
        (tmp_path / "request").write_text('{"wish": "run"}')
        assert [one.communicate(timeout=300)[0].split() for one in ranks] == [["0", "1", "2"]] * 2
    finally:
        for one in ranks:
            one.kill()
    assert [json.loads(line)["grpo_paused"] for line in (tmp_path / "steps").read_text().splitlines()] == [True, False]


def test_the_example_resumes_and_gives_its_trainer_the_callback(tmp_path, monkeypatch):
    made = []

    class GRPOTrainer:
        def __init__(self, **given):
            self.given = given

        def train(self, resume_from_checkpoint):
            made.append((self.given, resume_from_checkpoint))

    monkeypatch.setitem(sys.modules, "trl", SimpleNamespace(GRPOConfig=TrainingArguments, GRPOTrainer=GRPOTrainer))
    words = ["trl_grpo.py", "--output_dir", str(tmp_path), "--use_cpu", "--resume_from_checkpoint", "out/checkpoint-20"]
    monkeypatch.setattr(sys, "argv", words)
    runpy.run_path(str(REPOSITORY / "assets" / "examples" / "trl_grpo.py"), run_name="__main__")
    ((given, resumed),) = made
    assert resumed == "out/checkpoint-20"
    assert [type(one) for one in given["callbacks"]] == [LauncherCallback]


def test_it_needs_nothing_of_the_launcher():
    tree = ast.parse(inspect.getsource(trainer_callback))
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert names == {"__future__", "json", "os", "pathlib", "time", "torch", "transformers", "typing"}
