"""The server of `python -m scripts.watch`: runs of a fileroot in a browser, from their files alone.

May import everything below `scripts`. Begin with `server`, which answers the page of launcher/html_report;
`watched_run` reads one run as it grows, `run_list` says which runs there are.
"""
