"""A head that answers nobody is lost; a driver that stood still itself says nothing about the head."""

import threading

import pytest

from actors.cluster import joined_cluster
from actors.cluster.joined_cluster import SILENT_S, HeadWatch


@pytest.fixture
def head(monkeypatch):
    """It answers once; the next question waits until the end of the test."""
    asked, over = threading.Semaphore(0), threading.Event()
    answers = iter([[]])

    def alive_nodes():
        asked.release()
        if (nodes := next(answers, None)) is None:
            over.wait()
            return []
        return nodes

    monkeypatch.setattr(joined_cluster, "alive_nodes", alive_nodes)
    monkeypatch.setattr(joined_cluster, "LOOK_S", 0.0)
    yield asked
    over.set()


def watch(head):
    now = [0.0]
    found = HeadWatch(clock=lambda: now[0])
    assert head.acquire(timeout=30)
    assert head.acquire(timeout=30)
    return found, now


def test_a_head_that_does_not_answer_is_lost(head):
    found, now = watch(head)
    while now[0] < SILENT_S:
        assert found.lost() == ""
        now[0] += 0.25
    now[0] += 0.25
    assert found.lost() == "the cluster's head has not answered for 45 s"


def test_a_driver_that_stood_still_accuses_nobody(head):
    """As on a machine that was suspended: the answer may come as soon as somebody listens again."""
    found, now = watch(head)
    assert found.lost() == ""
    now[0] += 10 * SILENT_S
    assert found.lost() == ""
