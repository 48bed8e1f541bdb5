"""A host that gets full is told once; files in the kernel's cache are no memory in use."""

import time
from types import SimpleNamespace

from actors.monitoring.health_monitor import HealthMonitor
from actors.monitoring.memory_watch import MemoryWatch
from actors.monitoring.reward_series import RewardSeries
from launcher.config.schema import RunConfig
from launcher.resources import hardware
from launcher.resources.hardware import OomKillWatch, cgroup_memory, memory_in_use, oom_kills
from launcher.run_files.journal import Journal, read_lines
from launcher.run_files.run_paths import RunPaths

MIB = 2**20


def watch(tmp_path):
    """Looks at a host with `used` of 1,000 MiB; returns the reasons of all events so far."""
    in_use = {"GPU 0 memory": (990 * MIB, 1000 * MIB)}
    events = tmp_path / "events.jsonl"
    watching = MemoryWatch(Journal(events, 1, time.time), read=lambda: in_use)

    def look(used):
        in_use["host memory"] = (used * MIB, 1000 * MIB)
        watching.sample_memory()
        found = list(read_lines(events)) if events.exists() else []
        assert {(one["event"], one["subject"]) for one in found} <= {("memory.rising", "host memory")}
        return [one["reason"] for one in found]

    return look


def test_a_host_that_gets_full_is_told_once_until_there_is_room_again(tmp_path):
    """A GPU is filled on purpose."""
    look = watch(tmp_path)
    assert look(899) == []
    assert look(900) == look(990) == look(880) == look(920) == look(800) == look(910) == ["90% of 1.0 GiB is in use"]
    assert look(799) == ["90% of 1.0 GiB is in use"]
    assert look(950) == ["90% of 1.0 GiB is in use", "95% of 1.0 GiB is in use"]


async def test_memory_is_looked_at_once_an_interval(tmp_path):
    now, looks = [0.0], []
    memory = SimpleNamespace(sample_memory=lambda: looks.append(now[0]))
    journal = Journal(tmp_path / "events.jsonl", 1, time.time)
    config = RunConfig(experiment_name="exp")
    series = RewardSeries.read(RunPaths(fileroot=tmp_path, user="ann", experiment_name="exp", trial_name="t0"))
    monitor = HealthMonitor(config, journal, ask=None, series=series, memory=memory, clock=lambda: now[0])
    while now[0] < 35:
        now[0] += 1.0
        monitor.watch({})
        await monitor._memory_look._task
    await monitor.close()
    assert looks == [1.0, 11.0, 21.0, 31.0]


def test_this_host_has_memory_in_use():
    used, limit = memory_in_use()["host memory"]
    assert 0 < used < limit


def test_cached_files_are_not_in_use(tmp_path):
    own = tmp_path / "cgroup"
    own.write_text("0::/run\n")
    folder = tmp_path / "run"
    folder.mkdir()
    for name, text in {"memory.max": "1000", "memory.current": "900"}.items():
        (folder / name).write_text(text)
    (folder / "memory.stat").write_text("anon 100\nfile 800\ninactive_file 500\nactive_file 200\n")
    assert cgroup_memory(tmp_path, own) == (1000.0, 200.0)


def host(folder, own: str) -> dict:
    """A machine without cgroups, on which the process 5 is where `own` says."""
    (folder / "proc" / "5").mkdir(parents=True)
    (folder / "proc" / "5" / "cgroup").write_text(own)
    return {"root": folder / "cgroups", "proc": folder / "proc"}


def counted(file, text: str):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_kills_for_want_of_memory_are_counted_where_they_are_told(tmp_path):
    where = host(tmp_path, "0::/run\n")
    assert oom_kills(5, **where) == (tmp_path / "proc" / "vmstat", 0)
    on_host = counted(tmp_path / "proc" / "vmstat", "nr_free_pages 5\noom_kill 7\n")
    assert oom_kills(5, **where) == (on_host, 7)
    own = counted(tmp_path / "cgroups/run/memory.events", "low 0\noom 2\noom_kill 1\n")
    assert oom_kills(5, **where) == (own, 1), "the cgroup's own count comes first"


def test_version_1_counts_a_kill_in_the_cgroup_of_who_was_killed_alone(tmp_path):
    where = host(tmp_path, "7:cpu:/\n4:memory:/jobs/mine\n0::/\n")
    mounted = counted(tmp_path / "cgroups/memory/memory.oom_control", "oom_kill_disable 0\noom_kill 0\n")
    assert oom_kills(5, **where) == (mounted, 0), "a container sees its own as the root"
    own = counted(tmp_path / "cgroups/memory/jobs/mine/memory.oom_control", "under_oom 0\noom_kill 3\n")
    assert oom_kills(5, **where) == (own, 3)


def test_a_rise_is_told_over_two_looks_and_never_between_two_cgroups(monkeypatch):
    told = {"a": 3, "b": 9}
    where = ["a"]
    monkeypatch.setattr(hardware, "oom_kills", lambda pid=None: (where[0], told[where[0]]))
    monkeypatch.setattr(hardware, "oom_kills_in", told.get)
    kills = OomKillWatch()
    told["a"] = 4
    kills.note_count(5)
    assert kills.risen() == 1, "the look may come between the kill and the news of it"
    where[0] = "b"
    kills.note_count(5)
    assert kills.risen() == 0, "the process was moved: nobody was killed there"
    told["b"] = 10
    assert kills.risen() == 1
