"""The injector against real processes: each fault is proven to have fired, and to have hit nobody else."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from actors.processes.process_tree import Process, identify, wait_ended
from launcher.checkpoints.checkpoint_store import CheckpointName, CheckpointStore
from launcher.run_files.journal import append_line, read_lines
from scripts.faults.find import NotLive, find_driver, live_runs, look, state, title
from scripts.faults.place import FaultPlace
from scripts.inject_fault import main
from tests.programs.fake_run import SLEEP, run_paths

REPOSITORY = Path(__file__).parents[3]
DEADLINE_S = 30.0


class Game:
    """A fake run, and the injector's command on it."""

    def __init__(self, folder: Path, servers: int, step_mib: int = 0) -> None:
        self.paths = run_paths(folder)
        self.folder = folder
        self._run = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.programs.fake_run", str(folder)),
                *("--servers", str(servers), "--step-mib", str(step_mib)),
            ],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.driver = identify(self._run.pid)
        assert self._answer() == "up"

    def _answer(self) -> str:
        assert self._run.stdout is not None
        return self._run.stdout.readline().strip()

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            assert self._run.stdin is not None
            self._run.stdin.write("\n")
            self._run.stdin.flush()
            self._answer()

    def inject(self, *words: str) -> int:
        return main([*words, "--fileroot", str(self.folder), "--within", "0.3"])

    def inject_while_it_steps(self, *words: str) -> int:
        """A step takes 0.3 s, in which a hungry trainer takes its memory at least once."""
        ended = threading.Event()

        def steps() -> None:
            while not ended.wait(0.3):
                self.step()

        stepping = threading.Thread(target=steps)
        stepping.start()
        try:
            return main([*words, "--fileroot", str(self.folder), "--within", "20"])
        finally:
            ended.set()
            stepping.join()

    def record(self) -> list[dict]:
        return list(read_lines(FaultPlace.of(self.paths).record))

    def fired(self) -> dict:
        (line,) = [line for line in self.record() if line["what"] == "fired"]
        return line

    def commit_checkpoint(self, step: int) -> Path:
        name = CheckpointName(global_step=step, epoch=0, epoch_step=step)
        store = CheckpointStore(self.paths.default_checkpoints)
        with store.staging(name) as staged:
            (staged / "model.safetensors").write_bytes(os.urandom(4096))
            return store.commit(
                staged, global_step=step, policy_version=step + 1, config_fingerprint={}, health={}, keep=False
            ).path

    def end(self) -> None:
        found = [p for server in look(self.paths).servers for p in server.tree] if self._run.poll() is None else []
        if self._run.poll() is None:
            self._run.terminate()
        self._run.communicate(timeout=DEADLINE_S)
        assert wait_ended(found, DEADLINE_S)


@pytest.fixture
def game(tmp_path, request):
    game = Game(tmp_path, getattr(request, "param", 2))
    handler = signal.getsignal(signal.SIGTERM)  # the command sets its own
    yield game
    signal.signal(signal.SIGTERM, handler)
    game.end()


def gone(pids: list[int]) -> bool:
    """Also a moment after the signal: a busy machine takes its time to end a process."""
    return wait_ended([process for pid in pids if (process := identify(pid)) is not None], DEADLINE_S)


# ── finding ──


def test_a_run_is_found_with_all_its_processes(game):
    found = look(game.paths)
    assert found.driver == game.driver
    assert title(found.trainer) == "ray::Trainer.run"
    assert set(found.supervisors) == {"health_monitor", "coordinator"}
    assert [server.index for server in found.servers] == [0, 1]
    for server in found.servers:
        assert server.url == "http://127.0.0.1:1"
        assert server.part("http") == (server.http,)
        assert len(server.part("tree")) == 3
        assert [title(p) for part in ("scheduler", "detokenizer") for p in server.part(part)] == [
            "sglang::scheduler",
            "sglang::detokenizer",
        ]
    assert live_runs(game.folder) == [game.paths]


def test_a_stranger_of_the_same_title_is_not_the_run_s(game):
    stranger = subprocess.Popen(["ray::Trainer.run", "-S", "-c", SLEEP], executable=sys.executable)
    try:
        game.step()
        game.commit_checkpoint(0)
        os.kill(look(game.paths).trainer.pid, signal.SIGKILL)
        assert game.inject("T1") == 1
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_pid_in_the_lock_that_is_another_process_by_now_is_no_driver(game, tmp_path):
    signed = json.loads(game.paths.lock.read_text())
    game.paths.lock.write_text(json.dumps(signed | {"pid": os.getpid()}))
    with pytest.raises(NotLive, match="is not running"):
        find_driver(game.paths)
    game.paths.lock.write_text(json.dumps(signed | {"host": "elsewhere"}))
    with pytest.raises(NotLive, match="runs on elsewhere"):
        find_driver(game.paths)
    game.paths.lock.write_text(json.dumps(signed))
    assert find_driver(game.paths) == game.driver


