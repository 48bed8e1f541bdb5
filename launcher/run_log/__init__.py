"""What a run's metrics.jsonl and events.jsonl say, read once for every tool: the one place that folds them.

May import `launcher.run_files` and below; no Ray and no torch. Begin at `run_log`, which takes the lines one by one;
`file_follower` reads them from files that may still grow.
"""
