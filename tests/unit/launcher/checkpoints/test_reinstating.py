"""What a mistaken restore set aside is put back, as the events say; what came after the restore makes way."""

from launcher.checkpoints.checkpoint_catalog import CheckpointCatalog, set_aside_by_restore
from launcher.checkpoints.checkpoint_store import CheckpointStore
from launcher.config.schema import RunConfig
from launcher.run_files.journal import append_line
from launcher.run_files.run_paths import RunPaths
from tests.support.worlds.checkpoints import save, steps_of


def test_what_the_last_restore_set_aside_is_put_back_and_may_be_begun_again(paths, tmp_path):
    store = CheckpointStore(tmp_path / "default")

    def event(name, **facts):
        append_line(paths.events, {"event": name, **facts})

    for step in (4, 9, 14, 19):
        save(store, step)
    (earlier,) = store.condemn_after(14)  # by another collapse: it stays where it is
    event("trainer.restoring", onset_step=17)
    event("checkpoint.condemned", checkpoints=[earlier.name])
    event("trainer.restored", global_step=14)
    save(store, 19)

    event("trainer.restoring", onset_step=16)
    event("checkpoint.condemned", checkpoints=[path.name for path in store.condemn_after(14)])
    for path in store.set_aside_after(4):
        event("checkpoint.set_aside", subject=path.name)
    event("trainer.restored", global_step=4)
    event("trainer.restoring", onset_step=None)  # its process died: nothing is undone by that
    save(store, 9)

    names = set_aside_by_restore(paths)
    assert len(names) == 3
    assert earlier.name not in names
    assert [path.name.rpartition("step")[2] for path in store.reinstate(4, names)] == ["19", "14", "9"]
    assert steps_of(store) == [4, 9, 14, 19]
    assert earlier.exists()
    for checkpoint in store.list():
        store.verify(checkpoint)
    assert store.reinstate(4, names) == ()
    assert steps_of(store) == [4, 9, 14, 19]


def test_what_a_try_that_failed_has_set_aside_belongs_to_the_same_restore(paths):
    """The checkpoint that was chosen is damaged: an older one is loaded, and nothing is left to condemn then."""
    for event in (
        {"event": "trainer.restored", "global_step": -1},
        {"event": "trainer.restoring", "onset_step": 16},
        {"event": "checkpoint.condemned", "checkpoints": ["the newest"]},
        {"event": "trainer.restoring_failed"},
        {"event": "trainer.restoring", "onset_step": 16},
        {"event": "checkpoint.set_aside", "subject": "the damaged one"},
        {"event": "trainer.restored", "global_step": 4},
    ):
        append_line(paths.events, event)
    assert set_aside_by_restore(paths) == ["the newest", "the damaged one"]


def test_what_names_no_checkpoint_is_none_of_them(paths):
    """A line without a subject put "None" on the list of what is to be put back."""
    for event in (
        {"event": "trainer.restoring", "onset_step": 10**30},
        {"event": "checkpoint.set_aside"},
        {"event": "checkpoint.set_aside", "subject": ["x"]},
        {"event": "checkpoint.condemned", "checkpoints": [7, None, "a", "a"]},
        {"event": "checkpoint.condemned", "checkpoints": {"b": 1}},
        {"event": "checkpoint.condemning", "after_step": 10**400},
        {"event": "recovery.taken", "set_aside": [[]]},
    ):
        append_line(paths.events, event)
    assert set_aside_by_restore(paths, ["epoch0epochstep5globalstep5.condemned-1"]) == ["a"]


def test_what_was_condemned_by_a_coordinator_that_was_killed_before_it_said_so_is_put_back_too(tmp_path):
    """What the run had learned stayed set aside, though the restore was found to be a mistake: no event named it."""
    paths = RunPaths(fileroot=tmp_path, user="ann", experiment_name="exp", trial_name="t0")
    paths.prepare()
    store = CheckpointStore(paths.default_checkpoints)
    catalog = CheckpointCatalog.of_run(RunConfig(experiment_name="exp", trial_name="t0"), paths)

    def event(name, **facts):
        append_line(paths.events, {"event": name, **facts})

    for step in (4, 9, 14, 19, 24):
        save(store, step)
    event("recovery.taken", set_aside=[path.name for path in store.condemn_after(19)])  # by a person
    event("checkpoint.condemning", after_step=9)
    event("trainer.restoring", onset_step=10)
    catalog.condemn_after(9)
    event("trainer.restored", global_step=4)
    store.set_aside_after(4)  # the trainer's part, which it was killed before it could name
    assert steps_of(store) == [4]
    assert [name.rpartition("step")[2] for name in catalog.reinstate_after(4)] == ["14", "19"]
    assert catalog.reinstate_after(4) == ()
    assert steps_of(store) == [4, 14, 19]
