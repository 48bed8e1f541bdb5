"""What a restore sets aside is known before it is moved, so that a mistaken one can be undone."""

import pytest

from actors.training.checkpointing import Checkpointer
from actors.training.run_position import RunPosition
from actors.training.step_state import Restored
from launcher.checkpoints.checkpoint_catalog import CheckpointCatalog
from launcher.checkpoints.checkpoint_store import CheckpointStore
from launcher.config.schema import RunConfig
from launcher.run_files.journal import Journal, append_line
from launcher.run_files.run_paths import RunPaths
from tests.support.worlds.checkpoints import save, steps_of


class Killed(BaseException):
    """In place of SIGKILL."""


@pytest.mark.parametrize("told", [0, 1])
def test_what_a_trainer_had_set_aside_when_it_was_killed_is_put_back_too(tmp_path, told):
    """It moved the folders and told afterwards: the restore was found to be a mistake, and steps 9 to 19 were lost to
    the next command."""
    paths = RunPaths(fileroot=tmp_path, user="ann", experiment_name="exp", trial_name="t0")
    paths.prepare()
    config, store = RunConfig(experiment_name="exp", trial_name="t0"), CheckpointStore(paths.default_checkpoints)
    for step in (4, 9, 14, 19):
        save(store, step)
    lines = []

    class Dying(Journal):
        def record(self, event, **facts):
            lines.append(event)
            if event == "checkpoint.set_aside" and lines.count(event) > told:
                raise Killed
            return super().record(event, **facts)

    append_line(paths.events, {"event": "trainer.restoring", "onset_step": 10})
    restored = Restored(position=RunPosition(next_step=5))
    with pytest.raises(Killed):
        Checkpointer(config, paths, Dying(paths.events, 1), None, None)._continue_from(restored, "step 4")
    Checkpointer(config, paths, Journal(paths.events, 1), None, None)._continue_from(restored, "step 4")  # the next one
    append_line(paths.events, {"event": "trainer.restored", "global_step": 4})
    save(store, 9)
    assert steps_of(store) == [4, 9]
    catalog = CheckpointCatalog.of_run(config, paths)
    assert sorted(int(name.rpartition("step")[2]) for name in catalog.reinstate_after(4)) == [9, 14, 19]
    assert catalog.reinstate_after(4) == ()
    assert steps_of(store) == [4, 9, 14, 19]
