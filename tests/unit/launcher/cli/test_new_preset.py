"""`python -m launcher init`: a preset of one's own that composes to what it was made from, and overwrites nothing."""

import copy
import dataclasses

import pytest
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins

from launcher.base.errors import ConfigError, UsageError
from launcher.cli import new_preset
from launcher.config.compose import compose, find_own_presets, presets, register
from launcher.config.schema import RunConfig
from launcher.config.settings import settings_of
from tests.support.composed import composed

MEANINGS = {one.key: one.meaning for one in settings_of(RunConfig)}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Once a process: what these two store has to stay.
    register()
    Plugins.instance()
    store = ConfigStore.instance()  # of the whole process: what is stored here must not be a preset of other tests
    monkeypatch.setattr(store, "repo", copy.deepcopy(store.repo))
    return tmp_path


@pytest.mark.parametrize("base", ["arithmetic_dapo", "gsm8k_h200_cluster", "areal"])
def test_the_new_preset_composes_to_what_it_was_made_from(base):
    name = f"own_{base}"
    assert new_preset.run([f"{name}.yaml", f"conf={base}"]) == 0
    needed = ["trainer.config=their.yaml", "trainer.command=train"] if base == "areal" else []
    assert compose([f"conf={name}", *needed]) == dataclasses.replace(
        composed(f"conf={base}", *needed), experiment_name=name
    )


def test_each_value_has_its_meaning_beside_it_and_can_be_changed(here):
    new_preset.run(["my_run.yaml"])
    text = (here / "my_run.yaml").read_text()
    written = [line for line in text.splitlines() if ": " in line and not line.startswith("#")]
    assert len(written) > 20
    for line in written:
        key = line.split(":")[0].strip()
        assert any(line.endswith(f"  # {meaning}") for name, meaning in MEANINGS.items() if name.endswith(key)), line
    (here / "my_run.yaml").write_text(text.replace("batch_size: 16", "batch_size: 8"))
    assert compose(["conf=my_run"]).train_dataset.batch_size == 8
    assert compose(["conf=my_run", "train_dataset.batch_size=4"]).train_dataset.batch_size == 4


@pytest.mark.parametrize("base", presets())
def test_what_data_of_one_s_own_needs_is_always_written(here, base):
    new_preset.run(["my_run.yaml", f"conf={base}"])
    written = yaml.safe_load((here / "my_run.yaml").read_text())
    assert {"path", "prompt_key", "messages_key", "answer_key"} <= set(written["train_dataset"])
    assert next(iter(written["train_dataset"])) == "path"
    assert written["reward"]["fn"]
    assert isinstance(written["seed"], int)


def test_saver_recover_and_evaluator_have_comments_of_their_own(here):
    new_preset.run(["my_run.yaml"])
    lines = (here / "my_run.yaml").read_text().splitlines()
    comments = [line.partition("  # ")[2] for line in lines if line.strip().startswith("freq_")]
    assert comments == [
        "interval of the checkpoints that are kept for good, in epochs; null: not by epochs",
        "interval of the checkpoints to resume from, in steps; null: not by steps",
        "interval of the evaluations on held-out data, in steps; null: not by steps",
    ]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "init needs the name of one file"),
        (["a.yaml", "b.yaml"], "init needs the name of one file"),
        (["a/b.yaml"], "a/b.yaml is no name of a preset"),
        (["my-run.yaml"], "my-run.yaml is no name of a preset"),
        (["true.yaml"], "true.yaml is no name of a preset"),
        (["null.yaml"], "null.yaml is no name of a preset"),
        (["lauf_für_mich.yaml"], "lauf_für_mich.yaml is no name of a preset"),
        (["my_run"], "my_run is no name of a preset"),
        (["gsm8k_h200.yaml"], "gsm8k_h200 is a preset of the launcher"),
        (["my_run.yaml", "conf=nope"], "conf=nope: there is no such preset"),
    ],
)
def test_what_is_no_name_is_refused_and_nothing_is_written(here, words, told):
    with pytest.raises(UsageError) as refused:
        new_preset.run(words)
    assert refused.value.message.startswith(told)
    assert refused.value.hint
    assert [*here.iterdir()] == []


