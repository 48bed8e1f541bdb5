"""A script with TRL's GRPOTrainer: steps from what transformers prints, checkpoints as its Trainer has them. With the
LauncherCallback (launcher/adapters/trainer_callback.py) its steps come from `trainer.metrics` instead.

Seen with TRL 1.16.0 and transformers 5.12.1. At each logging step the Trainer prints a dict without the step's number,
and then its progress bar, which has it. `disable_tqdm` therefore can't be used. The script must pass
`resume_from_checkpoint` on to `train()`, as TRL's own scripts do.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher.adapters.command_adapter import MOST_REST, CommandAdapter, step_seen
from launcher.adapters.trainer_adapter import StepSeen, TrainerCommand
from launcher.base.errors import ConfigError
from launcher.config.foreign import ForeignTrainerConfig

LOGGED = re.compile(
    r"(?P<figures>\{'[^{}\r\n]*'reward': [^{}\r\n]*\})[^{}]*?\r *\d+%\|[^|\r\n]*\| (?P<step>\d+)/\d+ \["
)
"""The figures of a step, and behind them the bar of the steps; other bars have a name before their percentage."""
STATE = "trainer_state.json"
FINITE = ("loss", "grad_norm")


class TrlAdapter(CommandAdapter):
    """Raises ConfigError as CommandAdapter does; `trainer.pattern` has no use here."""

    def __init__(self, settings: ForeignTrainerConfig) -> None:
        if settings.pattern is not None:
            raise ConfigError(
                "trainer.pattern is set with trainer.adapter=trl, which reads TRL's own output",
                "set null, or trainer.metrics for a script with the LauncherCallback",
            )
        if settings.checkpoints is None:
            raise ConfigError("trainer.checkpoints=null", "set it to the script's output_dir, e.g. out/checkpoint-*")
        super().__init__(
            dataclasses.replace(
                settings,
                pattern=LOGGED.pattern,
                checkpoint_file=settings.checkpoint_file or STATE,
                resume=settings.resume or "--resume_from_checkpoint *",
            )
        )
        if self.source is None:
            self.reads = "trainer.adapter=trl (a GRPOTrainer's log, with disable_tqdm=false)"

    def command(self, resume: Path | None) -> TrainerCommand:
        """Unbuffered, so that the figures and the bar, of two streams, come in their order."""
        made = super().command(resume)
        return dataclasses.replace(made, variables={"PYTHONUNBUFFERED": "1", **made.variables})

    def read(self, text: str) -> tuple[Sequence[StepSeen], str]:
        if self.source is not None:
            return super().read(text)
        found, end = [], 0
        for match in LOGGED.finditer(text):
            end = match.end()
            figures = _figures(match["figures"])
            others = {name: figures[name] for name in FINITE if name in figures}
            step = step_seen(match["step"], figures.get("reward"), others, spread=figures.get("reward_std"))
            if step is not None:
                found.append(step)
        return found, text[end:][-MOST_REST:]

    def spread_in(self, record: Mapping[str, object]) -> object:
        return record.get("reward_std")

    def problem_of(self, path: Path, step: int, last: Path) -> str:
        """The state is the last file that the Trainer writes into a checkpoint; it is not written in one piece."""
        try:
            state = json.loads(last.read_text())
        except FileNotFoundError:
            return f"{last.name} is not there yet"
        except (OSError, ValueError) as error:
            return f"{last.name} can't be read: {error}"
        written = state.get("global_step") if isinstance(state, dict) else None
        return "" if written == step else f"{last.name} is of step {written}"


def _figures(text: str) -> dict[str, object]:
    """The printed dict; transformers prints its values as texts, which is why `nan` may stand here as a name too."""
    try:
        figures = ast.literal_eval(re.sub(r": (nan|-?inf)\b", r": '\1'", text))
    except (ValueError, SyntaxError):
        return {}
    return figures if isinstance(figures, dict) else {}
