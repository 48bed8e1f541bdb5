"""The Ray cluster: start or join it, reserve the run's resources, watch its nodes, fence actors that are cut off.

May import `actors.processes` and the launcher's rooms below `actors`. Begin with `ray_cluster` (start and join),
`placement_group` (where each actor runs) and `fencing` (when an actor must end itself).
"""
