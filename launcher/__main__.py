"""`python -m launcher conf=<preset> [key=value …]`: compose → RunConfig, once → checks → pre-flight → driver.

Hydra's own command line stays as its users know it (`--cfg job`, `--help`, `-m`, `--info`, completion). What it
refuses is one message of ours, with exit code 2 (`launcher.config.hydra_messages`); HYDRA_FULL_ERROR=1 shows
its traceback. The driver, and with it Ray and torch, is imported only when a run really starts.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

try:
    import hydra
except ModuleNotFoundError as absent:  # the first package that is not Python's own: the interpreter is another one
    print(
        f"error: {absent.name} is not installed for {sys.executable}\n"
        "  → run the python of the environment of the launcher, or pip install -c constraints.txt -e .",
        file=sys.stderr,
    )
    sys.exit(2)
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from launcher import __version__
from launcher.base.errors import (
    ConfigError,
    DataError,
    EmptyData,
    LauncherError,
    ModelError,
    RewardImportError,
    UnsupportedModel,
    UnsupportedSetting,
)
from launcher.base.exit_codes import EXIT_CODES
from launcher.base.findings import Finding
from launcher.base.messages import TerminalStatus
from launcher.base.rollouts import Prompt
from launcher.checkpoints.model_shape import ModelShape
from launcher.cli import doctor, keeper, new_preset
from launcher.cli.interrupts import Interrupts
from launcher.config import hydra_plugin
from launcher.config.compose import (
    CONFIG_FOLDER,
    CONFIG_NAME,
    REPOSITORY,
    as_hydra_takes,
    find_own_presets,
    keys_to_fit,
    presets,
    refuse_bare_preset,
    register,
    to_run_config,
)
from launcher.config.foreign import OWN
from launcher.config.hydra_arguments import quoted, refuse_not_utf8
from launcher.config.hydra_messages import explain, refuse_dashes, refuse_options
from launcher.config.hydra_plugin import Compose
from launcher.config.schema import RunConfig
from launcher.config.shipped_data import foreign_held_out
from launcher.reporting.terminal_text import as_far_as_it_is_read, console_of_width, discard, speak_anywhere, unwritten
from launcher.resources.config_checks import check, find_notes
from launcher.resources.fitting import fit, settings_to_fit
from launcher.resources.foreign_plan import find_missing_for_command, plan_lines, served, with_their_names
from launcher.resources.hardware import Hardware, find_hardware, of_the_run, planned_hardware
from launcher.resources.missing_files import find_shape, model_folder
from launcher.resources.node_checks import check_node, unknown_of_node
from launcher.resources.plan_view import WIDTH, show
from launcher.resources.preflight import find_missing, preflight, refuse
from launcher.resources.run_plan import make_plan, noted, recommend_server, with_standby_trainer
from launcher.run_files.run_paths import login_name
from launcher.sweep.sweep_command import ReadTrial, candidates_of, run_sweep

FULL_ERROR = "HYDRA_FULL_ERROR"
CRASHED = 1
NOWHERE = (UnsupportedModel, UnsupportedSetting, EmptyData)
"""What no other machine would make right, so that a plan alone is refused for it too."""


def main(run_alone: Sequence[str] = ("-m", "launcher")) -> int:
    """Run the command line in sys.argv. `run_alone`: Python's arguments for a single run, as a sweep starts them."""
    Interrupts.hold_back_notice()
    speak_anywhere()
    keep_bytecode()
    keep_assertions()
    find_modules_here()
    have_a_user_name()
    try:
        refuse_not_utf8(sys.argv[1:])
        if "--version" in sys.argv[1:]:
            return show_version()
        if sys.argv[1:2] == [doctor.COMMAND]:
            return doctor.run(sys.argv[2:])
        if sys.argv[1:2] == [new_preset.COMMAND]:
            return new_preset.run(sys.argv[2:])
        refuse_dashes(sys.argv[1:])
        refuse_bare_preset(sys.argv[1:])
        register()
        find_own_presets(sys.argv[1:])
        sys.argv[1:] = ordered_arguments(sys.argv[1:])
        refuse_options(sys.argv[1:])
    except LauncherError as error:
        return _refuse(error)
    register()
    wants_traceback = os.environ.get(FULL_ERROR) == "1"
    codes: list[int] = []

    def job(composed: DictConfig) -> int:
        codes.append(CRASHED)
        with _full_error(wants_traceback):
            codes[-1] = _run_composed(composed)
        return codes[-1]

    def trials(combinations: Sequence[Sequence[str]], compose: Compose) -> None:
        codes.append(CRASHED)
        command = (sys.executable, *run_alone, *options_of_each_trial(sys.argv[1:]))
        with _full_error(wants_traceback):
            codes[-1] = _run_combinations(combinations, compose, command)

    hydra_plugin.hand_over_to(trials)
    command = hydra.main(version_base="1.3", config_path=str(CONFIG_FOLDER), config_name=CONFIG_NAME)(job)
    try:
        with _full_error(True):  # makes Hydra raise what it would print in its own way
            try:
                command()
            finally:
                if not codes:  # what Hydra itself printed; after `--help` it exits
                    sys.stdout.flush()
    except KeyboardInterrupt:
        print("ended by Ctrl-C", file=sys.stderr)
        return EXIT_CODES[TerminalStatus.ABORTED]
    except BrokenPipeError:  # `… --cfg job | head`
        discard(sys.stdout)
        return CRASHED
    except Exception as error:  # Hydra refuses with ValueErrors and assertions beside its own kinds
        if wants_traceback or codes:
            raise
        if isinstance(error, OSError) and error.errno and error.filename is None:  # a full disk; Hydra's have no errno
            discard(sys.stdout)
            return _refuse(unwritten(error))
        return _refuse(explain(error, sys.argv[1:]))
    return next((code for code in codes if code), 0)


