"""A dry run finds what the run itself would refuse before its first step, where no Ray is needed for it."""

import json
from types import SimpleNamespace

import pytest

from actors.data.training_data import gathered, queue_of
from actors.model.model_folder import load_tokenizer
from actors.training import start_check
from actors.training.start_check import check_resume, check_template
from launcher.base.errors import CheckpointError, ConfigError, DataError, ModelError
from launcher.base.rollouts import Prompt
from launcher.config.compose import REPOSITORY
from tests.support.composed import composed

FORGETS = "{% for m in messages %}{% if loop.last %}{{ m.role }}:{{ m.content }};{% endif %}{% endfor %}"
EACH = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
KEEPS = EACH + "{% if add_generation_prompt %}assistant:{% endif %}"


def config_of(tmp_path, *settings):
    return composed("conf=arithmetic_cpu", f"cluster.fileroot={tmp_path}", "valid_dataset=null", *settings)


def prompts(*names):
    return {"train_dataset": [Prompt(id=name, token_ids=(1,), record={}, answer_key=None) for name in names]}


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """A checkpoint at the beginning of the data, as far as its position is concerned."""

    def make(config, these):
        content = {"queue": queue_of(config, gathered(config, these)).state_dict()}
        (tmp_path / "position.json").write_text(json.dumps(content))
        found = SimpleNamespace(path=tmp_path)
        monkeypatch.setattr(start_check, "resume_point", lambda config, paths: found)

    return make


def test_changed_data_and_a_changed_seed_are_refused(tmp_path, saved):
    config = config_of(tmp_path)
    saved(config, prompts("a", "b"))
    assert check_resume(config, prompts("a", "b")).startswith("resumes from ")
    assert check_resume(config, {}).startswith("resumes from "), "without a tokenizer the prompts are not known"
    with pytest.raises(DataError, match="the data set, its order or the seed is not the checkpoint's"):
        check_resume(config, prompts("a", "c"))
    with pytest.raises(DataError, match="seed was 1, is 2"):
        check_resume(config_of(tmp_path, "seed=2"), prompts("a", "b"))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"queue": 3}'])
def test_a_position_that_can_t_be_read_is_refused(tmp_path, saved, content):
    config = config_of(tmp_path)
    saved(config, prompts("a"))
    (tmp_path / "position.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"position.json can't be read"):
        check_resume(config, prompts("a"))


def test_a_resume_that_has_no_checkpoint_is_refused_and_nothing_is_made(tmp_path):
    assert check_resume(config_of(tmp_path), prompts("a")) == ""
    with pytest.raises(ConfigError, match="no complete checkpoint in"):
        check_resume(config_of(tmp_path, "recover.mode=on"), prompts("a"))
    assert list(tmp_path.iterdir()) == []


def test_a_template_that_can_t_be_continued_is_refused_for_episodes_only(tmp_path):
    tokenizer = load_tokenizer(REPOSITORY / "assets/arithmetic/model", key="tokenizer_path")
    template = tmp_path / "forgets.jinja"
    template.write_text(FORGETS)
    plays = "rollout.episode=actors.reward.calculator:solve"
    check_template(config_of(tmp_path, f"chat.template={template}"), tokenizer)
    with pytest.raises(ModelError, match="can't be continued turn by turn"):
        check_template(config_of(tmp_path, f"chat.template={template}", plays), tokenizer)
    template.write_text(KEEPS)
    check_template(config_of(tmp_path, f"chat.template={template}", plays), tokenizer)