# ── signals ──


@pytest.mark.parametrize("part", ["scheduler", "http", "detokenizer", "tree"])
def test_c1_ends_the_part_that_is_named_and_no_other_server(game, part):
    game.step()
    first, second = look(game.paths).servers
    meant = [process.pid for process in first.part(part)]
    assert game.inject(f"C1:part={part},server=0") == 0
    fired = game.fired()
    assert (fired["target"], fired["part"], sorted(fired["pids"])) == ("server-0", part, sorted(meant))
    assert gone(meant)
    assert all(identify(process.pid) == process for process in second.tree)
    assert fired["began_monotonic"] <= fired["monotonic"]


def test_c7_ends_every_server_and_leaves_the_trainer(game):
    game.step()
    before = look(game.paths)
    assert game.inject("C7") == 0
    assert sorted(game.fired()["pids"]) == sorted(p.pid for server in before.servers for p in server.tree)
    assert gone(game.fired()["pids"])
    assert look(game.paths).trainer == before.trainer


def test_c2_stops_for_good_or_for_a_time(game):
    game.step()
    (scheduler,) = look(game.paths).servers[1].part("scheduler")
    assert game.inject("C2:part=scheduler,server=1") == 0
    assert game.fired()["pids"] == [scheduler.pid]
    assert state(scheduler) == "T"
    os.kill(scheduler.pid, signal.SIGCONT)
    game.step()
    assert game.inject("C2:part=http,server=0,seconds=0.1") == 0
    assert state(look(game.paths).servers[0].http) in "SR"


def test_c4_stops_and_goes_and_leaves_it_going(game):
    game.step()
    (scheduler,) = look(game.paths).servers[0].part("scheduler")
    assert game.inject("C4:server=0,slower=4,period_s=0.02,seconds=0.2") == 0
    assert game.fired()["stops"] >= 2
    assert state(scheduler) in "SR"


def test_t1_needs_a_whole_checkpoint_or_to_be_told(game, capsys):
    game.step()
    trainer = look(game.paths).trainer
    assert game.inject("T1") == 2
    assert "no whole checkpoint" in capsys.readouterr().out
    assert identify(trainer.pid) == trainer
    assert game.inject("T1", "--even-the-last") == 0
    assert game.fired()["pids"] == [trainer.pid]
    assert gone([trainer.pid])


def test_t1_at_a_save_kills_while_the_folder_is_staged(game):
    """The folder is there all the time from before the step on: only one that appears meanwhile counts."""
    game.step()
    game.commit_checkpoint(0)
    old = game.paths.default_checkpoints / ".staging-old"
    old.mkdir()
    writer = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import pathlib, sys, time\ntime.sleep(0.3)\npathlib.Path(sys.argv[1]).mkdir()",
            str(game.paths.default_checkpoints / ".staging-new"),
        ]
    )
    assert main(["T1:moment=save", "--fileroot", str(game.folder), "--within", "20"]) == 0
    writer.wait()
    assert game.fired()["proof"] == ".staging-new was there"
    assert gone(game.fired()["pids"])


def test_a_moment_that_does_not_come_is_missed_and_the_trainer_goes_on(game):
    game.step()
    game.commit_checkpoint(0)
    trainer = look(game.paths).trainer
    assert game.inject("T1:moment=backward") == 1
    assert [line["what"] for line in game.record()] == ["begun", "missed"]
    assert "'backward' did not come" in game.record()[-1]["reason"] or "py-spy" in game.record()[-1]["reason"]
    assert state(trainer) in "SR"


@pytest.mark.parametrize("who", ["health_monitor", "coordinator"])
def test_m1_ends_the_supervisor_that_is_named(game, who):
    game.step()
    meant = look(game.paths).supervisors[who]
    assert game.inject(f"M1:who={who}") == 0
    assert game.fired()["pids"] == [meant.pid]
    assert set(look(game.paths).supervisors) == {"health_monitor", "coordinator"} - {who}


def test_m2_ends_the_driver_and_what_was_to_follow_is_missed(game):
    game.step()
    game.commit_checkpoint(0)
    servers = look(game.paths).servers
    assert game.inject("M2", "C1") == 1
    assert gone([game.driver.pid])
    whats = [(line["kind"], line["what"]) for line in game.record()]
    assert whats[:2] == [("M2", "begun"), ("M2", "fired")]
    assert whats[2] == ("C1", "missed")
    assert wait_ended([p for server in servers for p in server.tree], DEADLINE_S)


def test_d1_ends_a_server_and_the_trainer(game):
    game.step()
    game.commit_checkpoint(0)
    before = look(game.paths)
    assert game.inject("D1") == 0
    assert before.trainer.pid in game.fired()["pids"]
    assert len(game.fired()["pids"]) == 4
    assert gone(game.fired()["pids"])


