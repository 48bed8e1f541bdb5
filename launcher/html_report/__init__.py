"""The page report.html: charts drawn as SVG and a Jinja2 template around them, from the facts of a run.

May import `launcher.reporting` and below. Begin at `report_writer`, which writes the page while the run continues;
`report_page` fills the template, `svg_chart` draws every chart, also those of the page that `launcher.diagnosis` makes.
"""
