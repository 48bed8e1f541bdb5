"""All errors of this system, in one tree.

    LauncherError
    ├── UsageError                   the command or its surroundings are wrong; nothing was started (exit code 2)
    │   ├── ConfigError              a key: unknown, of a wrong type, out of range, or in contradiction with another
    │   │   └── UnsupportedSetting   a value that the model, its tokenizer or SGLang takes on no machine
    │   ├── ResourceError            the machine: no GPU, too little memory, a port in use, no room on a disk
    │   ├── StorageError             a folder: missing, not writable, held by another run
    │   │   └── StillRunning         the run itself is running
    │   ├── ModelError               a model folder: missing, incomplete, damaged, without a chat template
    │   │   └── UnsupportedModel     a model that this version trains on no machine
    │   ├── DataError                a data set: missing, empty, or a record that can't be used
    │   │   └── EmptyData            a data set that is there and has no records: on no machine
    │   └── RewardImportError        a reward function that can't be imported or called
    └── RunError                     a started run can't continue; it halts with its reason (exit code 3)
        ├── ServerError              an SGLang server: did not start, died, or refused
        │   ├── WeightsRefused       a server did not take, or did not confirm, a weight version
        │   └── RequestFailed        one request had no complete, valid answer; holds whether to retry
        ├── RolloutError             no rollout could be had from any server
        ├── RewardError              the reward function raised or answered nonsense
        ├── TrainerError             the step loop: non-finite numbers, a lost process
        ├── CheckpointError          a checkpoint: torn, damaged, of another run, or not written
        │   └── DiskError            its disk does not give it now, or takes nothing: nothing is known of the checkpoint
        ├── StateError               a change of the run's state that is not legal: a defect of the launcher's own
        └── JournalError             a line of the metrics, ledger or events could not be written

Each error says what happened and why, and `hint` says what to change: the key, file or value. Each survives
pickling, since it crosses actor borders. To add one: put it under the parent whose exit code it shares, draw it
above, and raise it where the cause is first known.
"""

from __future__ import annotations

import re

HINT = "\n  → "
"""Between what happened and what to change, in an error's text."""
PRINTED = re.compile(r"^error: (.*(?:\n[ \t]+\S.*)*)", re.MULTILINE)
"""An error as each command prints it: further lines of its text are indented."""


def printed_error(output: str) -> tuple[str, str] | None:
    """What happened and what to change, of the last error of ours in a command's output; None where there is none.
    Elsewhere in a line the words are another program's, or stand in the error's own text."""
    if not (found := PRINTED.findall(output)):
        return None
    message, _, hint = found[-1].partition(HINT)
    return message, hint


class LauncherError(Exception):
    """What happened (`message`) and what to change (`hint`, may be empty)."""

    exit_code = 3

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}{HINT}{self.hint}" if self.hint else self.message


class UsageError(LauncherError):
    """The command, the configuration or the machine is wrong; nothing was started."""

    exit_code = 2


class ConfigError(UsageError):
    """A setting can't be used."""


class UnsupportedSetting(ConfigError):
    """A value that goes with the model, its tokenizer or SGLang on no machine."""


class ResourceError(UsageError):
    """The machine lacks what the configuration asks for."""


class StorageError(UsageError):
    """A folder can't be read, written, or is held by another run."""


class StillRunning(StorageError):
    """The run itself is running, on whatever machine."""


class ModelError(UsageError):
    """A model folder can't be used."""


class UnsupportedModel(ModelError):
    """A model of a kind that this version does not train, whatever the machine."""


class DataError(UsageError):
    """A data set or one of its records can't be used."""


class EmptyData(DataError):
    """A data set that is there and holds no records."""


class RewardImportError(UsageError):
    """The reward function named in the configuration can't be imported or called."""


class RunError(LauncherError):
    """A started run can't continue."""


class ServerError(RunError):
    """An SGLang server did not start, died, or refused."""


class WeightsRefused(ServerError):
    """A server did not take, or did not confirm, a weight version."""


class RequestFailed(ServerError):
    """One request to a server had no complete, valid answer.

    `kind`: refused reset timeout http_5xx http_4xx truncated empty aborted malformed (the answer), stale
    nonfinite impossible (the weights), moved (to another server). `retryable`: another try, or another server, may
    do better.
    """

    def __init__(self, message: str, hint: str = "", *, kind: str = "malformed", retryable: bool = True) -> None:
        super().__init__(message, hint)
        self.kind = kind
        self.retryable = retryable


class RolloutError(RunError):
    """No rollout could be had from any server."""


class RewardError(RunError):
    """The reward function raised, or answered something that is not a finite number."""


class TrainerError(RunError):
    """The training loop can't continue."""


class CheckpointError(RunError):
    """A checkpoint is torn, damaged, of another run, or could not be written."""


class DiskError(CheckpointError):
    """A disk does not give a checkpoint now, or does not take what was to be changed: the checkpoint may be sound."""


class StateError(RunError):
    """A change of the run's state that is not legal: a defect of the launcher's own."""


class JournalError(RunError):
    """A line of the metrics, the ledger or the events could not be written."""
