"""The parts of `python -m scripts.inject_fault`: what may be done to a run from outside, when, and how."""
