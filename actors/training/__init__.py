"""The trainer: the step loop and what surrounds it (gate, checkpoints, state after each step, servers), as a Ray actor.

May import every room of `actors` below it. Begin with `step_loop`; `training` assembles its parts, `trainer` is the
actor.
"""
