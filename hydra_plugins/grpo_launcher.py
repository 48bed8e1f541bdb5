"""Where Hydra looks for plugins: the sweeper and the launcher of `python -m launcher -m`, from the launcher's own room.

`hydra_plugins` is a namespace that all of Hydra's plugins share: this folder must have no `__init__.py`.
"""

from launcher.config.hydra_plugin import TrialLauncher, TrialSweeper

__all__ = ["TrialLauncher", "TrialSweeper"]
