"""Judges what was read: since which step the rewards fell, why, what to change, and from which checkpoint to resume.

May import `launcher.diagnosis.reading` and the rooms below diagnosis; reads nothing but its arguments. Begin at
`verdict.py`: `diagnose` calls the others in order. What is evidence of which cause is a table in `rules.py`.
"""
