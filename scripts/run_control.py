"""Shows and controls a live run: `python -m scripts.run_control status --experiment-name …`.

Works on any machine that sees the run's files, for detached runs and for others; needs no Ray and no token. A
request is written to a file that only the run's own user can write, and holds until the next request or the next start.
"""

from __future__ import annotations

import argparse
import dataclasses
import socket
import sys
import time
from collections.abc import Callable

from launcher.base.errors import StorageError, UsageError
from launcher.base.messages import ServerState, TerminalStatus
from launcher.base.own_python import python
from launcher.cli.attach import attach, progress_of
from launcher.reporting.current_status import CurrentStatus, read_now
from launcher.reporting.formats import duration
from launcher.reporting.terminal_panel import render_line
from launcher.reporting.terminal_text import as_far_as_it_is_read
from launcher.resources.config_checks import beyond_last_port
from launcher.run_files.control_requests import ControlRequest, RequestEntry, ask, wanted
from launcher.run_files.run_ends import ENDS
from launcher.run_files.run_paths import RunPaths, login_name, names_of
from launcher.run_files.written_settings import read_settings, setting_of
from launcher.run_log.run_log import RunLog, RunLogFiles, last_end, read_run_log
from scripts.checkpoints.arguments import Parser, seconds
from scripts.ending import DONE, ended, print_json
from scripts.run_choice import add_run_arguments, chosen_run
from scripts.run_processes import seen_to_write
from scripts.run_stacks import stacks

NOT_LIVE, LATE = 1, 4
STILL = frozenset({"start", "idle"})
"""Phases in which the trainer takes no step."""
REQUESTS = {"pause": ControlRequest.PAUSE, "resume": ControlRequest.RUN, "stop": ControlRequest.STOP}


def main(arguments: list[str] | None = None) -> int:
    return ended(lambda: _do(parser().parse_args(arguments)))


def parser() -> argparse.ArgumentParser:
    made = Parser(
        "run_control",
        "Show and control a live run.",
        "0 done (of attach: the run finished); 1 status: the run is not live; 2 the command is wrong; 3 of attach: the "
        "run errored, or its driver stopped writing; 4 asked, and the run did not do it in time; 130 of attach: the "
        "run was aborted.",
    )
    made.add_argument(
        "what",
        choices=["status", "attach", "stacks", "pause", "resume", "scale", "stop"],
        help="status: its state; stacks: what each of its processes on this machine is doing; "
        "attach: the screen of its driver, until it ends; pause: no further step until resume; "
        "scale: servers are started, or leave, until there are --servers; stop: save and end",
    )
    add_run_arguments(made)
    made.add_argument("--servers", type=int, help="for scale: the number of servers to have")
    made.add_argument("--reason", default="", help="reason of a pause, a scale or a stop, for the journal")
    made.add_argument(
        "--timeout",
        type=seconds,
        default=120.0,
        metavar="S",
        help="seconds to wait until the run has done what was asked (default: %(default)s); 0: none; attach waits for "
        "the end",
    )
    made.add_argument("--json", action="store_true", help="status as JSON")
    return made


def _do(given: argparse.Namespace) -> int:
    paths = chosen_run(given)
    if given.what == "status":
        return _status(paths, as_json=given.json)
    if not lives(paths):
        raise UsageError(f"{_name(paths)} is not running{_how_it_ended(paths)}", _what_next(paths))
    if given.what == "attach":
        return attach(paths)
    if given.what == "stacks":
        return _stacks(paths)
    request = send(paths, given.what, reason=given.reason, servers=given.servers)
    print(f"asked to {given.what}: {_name(paths)}", flush=True)
    run = RunLogFiles(paths, with_steps=False)
    reached: Callable[[], bool] = {
        "pause": lambda: _state_in(run.log)[0] == "PAUSED" and not _phase_of_step(paths),
        "resume": lambda: _state_in(run.log)[0] not in ("PAUSED", "INITIALIZING"),
        "scale": lambda: _has_size(paths, request),
        "stop": lambda: run.log.last_end() is not None,
    }[given.what]

    def is_over() -> bool:
        return run.refresh().last_end() is not None or reached()

    if given.timeout and not _within(given.timeout, is_over):
        print(_why_late(paths, given.timeout), file=sys.stderr)
        return LATE
    if given.what != "stop" and run.refresh().last_end() is not None:
        print(f"not done: {_name(paths)} has ended{_how_it_ended(paths)}", file=sys.stderr)
        return LATE
    fleet = f", with {', '.join(serving(paths))}" if given.what == "scale" else ""
    print(f"{_name(paths)} is {state_of(paths)[0]}{fleet}")
    return DONE


def send(paths: RunPaths, what: str, *, reason: str, servers: int | None = None) -> RequestEntry:
    """Ask the run to pause, resume, stop or scale; what was asked of its servers before still holds.

    Raises UsageError for a size that can't be, StorageError where this user may not ask.
    """
    asked = _asked(paths) or RequestEntry(wish=ControlRequest.RUN, by="")
    request = dataclasses.replace(asked, by=f"{login_name()}@{socket.gethostname()}", reason=reason)
    if what == "scale":
        if servers is None or servers < 1:
            told = "scale needs --servers" if servers is None else f"--servers {servers}: a run needs a server"
            there = serving(paths, any_state=True)
            raise UsageError(told, f"1 or more; there are {', '.join(there)}, and `stop` ends the run")
        port = setting_of(read_settings(paths.config), "sglang.port")
        if isinstance(port, int) and (allowed := beyond_last_port(port, servers)):
            raise UsageError(f"--servers {servers}: sglang.port={port}: {allowed}", "ask for fewer servers")
        request = dataclasses.replace(request, servers=servers)
    else:
        request = dataclasses.replace(request, wish=REQUESTS[what], at=time.time())
    ask(paths, request)
    return request


