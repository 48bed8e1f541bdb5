"""Shows a diagnosis: as text for a terminal, as JSON for programs, as an HTML page with the reward curve.

May import `launcher.diagnosis.judging` and below, and `launcher.html_report` for its charts and page frame. Begin at
`as_text`, whose `facts` are what all three forms show.
"""
