"""The plan of another project's trainer, and what is refused before anything is started."""

import json

import pytest
from packaging.specifiers import SpecifierSet

from launcher.base.errors import ConfigError
from launcher.config.settings import with_values
from launcher.resources import node_checks
from launcher.resources.config_checks import check
from launcher.resources.foreign_plan import find_missing_for_command, plan_lines, with_their_names
from launcher.run_files.run_paths import RunPaths
from tests.support.composed import composed


def config_of(tmp_path, *more):
    (tmp_path / "train.py").touch()
    words = ("conf=command", "trainer.command='python3 train.py'", "trainer.checkpoints=out/step-*", *more)
    return with_values(composed(*words), {"trainer.cwd": str(tmp_path), "cluster.fileroot": str(tmp_path / "runs")})


def missing(tmp_path, *more):
    config = config_of(tmp_path, *more)
    check(config)
    return [error.message for error in find_missing_for_command(config)]


def saved(tmp_path, step):
    folder = tmp_path / "out" / f"step-{step}"
    folder.mkdir(parents=True)
    (folder / "state.json").touch()
    return folder


def test_the_plan_names_the_rung_the_command_and_how_it_resumes(tmp_path):
    plan = "\n".join(plan_lines(config_of(tmp_path, "trainer.resume='--resume *'")))
    for part in ("rung A, a command (command): python3 train.py", "by trainer.pattern", "resumes with --resume"):
        assert part in plan
    assert "from its newest by itself" in "\n".join(plan_lines(config_of(tmp_path)))
    assert "starts from the beginning" in "\n".join(plan_lines(config_of(tmp_path, "trainer.checkpoints=null")))


def test_a_reward_check_that_can_not_be_run_is_refused_by_its_name(tmp_path):
    asked = "trainer.reward_check='python3 check.py'"
    (said,) = missing(tmp_path, asked)
    assert said == f"trainer.reward_check: {tmp_path}/check.py is no file"
    assert missing(tmp_path, "trainer.reward_check=no-such-program")[0].startswith("trainer.reward_check: no-such-")
    (tmp_path / "check.py").touch()
    assert missing(tmp_path, asked) == []
    assert "python3 check.py says whether the reward function" in "\n".join(plan_lines(config_of(tmp_path, asked)))


def test_servers_of_another_sglang_are_refused_and_a_command_alone_needs_none(tmp_path, monkeypatch):
    """They were started, and failed at the first weights."""
    monkeypatch.setattr(node_checks, "SGLANG", SpecifierSet("==0.1"))
    asks_servers = [
        "trainer.rung=servers",
        "actor.path=${repo:assets/arithmetic/model}",
        "sglang.max_total_tokens=20000",
    ]
    (said,) = missing(tmp_path, *asks_servers)
    assert said.startswith("packages: sglang ")
    assert said.endswith("works with sglang==0.1 alone")
    assert missing(tmp_path) == []


