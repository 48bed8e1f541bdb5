"""Views of a run under way, as the terminal shows them."""

from launcher.base.messages import ServerInfo, ServerState, TrainerStatus
from launcher.reporting.run_view import RunView


def server(index, state, version=None, reason=""):
    return ServerInfo(
        name=f"llm_server-{index}", index=index, generation=1, state=state, weight_version=version, reason=reason
    )


def view(*, steps_done=37, total_steps=200, **changes):
    defaults = {
        "status": TrainerStatus(
            phase="train",
            next_step=steps_done,
            total_steps=total_steps,
            steps_per_epoch=100,
            policy_version=steps_done,
            pid=1,
            seconds_in_phase=0.42,
        ),
        "title": "arithmetic_cpu / trial0",
        "attempt": 1,
        "elapsed_s": 95.0,
        "rewards": tuple(0.3 + 0.01 * step for step in range(37)),
        "step_seconds": (1.0, 2.0, 9.0),
        "tokens_per_s": 1843.2,
        "servers": (server(0, ServerState.READY, 37),),
        "last_event": "checkpoint.committed epoch0epochstep19globalstep19",
    }
    return RunView(**(defaults | changes))
