"""deploy/: each recipe is parsed or run, and what it asks of the launcher is something that the launcher knows."""

import configparser
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import jsonschema
import pytest
import yaml

from launcher.base.errors import ConfigError
from launcher.base.exit_codes import EXIT_CODES, RESUMES
from launcher.cli.deadlines import Deadline, TimesTaken, due
from launcher.config.compose import REPOSITORY, presets
from launcher.config.schema import RunConfig
from launcher.config.settings import settings_of
from launcher.resources.config_checks import check
from launcher.resources.hardware import find_hardware, planned_hardware
from launcher.resources.missing_files import find_shape
from launcher.resources.run_plan import make_plan
from tests.support.composed import composed
from tests.support.machine import scaled

DEPLOY = REPOSITORY / "deploy"
SBATCH, UNIT = DEPLOY / "slurm" / "grpo.sbatch", DEPLOY / "systemd" / "grpo@.service"
RAYJOB, SKY = DEPLOY / "kuberay" / "rayjob.yaml", DEPLOY / "skypilot" / "grpo.yaml"


def planned(settings, *, nodes=1, per_node):
    """What a run with these settings uses of nodes with so many of the GPUs that its preset is for."""
    config = composed(*settings)
    check(config)
    described = replace(config, cluster=replace(config.cluster, n_gpus_per_node=per_node))
    hardware = planned_hardware(described, find_hardware())
    assert hardware.n_nodes == nodes
    plan = make_plan(config, hardware, find_shape(config))
    assert plan.shortage is None
    return config, plan


# ── Slurm ──

PROGRAMS = {
    "grpo-launcher": """
        import pathlib, signal, sys, time
        heard = []
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, lambda got, frame: heard.append(signal.Signals(got).name))
        note("grpo-launcher", *sys.argv[1:])
        folder.joinpath("runs").touch()
        give_up_at = time.monotonic() + 300
        while not heard and not folder.joinpath("exit").exists() and time.monotonic() < give_up_at:
            time.sleep(0.01)
        time.sleep(0.2)  # to save takes longer than the script's trap
        note("heard", *heard)
        sys.exit({"SIGUSR1": 75, "SIGTERM": 130}[heard[0]] if heard else int(folder.joinpath("exit").read_text()))
    """,
    "srun": 'note("srun", *sys.argv[1:])\nsignal.pause()',
    "scontrol": 'note("scontrol", *sys.argv[1:])',
    "ray": 'note("ray", *sys.argv[1:])',
    "python": 'note("python", *sys.argv[1:])\nprint("export RAY_AUTH_MODE=token")',
    "hostname": """
        given = folder / "addresses"
        addresses = given.read_text() if given.exists() else "10.0.0.1 fd00::1"
        print("node-0" if sys.argv[1:] == ["-s"] else addresses)
    """,
}
HEAD = """#!{python}
import pathlib, shlex, signal, sys
folder = pathlib.Path({folder!r})
def note(*words):
    with (folder / "said").open("a") as file:
        file.write(shlex.join(words) + "\\n")
"""


