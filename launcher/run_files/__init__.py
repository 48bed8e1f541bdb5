"""The files of a run: their paths and lock, the journal and its readers, the keys, and the requests of an operator.

May import `launcher.base`, `launcher.config` and `launcher.policy`. Begin with `run_paths`.
"""
