"""The smoke of a GPU: its table, what fails and what is skipped, and runs whose settings are possible."""

import contextlib
import json
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer

from actors.reward.reward_import import load_reward_fn
from launcher.checkpoints.model_shape import KNOWN_SHAPES
from launcher.config.compose import REPOSITORY, compose
from launcher.resources.config_checks import check
from launcher.resources.gpus import Gpu
from launcher.run_files.journal import append_line
from launcher.run_files.run_paths import RunPaths
from scripts.lab import gpu_smoke, smoke_models
from scripts.lab.cells import Cell, Mark, Skipped, Workplace
from scripts.lab.gpu_smoke import Smoke, main
from scripts.lab.smoke_models import large_words, small_words

NO_GPU = "NVML finds no driver"
PLACE = Workplace(folder=REPOSITORY)


def smoke(folder, no_gpu=NO_GPU):
    return Smoke(folder, [], no_gpu, contextlib.ExitStack())


def cell(name, measures=None, *marks, error=None, expected_s=1.0):
    def run(place):
        if error is not None:
            raise error
        return measures

    return Cell(name=name, how="made", run=run, marks=marks, expected_s=expected_s)


@pytest.fixture
def made(tmp_path, monkeypatch):
    """The command with made parts: its exit code, the parts of results.json, and results.md."""
    monkeypatch.setattr(gpu_smoke, "find_gpus", lambda: SimpleNamespace(none=NO_GPU, gpus=()))
    monkeypatch.setattr(gpu_smoke, "make_model", lambda folder, name: folder.mkdir())

    def run(*cells):
        monkeypatch.setattr(Smoke, "cells", lambda self: list(cells))
        code = main(["--minutes", "1", "--output", str(tmp_path / "out")])
        parts = json.loads((tmp_path / "out" / "results.json").read_text())["parts"]
        return code, {part["part"]: part for part in parts}, (tmp_path / "out" / "results.md").read_text()

    return run


def test_each_part_has_its_row_and_one_that_fails_ends_no_other(made):
    near = Mark(measure="distance", limit=0.1, how="worst")
    code, parts, table = made(
        cell("raises", error=RuntimeError("the run took 0 of 3 steps\n see its log")),
        cell("misses", {"distance": [0.05, 0.2]}, near),
        cell("says_nothing", {}, near),
        cell("absent", error=Skipped("no GPU: none")),
        cell("slow", {}, expected_s=100.0),
        cell("fine", {"step_s": [1.0, 3.0, 2.0], "distance": [0.1]}, near),
    )
    results = {name: part["result"] for name, part in parts.items()}
    assert code == 1
    assert results.pop("slow") == "not run"
    assert list(results.values()) == ["failed", "failed", "failed", "skipped", "ok"]
    assert parts["raises"]["reason"] == "RuntimeError: the run took 0 of 3 steps see its log"
    assert "| misses | made | failed | **distance must be worst ≤ 0.1**, distance 0.125 (0.05 to 0.2) | 0 |" in table
    assert "| says_nothing | made | failed | **distance must be worst ≤ 0.1** | 0 |" in table
    assert "| absent | made | skipped | no GPU: none | 0 |" in table
    assert "| fine | made | ok | step_s 2 (1 to 3), distance 0.1 | 0 |" in table


def test_what_is_skipped_or_did_not_fit_is_no_failure(made):
    code, parts, _ = made(cell("absent", error=Skipped("no GPU")), cell("late", {}, expected_s=99.0), cell("fine", {}))
    assert (code, [part["result"] for part in parts.values()]) == (0, ["skipped", "not run", "ok"])


def test_what_needs_a_gpu_is_skipped_by_name_without_one_and_the_other_way_round(tmp_path):
    def skipped(no_gpu):
        for one in smoke(tmp_path, no_gpu).cells():
            if one.name.endswith(("nvml", "memory", "_cuda" if no_gpu else "_host")):
                with pytest.raises(Skipped) as reason:
                    one.run(PLACE)
                yield one.name, str(reason.value)

    assert dict(skipped(NO_GPU)) == dict.fromkeys(
        ("nvml", "memory", "server_oom_cuda", "trainer_oom_cuda"), f"no GPU: {NO_GPU}"
    )


def test_parts_of_a_run_that_did_not_start_say_so(tmp_path):
    parts = {one.name: one for one in smoke(tmp_path).cells()}
    for name in ("server_killed", "server_oom_host", "trainer_oom_host", "ledger", "tensor"):
        with pytest.raises(Skipped, match="there is no run: see `disk`"):
            parts[name].run(PLACE)


def test_a_gpu_that_no_run_can_use_fails_by_its_name(monkeypatch):
    broken = gpu_smoke.check_node()[0].__class__(subject="GPU 0", text="MIG", level=gpu_smoke.Severity.GPU, hint="off")
    monkeypatch.setattr(gpu_smoke, "check_node", lambda: (broken,))
    with pytest.raises(gpu_smoke.RunError, match="GPU 0: MIG"):
        gpu_smoke.nvml(PLACE)


