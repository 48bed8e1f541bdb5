"""What an operator runs: `python -m scripts.<tool> --help`."""

import sys
from types import TracebackType


def _say_interrupted(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


if sys.argv[:1] == ["-m"]:  # a tool is starting: Ctrl-C while its libraries are read is no defect to trace
    sys.excepthook = _say_interrupted
