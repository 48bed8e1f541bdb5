"""Which nodes are lost is said once, also by a Coordinator that was lost with one; who has no place is told from who
is only being started."""

import asyncio

from actors.cluster.node_watch import HOMELESS_S, ClusterNode, NodeWatch


class Cluster:
    def __init__(self, *alive: str, known: frozenset[str] = frozenset()) -> None:
        self.alive = set(alive)
        self.dead = set[str]()
        self.placed = {"a"}
        self.now = 0.0
        self.told: list[str] = []
        self.watch = NodeWatch(
            {"server-0": "a"},
            lost=lambda node: self.told.append(f"lost {node.id}"),
            joined=lambda node: self.told.append(f"joined {node.id}"),
            known=known,
            look=self.nodes,
            has_place=lambda actor: actor in self.placed,
            clock=lambda: self.now,
        )

    def nodes(self) -> dict[str, ClusterNode]:
        return {
            name: ClusterNode(id=name, address="10.0.0.1", is_alive=name in self.alive)
            for name in self.alive | self.dead
        }

    def lose(self, name: str) -> None:
        self.alive.remove(name)
        self.dead.add(name)

    def look(self) -> list[str]:
        asyncio.run(self.watch.observe_nodes())
        told = self.told
        self.told = []
        return sorted(told)


def test_a_node_is_lost_once_and_joins_once():
    cluster = Cluster("n1", "n2")
    assert cluster.look() == ["joined n1", "joined n2"]
    assert cluster.look() == []
    cluster.lose("n2")
    assert cluster.look() == ["lost n2"]
    cluster.alive.add("n3")
    assert cluster.look() == ["joined n3"]
    assert cluster.look() == []


def test_nodes_that_were_dead_before_the_run_are_nobodys_loss():
    cluster = Cluster("n1")
    cluster.dead.add("n0")
    assert cluster.look() == ["joined n1"]


def test_a_coordinator_that_was_lost_with_its_node_is_followed_by_one_that_says_so():
    cluster = Cluster("n1", known=frozenset({"n1", "n2"}))
    cluster.dead.add("n2")
    assert cluster.look() == ["lost n2"]


def test_who_is_nowhere_for_long_has_no_place_and_who_is_being_started_has():
    cluster = Cluster("n1", "n2")
    cluster.look()
    assert cluster.watch.unschedulable_since("server-0") is None
    cluster.placed.clear()
    cluster.now = 100.0
    cluster.look()
    assert cluster.watch.unschedulable_since("server-0") is None
    cluster.now += HOMELESS_S
    cluster.look()
    assert cluster.watch.unschedulable_since("server-0") == 100.0
    cluster.placed.add("a")
    cluster.look()
    assert cluster.watch.unschedulable_since("server-0") is None


def test_on_one_node_nobody_is_asked_for_a_place():
    cluster = Cluster("n1")
    cluster.placed.clear()
    cluster.look()
    cluster.now += 2 * HOMELESS_S
    cluster.look()
    assert cluster.watch.unschedulable_since("server-0") is None
