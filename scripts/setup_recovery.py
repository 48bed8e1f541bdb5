"""Sets up the checkpoint that a run goes back to: `python -m scripts.setup_recovery --help`.

See docs/checkpoints.md. Ours: a request in one small file, which the run takes at once, or its next launch. AReaL's:
what its own resume loads. The checkpoints themselves stay as they are; --undo takes the last set-up back.
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from launcher.base.errors import UsageError
from launcher.checkpoints.checkpoint_catalog import CatalogEntry, CheckpointCatalog
from launcher.checkpoints.checkpoint_store import SET_ASIDE
from launcher.checkpoints.restore_request import (
    FORCED,
    ask_restore,
    asked_before,
    refuse_old_form,
    withdraw_restore,
)
from launcher.run_files.run_paths import login_name
from scripts.checkpoints import areal_setup
from scripts.checkpoints.arguments import NOTHING_FITS, Parser, add_trial, step, trial_of
from scripts.checkpoints.choosing import Chosen, Wanted, choose, read_catalog
from scripts.checkpoints.command import next_command
from scripts.checkpoints.display import say_damage, say_not_read
from scripts.checkpoints.trial_lock import held_or_running
from scripts.ending import DONE, ended, print_json

NAME = "setup_recovery"
EXIT_CODES = (
    "0 it is set up, or undone; 1 it was refused, and nothing was changed: none fits, it is torn, it holds damage; "
    "2 there is no such trial, a run of AReaL's is running, or the command is wrong"
)


def main(arguments: Sequence[str] | None = None) -> int:
    return ended(lambda: _do(parser().parse_args(arguments)), refused=NOTHING_FITS)


def parser() -> argparse.ArgumentParser:
    made = Parser(
        NAME,
        "Set up the checkpoint that a run goes back to: at once where it is running, else with its next launch.",
        EXIT_CODES,
    )
    add_trial(made)
    which = made.add_argument_group("which checkpoint").add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--before-step", type=step, metavar="N", help="the newest complete checkpoint of a step before N"
    )
    which.add_argument("--checkpoint-path", type=Path, metavar="FOLDER", help="this checkpoint")
    which.add_argument("--good", action="store_true", help="the newest good checkpoint")
    which.add_argument("--undo", action="store_true", help="undo the last set-up, as long as the run has not taken it")
    made.add_argument(
        "--force", action="store_true", help="accept a checkpoint with known damage; never an incomplete one"
    )
    made.add_argument("--json", action="store_true", help="print what was done as JSON")
    return made


def _do(given: argparse.Namespace) -> int:
    return _undo(given) if given.undo else _set_up(given)


def _set_up(given: argparse.Namespace) -> int:
    wanted = Wanted(before_step=given.before_step, good=given.good, path=given.checkpoint_path, force=given.force)
    trial = trial_of(given)
    with held_or_running(trial, NAME) as is_running:
        facts, lines = set_up(read_catalog(trial), wanted, is_running=is_running)
    if given.json:
        print_json(facts)
    else:
        print("\n".join(lines))
    return DONE


def set_up(
    catalog: CheckpointCatalog, wanted: Wanted, *, is_running: bool = False
) -> tuple[dict[str, object], list[str]]:
    """What was done, as facts and as text. Raises CheckpointError and UsageError, with nothing changed."""
    if catalog.trial.is_ours:
        refuse_old_form(catalog.trial.paths)
    chosen = choose(catalog, wanted)
    if chosen is None:
        return _stays(catalog)
    facts = _made(catalog, chosen) | {"is_running": is_running}
    return facts, [*_lines(catalog, chosen, facts)]


def _stays(catalog: CheckpointCatalog) -> tuple[dict[str, object], list[str]]:
    """AReaL's own recover folder is the best there is: model, optimizer and data position of one step."""
    info, trial = catalog.recover_info, catalog.trial
    assert info is not None
    assert info.name is not None
    command = next_command(trial)
    facts: dict[str, object] = {
        "format": "grpo-setup/1",
        "step": info.name.global_step,
        "source": str(trial.areal_checkpoint),
        "recover_checkpoint": str(trial.areal_checkpoint),
        "recover_info": str(info.folder),
        "how": "there already",
        "has_optimizer": True,
        "next_command": command,
    }
    step = info.name.global_step
    return facts, [
        f"{trial.name}: nothing to do: AReaL's own recover folder fits, of step {step}, with its optimizer",
        f"  {trial.areal_checkpoint}",
        f"continue with: {command}",
        *filter(None, [say_not_read(catalog)]),
    ]


