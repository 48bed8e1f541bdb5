"""The command, what it decides and what it writes; `__version__` is where the version is set."""

__version__ = "0.1.0"
