"""The command in a process of its own."""

import os

from launcher.config.compose import REPOSITORY

QUICK = "reward.fn=tests.support.rewards:by_text"  # imported in no time
PYTHONPATH = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
