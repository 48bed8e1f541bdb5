"""What this system costs: `python -m scripts.lab.benchmark <name>`, one module for each name.

Contestants are measured side by side within one run, in alternation, and reported as ratios: seconds of one machine at
one moment say little about another. docs/measurements.md has the figures and the commands they came from. A module has
`add_arguments(parser)` and `run(arguments)`, which returns what it measured (`measured`, with the arithmetic of
ratios); `__main__` prints it and writes it down. Begin there. May import everything below `scripts`.
"""
