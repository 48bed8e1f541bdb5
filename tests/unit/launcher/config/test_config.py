"""From overrides and presets to one RunConfig; what can't be composed says the key, the value and what is allowed."""

import pickle
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from launcher.base.errors import ConfigError
from launcher.config.compose import REPOSITORY, compose, keys_to_fit, presets
from launcher.config.schema import RunConfig
from launcher.config.settings import settings_of, with_values
from launcher.config.shipped_data import foreign_held_out
from launcher.resources.config_checks import check, find_notes, find_problems
from scripts.document_settings import PAGE, page
from tests.support.composed import composed


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        compose(overrides)
    return str(error.value)


@pytest.fixture
def own_preset(tmp_path):
    """Write a user's preset; returns the overrides that choose it."""

    def write(text: str) -> tuple[str, str]:
        folder = tmp_path / "conf"
        folder.mkdir(exist_ok=True)
        (folder / "mine.yaml").write_text(text)
        return "conf=mine", f"hydra.searchpath=[file://{tmp_path}]"

    return write


@pytest.mark.parametrize("name", presets())
def test_every_preset_is_sound(name):
    """It composes, contradicts nothing, needs no note, saves after step two and every ten minutes."""
    config = composed(f"conf={name}")
    check(config)
    assert find_notes(config) == []
    assert config.experiment_name == name
    assert (config.recover.first_steps, config.recover.freq_secs) == (2, 600)
    assert foreign_held_out(config) == "", "the held-out data of another preset"


def test_what_comes_out_is_plain_and_crosses_processes():
    config = composed("conf=arithmetic_cpu")
    assert type(config) is RunConfig
    assert type(config.sglang.extra_args) is dict
    assert pickle.loads(pickle.dumps(config)) == config


@pytest.mark.parametrize("name", ["2026_11_26", "3.10", "12e4567", "1e5", "007", "'3.10'"])
def test_a_name_stays_as_it_was_typed(name):
    """Hydra makes 20261126, 3.1 and infinity of the first three, and two commits' names would be of one run."""
    config = compose(["conf=arithmetic_cpu", f"trial_name={name}", f"train_dataset.name={name}", "seed=1_0"])
    assert (config.trial_name, config.train_dataset.name, config.seed) == (name.strip("'"), name.strip("'"), 10)


def test_defaults_follow_the_settings_they_are_tied_to():
    config = compose(["conf=arithmetic_cpu", "actor.path=Qwen/Qwen2.5-0.5B", "actor.dtype=bfloat16", "seed=7"])
    assert (config.sglang.model_path, config.ref.path) == ("Qwen/Qwen2.5-0.5B",) * 2
    assert (config.sglang.dtype, config.sglang.random_seed) == ("bfloat16", 7)


def test_a_value_that_is_given_as_missing_keeps_its_default():
    config = compose(["conf=arithmetic_cpu", "stats_logger.wandb.mode=???"])
    assert config == composed("conf=arithmetic_cpu")


def test_repo_paths_lie_in_the_repository_wherever_the_command_is_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = compose(["conf=arithmetic_cpu"])
    assert config.actor.path == str(REPOSITORY / "assets/arithmetic/model")
    assert config.cluster.fileroot == str(tmp_path / "outputs/grpo")


def test_paths_that_exist_become_absolute_and_hub_names_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    config = compose(["conf=arithmetic_cpu", "actor.path=model", "train_dataset.path=openai/gsm8k"])
    assert config.actor.path == str(tmp_path / "model")
    assert config.train_dataset.path == "openai/gsm8k"


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("chat.template", "{{ messages[0].content }} " * 20, "File name too long"),
        ("train_dataset.path", "x" * 300, "File name too long"),
        ("actor.path", "~nobody-of-that-name/model", "Could not determine home directory"),
    ],
)
def test_what_is_neither_a_path_nor_a_name_is_one_message(key, value, said):
    """As the text of a chat template: it ended the command with a traceback."""
    told = refusal("conf=arithmetic_cpu", f"{key}='{value}'")
    assert told.startswith(f"{key}={value[:80]}: {said}")
    assert "give the path" in told


def test_without_held_out_data_there_is_no_section(own_preset):
    overrides = own_preset(
        "# @package _global_\nexperiment_name: x\ntrain_dataset: {path: a/b}\nactor: {path: c/d}\nrecover: {mode: on}\n"
    )
    assert compose(overrides).valid_dataset is None
    assert compose([*overrides, "valid_dataset.path=e/f"]).valid_dataset.path == "e/f"
    assert "valid_dataset.path" in refusal(*overrides, "valid_dataset.max_items=3")


def test_a_bare_on_in_yaml_is_the_word_on(own_preset):
    text = (
        "# @package _global_\nexperiment_name: x\ntrain_dataset: {path: a/b}\nactor: {path: c/d}\nrecover: {mode: %s}\n"
    )
    assert compose(own_preset(text % "on")).recover.mode == "on"
    assert compose(own_preset(text % "off")).recover.mode == "off"