class Job:
    """The batch script, with stand-ins for Slurm, Ray and the launcher on its PATH."""

    def __init__(self, folder, *arguments, **environment):
        self.folder = folder
        bin_ = folder / "bin"
        bin_.mkdir()
        for name, body in PROGRAMS.items():
            text = "\n".join(line.removeprefix("        ") for line in body.splitlines())
            (bin_ / name).write_text(HEAD.format(python=sys.executable, folder=str(folder)) + text)
            (bin_ / name).chmod(0o755)
        given = {"PATH": f"{bin_}:{os.environ['PATH']}", "SLURM_JOB_ID": "77", **environment}
        self.process = subprocess.Popen(
            ["bash", str(SBATCH), *arguments],
            env=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def wait_for_the_run(self):
        give_up_at = time.monotonic() + scaled(60)
        while not (self.folder / "runs").exists():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < give_up_at, self.process.communicate()
            time.sleep(0.01)

    def said(self):
        return self.said_in(self.folder)

    @staticmethod
    def said_in(folder):
        return [shlex.split(line) for line in (folder / "said").read_text().splitlines()]

    def ends(self):
        output, _ = self.process.communicate(timeout=scaled(60))
        return self.process.returncode, output


@pytest.fixture
def job(tmp_path):
    started = []

    def start(*arguments, **environment):
        started.append(Job(tmp_path, *arguments, **environment))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            os.killpg(one.process.pid, signal.SIGKILL)
            one.process.communicate()


def test_the_signal_before_the_time_limit_reaches_the_run_and_the_job_is_put_into_the_queue_again(job):
    one = job("conf=gsm8k_h200")
    one.wait_for_the_run()
    one.process.send_signal(signal.SIGUSR1)
    assert one.ends()[0] == 0
    assert one.said() == [
        ["grpo-launcher", "conf=gsm8k_h200", "run.notice_s=120"],
        ["heard", "SIGUSR1"],
        ["scontrol", "requeue", "77"],
    ]


def test_a_job_that_is_cancelled_saves_and_is_not_put_into_the_queue(job):
    one = job("conf=gsm8k_h200")
    one.wait_for_the_run()
    one.process.send_signal(signal.SIGTERM)
    assert one.ends()[0] == EXIT_CODES["ABORTED"]
    assert [words[0] for words in one.said()] == ["grpo-launcher", "heard"]


@pytest.mark.parametrize("code", [0, 2, 3])
def test_any_other_end_is_the_job_s_own(job, tmp_path, code):
    (tmp_path / "exit").write_text(str(code))
    one = job("conf=gsm8k_h200")
    assert one.ends()[0] == code
    assert "scontrol" not in [words[0] for words in one.said()]


def test_several_nodes_get_a_ray_cluster_that_ends_with_the_run(job):
    one = job("conf=gsm8k_h200_cluster", SLURM_JOB_NUM_NODES="3", SLURMD_NODENAME="node-0", GRPO_TOKEN_FOLDER="/keys")
    one.wait_for_the_run()
    one.process.send_signal(signal.SIGUSR1)
    assert one.ends()[0] == 0
    said = one.said()
    settings = ["run.notice_s=120", "cluster.address=10.0.0.1:6379", "cluster.n_nodes=3"]
    assert ["python", "-m", "scripts.ray_environment", "/keys"] in said
    assert ["ray", "start", "--head", "--node-ip-address=10.0.0.1", "--port=6379"] in said
    (step,) = [words for words in said if words[0] == "srun"]
    assert step[1:4] == ["--nodes=2", "--ntasks=2", "--exclude=node-0"]
    assert step[4:] == ["ray", "start", "--address=10.0.0.1:6379", "--block"]
    assert ["grpo-launcher", "conf=gsm8k_h200_cluster", *settings] in said
    assert said[-2:] == [["ray", "stop"], ["scontrol", "requeue", "77"]]


@pytest.mark.parametrize("addresses", ["127.0.1.1 10.0.0.1", "fe80::1 169.254.0.7 10.0.0.1", "::1 0.0.0.0 10.0.0.1"])
def test_the_head_s_address_is_one_that_another_node_reaches(job, tmp_path, addresses):
    (tmp_path / "addresses").write_text(addresses)
    (tmp_path / "exit").write_text("0")
    one = job("conf=gsm8k_h200_cluster", SLURM_JOB_NUM_NODES="2", GRPO_TOKEN_FOLDER="/keys")
    one.wait_for_the_run()
    assert one.ends()[0] == 0
    assert ["ray", "start", "--head", "--node-ip-address=10.0.0.1", "--port=6379"] in one.said()


def test_the_head_s_address_is_that_of_the_way_to_another_node(job, tmp_path):
    """A node has several, and only one leads there: not Docker's."""
    (tmp_path / "addresses").write_text("172.17.0.1 10.0.0.1")
    (tmp_path / "exit").write_text("0")
    ways = {
        "scontrol": 'printf "node-0\\nnode-1\\n"',
        "getent": '[ "$2" = node-1 ] && echo "10.0.0.2 STREAM node-1"',
        "ip": '[ "$4" = 10.0.0.2 ] && echo "10.0.0.2 dev eth1 src 10.0.0.1 uid 0"',
    }
    extra = tmp_path / "ways"
    extra.mkdir()
    for name, body in ways.items():
        (extra / name).write_text(f"#!/bin/bash\n{body}\n")
        (extra / name).chmod(0o755)
    path = f"{extra}:{tmp_path / 'bin'}:{os.environ['PATH']}"
    one = job("conf=gsm8k_h200_cluster", SLURM_JOB_NUM_NODES="2", GRPO_TOKEN_FOLDER="/keys", PATH=path)
    one.wait_for_the_run()
    assert one.ends()[0] == 0
    assert ["ray", "start", "--head", "--node-ip-address=10.0.0.1", "--port=6379"] in one.said()


@pytest.mark.parametrize("addresses", ["127.0.1.1", "", "fe80::1 ::1", "169.254.3.4", "fd00::1"])
def test_a_node_without_an_address_for_others_is_refused_before_anything_starts(job, tmp_path, addresses):
    (tmp_path / "addresses").write_text(addresses)
    code, output = job("conf=gsm8k_h200_cluster", SLURM_JOB_NUM_NODES="2", GRPO_TOKEN_FOLDER="/keys").ends()
    assert code != 0
    assert output.count("\n") == 1
    assert "set GRPO_HEAD_ADDRESS to one" in output
    assert not {"ray", "srun", "grpo-launcher"} & {words[0] for words in Job.said_in(tmp_path)}


@pytest.mark.parametrize("given", ["127.0.0.1", "node-0", "10.0.0.1:6379", "::1"])
def test_an_address_that_was_given_and_can_t_be_the_head_s_is_named(job, tmp_path, given):
    (tmp_path / "addresses").write_text("10.0.0.1")
    settings = {"SLURM_JOB_NUM_NODES": "2", "GRPO_TOKEN_FOLDER": "/keys", "GRPO_HEAD_ADDRESS": given}
    code, output = job("conf=gsm8k_h200_cluster", **settings).ends()
    assert code != 0
    assert output.startswith(f"GRPO_HEAD_ADDRESS={given} is no IPv4 address of node-0 that other nodes reach")
    assert output.count("\n") == 1


def test_several_nodes_without_a_folder_for_the_token_are_refused_in_one_message(job):
    code, output = job("conf=gsm8k_h200_cluster", SLURM_JOB_NUM_NODES="2").ends()
    assert code != 0
    assert output.count("\n") == 1
    assert "GRPO_TOKEN_FOLDER: set it to a folder of yours that each node sees" in output


def test_the_script_asks_slurm_for_the_signal_and_leaves_the_run_as_much_time():
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", SBATCH.read_text(), re.M))
    assert options["signal"] == "B:USR1@120"
    assert "requeue" in options
    assert "run.notice_s=120" in SBATCH.read_text()
    assert f"RESUMES={RESUMES}\n" in SBATCH.read_text()


SLURM_EXAMPLES = [
    line.partition("sbatch ")[2]
    for page in (SBATCH, REPOSITORY / "docs" / "clusters.md")
    for line in page.read_text().splitlines()
    if re.search(r"\bsbatch .*deploy/slurm/grpo\.sbatch conf=", line)
]


def as_asked_of_slurm(example):
    """Options of the script, and above them those of the command; the settings that the run gets."""
    given, _, settings = example.partition("deploy/slurm/grpo.sbatch ")
    options = re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", SBATCH.read_text(), re.M)
    return dict(options + re.findall(r"--([\w-]+)(?:=(\S+))?", given)), shlex.split(settings, comments=True)


@pytest.mark.parametrize("example", SLURM_EXAMPLES)
def test_a_slurm_job_asks_for_the_gpus_that_its_run_uses(example):
    asked, settings = as_asked_of_slurm(example)
    nodes, per_node = int(asked["nodes"]), int(asked["gpus-per-node"])
    if nodes > 1:
        settings += ["cluster.address=10.0.0.1:6379", f"cluster.n_nodes={nodes}"]
        assert "exclusive" in asked, "nobody else's Ray has port 6379 there"
    config, plan = planned(settings, nodes=nodes, per_node=per_node)
    assert plan.gpus_needed == nodes * per_node
    host = [place.planned for place in plan.places if place.gpu is None]
    assert max(host) <= per_node * int(asked["mem-per-gpu"].removesuffix("G")) * 2**30
    booked = config.sglang.n_servers * config.sglang.num_cpus + config.actor.dp_size * config.actor.num_cpus
    assert booked <= nodes * per_node * int(asked["cpus-per-gpu"])


def test_there_are_examples_of_one_gpu_of_one_node_and_of_several():
    asked = [as_asked_of_slurm(one)[0] for one in SLURM_EXAMPLES]
    assert {("1", "1"), ("1", "8"), ("2", "8")} <= {(one["nodes"], one["gpus-per-node"]) for one in asked}


# ── systemd ──


def test_the_unit_restarts_what_was_killed_and_nothing_that_has_said_its_word():
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str
    parser.read(UNIT)
    service = parser["Service"]
    assert service["Restart"] == "on-failure"
    final = {int(code) for key in ("SuccessExitStatus", "RestartPreventExitStatus") for code in service[key].split()}
    assert final == {1, 2, *EXIT_CODES.values()} - {0}
    assert RESUMES not in final
    assert service["ExecStart"].split()[1] == "grpo-launcher"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_has_nothing_to_say(tmp_path):
    done = subprocess.run(
        ["systemd-analyze", "verify", "--user", str(UNIT)],
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=scaled(60),
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


# ── Kubernetes, clouds ──


RAYJOB_SCHEMA = yaml.safe_load((REPOSITORY / "tests" / "support" / "rayjob_schema.yaml").read_text())


@pytest.mark.parametrize(
    ("written", "instead"),
    [
        ("backoffLimit", "backofLimit"),
        ("replicas: 1\n", "replicas: one\n"),
        ("mode: token", "mode: password"),
        ("memory: 512Gi", "memory: 512 GB"),
        ("- groupName: gpu\n        replicas", "- replicas"),
    ],
)
def test_the_rayjob_is_of_the_resource_s_schema_and_a_wrong_one_is_not(written, instead):
    text = RAYJOB.read_text()
    jsonschema.validate(yaml.safe_load(text), RAYJOB_SCHEMA)
    assert written in text
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(yaml.safe_load(text.replace(written, instead)), RAYJOB_SCHEMA)


def test_the_rayjob_is_of_our_ray():
    job = yaml.safe_load(RAYJOB.read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    assert f"ray=={cluster['rayVersion']}\n" in (REPOSITORY / "constraints.txt").read_text()
    assert cluster["authOptions"] == {"mode": "token"}
    (group,) = cluster["workerGroupSpecs"]
    assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    mounted = {one["mountPath"] for one in group["template"]["spec"]["containers"][0]["volumeMounts"]}
    assert {"/shared", "/dev/shm"} == mounted


def test_the_rayjob_asks_for_the_gpus_that_its_run_uses():
    spec = yaml.safe_load(RAYJOB.read_text())["spec"]
    (group,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    pods = [spec["rayClusterSpec"]["headGroupSpec"], *[group] * group["replicas"]]
    limits = [pod["template"]["spec"]["containers"][0]["resources"]["limits"] for pod in pods]
    gpus = [int(limit["nvidia.com/gpu"]) for limit in limits]
    settings = shlex.split(spec["entrypoint"])[1:]
    _, plan = planned(settings, nodes=len(pods), per_node=gpus[0])
    assert plan.gpus_needed == sum(gpus)


SKY_RESOURCES = yaml.safe_load("""# The fields of `resources` that the recipe uses, as SkyPilot itself checks them
type: object
additionalProperties: false
properties:
  accelerators: {anyOf: [{type: string}, {type: object}, {type: array, items: {type: string}}]}
  use_spot: {type: boolean}
  disk_size: {anyOf: [{type: string}, {type: integer}]}
  job_recovery:
    type: object
    additionalProperties: false
    properties:
      strategy: {type: [string, 'null']}
      max_restarts_on_errors: {type: integer, minimum: 0}
      recover_on_exit_codes:
        {type: array, uniqueItems: true, items: {type: integer, minimum: 0, maximum: 255}}
""")


@pytest.mark.parametrize(
    ("written", "instead"),
    [
        ("use_spot: true", "use_spot: yes please"),
        ("use_spot:", "spot:"),
        ("[75]", "['75']"),
        ("recover_on_exit_codes", "recover_on"),
    ],
)
def test_the_resources_of_the_managed_job_are_of_skypilot_s_schema_and_wrong_ones_are_not(written, instead):
    text = SKY.read_text()
    jsonschema.validate(yaml.safe_load(text)["resources"], SKY_RESOURCES)
    assert written in text
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(yaml.safe_load(text.replace(written, instead))["resources"], SKY_RESOURCES)


def test_the_managed_job_is_recovered_from_the_exit_code_that_resumes_only():
    task = yaml.safe_load(SKY.read_text())
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [RESUMES]
    assert {"BUCKET", "NOTICE"} == task["envs"].keys()
    assert all(f'"${name}"' in task["run"] for name in task["envs"])


def managed_settings():
    """Of the launcher, as the managed job gives them."""
    task = yaml.safe_load(SKY.read_text())
    (line,) = [line for line in task["run"].splitlines() if "grpo-launcher" in line]
    for name, value in task["envs"].items():
        line = line.replace(f"${name}", value or "s3://yours/grpo")
    return shlex.split(line)[1:]


MACHINES = re.findall(r"accelerators: (\w+):(\d+)(?: and (conf=\w+))?", SKY.read_text())


@pytest.mark.parametrize(("card", "count", "preset"), MACHINES)
def test_the_managed_job_rents_the_gpus_that_its_run_uses(card, count, preset):
    settings = [*managed_settings(), *([preset] if preset else [])]
    config, plan = planned(settings, per_node=int(count))
    assert plan.gpus_needed == int(count)
    assert config.hardware.gpu_memory_gib <= {"H100": 79, "H200": 139}[card]


def test_the_managed_job_says_what_to_rent_for_a_preset_of_8_gpus_too():
    assert sorted(MACHINES) == [("H100", "1", ""), ("H100", "8", "conf=gsm8k_node_80gb")]
    assert yaml.safe_load(SKY.read_text())["resources"]["accelerators"] == "H100:1"


def test_the_job_names_settings_for_a_cloud_that_leaves_30_s():
    (said,) = re.findall(r"# .*30 s.*: add (.*)$", SKY.read_text(), re.M)
    assert said in (REPOSITORY / "docs" / "clusters.md").read_text()
    config = composed(*managed_settings(), *shlex.split(said))
    check(config)
    assert config.run.notice_s == 30
    with pytest.raises(ConfigError, match=r"run\.notice_s=30\.0: more than run\.margin_s=30.* lower run\.margin_s"):
        check(composed(*managed_settings(), "run.notice_s=30"))


def test_of_30_s_none_is_left_unused_before_a_save_and_its_copy_were_measured():
    (said,) = re.findall(r"# .*30 s.*: add (.*)$", SKY.read_text(), re.M)
    short = composed(*managed_settings(), *shlex.split(said)).run
    usual = composed(*managed_settings()).run

    def begins(run):
        return bool(due([Deadline(at=run.notice_s, what="it")], TimesTaken(copy_s=None), run.margin_s, now=0.0))

    assert (begins(short), begins(usual)) == (True, False)


@pytest.mark.parametrize("path", [SBATCH, UNIT, RAYJOB, SKY], ids=lambda path: path.name)
def test_the_settings_and_presets_that_a_recipe_names_exist(path):
    known = {setting.key for setting in settings_of(RunConfig)}
    text = re.sub(r"https?://\S+", "", path.read_text())
    named = re.findall(r"(?<![\w./-])([a-z_]+(?:\.[a-z_]+)+|conf)=([\w./-]*)", text)
    assert named
    assert [key for key, _ in named if key != "conf" and key not in known] == []
    assert [value for key, value in named if key == "conf" and value not in presets()] == []
