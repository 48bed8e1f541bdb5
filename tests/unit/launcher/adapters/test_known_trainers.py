"""Presets for other projects' trainers, which nobody has run: their output, their folders, what names a checkpoint."""

import pytest

from launcher.adapters.command_adapter import CommandAdapter
from tests.support.composed import composed

VERL = """\
(TaskRunner pid=222265) step:0 - val-aux/openai/gsm8k/reward/mean@1:0.565 - val-core/openai/gsm8k/acc/mean@1:0.508
(TaskRunner pid=222265) Training Progress:   0%|          | 1/624 [10:00<103:53:21, 600.32s/it]
(TaskRunner pid=222265) step:1 - global_seqlen/min:484245.000 - actor/entropy:0.323 - training/global_step:1.000 - \
critic/score/mean:0.558 - critic/score/max:1.000 - critic/rewards/mean:0.541 - response_length/mean:288.698
(TaskRunner pid=222265) step:34 - global_seqlen/min:419336 - actor/ppo_kl:-8.163164312320433e-06 - \
training/global_step:34 - critic/score/mean:-0.0182796623557806 - critic/score/max:1.0 - critic/rewards/mean:-0.0182796
step:35 - actor/lr:2e-06 - critic/score/mean:np.float64(0.25) - critic/score/max:np.float64(1.0)
"""
"""Lines of verl's console logger as users have reported them (its issues 2060, 2566, 7412), shortened."""


def test_verls_console_and_its_folders_are_read(tmp_path):
    settings = composed("conf=verl", "trainer.command='python -m verl.trainer.main_ppo'", f"trainer.cwd={tmp_path}")
    made = CommandAdapter(settings.trainer)
    steps, _ = made.read(VERL)
    assert [(one.step, one.reward) for one in steps] == [(1, 0.558), (34, -0.0182796623557806), (35, 0.25)]
    for step, has_data in ((20, True), (40, False)):
        folder = tmp_path / "out" / f"global_step_{step}"
        (folder / "actor").mkdir(parents=True)
        if has_data:
            (folder / "data.pt").touch()
    (tmp_path / "out" / "latest_checkpointed_iteration.txt").write_text("20")
    assert [(one.step, one.is_whole) for one in made.checkpoints()] == [(20, True), (40, False)]
    where = tmp_path / "out" / "global_step_20"
    assert made.command(where).words[3:] == ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={where}")


SLIME = """\
(RolloutManager pid=1805485) [2026-04-15 07:57:53] rollout.py:1193 - perf 0: {'rollout/response_len/mean': 2773.71, \
'perf/rollout_time': 371.1796889305115}
\x1b[36m(MegatronTrainRayActor pid=10122)\x1b[0m [2026-07-20 17:53:24] data.py:193 - rollout 0: {'rollout/\
response_lengths': 5824.083333333333, 'rollout/rewards': 1.241763432820638e-09, 'rollout/truncated': 0.0, \
'rollout/raw_reward': 0.20833333333333334, 'rollout/total_lengths': 11525.916666666666}
(MegatronTrainRayActor pid=10122) [2026-07-20 17:55:02] model.py:918 - step 0: {'train/loss': 0.0021, 'train/step': 0}
(MegatronTrainRayActor pid=10122) [2026-07-20 18:01:40] data.py:193 - rollout 1: {'rollout/raw_reward': nan}
"""
"""As in its issue 1837, and in a log that a user keeps; shortened."""
OPENRLHF = """\
(PPOTrainer pid=77) INFO 08-13 10:02:11 ppo_trainer.py:547] ✨ Global step 1: {'policy_loss': 0.02, 'kl': 0.0, \
'reward': 0.066, 'response_length': 411.5, 'timing/broadcast': 1.98, 'rollout/reward_mean': 0.07}
(PPOTrainer pid=77) INFO 08-13 10:02:11 ppo_trainer.py:594] ✨ Evaluation completed in 0:01:01, global_step 1, eval
(PPOTrainer pid=77) INFO 08-13 10:04:40 ppo_trainer.py:547] ✨ Global step 2: {'rollout/reward_mean': -0.5}
"""
NEMO_RL = """\

========================= Step 1/100 =========================
▶ Preparing batch...

📊 Training Results:
  • Loss: 0.0123
  • Avg Reward: 0.2500
  • Mean Generation Length: 311.5000
========================= Step 2/100 =========================
Saving checkpoint for step 2...
  • Avg Filtered Reward: 0.5000
  • Avg Total Reward: 0.1250
========================= Step 3/100 =========================
"""
"""Both as their sources print it: no line of a run of theirs was at hand."""


def adapter(conf, tmp_path):
    settings = composed(f"conf={conf}", "trainer.command='python train.py'", f"trainer.cwd={tmp_path}")
    return CommandAdapter(settings.trainer)


@pytest.mark.parametrize(
    ("conf", "text", "seen", "folder", "found", "tracker"),
    [
        (
            "slime",
            SLIME,
            [(0, 0.20833333333333334), (1, None)],
            "iter_0000012",
            12,
            ("latest_checkpointed_iteration.txt", "12"),
        ),
        ("openrlhf", OPENRLHF, [(1, 0.066), (2, -0.5)], "_actor/global_step12", 12, ("_actor/latest", "global_step12")),
        ("nemo_rl", NEMO_RL, [(1, 0.25), (2, 0.125)], "step_12", 12, None),
    ],
)
def test_their_output_and_their_folders_are_read(conf, text, seen, folder, found, tracker, tmp_path):
    made = adapter(conf, tmp_path)
    assert [(one.step, one.reward) for one in made.read(text)[0]] == seen
    for cut in range(len(text)):
        first, rest = made.read(text[:cut])
        assert [*first, *made.read(rest + text[cut:])[0]] == made.read(text)[0], "however it is cut"
    where = tmp_path / "out" / folder
    where.mkdir(parents=True)
    (where.parent / f"tmp_{where.name}").mkdir()
    assert [one.step for one in made.checkpoints()] == [found]
    fresh, resumed = made.command(None), made.command(where)
    if tracker is None:
        assert (fresh, fresh.removes, fresh.writes) == (resumed, (), {})
    else:
        file = tmp_path / "out" / tracker[0]
        assert (fresh.removes, fresh.writes) == ((file,), {})
        assert (resumed.removes, resumed.writes) == ((), {file: tracker[1]})


def test_openrlhf_loads_only_where_there_is_something_to_load(tmp_path):
    made = adapter("openrlhf", tmp_path)
    assert made.command(None).words == ("python", "train.py")
    assert made.command(tmp_path / "out/_actor/global_step4").words == ("python", "train.py", "--ckpt.load_enable")
    assert "resumes with --ckpt.load_enable" in next(made.plan())
    assert "resumes from out/latest_checkpointed_iteration.txt by itself" in next(adapter("slime", tmp_path).plan())