def test_a_run_that_was_refused_ends_the_command_with_its_message(tmp_path, monkeypatch):
    refused = tmp_path / "disk"
    paths = RunPaths(fileroot=refused, user="u", experiment_name="e", trial_name="t")
    refused.mkdir()
    (refused / "console.log").write_text("note: …\nerror: memory: 9 GiB are planned, 5 are there\n  → less\n")
    monkeypatch.setattr(
        Smoke, "_started", lambda *_: (paths, SimpleNamespace(poll=lambda: 2, wait=lambda _: 2, terminate=lambda: None))
    )
    with pytest.raises(gpu_smoke.UsageError) as told:
        smoke(tmp_path)._begin(PLACE)
    assert str(told.value) == "memory: 9 GiB are planned, 5 are there\n  → less"


@pytest.fixture
def run_that_ends(tmp_path, monkeypatch):
    """The command whose first run is a process of its own that writes what is given, and ends with exit code 2."""
    monkeypatch.setattr(gpu_smoke, "find_gpus", lambda: SimpleNamespace(none="", gpus=()))
    monkeypatch.setattr(gpu_smoke, "make_model", lambda folder, name: folder.mkdir())
    parts = Smoke.cells
    monkeypatch.setattr(Smoke, "cells", lambda self: [one for one in parts(self) if one.name == "disk"])
    started = gpu_smoke.started
    (tmp_path / "stand_in_launcher.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(
        gpu_smoke, "started", lambda words, paths, **how: started(words, paths, module="stand_in_launcher", **how)
    )

    def run(*events, said):
        monkeypatch.setenv("STAND_IN", json.dumps({"events": events, "said": said}))
        return main(["--output", str(tmp_path / "out")])

    return run


STAND_IN = """
import json, os, sys
from launcher.config.compose import compose
from launcher.run_files.journal import Journal
from launcher.run_files.run_paths import RunPaths
told = json.loads(os.environ["STAND_IN"])
paths = RunPaths.of(compose(sys.argv[1:]))
if told["events"]:
    paths.logs.mkdir(parents=True)
for name, reason in told["events"]:
    Journal(paths.events, 1).record(name, reason=reason, exit_code=2)
print(told["said"])
sys.exit(2)
"""
NO_ACCELERATOR = "actor.device=cuda: torch finds no GPU: No accelerator is available: error: 803"


def test_a_run_that_had_started_keeps_its_logs_whatever_its_exit_code(run_that_ends, tmp_path, capsys):
    """NVML answers and torch finds no GPU: all that tells why was removed with the folder."""
    ended = ("run.errored", f"{NO_ACCELERATOR}\n  → look at the driver")
    noise = "(Trainer pid=7) error: 12 warnings\n" * 100
    assert run_that_ends(("run.started", "fresh"), ended, said=f"{noise}{NO_ACCELERATOR}\nthe run ended: ERRORED") == 1
    (part,) = json.loads((tmp_path / "out/results.json").read_text())["parts"]
    assert part["result"] == "failed"
    assert part["reason"].startswith("RunError: the run ended with exit code 2 (")
    assert part["reason"].endswith(f"): {NO_ACCELERATOR} → look at the driver")
    assert "warnings" not in part["reason"]
    (console,) = (tmp_path / "out").rglob("console.log")
    assert str(console) in part["reason"]
    assert noise in console.read_text()
    assert NO_ACCELERATOR in capsys.readouterr().out


def test_a_run_that_ends_without_a_word_of_its_own_shows_its_last_lines_alone(run_that_ends, tmp_path):
    assert run_that_ends(("run.started", "fresh"), said="a line\n" * 500 + "Killed") == 1
    (part,) = json.loads((tmp_path / "out/results.json").read_text())["parts"]
    assert part["reason"].count("a line") < 5
    assert "Killed" in part["reason"]


def test_a_run_that_was_refused_leaves_nothing_and_its_own_message_is_the_commands(run_that_ends, tmp_path, capsys):
    said = "note: error: 1\nerror: memory: the limit of error: 5 GiB\n  → less\n"
    assert run_that_ends(said=said) == 2
    assert capsys.readouterr().err == "error: memory: the limit of error: 5 GiB\n  → less\n"
    assert not (tmp_path / "out").exists()


def test_points_are_those_of_the_steps_and_what_a_line_lacks_is_no_point(tmp_path):
    paths = RunPaths(fileroot=tmp_path, user="u", experiment_name="e", trial_name="t")
    paths.logs.mkdir(parents=True)
    append_line(paths.metrics, {"timeperf/step_s": 1.5, "grpo_actor/logprob_distance/avg": 1e-7})
    append_line(paths.metrics, {"timeperf/step_s": 2.5})
    found = {name: points for name, points in gpu_smoke.step_points(paths).items() if points}
    assert found == {"step_s": [1.5, 2.5], "logprob_distance": [1e-7]}


CARD = Gpu(name="NVIDIA H200", memory=139 << 30, free=139 << 30)
SMALLER = Gpu(name="NVIDIA H100", memory=79 << 30, free=79 << 30)


