"""Runs the command."""

import sys

from scripts.gpu_smoke import main

sys.exit(main())
