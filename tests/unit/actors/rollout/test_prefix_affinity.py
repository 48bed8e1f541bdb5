"""Which server has a prompt's prefix: the one that was asked last, and is still the same at the same weights."""

import dataclasses

from actors.rollout import prefix_affinity
from actors.rollout.prefix_affinity import PrefixAffinity
from launcher.base.messages import ServerInfo, ServerState

SERVER = ServerInfo(name="server-0", index=0, generation=0, state=ServerState.READY, url="", weight_version=3)
OTHER = dataclasses.replace(SERVER, name="server-1", index=1)


def test_home_is_the_last_that_was_asked_and_no_other():
    affinity = PrefixAffinity()
    assert affinity.home("p") == ""
    affinity.asked("p", SERVER)
    assert (affinity.home("p"), affinity.home("q")) == (SERVER.name, "")
    affinity.asked("p", OTHER)
    assert affinity.home("p") == OTHER.name


def test_warm_is_the_same_incarnation_at_the_same_weights():
    affinity = PrefixAffinity()
    affinity.asked("p", SERVER)
    assert affinity.is_warm("p", SERVER)
    for change in ({"generation": 1}, {"weight_version": 4}, {"lineage": 7}, {"name": "server-1"}):
        assert not affinity.is_warm("p", dataclasses.replace(SERVER, **change))
    affinity.asked("", SERVER)
    assert not affinity.is_warm("", SERVER)


def test_the_prompt_that_was_asked_least_lately_is_forgotten_first(monkeypatch):
    monkeypatch.setattr(prefix_affinity, "MOST", 2)
    affinity = PrefixAffinity()
    for prompt in ("a", "b", "a"):
        affinity.asked(prompt, SERVER)
    assert all(affinity.home(prompt) == SERVER.name for prompt in "ab")
    affinity.asked("c", SERVER)
    assert [affinity.home(prompt) == SERVER.name for prompt in "abc"] == [True, False, True]
