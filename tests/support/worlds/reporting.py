"""The status of a run at one moment."""

from launcher.base.messages import TrainerStatus
from launcher.reporting.current_status import CurrentStatus

STATUS = TrainerStatus(
    phase="rollout", next_step=1, total_steps=9, steps_per_epoch=9, policy_version=1, pid=1, seconds_in_phase=0.0
)


NOW = CurrentStatus(
    attempt=1, beat=1, host="here", pid=1, address="local", is_detached=False, elapsed_s=1.0, status=STATUS
)
