"""The page of `python -m scripts.watch`: runs of a fileroot in a browser, from their files alone.

May import everything below `scripts`. Begin with `server`, which answers the page; `watched_run` reads one run as it
grows, `lanes` its states over time, `samples` its completions, `settings_table` its
settings; `static/` is the page itself, with the chart library uPlot beside its licence.
"""
