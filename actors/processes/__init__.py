"""Processes of this machine: start them under a guard, watch their end, signal exactly the one that is meant.

Standard library only in `process_guard`, `guard_options`, `log_drain`, `process_tree` and `exit_notifier`, which run
with `python -S`, and in `forked_start`; the others may import `launcher.base`. Begin with `process_guard`, which draws
the tree of processes around a server.
"""