def _made(catalog: CheckpointCatalog, chosen: Chosen) -> dict[str, object]:
    """Do it. Raises CheckpointError, with nothing changed."""
    entry, trial = chosen.entry, catalog.trial
    facts: dict[str, object] = {
        "format": "grpo-setup/1",
        "step": entry.global_step,
        "source": str(entry.path),
        "forced": chosen.forced,
        "passed_over": list(chosen.passed_over),
    }
    if trial.is_ours:
        more = _asked(catalog, entry, chosen.forced)
    else:
        made = areal_setup.prepare(catalog, entry, forced=chosen.forced)
        more = {
            "recover_checkpoint": made.checkpoint,
            "recover_info": made.info,
            "how": "written from the export",
            "has_optimizer": False,
            "data_position_of_step": made.data_step,
        }
    return facts | more | {"next_command": next_command(trial, has_optimizer=bool(more["has_optimizer"]))}


def _asked(catalog: CheckpointCatalog, entry: CatalogEntry, forced: str) -> dict[str, object]:
    """Have a run of ours go back. Raises CheckpointError, UsageError."""
    paths, damage = catalog.trial.paths, catalog.health.damage
    store = paths.default_checkpoints
    if entry.path.parent not in (store, store / SET_ASIDE):
        raise UsageError(f"{entry.path} is not one of the run's checkpoints", f"copy it into {store} first")
    is_before = damage is not None and entry.global_step < damage.first_step
    before = asked_before(paths)
    ask_restore(
        paths,
        entry.checkpoint,
        why=f"set up by {login_name()}@{socket.gethostname()}" + (f"; {FORCED}{forced}" if forced else ""),
        condemn_after=damage.first_step - 1 if damage is not None and is_before else None,
    )
    return {
        "recover_checkpoint": str(entry.path),
        "how": str(paths.restore),
        "has_optimizer": True,
        "in_place_of_step": None if before is None else before.step,
    }


def _lines(catalog: CheckpointCatalog, chosen: Chosen, facts: dict[str, object]) -> Iterator[str]:
    name = catalog.trial.name
    goes_back = "the run goes back to" if facts["is_running"] else "the next launch resumes from"
    yield f"{name}: {goes_back} step {facts['step']}, at step {chosen.entry.global_step + 1}"
    yield f"  {facts['recover_checkpoint']} ({facts['how']}), from {facts['source']}"
    if facts.get("in_place_of_step") is not None:
        yield f"  in place of the set-up of step {facts['in_place_of_step']}, which the run has not taken"
    if catalog.health.damage is not None:
        yield f"  {say_damage(catalog.health.damage)}"
    if why := catalog.health.not_known:
        yield f"  its health was not seen: {why}"
    for passed in chosen.passed_over:
        yield f"  passed over: {passed}"
    if chosen.forced:
        yield f"  FORCED although: {chosen.forced}"
    if not facts["has_optimizer"]:
        yield f"  an export holds no optimizer: AReaL begins with a fresh one, which needs {areal_setup.NO_OPTIMIZER}"
        yield "  and a few steps of warm-up (actor.optimizer.warmup_steps_proportion), or the first steps are too large"
        yield f"  the data position is that of step {facts['data_position_of_step']}: prompts are left out or met again"
    yield "  take it back: the same command with --undo in place of the choice"
    if facts["is_running"]:
        yield "it is running, and does so by itself: it pauses, saves, loads that step and goes on (recovery.taken)"
    else:
        yield f"continue with: {facts['next_command']}"
    if skipped := say_not_read(catalog):
        yield skipped


def _undo(given: argparse.Namespace) -> int:
    if given.force:
        raise UsageError("--undo takes no --force", "leave it out")
    trial = trial_of(given)
    with held_or_running(trial, NAME):
        left = withdraw_restore(trial.paths) if trial.is_ours else areal_setup.undo(trial)
    if given.json:
        print_json({"format": "grpo-setup/1", "undone": True, "now": left})
    else:
        print(f"{trial.name}: undone; {left}")
    return DONE


if __name__ == "__main__":
    sys.exit(main())
