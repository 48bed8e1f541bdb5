"""Diagnoses a run from its logs: when it went wrong, why, and what to do. No Ray, no torch, no network.

`reading` turns logs into steps and events, `judging` finds onset, cause and advice in them, `output` shows the result.
Each imports only the ones before it. Begin at `judging/verdict.py`.
"""
