"""Reads a run's files and shows them to people: live in a terminal, as a closing summary, as a curve, in WandB.

May import `launcher.resources` and below; no Ray and no torch. Begin at `run_facts`, which turns the lines that
`run_reader` reads into what happened, what was kept and what was lost; `live_display` shows a run that is under way.
"""