def test_a_file_that_is_there_is_not_overwritten(here):
    (here / "my_run.yaml").write_text("seed: 1\n")
    with pytest.raises(UsageError, match="is not overwritten"):
        new_preset.run(["my_run.yaml"])
    assert (here / "my_run.yaml").read_text() == "seed: 1\n"


@pytest.mark.parametrize(("content", "told"), [("[1,2", "broken.yaml can't be read"), ("- 1\n", "holds no settings")])
def test_a_file_that_is_no_preset_is_named(here, content, told):
    (here / "broken.yaml").write_text(content)
    with pytest.raises(ConfigError) as refused:
        compose(["conf=broken"])
    assert told in refused.value.message


def test_the_shipped_presets_stay_what_they_are(here):
    """A file in the working folder that has the name of a shipped preset takes nobody's place."""
    (here / "arithmetic_cpu.yaml").write_text("# @package _global_\nseed: 77\n")
    assert compose(["conf=arithmetic_cpu"]).seed != 77
    assert "arithmetic_cpu" in presets()


def test_every_preset_can_be_a_base():
    for base in presets():
        assert yaml.safe_load(new_preset.text_of("my_run", base))["experiment_name"] == "my_run"


def test_a_preset_of_one_s_own_may_be_built_on_another(here):
    new_preset.run(["first.yaml"])
    for name, base in (("second", "first"), ("third", "second")):
        (here / f"{name}.yaml").write_text(f"defaults:\n  - {base}\n  - _self_\nexperiment_name: {name}\nseed: 77\n")
    made = compose(["conf=third"])
    assert (made.experiment_name, made.seed, made.actor.path) == ("third", 77, compose(["conf=first"]).actor.path)


def test_several_of_one_s_own_are_found_for_a_sweep_and_in_quotes(here):
    for name in ("one", "other"):
        new_preset.run([f"{name}.yaml"])
    find_own_presets(["conf=one, other"])
    assert {"one.yaml", "other.yaml"} <= ConfigStore.instance().repo["conf"].keys()
    assert compose(['conf="other"']).experiment_name == "other"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"seed: 3  # f\xfcr", "mine.yaml can't be read: 'utf-8' codec can't decode byte 0xfc"),
        (b"defaults:\n  - mine\nseed: 3\n", "a preset is built on itself"),
        (b"defaults:\n  - nowhere\nseed: 3\n", "mine.yaml is built on nowhere (defaults), and there is no such preset"),
        (
            b"defaults:\n  - arithmetic_cpu\n  - _self_\nactor:\n  pth: x\n",
            "unknown key actor.pth=x (in mine.yaml)",
        ),
        (b"defaults:\n  - arithmetic_cpu\n  - _self_\nseed: many\n", "seed=many (in mine.yaml): of type int"),
        (b"defaults:\n  - arithmetic_cpu\n  - _self_\nrollout:\n", "e.g. rollout."),
        (b"{}", "set it in the preset"),
    ],
)
def test_what_is_wrong_with_one_s_own_is_one_message_that_names_its_file(here, text, told):
    (here / "mine.yaml").write_bytes(text)
    with pytest.raises(ConfigError) as refused:
        compose(["conf=mine"])
    assert told in str(refused.value)
    assert "provider=" not in str(refused.value)
    assert "conf/mine" not in str(refused.value)


def test_a_text_of_several_lines_is_written_on_one(here):
    new_preset.run(["mine.yaml", "conf=gsm8k_h200"])
    (line,) = [line for line in (here / "mine.yaml").read_text().splitlines() if "question_suffix" in line]
    assert line.startswith('  question_suffix: "\\nPlease')
    assert MEANINGS["chat.question_suffix"] in line
