"""Processes of this machine: run them in a host, watch their end, signal exactly the one that is meant.

Standard library only in `process_host`, `log_drain` and `process_tree`, which run with `python -S`; the others may
import `launcher.base`. Begin with `process_host`, which draws the tree of processes around a server.
"""
