"""A server whose GPU fails is started without that GPU, by a Coordinator that comes later too."""

import asyncio
import time

import pytest

from actors.supervision.action_executor import ActionExecutor
from actors.supervision.cluster_observer import ClusterObserver
from actors.supervision.oom_backoff import OomBackoff
from actors.supervision.run_history import RunHistory
from launcher.base.gpu_names import GpuName
from launcher.base.messages import ServerExit, ServerInfo, ServerState
from launcher.config.schema import RunConfig
from launcher.reporting.event_lines import tell
from launcher.run_files.journal import Journal, read_lines
from launcher.run_files.run_paths import RunPaths
from scripts.health.recorded_run import read_view
from scripts.health.run_check import Subject, check_run
from tests.support.fake_actors import FakeActor, never

BAD, OTHER = (GpuName(host="node7", number=number, uuid=f"GPU-{number}") for number in "02")
XID = "ended by itself with exit code -6: NVRM: Xid (PCI:0000:19:00): 79, GPU has fallen off the bus."


class Run:
    """One server, whose actor gets the GPU `spare`, or none, in place of one that it is to avoid."""

    def __init__(self, folder, *, spare):
        self.config = RunConfig(experiment_name="gpus")
        self.config.cluster.fileroot = str(folder)
        self.paths = RunPaths.of(self.config)
        self.paths.prepare()
        self.spare = spare
        self.asked = []
        self.generation = -1
        self.coordinator(attempt=1)

    def coordinator(self, *, attempt):
        """That begins: it knows what is in the files alone."""
        journal = Journal(self.paths.events, attempt, time.time)
        self.history = RunHistory.read(journal, self.paths.events, attempt)
        actor = FakeActor(stop=None, start=self.start, wait_ready=self.ready, wait_exit=never, info=self.ready)
        memory = OomBackoff(self.config, self.history, None, on_gpu=True, shares_gpu=False)
        self.observer = ClusterObserver(
            self.config,
            self.paths,
            self.history,
            servers={"server-0": actor},
            trainer=FakeActor(view=lambda: None),
            monitor=None,
            memory=memory,
        )
        self.executor = ActionExecutor(self.config, self.history, self.observer, shares_gpu=False)

    def start(self, avoid=(), **order):
        self.asked.append(avoid)
        self.generation = order["generation"]
        gpus = (self.spare or BAD,) if avoid else ()
        return ServerInfo(name="server-0", index=0, generation=self.generation, state=ServerState.STARTING, gpus=gpus)

    def ready(self):
        return ServerInfo(name="server-0", index=0, generation=self.generation, state=ServerState.READY)

    def dies(self, generation, reason=XID, gpu=BAD):
        end = ServerExit(
            name="server-0",
            generation=generation,
            pid=7,
            exit_code=-6,
            reason=reason,
            at=time.time(),
            monotonic=time.monotonic(),
            gpus=(gpu,),
        )
        self.observer._server_died(end)

    def starts(self):
        asyncio.run(self._start())

    async def _start(self):
        try:
            await self.executor._start_server(self.observer.slots["server-0"])
        finally:
            await self.executor.close()

    def told(self, *names):
        return [tell(event) for event in read_lines(self.paths.events) if event["event"] in names]


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path, spare=OTHER)


def test_the_next_incarnation_is_started_without_the_gpu_and_that_is_told(run):
    run.starts()
    assert run.asked == [()]
    run.dies(0)
    run.coordinator(attempt=1)  # and it was killed here: what it knew is in the files
    run.starts()
    assert run.asked[-1] == (BAD,)
    (aside,) = run.told("gpu.quarantined")
    assert aside.startswith("GPU 0 of node7 is set aside: its GPU reports a fault (ECC, NVLink, or lost) (server-0)")
    assert run.told("server.moved") == ["server-0: it is on GPU 2 of node7 now"]


def test_a_later_attempt_does_without_it_too(run):
    run.starts()
    run.dies(0)
    run.coordinator(attempt=2)
    run.history.event("run.started", subject="run", reason="resumed")
    run.starts()
    assert run.asked[-1] == (BAD,)
    checked = Subject(
        paths=run.paths,
        view=read_view(run.paths),
        is_live=False,
        processes=None,
        timeout_s=1.0,
        recent_s=1.0,
        extra_servers=(),
    )
    (told,) = [finding.said for finding in check_run(checked) if finding.subject == "GPUs"]
    assert told.startswith("set aside for a fault: GPU 0 of node7: its GPU reports a fault"), "check_health"


def test_where_no_other_is_free_it_goes_on_and_that_is_told(tmp_path):
    run = Run(tmp_path, spare=None)
    run.starts()
    run.dies(0)
    run.coordinator(attempt=1)
    run.starts()
    assert run.told("gpu.none_free") == ["server-0: no other GPU of its node is free: it goes on with GPU 0 of node7"]
    run.dies(1)
    assert len(run.told("gpu.quarantined")) == 1


def test_an_illegal_access_on_a_second_gpu_is_told_to_be_a_kernels(run):
    access = "ended by itself with exit code -6: CUDA error: an illegal memory access was encountered"
    run.dies(0, access)
    run.dies(1, access, OTHER)
    assert len(run.told("gpu.quarantined")) == 1
    assert "more likely a kernel's defect" in run.told("gpu.kept")[0]


def test_the_operator_may_have_gpus_used_all_the_same(run):
    run.starts()
    run.dies(0)
    run.config.recovery.quarantine_gpus = False
    run.dies(1, gpu=OTHER)
    run.coordinator(attempt=1)
    run.starts()
    assert run.asked[-1] == ()
    assert len(run.told("gpu.quarantined")) == 1
