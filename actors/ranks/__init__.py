"""A trainer of several ranks: rank 0's control of the others, and the actor that runs each of them.

May import `actors.model`, `actors.cluster` and what lies below them. Begin with `rank_controller`.
"""