# ── who is left alone ──


def test_nothing_happens_before_the_first_step(game):
    before = look(game.paths)
    assert game.inject("C1") == 1
    assert "not committed a step yet" in game.record()[-1]["reason"]
    assert look(game.paths) == before


def test_a_role_that_has_not_stepped_since_the_last_fault_is_left_alone(game):
    game.step()
    assert game.inject("C1:server=0", "C1:server=1") == 1
    assert [line["what"] for line in game.record()] == ["begun", "fired", "missed"]
    assert "no step was committed since the last fault" in game.record()[-1]["reason"]


@pytest.mark.parametrize("game", [1], indirect=True)
def test_a_server_that_is_not_ready_is_left_alone(game):
    game.step()
    append_line(game.paths.events, {"event": "server.died", "subject": "server-0"})
    assert game.inject("C1") == 1
    assert "no server is READY" in game.record()[-1]["reason"]
    assert len(look(game.paths).servers) == 1


@pytest.mark.parametrize("game", [1], indirect=True)
def test_keep_one_keeps_one(game):
    game.step()
    (server,) = look(game.paths).servers
    assert game.inject("C1", "--keep-one") == 2
    assert identify(server.http.pid) == server.http
    assert game.inject("C1:part=http", "--keep-one", "--even-the-last") == 0
    assert gone([server.http.pid])


def test_a_step_is_waited_for(game):
    game.step(3)
    assert game.inject("C1:part=scheduler@2") == 0
    assert game.fired()["step"] == 2


# ── checkpoints and disks ──


@pytest.mark.parametrize("damage", ["torn", "flip", "manifest"])
def test_t4_damages_the_newest_and_keeps_the_last_whole_one(game, damage):
    game.step()
    game.commit_checkpoint(0)
    store = CheckpointStore(game.paths.default_checkpoints)
    assert game.inject(f"T4:damage={damage},then=nothing") == 2
    assert store.latest_complete().checkpoint.global_step == 0
    game.commit_checkpoint(1)
    assert game.inject(f"T4:damage={damage},then=nothing") == 0
    assert store.latest_complete().checkpoint.global_step == 0
    assert game.inject(f"T4:damage={damage},then=nothing") == 2
    assert look(game.paths).trainer is not None


def test_t4_goes_on_with_t1(game):
    game.step()
    trainer = look(game.paths).trainer
    for step in (0, 1):
        game.commit_checkpoint(step)
    assert game.inject("T4") == 0
    assert game.fired()["pids"] == [trainer.pid]
    assert gone([trainer.pid])


def test_t5_never_fills_the_machine_s_own_disk(game, capsys):
    game.step()
    game.commit_checkpoint(0)
    assert game.inject("T5") == 2
    assert "mount -t tmpfs" in capsys.readouterr().err


# ── the command ──


def test_a_dry_run_does_nothing_and_names_everybody(game, capsys):
    game.step()
    before = look(game.paths)
    assert game.inject("C7", "T1@30", "--dry-run") == 0
    said = capsys.readouterr().out
    assert f"driver   pid {game.driver.pid}" in said
    assert "server-0 READY" in said
    assert "no whole checkpoint" in said
    assert look(game.paths) == before
    assert not FaultPlace.of(game.paths).root.exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "no fault was named"),
        (["S4"], "can't be injected"),
        (["--storm", "C1x3"], "--steps"),
        (["C1", "--run", "game"], "names no run"),
        (["C1", "--run", "game/night"], "game/night"),
        (["S1"], "config.yaml"),
        (["C8"], "--interpose"),
        (["N1"], "no raylet"),
    ],
)
def test_a_wrong_command_says_what_is_missing_and_does_nothing(game, words, named, capsys):
    game.step()
    before = look(game.paths)
    assert game.inject(*words) == 2
    assert named in capsys.readouterr().err
    assert look(game.paths) == before
    assert game.record() == []


def test_without_a_live_run_there_is_nothing_to_break(tmp_path, capsys):
    assert main(["C1", "--fileroot", str(tmp_path)]) == 2
    assert "none" in capsys.readouterr().err


def test_an_interrupted_injector_lets_go_of_what_it_holds(game):
    game.step()
    (scheduler,) = look(game.paths).servers[0].part("scheduler")
    injector = subprocess.Popen(
        [
            *(sys.executable, "-m", "scripts.inject_fault", "C2:part=scheduler,server=0,seconds=1000"),
            *("--fileroot", str(game.folder)),
        ],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert "begun" in injector.stdout.readline()
    wait_for_state(scheduler, "T")
    injector.terminate()
    assert injector.wait(DEADLINE_S) == 130
    assert state(scheduler) in "SR"


def wait_for_state(process: Process, letter: str) -> None:
    while state(process) != letter:
        assert identify(process.pid) == process
        os.sched_yield()
