"""What the nodes of a cluster answer becomes one message: each finding once, with the nodes it is of."""

from actors.cluster.node_answers import NodeAnswer
from actors.cluster.node_readiness import _check_this_node, node_problems
from launcher.base.findings import Finding, Severity
from launcher.resources import node_checks
from launcher.resources.node_checks import check_node
from tests.support.composed import composed

OLD = Finding(subject="driver", text="550.1", level=Severity.GPU, hint="install another")
ABSENT = Finding(subject="packages", text="sglang not installed", level=Severity.BAD, hint="pip install it")
NOTE = Finding(subject="GPU 0", text="busy", level=Severity.NOTE, hint="end it")
ON_GPUS = composed("conf=gsm8k_h200_cluster")
ON_CPUS = composed("conf=arithmetic_cpu")


def node(name, *checks, gpus=8.0, problem=""):
    return NodeAnswer(node=name, address=name, gpus=gpus, answer=checks, problem=problem)


def test_a_finding_is_told_once_with_its_nodes():
    said = node_problems(ON_GPUS, [node("a", OLD, NOTE), node("b", OLD), node("c", NOTE)])
    assert said == "nodes a, b: driver: 550.1\n  → install another"


def test_two_findings_and_a_silent_node_are_all_told():
    said = node_problems(ON_GPUS, [node("a", OLD, ABSENT), node("b", problem="no answer within 90 s")])
    assert said.startswith("3 findings:\n")
    assert all(text in said for text in ("node a: driver", "node a: packages", "node b: no answer within 90 s"))


def test_what_needs_a_gpu_is_not_asked_of_a_node_without_one():
    assert node_problems(ON_GPUS, [node("a", OLD, gpus=0)]) == ""
    assert "packages" in node_problems(ON_GPUS, [node("a", OLD, ABSENT, gpus=0)])


def test_a_run_on_the_cpu_needs_no_gpu_that_works():
    assert node_problems(ON_CPUS, [node("a", OLD)]) == ""
    assert "packages" in node_problems(ON_CPUS, [node("a", ABSENT)])


def test_a_node_that_ray_runs_on_already_needs_room_for_a_server_alone(monkeypatch):
    """A node of a running cluster was refused for want of the room that Ray's own processes had taken there."""

    def processes(room):
        monkeypatch.setattr(node_checks, "room_for_processes", lambda: (room, "pids.max is 800"))
        both = (*check_node(), *_check_this_node._function())
        return [one.level for one in both if one.subject == "processes"]

    assert processes(350) == [Severity.BAD, Severity.OK]
    assert processes(84) == [Severity.BAD, Severity.BAD]