@pytest.mark.parametrize("no_gpu", [NO_GPU, ""], ids=["cpu", "gpu"])
def test_the_settings_of_the_runs_are_possible(no_gpu, tmp_path):
    check(compose(small_words(tmp_path, no_gpu=no_gpu)))


@pytest.mark.parametrize(
    ("gpus", "preset"), [((), "arithmetic_cpu"), ((SMALLER,), "gsm8k_one_80gb"), ((CARD,), "gsm8k_h200")]
)
def test_the_large_run_is_the_preset_for_the_card_on_made_problems(gpus, preset, tmp_path):
    problems = tmp_path / "problems.jsonl"
    smoke_models.make_problems(problems)
    words = large_words(tmp_path, problems, gpus, ["trial_name=mine"])
    assert words[0] == f"conf={preset}"
    config = compose(words)
    check(config)
    assert (config.trial_name, config.actor.path) == ("mine", str(tmp_path))
    if gpus:
        assert config.train_dataset.path == config.valid_dataset.path == str(problems)
    records = [json.loads(line) for line in problems.read_text().splitlines()]
    assert all(eval(one["question"].rstrip("=?")) == int(one["answer"].removeprefix("#### ")) for one in records)


def test_a_run_can_use_its_reward_function(tmp_path):
    fn = load_reward_fn(compose(small_words(tmp_path, no_gpu=NO_GPU)).reward.fn)
    assert [fn(token_ids=ids) for ids in ([1, 2], [1, 3])] == [1.0, 0.0]


def test_a_server_that_died_twice_before_the_first_step_is_waited_for_no_longer(tmp_path):
    paths = RunPaths(fileroot=tmp_path, user="u", experiment_name="e", trial_name="t")
    paths.logs.mkdir(parents=True)
    for _ in range(2):
        append_line(paths.events, {"event": "server.died", "subject": "server-0"})
    with pytest.raises(gpu_smoke.RunError, match="the server died twice before the first step"):
        smoke(tmp_path)._until_committed(SimpleNamespace(poll=lambda: None), paths, 3)
    append_line(paths.metrics, {"global_step": 0})
    smoke(tmp_path)._until_committed(SimpleNamespace(poll=lambda: None), paths, 1)


def test_a_model_is_made_for_runs_to_come_and_is_not_made_again(tmp_path, monkeypatch, capsys):
    made = []

    def save(like, folder, changes, on_the_gpu):
        made.append(on_the_gpu)
        folder.mkdir()

    monkeypatch.setattr(gpu_smoke, "find_gpus", lambda: SimpleNamespace(none=NO_GPU, gpus=()))
    monkeypatch.setattr(smoke_models, "_save_random_weights", save)
    words = ["--make-only", "--model-folder", str(tmp_path / "made" / "model")]
    assert [main(words), main(words)] == [0, 0]
    assert made == [False]
    assert main(words[:1]) == 2
    assert "name it with --model-folder" in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_of_a_known_shape_has_a_word_for_each_of_its_ids(tmp_path, monkeypatch):
    shape = KNOWN_SHAPES[gpu_smoke.SMALL]
    small = {name: getattr(shape, name) for name in ("model_type", "positions", "tied")}
    small |= {"hidden": 16, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 8, "intermediate": 32, "vocab": 300}
    monkeypatch.setattr(smoke_models, "KNOWN_SHAPES", {"made": type(shape)(**small)})
    gpu_smoke.make_model(tmp_path / "model", "made")
    assert type(shape).of(json.loads((tmp_path / "model" / "config.json").read_text())) == type(shape)(**small)
    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 300
    assert all(tokenizer.decode([number]) for number in range(277, 300))
    own = Tokenizer.from_file(str(REPOSITORY / "assets" / "arithmetic" / "model" / "tokenizer.json"))
    text = "<|im_start|>user 60+6+8=?<|im_end|>"
    assert tokenizer.encode(text).ids == own.encode(text).ids


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "nope"], "--model nope: no such shape\n  → there are tiny, Qwen/Qwen2.5-0.5B"),
        (["--minutes", "0"], "--minutes 0: no cell fits"),
        (["--parts", "disk,nope"], "--parts nope: no such name\n  → there are nvml, disk, "),
        (["--output", "{full}"], "is not an empty folder"),
        (["--model", "Qwen/Qwen2.5-0.5B"], "model needs 1.8 GiB, 0.0 GiB are free\n  → make room"),
    ],
)
def test_a_wrong_command_is_one_message_and_nothing_is_left(words, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(smoke_models.shutil, "disk_usage", lambda path: SimpleNamespace(free=0, total=1))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert main([word.format(full=tmp_path / "full") for word in words]) == 2
    errors = capsys.readouterr().err
    assert said in errors
    assert errors.count("error:") == 1
    assert not (tmp_path / "gpu_smoke").exists()
    assert (tmp_path / "full" / "file").exists()


def test_every_part_is_on_its_page(tmp_path):
    page = (REPOSITORY / "docs" / "gpu.md").read_text()
    parts = [*smoke(tmp_path).cells(), *smoke(tmp_path).large_cells()]
    assert [one.name for one in parts if f"`{one.name}`" not in page] == []
