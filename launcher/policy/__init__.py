"""Every decision of a run, as pure functions: observations and the time go in, data comes out. Nothing here acts.

It may import the standard library, launcher.base and launcher.config only. Begin with `plan.py`, the plan of one
look (`observed.py` → `actions.py`); `admission.py` decides about a batch, `liveness.py` and `trainer_liveness.py` about
a process, `reward_health.py` about the rewards, `restore.py` about a checkpoint, `memory_backoff.py` about settings.
"""