def show_version() -> int:
    """Which one it is, and which copy of it. Raises ResourceError where that can't be printed."""
    kind = "from the checkout" if (REPOSITORY / "pyproject.toml").exists() else "installed in"
    with as_far_as_it_is_read():
        print(f"grpo-launcher {__version__} {kind} {REPOSITORY} (python {platform.python_version()})")
    return 0


def keep_bytecode() -> None:
    """In this process and those that it starts. A run starts a dozen, and each would compile thousands of modules again
    where PYTHONDONTWRITEBYTECODE is set, as it is in many containers."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False


def keep_assertions() -> None:
    """In all processes that this one starts: a local Ray whose own processes have PYTHONOPTIMIZE times out."""
    os.environ.pop("PYTHONOPTIMIZE", None)


def find_modules_here() -> None:
    """The installed command finds the user's modules in the working folder, as `python -m launcher` does, but behind
    all others: a folder of theirs may be called `scripts`."""
    with suppress(FileNotFoundError):
        if not sys.flags.safe_path and not {"", os.getcwd()} & set(sys.path):  # noqa: PTH109 - as sys.path has it
            sys.path.append(os.getcwd())  # noqa: PTH109


def have_a_user_name() -> None:
    """torch and SGLang ask for it, and fail where the user id has none, as in many containers."""
    if not os.environ.get("USER"):
        os.environ["USER"] = login_name()


def ordered_arguments(arguments: Sequence[str]) -> list[str]:
    """The arguments in a form that Hydra takes.

    Overrides come after options: `conf=x --cfg job seed=1` is an error to argparse, which takes them in one piece
    only. Help needs no preset, but Hydra composes one before it shows any: it is the same with each. What follows `--`
    is for another project's trainer, as it is.
    """
    if "--" in arguments:
        at = arguments.index("--")
        theirs = ",".join(quoted(one) for one in arguments[at + 1 :])
        arguments = [*arguments[:at], f"trainer.overrides=[{theirs}]"]
    overrides = [a for a in arguments if not a.startswith("-") and ("=" in a or a.startswith("~"))]
    options = [a for a in arguments if a not in overrides]
    if {"--help", "-h"} & set(options) and not any(a.startswith("conf=") for a in overrides):
        overrides.append(f"conf={presets()[0]}")
    is_completion = bool({"--shell-completion", "-sc"} & set(options))  # its `query=bash` is no setting
    return [*options, *(overrides if is_completion else as_hydra_takes(overrides))]


def options_of_each_trial(arguments: Sequence[str]) -> list[str]:
    """The arguments of a sweep, beside the overrides of its trials, that each trial needs too: where presets are."""
    options = [a for a in arguments if a not in ("-m", "--multirun") and (a.startswith("-") or "=" not in a)]
    return [a for a in options if not a.startswith("~")] + [a for a in arguments if a.startswith("hydra.searchpath")]


def _run_combinations(combinations: Sequence[Sequence[str]], compose: Compose, command: Sequence[str]) -> int:
    def read(overrides: Sequence[str]) -> tuple[RunConfig, Sequence[str]]:
        try:
            composed = compose(overrides)
        except Exception as error:  # as in main
            raise explain(error, overrides) from error
        config, marked = to_run_config(composed, overrides), keys_to_fit(composed)
        check(config, settings_to_fit(config, keys_of(overrides), marked))
        if config.trainer.adapter != OWN:
            raise ConfigError(f"trainer.adapter={config.trainer.adapter} with -m", "start each run by itself")
        return config, marked

    try:
        if not combinations:
            raise ConfigError(
                "-m without a trial: the values of one key are none", "glob() names groups of presets only"
            )
        if any("dry_run=true" in one.lower() for one in combinations[0]):
            return _show_plans(combinations, read)
        return run_sweep(combinations, read, command)
    except LauncherError as error:
        return _refuse(error)


def _show_plans(combinations: Sequence[Sequence[str]], read: ReadTrial) -> int:
    """Of each trial that is possible; the exit code is that of a wrong command where one is not."""
    _, candidates = candidates_of(combinations, read)
    shown = [
        _show_plan(one.config, find_hardware(), one.trial.overrides, one.marked, is_trial=True)
        for one in candidates
        if one.config is not None
    ]
    refused = [_refuse(one.refusal) for one in candidates if one.refusal is not None]
    return max([*shown, *refused], default=0)


def _run_composed(composed: DictConfig) -> int:
    try:
        of_hydra = HydraConfig.get()
        overrides = list(map(str, OmegaConf.to_container(of_hydra.overrides.task) or ()))  # as typed: not resolved
        preset = [f"conf={name}" for group, name in of_hydra.runtime.choices.items() if group == "conf"]
        config = to_run_config(composed, [*preset, *overrides])
        return launch(config, overrides, keys_to_fit(composed))
    except LauncherError as error:
        return _refuse(error)


def launch(config: RunConfig, overrides: Sequence[str] = (), marked: Sequence[str] = ()) -> int:
    """One run, or its plan where `dry_run`; the exit code. Raises LauncherError. `overrides`: of the command line;
    `marked`: the settings to fit."""
    check(config, settings_to_fit(config, keys_of(overrides), marked))
    if sys.stderr.isatty():  # else the screen stays empty for seconds; in a file nobody waits for the plan
        print("reading the model, the data and this machine …", file=sys.stderr, flush=True)
    if config.trainer.adapter != OWN:
        config = with_their_names(config, keys_of(overrides))
        check(config)
        return _launch_foreign(config)
    for note in (*find_notes(config), foreign_held_out(config)):
        if note:
            print(f"note: {note}", file=sys.stderr)
    hardware = find_hardware()
    if config.dry_run:
        return _show_plan(config, hardware, overrides, marked)
    hardware, shape = of_the_run(config, hardware), find_shape(config)
    config, note = fit(config, hardware, shape, keys_of(overrides), marked)
    check(config)
    checks = check_node()
    plan = noted(with_standby_trainer(config, hardware, make_plan(config, hardware, shape)), note)
    plan = noted(plan, unknown_of_node(config, checks))
    preflight(config, hardware, plan, checks)
    with as_far_as_it_is_read():
        show(config, plan, console_of_width(WIDTH))
    recovery = replace(config.recovery, standby_trainers=plan.standby_trainers)
    return _start(replace(config, recovery=recovery))


def _launch_foreign(config: RunConfig) -> int:
    """As `launch`, of another project's trainer. Its command is here and is planned for no other machine, so a dry run
    has the exit code of a wrong command where something is missing."""
    lines, missing = list(plan_lines(config)), find_missing_for_command(config)
    if not config.dry_run:
        refuse(missing)
    with as_far_as_it_is_read():
        print(*lines, sep="\n", flush=True)
    if config.dry_run:
        for one in missing:
            print(f"missing here: {one}", file=sys.stderr)
        return max((one.exit_code for one in missing), default=0)
    return _start(served(config))


def _start(config: RunConfig) -> int:
    """Raises LauncherError. Of any other run than a detached one this process becomes the keeper."""
    if not config.cluster.detached:
        return keeper.begin(config)
    from launcher.cli import detached
    from launcher.driver import run  # brings Ray along, which a dry run does without

    return detached.run(config, run)


def keys_of(overrides: Sequence[str]) -> set[str]:
    """The keys that a command line sets."""
    return {override.partition("=")[0].lstrip("+~") for override in overrides}


def _show_plan(
    config: RunConfig, found: Hardware, overrides: Sequence[str], marked: Sequence[str], *, is_trial: bool = False
) -> int:
    """Of data that is here, each record is read, one answer scored, and each prompt measured where the tokenizer is
    here too; the exit code is that of a wrong command where they can't be used."""
    composed, shape, planned = config, find_shape(config), planned_hardware(config, found)
    checks, here = check_node(), of_the_run(config, found)
    config, note = fit(composed, planned, shape, keys_of(overrides), marked)
    check(config)
    with as_far_as_it_is_read():
        plan = make_plan(config, planned, shape)
        if not is_trial:  # whose plan does not know of the GPUs that other trials take
            plan = noted(plan, recommend_server(config, planned, plan))
        plan = noted(noted(with_standby_trainer(config, planned, plan), note), unknown_of_node(config, checks))
        show(config, plan, console_of_width(WIDTH))
    if here == planned:
        all_missing: list[LauncherError] = [*find_missing(config, here, plan, checks)]
    else:
        all_missing = _find_missing_here(composed, here, shape, overrides, marked, checks)
    for missing in all_missing:
        if not isinstance(missing, NOWHERE):
            print(f"missing here: {missing}", file=sys.stderr)
    if nowhere := [missing for missing in all_missing if isinstance(missing, NOWHERE)]:
        return max(map(_refuse, nowhere))
    if any(isinstance(missing, DataError | RewardImportError) for missing in all_missing):
        return 0
    from actors.data.turn_ends import find_end_notes
    from actors.model.model_folder import load_tokenizer
    from actors.reward.data_check import check_data
    from actors.training.start_check import check_resume, check_template

    is_known = not any(isinstance(missing, ModelError) for missing in all_missing)
    folder = model_folder(config.tokenizer_path) if is_known else None
    context = config.sglang.context_length or (None if shape is None else shape.positions)
    try:
        tokenizer = None if folder is None else load_tokenizer(folder, key="tokenizer_path")
        if tokenizer is not None:
            check_template(config, tokenizer)
        told: list[str] = []
        length: list[str] = []
        prompts: dict[str, list[Prompt]] = {}
        notes = check_data(
            config,
            tokenizer=tokenizer,
            context=context,
            tell=told.append,
            tell_length=length.append,
            checkpoint_bytes=plan.checkpoint_bytes,
            keep=prompts,
        )
        if tokenizer is not None and (model := model_folder(config.actor.path)) is not None:
            notes = [*find_end_notes(tokenizer, config.chat, model), *notes]
        if begins := check_resume(config, prompts):
            told.append(begins)
    except LauncherError as error:
        return _refuse(error)
    with as_far_as_it_is_read():
        print(*length, *told, sep="\n", flush=True)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    return 0


