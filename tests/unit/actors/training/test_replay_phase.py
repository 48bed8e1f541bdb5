"""While prompts of healthy steps are answered again, the trainer may wait for a server as in any rollout."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from actors.rollout.live_rollouts import Stopped
from actors.supervision.trainer_signs import waits_for
from actors.training.interfaces import Phase
from actors.training.training import Training
from launcher.base.messages import ServerInfo, ServerState, TrainerView


def test_without_a_server_it_waits_for_one_and_is_not_hung():
    seen = []
    training = Training.__new__(Training)
    training._loop = SimpleNamespace(phase=Phase(name="train"))

    def collect(queue, *, want, weight_version):
        view = TrainerView(pid=1, is_started=True, is_running=True, is_allowed=True, phase=training._loop.phase.name)
        seen.append((waits_for(view), want, weight_version))
        raise Stopped

    training.servers = SimpleNamespace(rollouts=SimpleNamespace(collect_apart=collect))
    with pytest.raises(Stopped):
        training._replay(None, 4, 9)
    assert seen == [("a server", 4, 9)]
    assert training._loop.phase.name == "train", "the step goes on where it was"


@pytest.mark.parametrize(("lineage", "waits"), [(2, ""), (1, "a server")])
def test_a_server_with_what_a_restore_undid_is_none_to_make_rollouts(lineage, waits):
    held = ServerInfo(
        name="s0", index=0, generation=0, state=ServerState.READY, url="http://s", weight_version=7, lineage=lineage
    )
    view = TrainerView(pid=1, is_started=True, is_running=True, phase="rollout", policy_version=7, lineage=2)
    assert waits_for(replace(view, servers=(held,))) == waits
