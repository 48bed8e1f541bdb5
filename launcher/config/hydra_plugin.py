"""Hydra plugins for sweeps: a sweeper that makes the combinations, a launcher that passes them on together.

Ours, because hydra-ray-launcher 1.2.2, though it works with this Ray, runs a job as a Ray task: the run's driver would
be a worker of a cluster that outlives it, an exception of one job ends the sweep, and nothing is skipped when it is
started again. Hydra's own sweeper composes every combination first and refuses the sweep for one bad value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

Compose = Callable[[Sequence[str]], DictConfig]
"""Overrides → the composed configuration. Raises what Hydra raises."""
RunTrials = Callable[[Sequence[Sequence[str]], Compose], None]

NAME = "trials"
MODULE = "hydra_plugins.grpo_launcher"
"""Hydra takes plugins of that namespace only, so these two claim to be from there."""


class TrialSweeper(Sweeper):
    """Every combination at once, whether it can be composed or not."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._context = hydra_context
        self._launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        parser = OverridesParser.create(config_loader=self._context.config_loader)
        (combinations,) = BasicSweeper.split_arguments(parser.parse_overrides(arguments), None)
        return self._launcher.launch(combinations, initial_job_idx=0)


class TrialLauncher(Launcher):
    """Passes all combinations to `run_trials`, which `hand_over_to` sets."""

    run_trials: ClassVar[RunTrials]

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._context = hydra_context
        self._config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        type(self).run_trials(job_overrides, self._compose)
        return [JobReturn(overrides=list(one), status=JobStatus.COMPLETED) for one in job_overrides]

    def _compose(self, overrides: Sequence[str]) -> DictConfig:
        composed = self._context.config_loader.load_sweep_config(self._config, list(overrides))
        with open_dict(composed):
            del composed["hydra"]
        return composed


for _plugin in (TrialSweeper, TrialLauncher):
    _plugin.__module__ = MODULE


def store() -> None:
    """Make `hydra/launcher: trials` and `hydra/sweeper: trials` known to whoever composes."""
    configs = ConfigStore.instance()
    configs.store(group="hydra/launcher", name=NAME, node={"_target_": f"{MODULE}.{TrialLauncher.__name__}"})
    sweeper = {"_target_": f"{MODULE}.{TrialSweeper.__name__}"}
    configs.store(group="hydra/sweeper", name=NAME, node=sweeper)


def hand_over_to(run_trials: RunTrials) -> None:
    """`run_trials` is called once for each sweep."""
    TrialLauncher.run_trials = staticmethod(run_trials)
