"""TRL: steps and rewards from what transformers 5.12.1 printed with TRL 1.16.0, and checkpoints by their state."""

import json

import pytest

from launcher.adapters.trainer_adapter import adapter_of
from launcher.base.errors import ConfigError
from launcher.config.foreign import ForeignTrainerConfig

BAR = "\r {share}%|█▋        | {done}/6 [00:00<00:00,  8.60it/s]"
FIGURES = (
    "{{'loss': '{loss}', 'grad_norm': '11.83', 'completions/mean_length': '7', 'reward': '{reward}', "
    "'reward_std': '0.25', 'epoch': '0.1'}}"
)
LOADING = "\rLoading weights: 100%|██████████| 26/26 [00:00<00:00, 1976.58it/s]\n"
SAVING = "\rWriting model shards: 100%|██████████| 1/1 [00:00<00:00, 366.47it/s]\n"


def logged(done, reward, loss="0.1"):
    """As the Trainer prints it: the figures, on a line that the bar was cleared from, and the bar again."""
    bar = BAR.format(share=done * 16, done=done)
    return f"{bar}\r          \r{FIGURES.format(loss=loss, reward=reward)}\n{bar}"


def adapter(tmp_path, **settings):
    given = {"adapter": "trl", "command": "python t.py", "cwd": str(tmp_path), "checkpoints": "out/checkpoint-*"}
    return adapter_of(ForeignTrainerConfig(**(given | settings)))


@pytest.mark.slow
def test_the_bar_behind_the_figures_has_their_step_however_the_output_is_cut(tmp_path):
    ended = "\n\r    \r{'train_runtime': '0.4', 'train_loss': '-0.01'}\n" + BAR.format(share=100, done=6)
    text = LOADING + logged(1, "0.3333") + logged(2, "0.875") + SAVING + logged(3, "nan", loss="nan") + ended
    seen, _ = adapter(tmp_path).read(text)
    assert [(one.step, one.reward, one.spread, one.nonfinite) for one in seen] == [
        (1, 0.3333, 0.25, ()),
        (2, 0.875, 0.25, ()),
        (3, None, 0.25, ("reward", "loss")),
    ]
    for cut in range(0, len(text), 3):
        first, left = adapter(tmp_path).read(text[:cut])
        second, _ = adapter(tmp_path).read(left + text[cut:])
        assert [*first, *second] == seen


def test_its_output_is_unbuffered_and_it_resumes_with_its_own_flag(tmp_path):
    made = adapter(tmp_path, env={"WANDB_MODE": "offline"})
    resumed = made.command(tmp_path / "out" / "checkpoint-3")
    assert resumed.words[-2:] == ("--resume_from_checkpoint", f"{tmp_path}/out/checkpoint-3")
    assert resumed.variables == {"PYTHONUNBUFFERED": "1", "WANDB_MODE": "offline"}


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        (json.dumps({"global_step": 3}), ""),
        (json.dumps({"global_step": 6}), "trainer_state.json is of step 6"),
        ('{"global_step": 3, "log_his', "can't be read"),
        ("[]", "is of step None"),
        (None, "is not there yet"),
    ],
)
def test_a_checkpoint_is_whole_when_its_state_is(tmp_path, state, problem):
    folder = tmp_path / "out" / "checkpoint-3"
    folder.mkdir(parents=True)
    if state is not None:
        (folder / "trainer_state.json").write_text(state)
    (found,) = adapter(tmp_path).checkpoints()
    assert found.is_whole == (not problem)
    assert problem in found.problem


@pytest.mark.parametrize("settings", [{"pattern": "x"}, {"checkpoints": None}])
def test_settings_without_use_here_are_refused(tmp_path, settings):
    with pytest.raises(ConfigError, match=f"trainer.{next(iter(settings))}"):
        adapter(tmp_path, **settings)
