"""Reads logs of any size, by any of their writers, into one form: steps with their figures, and dated events.

May import the rooms below diagnosis (`launcher.reporting`, `launcher.checkpoints`, `launcher.policy`, …), and nothing
that judges. Begin at `inputs.py`; what comes out is in `log_records.py`.
"""
