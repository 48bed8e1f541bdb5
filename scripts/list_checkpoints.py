"""Lists the checkpoints of a trial, ours or AReaL's, each with its status: `python -m scripts.list_checkpoints --help`.

See docs/checkpoints.md. Nothing is changed and nothing is created by looking, also while the run is running.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from launcher.base.addresses import url_problem
from launcher.base.errors import ConfigError, UsageError
from launcher.checkpoints.checkpoint_catalog import CatalogEntry, CheckpointCatalog
from launcher.checkpoints.checkpoint_folder import Checkpoint
from launcher.checkpoints.remote_store import RemoteStore
from launcher.checkpoints.restore_request import asked_checkpoint, pending_restore
from launcher.policy.checkpoint_status import CheckpointStatus, newest_first
from launcher.reporting.formats import age
from launcher.reporting.terminal_text import SafeConsole, as_far_as_it_is_read, console_of_width
from launcher.run_files.run_paths import RunPaths
from scripts.checkpoints.arguments import NOTHING_FITS, Parser, add_trial, step, trial_of
from scripts.checkpoints.choosing import read_catalog
from scripts.checkpoints.display import catalog_facts, entry_facts, say_damage, say_not_read, size, table
from scripts.ending import DONE, ended, print_json

WIDTH = 140
"""Columns where there is no terminal."""

EXIT_CODES = (
    "0 there it is; 1 nothing fits what was asked for, or --verify found one that is not complete; "
    "2 there is no such trial, or the command is wrong"
)


def main(arguments: Sequence[str] | None = None) -> int:
    return ended(lambda: _list(parser().parse_args(arguments)), refused=NOTHING_FITS)


def parser() -> argparse.ArgumentParser:
    made = Parser("list_checkpoints", "List the checkpoints of a trial, with the status of each.", EXIT_CODES)
    add_trial(made)
    which = made.add_argument_group("which checkpoints")
    until = which.add_mutually_exclusive_group()
    until.add_argument("--max-step", type=step, metavar="N", help="only checkpoints of step N and earlier")
    until.add_argument("--before-step", type=step, metavar="N", help="only checkpoints of steps before N")
    which.add_argument("--latest", action="store_true", help="only the newest that is complete")
    which.add_argument(
        "--good", action="store_true", help="only good checkpoints; AReaL's are read completely for that"
    )
    made.add_argument(
        "--recover-info", action="store_true", help="also what the next launch would resume from, and whether it can"
    )
    made.add_argument(
        "--verify",
        action="store_true",
        help="read every file: check hashes, finite numbers, shapes, optimizer, position",
    )
    made.add_argument("--url", metavar="URL", help="list the copies at this recover.url instead of those on the disk")
    made.add_argument("--json", action="store_true", help="print JSON")
    return made


# ── the copies of a trial's checkpoints at its URL (`recover.url`), as their manifests describe them ──


def _list_copies(given: argparse.Namespace) -> int:
    where, copies = _read_copies(given)
    now = time.time()
    if given.json:
        print_json({"url": where, "copies": [_copy_facts(copy, now) for copy in copies]})
    else:
        print(f"{where}: {len(copies)} complete as far as their manifests say")
        for copy in copies:
            print(_copy_line(copy, now))
    return DONE if copies else NOTHING_FITS


def _read_copies(given: argparse.Namespace) -> tuple[str, tuple[Checkpoint, ...]]:
    """Where they are, and those that are complete, the newest last. Raises UsageError and CheckpointError."""
    if given.experiment_name is None or given.trial_name is None:
        raise UsageError("--url lists the copies of one trial", "give --experiment-name and --trial-name too")
    if problem := url_problem(given.url):
        raise UsageError("--url can't be used (not shown)", problem)
    try:
        remote = RemoteStore(given.url, experiment_name=given.experiment_name, trial_name=given.trial_name)
    except ConfigError as error:
        raise UsageError(f"--url: {error.message}", "give the recover.url of the run") from error
    return remote.where, remote.list()


def _copy_facts(copy: Checkpoint, now: float) -> dict[str, object]:
    manifest = copy.manifest
    assert manifest is not None, "only committed ones are copied"
    return {
        "name": str(copy.name),
        "global_step": copy.global_step,
        "age_s": now - manifest.created_at,
        "bytes": manifest.total_bytes,
        "reward_mean": manifest.reward_mean,
        "keep": copy.keep,
    }


def _copy_line(copy: Checkpoint, now: float) -> str:
    manifest = copy.manifest
    assert manifest is not None, "only committed ones are copied"
    mean = "–" if manifest.reward_mean is None else f"{manifest.reward_mean:.3f}"
    made, kept = age(now - manifest.created_at), " kept" * copy.keep
    return f"{copy.global_step:>6}  {made:>10}  {size(manifest.total_bytes):>10}  {mean:>6}{kept}"


# ── the checkpoints on the disk ──


def _list(given: argparse.Namespace) -> int:
    if given.url is not None:
        return _list_copies(given)
    catalog = read_catalog(trial_of(given))
    shown = chosen(catalog, given)
    recover = recover_facts(catalog) if given.recover_info else None
    good = _last_good(catalog, shown)
    now = time.time()
    with as_far_as_it_is_read():
        if given.json:
            facts = catalog_facts(catalog) | {
                "last_good": None if good is None else good.global_step,
                "last_good_path": None if good is None else str(good.path),
                "checkpoints": [entry_facts(entry, now) for entry in shown],
            }
            print_json(facts | ({} if recover is None else {"recover": recover}))
        else:
            _show(catalog, shown, good, recover, now)
    is_incomplete = given.verify and any(entry.problem for entry in shown)
    return NOTHING_FITS if is_incomplete or not shown else DONE


def chosen(catalog: CheckpointCatalog, given: argparse.Namespace) -> list[CatalogEntry]:
    """Those that were asked for, verified as far as that needs; the newest last."""
    before = given.before_step if given.max_step is None else given.max_step + 1
    shown: list[CatalogEntry] = []
    for found in reversed(catalog.entries):
        entry = found
        if before is not None and entry.global_step >= before:
            continue
        if given.latest and (shown or entry.set_aside_as or entry.problem):
            continue
        if given.good and catalog.presumed(entry).status is not CheckpointStatus.GOOD:
            continue
        if given.verify or (given.good and not entry.is_vouched):
            entry = catalog.verified(entry)
        if not (given.good and entry.status is not CheckpointStatus.GOOD) and not (given.latest and entry.problem):
            shown.append(entry)
    return shown[::-1]


def _last_good(catalog: CheckpointCatalog, shown: Sequence[CatalogEntry]) -> CatalogEntry | None:
    """As far as it is known without reading more than was asked for."""
    verified = {entry.path: entry for entry in shown}
    entries = [verified.get(entry.path, entry) for entry in catalog.entries]
    return next(iter(newest_first(entries, good=True)), None)


def recover_facts(catalog: CheckpointCatalog) -> dict[str, object]:
    """What a resume would begin from, beside the newest checkpoint."""
    trial = catalog.trial
    facts: dict[str, object] = {"prepared": None, "memory": _in_memory(catalog), "areal": None}
    if trial.is_ours:
        facts["prepared"] = _set_up(trial.paths)
    if (info := catalog.recover_info) is not None:
        facts["areal"] = {
            "path": str(info.folder),
            "checkpoint": str(trial.areal_checkpoint),
            "step": None if info.name is None else info.name.global_step,
            "epoch": None if info.name is None else info.name.epoch,
            "steps_per_epoch": info.steps_per_epoch,
            "complete": not info.problems,
            "has_optimizer": info.has_optimizer,
            "problems": list(info.problems),
        }
    return facts


def _set_up(paths: RunPaths) -> dict[str, object] | None:
    """What a person has set up for the run, and whether it can be taken. Raises StorageError where it can't be read."""
    checkpoint, problem = None, ""
    try:
        checkpoint = asked_checkpoint(paths)
    except ConfigError as error:
        problem = error.message
    request = pending_restore(paths)
    if request is None and not problem:
        return None
    return {
        "path": str(paths.restore),
        "step": None if request is None else request.step,
        "source": None if checkpoint is None else str(checkpoint.path),
        "prepared_at": None if request is None else request.asked_at,
        "forced": "" if request is None else request.forced,
        "complete": not problem,
        "problem": problem,
    }


