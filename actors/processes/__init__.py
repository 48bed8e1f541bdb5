"""Processes of this machine: start them under a guard, watch their end, signal exactly the one that is meant.

Standard library only in `process_guard`, `process_tree` and `exit_notifier`, which run with `python -S`; the others may
import `launcher.base`. Begin with `process_guard`, which draws the tree of processes around a server.
"""