def test_all_mistakes_of_a_command_are_told_at_once(own_preset):
    """The first was told alone, and each start found the next."""
    preset = own_preset("# @package _global_\ndefaults: [arithmetic_cpu]\ngate: {canaries: -1}\nactor: {lr: 1}\n")
    told = refusal(*preset, "health.silence_s=abc", "n_gpu=-3", "+sglang.tp=2", "train_dataset.path=???", "seed=null")
    message, _, hint = told.partition("\n  → ")
    assert hint.startswith("change the key that each line names")
    beginnings = [
        "7 settings can't be used:",
        "unknown key actor.lr=1 (in conf/mine.yaml); did you mean actor.optimizer.lr?",
        "gate.canaries=-1 (in conf/mine.yaml): allowed: at least 0 (number of known answers",
        "health.silence_s=abc: of type float, allowed: more than 0 (least silence of a server",
        "no value for train_dataset.path: source of the records",
        "seed=null: of type int, allowed: at least 0 and at most 2147483647, since",
        "unknown key n_gpu=-3",
        "unknown key sglang.tp=2",
    ]
    lines = [line.strip() for line in message.splitlines()]
    assert lines[0] == beginnings[0]
    assert len(lines) == len(beginnings)
    assert all(any(line.startswith(one) for line in lines) for one in beginnings), message


def test_a_number_with_a_point_is_no_whole_number(own_preset):
    """`seed=1.0` was taken for 1."""
    assert refusal("conf=arithmetic_cpu", "seed=1.0").startswith("seed=1.0: of type int, allowed: at least 0")
    assert refusal("conf=arithmetic_cpu", "recover.freq_steps=2e0").startswith("recover.freq_steps=2.0: of type int or")
    preset = own_preset("# @package _global_\ndefaults: [arithmetic_cpu]\ntotal_train_steps: 3.0\n")
    assert refusal(*preset).startswith("total_train_steps=3.0 (in conf/mine.yaml): of type int")
    assert compose(["conf=arithmetic_cpu", "actor.optimizer.lr=1"]).actor.optimizer.lr == 1.0


def test_what_follows_a_wrong_setting_is_not_told_too():
    """sglang.random_seed is the seed, unless it is given."""
    assert refusal("conf=arithmetic_cpu", "seed=-1").startswith("seed=-1: allowed: ")
    assert "2 settings" in refusal("conf=arithmetic_cpu", "seed=-1", "sglang.random_seed=-1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], ["no preset named", "arithmetic_cpu", "gsm8k_h200", "conf=<preset>"]),
        (
            ["conf=aritmetic_cpu"],
            ["unknown preset conf=aritmetic_cpu", "did you mean conf=arithmetic_cpu", "gsm8k_h200"],
        ),
        (["actor.optimiser.lr=1"], ["actor.optimiser.lr=1", "did you mean actor.optimizer.lr"]),
        (["actor.lr=0.1"], ["actor.lr=0.1", "did you mean actor.optimizer.lr?"]),
        (["+actor.lr=0.1"], ["unknown key actor.lr", "did you mean actor.optimizer.lr?"]),
        (["++gconfig.n_sample=4"], ["unknown key gconfig.n_sample", "did you mean gconfig.n_samples?"]),
        (["n_samples=4"], ["unknown key n_samples", "gconfig.n_samples or evaluator.n_samples"]),
        (["quux=4"], ["unknown key quux=4", "docs/configuration.md"]),
        (["actor.optimizer.lr=fast"], ["actor.optimizer.lr=fast", "type float", "more than 0"]),
        (["seed=1.5"], ["seed=1.5", "type int"]),
        (["seed=null"], ["seed=null", "type int"]),
        (["dry_run=perhaps"], ["dry_run=perhaps", "type bool"]),
        (["stats_logger.wandb.tags=a"], ["stats_logger.wandb.tags=a", "list of str"]),
        (["actor=3"], ["actor=3: a section", "actor.ppo_n_minibatches=…"]),
        (["train_dataset.path=???"], ["no value for train_dataset.path"]),
        (["seed"], ["can't be read", "'seed'", "key=value"]),
        (["seed=[1"], ["can't be read", "[1"]),
        (["seed=1,2"], ["seed=1,2", "-m"]),
        (["train_dataset.path=Übung.jsonl"], ["can't be read", "write 'train_dataset.path=\"Übung.jsonl\"'"]),
        (["~seed"], ["~seed", "can't be deleted", "another value"]),
        (["~valid_dataset"], ["~valid_dataset", "can't be deleted", "valid_dataset=null"]),
        (["gconfig.greedy=true"], ["unknown key gconfig.greedy", "gconfig has n_samples, max_new_tokens,"]),
        (["actor.path=${nope.x}"], ["nope.x", "not found"]),
        (["actor.path=${nope:x}"], ["nope", "${repo:path}"]),
        (["seed=${oc.env:NO_SUCH}"], ["Environment variable 'NO_SUCH' not found", "${oc.env:NAME}"]),
        (["trial_name=${trial_name}"], ["trial_name=${trial_name}: Recursive", "another setting's value"]),
        (["sglang.extra_args.watchdog_timeout=60"], ["+sglang.extra_args.watchdog_timeout=…"]),
        (["chat.template_kwargs.thinks=1"], ["+chat.template_kwargs.thinks=…"]),
        (["chat.template_kwargs={thinks: 1}"], ["one by one", "+chat.template_kwargs.NAME=VALUE"]),
        (["train_datasets.code.path=x"], ["train_datasets.code.path is not there", "+train_datasets.code.path=…"]),
        (["valid_datasets.code.path=x"], ["valid_datasets.code.path is not there", "+valid_datasets.code.path=…"]),
        (["conf="], ["no preset named", "arithmetic_cpu"]),
        (["cluster.fileroot="], ["cluster.fileroot is empty"]),
    ],
)
def test_what_cannot_be_composed_is_one_message(overrides, said):
    preset = [] if not overrides or overrides[0].startswith("conf=") else ["conf=arithmetic_cpu"]
    message = refusal(*preset, *overrides)
    for part in said:
        assert part in message
    assert "HYDRA_FULL_ERROR" not in message
    assert "object_type" not in message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "# @package _global_\nactor: {optimiser: {lr: 1}}\n",
            ["actor.optimiser", "conf/mine.yaml", "actor.optimizer"],
        ),
        ("# @package _global_\nseed: abc\n", ["seed=abc (in conf/mine.yaml)", "type int"]),
        ("seed: 1\n", ["conf/mine.yaml", "# @package _global_"]),
        ("# @package _global_\nseed: [1\n", ["mine.yaml", "line 3", "not valid YAML"]),
        ("# @package _global_\nvalid_dataset: null\n", ["null", "preset"]),
    ],
)
def test_what_is_wrong_in_a_preset_names_its_file(own_preset, text, said):
    message = refusal(*own_preset(text), "valid_dataset.path=x")
    for part in said:
        assert part in message