def _in_memory(catalog: CheckpointCatalog) -> dict[str, object] | None:
    """The state after a later step than the newest checkpoint's, on this machine."""
    state = catalog.newest_in_memory()
    on_disk = [entry.global_step for entry in catalog.entries if not entry.set_aside_as]
    if state is None or state.global_step <= max(on_disk, default=-1):
        return None
    return {"path": str(state.path), "step": state.global_step, "created_at": state.created_at}


def _show(
    catalog: CheckpointCatalog,
    shown: Sequence[CatalogEntry],
    good: CatalogEntry | None,
    recover: dict[str, object] | None,
    now: float,
) -> None:
    console = SafeConsole(soft_wrap=True)
    console.print(_answer(catalog, good, now))
    if catalog.health.damage is not None:
        console.print(say_damage(catalog.health.damage), style="red")
    if shown:
        console.print()
        console_of_width(WIDTH).print(table(shown, now))
        console.print(f"\nin {catalog.trial.default}")
    else:
        console.print(_nothing(catalog))
    for entry in shown:
        if entry.verification is not None:
            for note in (*entry.verification.problems[1:], *entry.verification.notes):
                console.print(f"step {entry.global_step}: {note}", style="dim")
    if recover is not None and shown:
        _show_recover(console, recover, now)
    if skipped := say_not_read(catalog):
        console.print(skipped, style="dim")


