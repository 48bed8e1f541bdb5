"""What a container leaves of the machine: CPU time and memory, by the tightest cgroup around this process."""

import os

import pytest

from launcher.resources import hardware
from launcher.resources.environment_checks import check_cpus
from launcher.resources.hardware import cgroup_memory, find_hardware, usable_cpus


@pytest.fixture
def cgroup(tmp_path, monkeypatch):
    """A machine of 16 CPUs; writes files of cgroups, each in the one around this process or below it."""
    root, own = tmp_path / "cgroup", tmp_path / "own"
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))

    def write(lines: str, **files: str):
        own.write_text(lines)
        for name, text in files.items():
            file = root / name.replace("__", "/").replace("_dot_", ".")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{text}\n")
        return root, own

    return write


V2, V1 = "0::/pod/job\n", "4:cpu,cpuacct:/pod/job\n"


@pytest.mark.parametrize(
    ("lines", "files", "cpus", "named"),
    [
        (V2, {"pod__job__cpu_dot_max": "400000 100000"}, 4, "pod/job/cpu.max allows the time of 4 CPUs"),
        (V2, {"pod__job__cpu_dot_max": "max 100000", "pod__cpu_dot_max": "250000 100000"}, 2, "pod/cpu.max"),
        (V2, {"pod__job__cpu_dot_max": "800000 100000", "pod__cpu_dot_max": "300000 100000"}, 3, "pod/cpu.max"),
        (V2, {"pod__job__cpu_dot_max": "50000 100000"}, 1, "the time of 0.5 CPUs"),
        (V2, {"pod__job__cpu_dot_max": "max 100000"}, 16, ""),
        (V2, {"pod__job__cpu_dot_max": "9900000 100000"}, 16, ""),
        (V2, {"pod__job__cpu_dot_max": ""}, 16, ""),
        (
            V1,
            {"cpu__pod__job__cpu_dot_cfs_quota_us": "50000", "cpu__pod__job__cpu_dot_cfs_period_us": "100000"},
            1,
            "0.5",
        ),
        (
            V1,
            {"cpu,cpuacct__pod__cpu_dot_cfs_quota_us": "300000", "cpu,cpuacct__pod__cpu_dot_cfs_period_us": "100000"},
            3,
            "cpu,cpuacct/pod/cpu.cfs_quota_us allows",
        ),
        (V1, {"cpu__cpu_dot_cfs_quota_us": "600000", "cpu__cpu_dot_cfs_period_us": "100000"}, 6, "cpu.cfs_quota_us"),
        (V1, {"cpu__pod__job__cpu_dot_cfs_quota_us": "-1", "cpu__pod__job__cpu_dot_cfs_period_us": "100000"}, 16, ""),
        ("", {}, 16, ""),
    ],
)
def test_the_cpus_of_a_container(cgroup, lines, files, cpus, named):
    count, why = usable_cpus(*cgroup(lines, **files))
    assert count == cpus
    assert named in why if named else why == ""


def test_a_set_of_cpus_is_a_limit_too(cgroup, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 4})
    assert usable_cpus(*cgroup("")) == (2, "2 of 16 CPUs are open to this process (cpuset or taskset)")


def test_plans_sweeps_and_the_doctor_know_it(cgroup, monkeypatch):
    """Sweeps divide `Hardware.cpus`."""
    root, own = cgroup(V2, pod__cpu_dot_max="200000 100000")
    monkeypatch.setattr(usable_cpus, "__defaults__", (root, own))
    assert find_hardware().cpus == 2
    assert check_cpus().text == f"2 ({root}/pod/cpu.max allows the time of 2 CPUs)"


def test_memory_above_which_the_kernel_slows_down_is_a_limit(cgroup):
    root, own = cgroup(
        V2,
        pod__job__memory_dot_max=str(8 * 2**30),
        pod__job__memory_dot_high=str(6 * 2**30),
        pod__job__memory_dot_current=str(2**30),
    )
    assert cgroup_memory(root, own) == (6 * 2**30, 2**30)
    assert hardware.cgroup_memory(root, root / "nowhere")[0] == float("inf")