def test_arguments_of_sglang_can_be_added():
    assert compose(["conf=arithmetic_cpu", "+sglang.extra_args.x=1"]).sglang.extra_args == {"x": 1}


def test_lists_of_two_instances_are_two_lists():
    first, second = RunConfig(), RunConfig()
    first.stats_logger.wandb.tags.append("x")
    assert second.stats_logger.wandb.tags == []


@pytest.mark.slow
def test_the_resolved_configuration_composes_to_itself(own_preset):
    config = compose(["conf=arithmetic_cpu", "seed=5"])
    assert compose(own_preset("# @package _global_\n" + yaml.safe_dump(asdict(config)))) == config


def test_every_setting_says_what_it_means():
    assert all(setting.meaning for setting in settings_of(RunConfig))


@pytest.mark.parametrize(
    ("key", "inside", "outside", "said"),
    [
        ("seed", [0, 2**31 - 1], [-1, 2**31, 1.5], "allowed: at least 0 and at most 2147483647, since SGLang's seed"),
        ("train_dataset.batch_size", [1, 10**9], [0, -1], "allowed: at least 1"),
        ("gconfig.top_p", [1, 0.1], [0, 1.1, float("nan")], "allowed: more than 0 and at most 1"),
        ("sglang.mem_fraction_static", [0.01, 0.99], [0, 1], "allowed: more than 0 and less than 1"),
        ("rollout.finish_s", [0, 86_400], [-1, 86_401, float("inf")], "allowed: at least 0 and at most 86400"),
        ("actor.device", ["auto", "cpu"], ["gpu", "AUTO", ""], "allowed: auto, cpu, cuda"),
        ("gconfig.top_k", [-1, 1], [-2, 0], "-1 or at least 1"),
        ("trial_name", ["a", 7], ["", "a/b", "a\n"], "allowed: a folder's name"),
        ("valid_dataset.batch_size", [1], [0, None], "allowed: at least 1"),
    ],
)
def test_both_sides_of_each_kind_of_limit(key, inside, outside, said):
    config = composed("conf=arithmetic_cpu")
    assert not any(find_problems(with_values(config, {key: value})) for value in inside)
    for value in outside:
        (problem,) = find_problems(with_values(config, {key: value}))
        assert problem.subject == f"{key}={'null' if value is None else value}"
        assert said in problem.text


def test_the_page_of_settings_is_what_the_schema_says():
    assert PAGE.read_text() == page(), "run: python -m scripts.document_settings"


@pytest.mark.parametrize("section", ["${saver}", "???"])
def test_marks_are_found_beside_a_section_that_is_one_word(section):
    """It was a traceback."""
    marked = {"sglang": {"mem_fraction_static": "${fitted:0.6}", "dtype": "bfloat16"}, "seed": "${fitted:1}"}
    composed = OmegaConf.create({"evaluator": section, "actor": {"path": "${sglang.dtype}"}, **marked})
    assert keys_to_fit(composed) == ["sglang.mem_fraction_static", "seed"]