def _answer(catalog: CheckpointCatalog, good: CatalogEntry | None, now: float) -> str:
    name = catalog.trial.name
    if good is not None:
        where = good.path if good.path.parent != catalog.trial.default else good.path.name
        return (
            f"{name}: the last good checkpoint is of step {good.global_step}, {age(now - good.created_at)} old: {where}"
        )
    likely = catalog.newest_first(good=True)
    if likely:
        step = likely[0].global_step
        return f"{name}: step {step} would be the last good one; nothing vouches for it yet: add --verify"
    return f"{name}: no good checkpoint; {_why_none(catalog)}"


def _why_none(catalog: CheckpointCatalog) -> str:
    if not catalog.entries:
        return f"there is none at all in {catalog.trial.default}"
    if catalog.health.not_known:
        return catalog.health.not_known
    return f"none has {catalog.health.needed} healthy steps after it and is complete"


def _nothing(catalog: CheckpointCatalog) -> str:
    if not catalog.entries:
        return f"the run has saved none yet, or all are gone; its logs are in {catalog.trial.logs}"
    steps = ", ".join(str(entry.global_step) for entry in catalog.entries)
    return f"no checkpoint fits the request; there are checkpoints of steps {steps}"


def _show_recover(console: SafeConsole, recover: dict[str, object], now: float) -> None:
    prepared, areal, memory = recover["prepared"], recover["areal"], recover["memory"]
    if isinstance(prepared, dict):
        if prepared["complete"]:
            made = f"set up {age(now - prepared['prepared_at'])} ago from {prepared['source']}"
            console.print(f"the next launch goes back to step {prepared['step']}, {made}; complete")
        else:
            console.print(f"what is set up can NOT be taken: {prepared['problem']}")
    elif isinstance(memory, dict):
        console.print(
            f"nothing is set up: the next launch takes the state after step {memory['step']} in this machine's memory"
        )
    elif areal is None:
        console.print("nothing is set up: the next launch takes the newest checkpoint")
    if isinstance(areal, dict):
        console.print(
            f"AReaL's recover_info is of step {areal['step']} (epoch {areal['epoch']}, {areal['steps_per_epoch']} steps"
            f" in each): {'it can resume' if areal['complete'] else 'it can NOT resume'}"
            f"{'' if areal['has_optimizer'] else ', without an optimizer: recover.no_load_optim=true'}"
        )
        for problem in areal["problems"]:
            console.print(f"  {problem}", style="red")


if __name__ == "__main__":
    sys.exit(main())
