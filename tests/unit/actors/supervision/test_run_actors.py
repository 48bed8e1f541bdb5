"""The driver has an actor for each server that there is to be: it follows the Coordinator's journal."""

import pytest

from actors.supervision.run_actors import RunActors
from launcher.config.schema import RunConfig
from launcher.run_files.run_paths import RunPaths


class Actors(RunActors):
    """Whose actors are their names, with a number for each that was made."""

    def __init__(self, folder):
        config = RunConfig(experiment_name="fleet")
        config.cluster.fileroot = str(folder)
        super().__init__(config, RunPaths.of(config), 1, placed=None)
        self.made = []

    def _new_server(self, name):
        self.made.append(name)
        self._all.append(f"{name} {len(self.made)}")
        return self._all[-1]

    def hears(self, event, **facts):
        self.follow({"event": event, **facts})
        return [*self._servers.values()]


@pytest.fixture
def killed(monkeypatch):
    killed = []
    monkeypatch.setattr("ray.kill", killed.append)
    return killed


@pytest.fixture
def actors(tmp_path):
    actors = Actors(tmp_path)
    actors._make_servers(1)
    return actors


def test_an_actor_is_made_for_each_that_comes_and_ended_with_each_that_left(actors, killed):
    assert actors.hears("fleet.resized", servers=3) == ["server-0 1", "server-1 2", "server-2 3"]
    assert actors.hears("fleet.resized", servers=2) == ["server-0 1", "server-1 2", "server-2 3"], "it has not left"
    assert actors.hears("server.left", subject="server-2") == ["server-0 1", "server-1 2"]
    assert killed == ["server-2 3"]
    assert actors.hears("fleet.resized", servers=3)[-1] == "server-2 4"
    assert actors.hears("server.ready", subject="server-2", servers="no number") == actors.hears("run.running")


def test_one_that_is_wanted_again_while_it_leaves_is_made_when_its_name_is_free(actors, killed):
    actors.hears("fleet.resized", servers=2)
    actors.hears("fleet.resized", servers=1)
    assert actors.hears("fleet.resized", servers=2) == ["server-0 1", "server-1 2"]
    assert actors.hears("server.left", subject="server-1") == ["server-0 1", "server-1 3"]
    assert killed == ["server-1 2"]
