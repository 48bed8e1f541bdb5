"""Mistakes that others made, of those that no other test here meets on its way (tests/traps.md has them all)."""

import ast
import asyncio
import dataclasses
from pathlib import Path

import pytest
import torch

from actors.monitoring.health_monitor import HealthMonitorActor
from actors.rollout.server_pool import ServerPool
from actors.serving.sglang_client import SGLangClient
from actors.serving.sglang_server import SGLangServer
from actors.supervision.coordinator_actor import COORDINATOR, TRAINERS, CoordinatorActor
from actors.supervision.run_actors import RunActors
from actors.training.trainer import MONITOR, Trainer
from actors.weights.weight_publisher import WeightPublisher
from actors.weights.weight_transports import TensorTransport
from launcher.base.messages import ServerInfo, ServerState
from launcher.checkpoints.checkpoint_catalog import CheckpointCatalog
from launcher.config.schema import DatasetConfig, RunConfig
from launcher.policy import checkpoint_status
from launcher.run_files.run_paths import RunPaths
from tests.programs import stand_in_server
from tests.support.ready_servers import nobody
from tests.support.worlds.rollout import fault
from tests.support.worlds.training import Trial

REPOSITORY = Path(__file__).parents[4]


def server(name="server-0", *, url="http://same", generation=0, state=ServerState.READY, version=0):
    return ServerInfo(name=name, index=0, generation=generation, state=state, url=url, weight_version=version)


async def test_a_restarted_server_at_the_same_address_gets_traffic_again():
    """A list of bad addresses, kept apart from the lives at them, shuts out the replacement for good."""
    pool = ServerPool(nobody)
    await pool.update([server()])
    await pool.suspect(("server-0", 0), "refused")
    await pool.update([server(state=ServerState.DEAD)])
    await pool.update([server(generation=1, state=ServerState.STALE)])
    await pool.confirm(("server-0", 0), 0)
    before = pool.servers()[0].state
    await pool.update([server(generation=1)])
    async with pool.acquire(0, avoid="server-0") as leased:
        await pool.close()
        assert (before, leased.generation) == (ServerState.STALE, 1)


@pytest.mark.slow
async def test_a_publish_waits_for_a_server_that_hangs_no_longer_than_its_deadline():
    start = ("--weight-version", "0")
    with stand_in_server.running(*start) as hung, stand_in_server.running(*start) as well:
        async with SGLangClient() as client:
            pool = ServerPool(nobody)
            await pool.update(
                [server(url=hung), server("server-1", url=well), server("server-2", url="http://[::1]:9")]
            )
            slow = {"kind": "slow", "path": "/update_weights_from_tensor", "times": 1, "seconds": 600}
            await fault(hung, slow)
            weights = {"w": torch.zeros(2)}.items()
            publisher = WeightPublisher(pool, TensorTransport(client, lambda: weights, tp_size=1, timeout_s=0.3))
            async with asyncio.timeout(60):
                await publisher.publish(3)
            states = [info.state for info in pool.servers()]
    assert states == [ServerState.STALE, ServerState.READY, ServerState.STALE]


# ── what protects is there without being asked for ──


class Started:
    """In place of Ray's actor class: notes how an actor would be created."""

    def __init__(self, kind, into):
        self._kind = kind
        self._into = into

    def options(self, **options):
        self._options = options
        return self

    def remote(self, *arguments, **named):
        self._into.append((self._kind, self._options, named))
        return self._kind


def test_a_plain_run_is_supervised_and_ray_brings_every_actor_back(tmp_path, monkeypatch):
    config = RunConfig(experiment_name="plain", train_dataset=DatasetConfig(path="none"))
    config.cluster.fileroot = str(tmp_path)
    paths = RunPaths.of(config)
    paths.prepare()
    created = []
    kinds = (SGLangServer, Trainer, HealthMonitorActor, CoordinatorActor)
    for kind in kinds:
        monkeypatch.setattr(kind, "options", Started(kind, created).options)

    class Placed:
        servers_on_gpu = shares_gpu = False

        def has(self, name):
            return True

        def options(self, name):
            return {"name": name}

        def further_ranks(self):
            return ()

    RunActors(config, paths, 1, Placed()).create(book=None, driver=None)
    assert [kind for kind, _, _ in created] == [*kinds]
    assert all(options["max_restarts"] == -1 for _, options, _ in created)
    assert [options["name"] for _, options, _ in created] == ["server-0", TRAINERS[0], MONITOR, COORDINATOR]
    asked = {kind: named for kind, _, named in created}
    assert asked[Trainer]["has_monitor"]
    assert asked[CoordinatorActor]["has_monitor"]


NOT_CALLED_YET = frozenset[str]()
"""Decisions that nothing asks for yet: a name leaves this list when the run asks for it, and none is added."""


def names_in(path):
    return {
        getattr(node, "id", getattr(node, "attr", None))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Name | ast.Attribute)
    }


@pytest.mark.slow
def test_every_decision_that_is_tested_is_also_taken_in_a_run():
    """Recovery that only tests call protects nobody."""
    sources = [path for room in ("launcher", "actors") for path in (REPOSITORY / room).rglob("*.py")]
    called = set().union(*(names_in(path) for path in sources))
    decisions = {
        node.name
        for path in (REPOSITORY / "launcher" / "policy").glob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    }
    assert len(decisions) > 20
    assert decisions - called <= NOT_CALLED_YET


# ── restores ──


@pytest.mark.slow
def test_after_a_restore_versions_go_on_from_the_checkpoint(tmp_path):
    """A counter that begins anew makes every token look stale, or worse, an old one look current."""
    first = Trial(tmp_path, steps=6)
    first.run()
    again = Trial(tmp_path, steps=9, resume=True)
    asked = []
    collect = again.loop._rollouts.collect

    def noted(queue, *, want, weight_version):
        asked.append(weight_version)
        return collect(queue, want=want, weight_version=weight_version)

    again.loop._rollouts.collect = noted
    again.run()
    assert asked == [6, 7, 8]
    assert [report.policy_version for report in again.reports] == [7, 8, 9]


@pytest.mark.slow
def test_a_last_good_checkpoint_is_not_deleted_by_age(tmp_path, monkeypatch):
    """Through the loop itself: the newest two are not the only ones that stay."""
    trial = Trial(tmp_path / "with", steps=16)
    trial.run()
    assert 3 in [c.global_step for c in trial.store.list()]
    monkeypatch.setattr(checkpoint_status, "KEPT_GOOD", 1)
    monkeypatch.setattr(CheckpointCatalog, "worth_sparing", lambda *args, **kwargs: frozenset())
    by_age = Trial(tmp_path / "without", steps=16)
    by_age.run()
    assert [c.global_step for c in by_age.store.list()] == [11, 15]


def test_a_server_that_slept_through_a_restore_does_not_pass_for_current():
    from launcher.base.messages import Health, Verdict
    from launcher.policy.observed import ServerFacts, TrainerFacts, is_current

    well = Verdict(health=Health.HEALTHY, reason="tokens")
    trainer = TrainerFacts(verdict=well, is_loaded=True, is_paused=False, policy_version=7, lineage=2, next_step=7)
    asleep = ServerFacts(name="server-0", state=ServerState.READY, verdict=well, weight_version=7, lineage=1)
    assert not is_current(asleep, trainer)
    assert is_current(dataclasses.replace(asleep, lineage=2), trainer)
