"""What this system costs: `python -m scripts.benchmark rollout|step|settings|publish|start|logs|onsets|…`.

Measured side by side within one run, in alternation, and told as ratios: seconds of one machine at one moment say
little of another. docs/benchmarks.md has the figures and the commands they came from.
"""
