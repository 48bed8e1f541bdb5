"""The page of a run: one HTML file with its scripts in it, and the facts of a run as JSON.

May import `launcher.reporting` and below. Begin at `page_facts`, which describes and builds the JSON; `page` puts it
into the file, `report_writer` writes report.html while the run continues, and `scripts.watch` serves the same page.
"""