def _find_missing_here(
    composed: RunConfig,
    hardware: Hardware,
    shape: ModelShape | None,
    overrides: Sequence[str],
    marked: Sequence[str],
    checks: Sequence[Finding],
) -> list[LauncherError]:
    """What the command lacks without `dry_run`, where the plan is of other hardware than this: it would be fitted to
    this."""
    told: list[LauncherError] = []
    try:
        here, _ = fit(composed, hardware, shape, keys_of(overrides), marked)
        plan = make_plan(here, hardware, shape)
    except LauncherError as error:  # hardware=auto, and nothing fits: of the GPUs' memory all is told
        here, told, plan = composed, [error], make_plan(composed, hardware, shape)
        plan = replace(plan, places=tuple(one for one in plan.places if one.gpu is None))
    return [*told, *find_missing(here, hardware, plan, checks)]


def _refuse(error: LauncherError) -> int:
    print(f"error: {error}", file=sys.stderr)
    return error.exit_code


@contextmanager
def _full_error(wanted: bool) -> Iterator[None]:
    before = os.environ.get(FULL_ERROR)
    os.environ[FULL_ERROR] = "1" if wanted else "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[FULL_ERROR]
        else:
            os.environ[FULL_ERROR] = before


if __name__ == "__main__":
    sys.exit(main())
