"""A machine whose run copies its checkpoints to a URL that others share."""

from functools import partial

from launcher.checkpoints.checkpoint_store import CheckpointStore
from launcher.checkpoints.remote_store import RemoteStore
from launcher.checkpoints.uploads import Uploader, fetch_if_empty
from launcher.config.schema import DatasetConfig, RunConfig
from launcher.run_files.journal import Journal, read_lines
from launcher.run_files.run_paths import RunPaths
from tests.support.machine import scaled

deadline_s = partial(scaled, 60)


class Machine:
    """A disk of its own, and the URL that it shares with others."""

    def __init__(self, root, url, *, keep_last=3):
        self.config = RunConfig(experiment_name="exp", trial_name="t1")
        self.config.cluster.fileroot = str(root)
        self.config.train_dataset = DatasetConfig(path="unused")
        self.config.recover.url = url
        self.config.recover.keep_last = keep_last
        self.paths = RunPaths.of(self.config)
        self.paths.prepare()
        self.store = CheckpointStore(self.paths.default_checkpoints)
        self.remote = RemoteStore(url, experiment_name="exp", trial_name="t1")
        self.uploader = self.new_uploader()

    def new_uploader(self):
        journal = Journal(self.paths.events, 1)
        return Uploader(self.remote, self.store, journal, keep_last=self.config.recover.keep_last)

    def copy(self):
        assert self.uploader.finish(deadline_s()) == ""

    def there(self):
        return [one.name.global_step for one in self.remote.list()]

    def fetch(self):
        return fetch_if_empty(self.config, self.paths, self.remote)

    def events(self, name):
        return [event for event in read_lines(self.paths.events) if event["event"] == name]


def far(folder, step):
    (found,) = (folder / "exp" / "t1").glob(f"*globalstep{step}")
    return found
