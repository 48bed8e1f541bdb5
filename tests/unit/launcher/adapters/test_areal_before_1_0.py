"""Files of AReaL before 1.0, which stay readable: step tables of each minibatch, and recover folders of 0.3. They are
shown and judged; an AReaL of today resumes from none of the latter."""

import os
import shutil
import zipfile

import pytest

from launcher.adapters.trainer_adapter import adapter_of
from tests.support.checkpoint_makers import make_areal, make_export, name_of, truncate
from tests.support.worlds.adapters import trainer

TWO_TABLES = """\
20250911-11:37:11.251 stats logger INFO: Epoch 1/2 Step 2/80 Train step 2/160 done.
20250911-11:37:11.251 stats logger INFO: Stats (1/2):
20250911-11:37:11.252 stats logger INFO:
╒═╕
│ grpo_actor/task_reward/avg │  2.5000e-01 │ grpo_actor/grad_norm │  1.0e+00 │
╘═╛
20250911-11:37:11.252 stats logger INFO: Stats (2/2):
20250911-11:37:11.253 stats logger INFO:
╒═╕
│ grpo_actor/grad_norm │  nan │ grpo_actor/update_successful │  1.0e+00 │
╘═╛
"""


def test_the_tables_of_all_minibatches_are_one_step(tmp_path):
    seen, rest = adapter_of(trainer(tmp_path)).read(TWO_TABLES)
    assert [(one.step, one.reward, one.total, one.nonfinite) for one in seen] == [(1, 0.25, 160, ("grad_norm",))]
    cut = TWO_TABLES[: TWO_TABLES.rindex("╘")]
    assert adapter_of(trainer(tmp_path)).read(cut) == ([], cut)
    assert rest == ""


def hugging_face_form(tmp_path, ranks=2):
    """As 0.3.1 to 0.3.4 write it: the model, then the optimizer of each rank, then step_info.json."""
    top, info = make_areal(tmp_path / "out", [], recover_step=9)
    folder = top / "default" / "recover_checkpoint"
    shutil.rmtree(folder)
    make_export(folder, seed=1)
    for rank in range(ranks):
        with zipfile.ZipFile(folder / f"optim_world_size_{ranks}_rank_{rank}.pt", "w") as file:
            file.writestr("optim/data.pkl", "not read" * 100)
    (info / "step_info.json").write_bytes((info / "step_info.json").read_bytes())
    return folder, info


def test_the_form_of_0_3_is_whole_with_the_optimizer_of_every_rank_and_nothing_to_resume_from(tmp_path):
    folder, _ = hugging_face_form(tmp_path)
    (own,) = adapter_of(trainer(tmp_path)).checkpoints()
    assert (own.step, own.path, own.is_whole, own.has_optimizer) == (9, folder, True, True)
    assert "a later one loads DCP alone" in own.no_resume


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder, _: (folder / "optim_world_size_2_rank_1.pt").unlink(), "lacks the optimizer of rank 1"),
        (lambda folder, _: truncate(folder / "optim_world_size_2_rank_0.pt"), "rank_0.pt is cut short"),
        (lambda folder, _: (folder / "optim_world_size_4_rank_0.pt").touch(), "an optimizer of 2 and of 4 ranks"),
        (lambda folder, _: truncate(folder / "model.safetensors"), "model.safetensors"),
        (lambda folder, _: (folder / "tokenizer_config.json").unlink(), "the export was cut short"),
        (lambda _, info: (info / "dataloader_info.pkl").unlink(), "dataloader_info.pkl"),
        (lambda _, info: made_before(info), "the weights may be of a later step than it says"),
    ],
)
def test_what_is_torn_of_it_is_not_whole(tmp_path, damage, said):
    folder, info = hugging_face_form(tmp_path)
    damage(folder, info)
    (own,) = adapter_of(trainer(tmp_path)).checkpoints()
    assert not own.is_whole
    assert said in own.problem


def made_before(info):
    os.utime(info / "step_info.json", (1.0, 1.0))


def test_an_export_beside_its_torn_recover_folder_is_not_called_damaged(tmp_path):
    folder, _ = hugging_face_form(tmp_path)
    make_export(folder.parent / str(name_of(4)), seed=4)
    truncate(folder / "model.safetensors")
    export, own = adapter_of(trainer(tmp_path)).checkpoints()
    assert (export.problem, own.is_whole) == ("", False)
