"""Can the reward function be imported and called? Asked of another process: a user's module may import torch, take
long, or end the process that imports it. It is not called.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from launcher.base.errors import RewardImportError, UsageError
from launcher.config.schema import RunConfig

IMPORT_WITHIN_S = 120.0

PROBE = """
import json, sys
from actors.reward.reward_import import load_reward_fn
from launcher.base.errors import RewardImportError
answer = None
try:
    load_reward_fn(sys.argv[1])
except RewardImportError as error:
    answer = [error.message, error.hint]
print(json.dumps(answer))
"""


def missing_reward(config: RunConfig) -> Iterator[UsageError]:
    """The reward function: importable, and with the keyword arguments it will be given."""
    error = why_not_importable(config.reward.fn)
    if error is not None:
        yield error


def why_not_importable(path: str) -> RewardImportError | None:
    """What `actors.reward.reward_import` says of the function; None where it can be used."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)}
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE, path],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=IMPORT_WITHIN_S,
            check=False,
        )
        answer = json.loads(done.stdout.splitlines()[-1])  # after whatever the module printed
    except subprocess.TimeoutExpired:
        reason = f"its import did not end within {IMPORT_WITHIN_S:g} s"
        return RewardImportError(f"reward.fn={path}: {reason}", "move what takes long into the function")
    except (IndexError, ValueError):
        reason = f"its import ended the process with exit code {done.returncode}"
        return RewardImportError(f"reward.fn={path}: {reason}", f"it said: {done.stderr.strip()[-200:]}")
    return None if answer is None else RewardImportError(*answer)