def _why_late(paths: RunPaths, timeout_s: float) -> str:
    state, reason = state_of(paths)
    late, phase = f"not done within {timeout_s:g} s", _phase_of_step(paths)
    if not lives(paths):
        return f"{late}: the driver of {_name(paths)} stopped writing; it was {state}\n  → {_what_next(paths)}"
    step = f"; its trainer is in a step still, at {phase}" if state == "PAUSED" and phase else ""
    return f"{late}; the request still holds. The run is {state}{f': {reason}' if reason else ''}{step}"


def _phase_of_step(paths: RunPaths) -> str:
    """ "" where the trainer takes no step. A run is PAUSED from when its trainer is told: it ends its step first."""
    now = read_now(paths)
    return "" if now is None or now.status is None or now.status.phase in STILL else now.status.phase


def serving(paths: RunPaths, *, any_state: bool = False) -> list[str]:
    now = read_now(paths)
    servers = () if now is None else now.servers
    return [one.name for one in servers if any_state or one.state is ServerState.READY]


def _has_size(paths: RunPaths, request: RequestEntry) -> bool:
    there, ready = serving(paths, any_state=True), serving(paths)
    return there == ready and len(ready) == request.servers


def lives(paths: RunPaths) -> bool:
    """Whether its driver writes."""
    return seen_to_write(paths) is not None


def state_of(paths: RunPaths) -> tuple[str, str]:
    """As the journal has it: a run state, or the status with which it ended; and why."""
    return _state_in(read_run_log(paths, with_steps=False))


def _state_in(log: RunLog) -> tuple[str, str]:
    _, state, reason = log.states[-1] if log.states else (0.0, "INITIALIZING", "")
    return state, "" if state == "INITIALIZING" else reason


def _status(paths: RunPaths, *, as_json: bool) -> int:
    is_live = lives(paths)
    with as_far_as_it_is_read():
        _show(paths, is_live=is_live, as_json=as_json)
    return DONE if is_live else NOT_LIVE


def _stacks(paths: RunPaths) -> int:
    now = read_now(paths)
    if now is None:
        raise StorageError(f"{paths.now} can't be read", "ask again: a live run writes it once a second")
    with as_far_as_it_is_read():
        for text in stacks(now):
            print(text, flush=True)
    return DONE


def _asked(paths: RunPaths) -> RequestEntry | None:
    try:
        return wanted(paths)
    except StorageError as error:
        if isinstance(error.__cause__, PermissionError):
            return None  # another user's run
        raise


def _show(paths: RunPaths, *, is_live: bool, as_json: bool) -> None:
    now = read_now(paths)
    asked = _asked(paths)
    if as_json:
        said = {
            "run": _name(paths),
            "is_live": is_live,
            "state": state_of(paths)[0],
            "steps_done": None if now is None or now.status is None else now.status.next_step,
            "total_steps": None if now is None or now.status is None else now.status.total_steps,
            "servers": [] if now is None or not is_live else [f"{one.name} {one.state}" for one in now.servers],
            "cluster": None if now is None else now.address,
            "is_detached": None if now is None else now.is_detached,
            "asked": None if asked is None else asked.wish,
        }
        print_json(said, indent=1)
    elif now is None or not is_live:
        print(f"{_name(paths)} is not running{_how_it_ended(paths)}\n  → {_what_next(paths)}")
    else:
        how = "detached" if now.is_detached else "with its driver"
        print(f"{_name(paths)} is {state_of(paths)[0]}: attempt {now.attempt}, for {duration(now.elapsed_s)}")
        print(f"on the cluster {now.address}, {how} (pid {now.pid} on {now.host})")
        if asked is not None and asked.wish is not ControlRequest.RUN:
            print(f"{asked.wish} {asked.description}")
        if now.status is not None:
            print(_line(paths, now))


def _line(paths: RunPaths, now: CurrentStatus) -> str:
    assert now.status is not None
    return render_line(
        progress_of(paths, now).view(now.status, servers=now.servers, evals=now.evals, now=time.monotonic())
    )


def _how_it_ended(paths: RunPaths) -> str:
    end = last_end(paths)
    if end is not None:
        return f": {ENDS[str(end['event'])]}, {end.get('reason') or 'no reason given'}"
    return ": its driver is gone and did not write how it ended" if paths.events.exists() else ""


def _what_next(paths: RunPaths) -> str:
    end = last_end(paths)
    if end is not None and ENDS[str(end["event"])] is TerminalStatus.FINISHED:
        return "it is complete: there is nothing left to control"
    return f"{python()} -m scripts.resume_training {names_of(paths)} resumes it"


def _name(paths: RunPaths) -> str:
    return f"{paths.experiment_name}/{paths.trial_name}"


def _within(seconds: float, holds: Callable[[], bool]) -> bool:
    give_up_at = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > give_up_at:
            return False
        time.sleep(0.2)
    return True


if __name__ == "__main__":
    sys.exit(main())
