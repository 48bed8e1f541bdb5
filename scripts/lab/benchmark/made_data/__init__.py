"""What the benchmarks make up: reward series, and whole runs with one cause of damage each.

It imports what scripts/lab/benchmark may. Begin with restore_world.py.
"""
