"""Shows a diagnosis: as text for a terminal, as JSON for programs.

May import `launcher.diagnosis.judging` and below. Begin at `as_text`.
"""
