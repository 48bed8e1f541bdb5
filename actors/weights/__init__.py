"""Getting the trainer's weights to the servers: folders, publishing, and the check that a server holds them.

May import `actors.model`, `actors.rollout`, `actors.serving` and what lies below them. Begin with `weight_publisher`.
"""
