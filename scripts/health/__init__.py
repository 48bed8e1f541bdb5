"""The checks of `python -m scripts.check_health`: each observes one thing, and a pure function judges what it saw.

May import `launcher` and what asks processes and servers in `actors`. Begin at `findings.py` for what a check returns,
and at `run_check.py` for a complete one.
"""