def test_nothing_is_missing_and_nothing_is_made(tmp_path):
    assert missing(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_checkpoint_that_no_run_has_seen_is_not_touched(tmp_path):
    folder = saved(tmp_path, 5)
    (said,) = missing(tmp_path)
    assert said.startswith(f"{folder}: no later step was seen")
    assert missing(tmp_path, "trainer.checkpoint_file=state.json") == []
    paths = RunPaths.of(config_of(tmp_path))
    paths.metrics.parent.mkdir(parents=True)
    paths.metrics.write_text(json.dumps({"global_step": 6, "time": folder.stat().st_mtime + 1}) + "\n")
    paths.events.write_text(json.dumps({"event": "trainer.starting"}) + "\n")
    assert missing(tmp_path) == []


def test_a_step_that_a_restore_undid_shows_no_checkpoint_whole(tmp_path):
    """The check before the start took it for the run's, and the supervisor did not: the run ended once it was begun."""
    changed_at = saved(tmp_path, 5).stat().st_mtime
    paths = RunPaths.of(config_of(tmp_path))
    paths.metrics.parent.mkdir(parents=True)
    steps = [{"global_step": step, "attempt": 1, "lineage": 0, "time": changed_at + 1} for step in (4, 5, 6)]
    paths.metrics.write_text("".join(json.dumps(step) + "\n" for step in steps) + '{"global_step": "x"}\n[')
    starting = json.dumps({"event": "trainer.starting", "attempt": 1}) + "\n"
    paths.events.write_text(starting)
    assert missing(tmp_path, "recover.mode=on") == []
    restored = {"event": "trainer.restored", "attempt": 1, "lineage": 1, "global_step": 4, "time": changed_at + 2}
    paths.events.write_text(starting + json.dumps(restored) + "\n")
    assert missing(tmp_path, "recover.mode=on") == ["recover.mode=on, and there is no whole checkpoint"]
    assert missing(tmp_path) == [], "the command was started before"


@pytest.mark.parametrize(("mode", "has_one", "refused"), [("off", True, 1), ("off", False, 0), ("on", False, 1)])
def test_recover_mode_holds_for_its_checkpoints(tmp_path, mode, has_one, refused):
    if has_one:
        saved(tmp_path, 5)
    said = missing(tmp_path, f"recover.mode={mode}", "trainer.checkpoint_file=state.json")
    assert [f"recover.mode={mode}" in one for one in said] == [True] * refused


def test_settings_of_servers_and_models_are_not_asked_for(tmp_path):
    check(config_of(tmp_path, "sglang.device=cpu"))
    with pytest.raises(ConfigError, match="restart"):
        check(config_of(tmp_path, "restart.restore=0"))


# ── AReaL's YAML ──

THEIRS = """
experiment_name: theirs
trial_name: first
seed: 3
allocation_mode: sglang:d4p1t2+fsdp:d2
cluster: {{n_nodes: 1, fileroot: "{root}/out"}}
scheduler: {{type: null}}
actor: {{path: model, weight_update_mode: disk}}
sglang:
  model_path: ${{actor.path}}
  dtype: float32
  context_length: 512
  mem_fraction_static: 0.7
  max_running_requests: 64
  random_seed: ${{seed}}
"""


def areal_config(tmp_path, *words, text=THEIRS):
    (tmp_path / "their.yaml").write_text(text.format(root=tmp_path))
    (tmp_path / "model").mkdir(exist_ok=True)
    words = ["conf=areal", f"trainer.cwd={tmp_path}", "trainer.config=their.yaml", *words]
    return with_their_names(composed(*words), [word.partition("=")[0] for word in words])


def test_the_servers_and_the_model_are_those_of_their_yaml(tmp_path):
    config = areal_config(tmp_path, "trainer.rung=servers")
    check(config)
    given = config.sglang
    assert given.model_path == str(tmp_path / "model")
    assert (given.n_servers, given.tp_size, given.dtype, given.context_length) == (4, 2, "float32", 512)
    assert (given.mem_fraction_static, given.max_running_requests, given.random_seed) == (0.7, 64, 3)
    assert "from their.yaml, where the command does not set them: sglang.model_path" in "\n".join(plan_lines(config))


def test_what_the_command_sets_comes_first_and_rung_a_takes_nothing(tmp_path):
    words = ("trainer.rung=servers", "sglang.n_servers=1", "sglang.dtype=bfloat16", f"actor.path={tmp_path}")
    given = areal_config(tmp_path, *words).sglang
    assert (given.n_servers, given.tp_size, given.dtype, given.model_path) == (1, 2, "bfloat16", str(tmp_path))
    assert areal_config(tmp_path).sglang == composed("conf=areal").sglang


def test_the_backend_of_rollouts_says_how_many_where_it_is_there(tmp_path):
    text = THEIRS + 'rollout: {{backend: "sglang:d3p2t1"}}\n'
    given = areal_config(tmp_path, "trainer.rung=servers", text=text).sglang
    assert (given.n_servers, given.tp_size) == (3, 2)


def test_a_value_of_theirs_that_cannot_be_used_is_named_with_its_file(tmp_path):
    with pytest.raises(ConfigError, match=r"their.yaml: sglang.context_length='long'"):
        areal_config(tmp_path, "trainer.rung=servers", text=THEIRS.replace("512", "long"))
    words = ("trainer.rung=servers", 'trainer.overrides=["sglang.context_length=256"]')  # what stands behind --
    assert areal_config(tmp_path, *words, text=THEIRS.replace("512", "long")).sglang.context_length == 256
    with pytest.raises(ConfigError, match=r"sglang.mem_fraction_static"):
        check(areal_config(tmp_path, "trainer.rung=servers", text=THEIRS.replace("0.7", "1.7")))
