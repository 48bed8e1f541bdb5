"""One function for each kind of fault: bring it about, prove that it fired, say what was done.

Each is handed what lives now and the fault's options, and returns figures for the record. It raises Missed where the
fault could not be brought about. What a fault changes for a time is changed back when it ends, however it ends; what
is stopped "until it is replaced" is not.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from actors.processes.process_tree import Process
from actors.processes.process_tree import send as send_signal
from scripts.faults import files, interposer, server_api, signals
from scripts.faults.broken_reward import fired
from scripts.faults.case import Case, Figures, lives
from scripts.faults.fault_proxy import Spoil
from scripts.faults.find import Server, title
from scripts.faults.kinds import ANY
from scripts.faults.moments import catch
from scripts.faults.place import FaultPlace
from scripts.faults.signals import Missed
from scripts.faults.starving import by_cgroup, by_limit, starve_trainer
from scripts.faults.switch import DEEDS, find_switch, switched_on

MIB = 2**20
LOOK_S = 0.05
PUBLISH_LOOK_S = 0.005
RANDOM_MOMENT_S = 3.0
"""T1 at any moment waits for up to this long first, so that the moment isn't always the same one of a step."""
RECOVERY_BEGINS_S = 2.0
"""D1 kills its server so long at most after the trainer."""
DRIVER_SIGNALS = {"kill": signal.SIGKILL, "int": signal.SIGINT, "term": signal.SIGTERM}


def crash_server(case: Case) -> Figures:
    server = case.server()
    part, processes = case.some_part(server)
    return {"target": server.name, "part": part, **signals.kill(processes)}


def hang_server(case: Case) -> Figures:
    server = case.server()
    part, processes = case.some_part(server)
    return {"target": server.name, "part": part, **_hold(case, processes)}


def _hold(case: Case, processes: Sequence[Process]) -> Figures:
    seconds = case.number("seconds")
    if not seconds:
        return {"pids": signals.stop(processes)}
    with signals.stopped(processes) as pids:
        case.sleep(seconds)
    return {"pids": pids, "seconds": seconds}


def starve_server(case: Case) -> Figures:
    server = case.server()
    (process, *_) = case.scheduler(server)
    limit = signals.limit_memory(process, int(case.number("headroom_mib") * MIB))
    until = time.monotonic() + case.number("seconds")
    sent = server_api.keep_busy(
        server.url, case.keys, tokens=64, together=16, prompt=128, until=until, alive=lambda: lives(process)
    )
    if lives(process):
        raise Missed(f"{server.name} lived on under its limit of {limit} bytes", "give it less: headroom_mib=0")
    return {"target": server.name, "pids": [process.pid], "limit_bytes": limit, "requests": sent}


def slow_server(case: Case) -> Figures:
    server = case.server()
    processes = case.scheduler(server)
    times = signals.duty_cycle(
        processes,
        slower=case.number("slower"),
        period_s=case.number("period_s"),
        seconds=case.number("seconds"),
        sleep=case.sleep,
    )
    return {"target": server.name, "pids": [process.pid for process in processes], "stops": times}


def load_stale_weights(case: Case) -> Figures:
    server = case.server()
    first = server_api.first_weights(case.paths)
    with _just_published(case, server) as said:
        version = "0" if case.word("label") == "true" else said
        server_api.load_weights(server.url, first, case.keys, version=version)
    return {"target": server.name, "loaded": first, "weight_version": said, "labelled": version}


@contextlib.contextmanager
def _just_published(case: Case, server: Server) -> Iterator[str]:
    """Right after the next publish, with the trainer standing: the weight version that the server says.

    At any other time the next publish would replace what is loaded before a token came from it.
    """
    before = server_api.weight_version(server.url, case.keys)
    deadline = time.monotonic() + case.within_s
    while (said := server_api.weight_version(server.url, case.keys)) == before:
        if time.monotonic() > deadline:
            raise Missed(f"{server.name} got no new weights in time", "give it longer with --within")
        case.sleep(PUBLISH_LOOK_S)
    with signals.stopped([case.trainer()]):
        yield said


def load_damaged_weights(case: Case) -> Figures:
    server = case.server()
    folder = FaultPlace.of(case.paths).damaged_weights
    with _just_published(case, server) as said:
        what = server_api.damaged_weights(case.paths, folder, case.draw.randrange)
        server_api.load_weights(server.url, str(folder), case.keys, version=said)
    return {"target": server.name, "tensor": what, "weight_version": said}


def crash_all_servers(case: Case) -> Figures:
    trees = [process for server in case.found.servers for process in server.tree]
    return {"target": ", ".join(server.name for server in case.found.servers), **signals.kill(trees)}


def spoil_requests(case: Case) -> Figures:
    return _interposed(case, Spoil(share=case.number("share")))


def slow_loads(case: Case) -> Figures:
    return _interposed(case, Spoil(load_s=case.number("load_s")))


def busy_health(case: Case) -> Figures:
    return _interposed(case, Spoil(busy=True))


def _interposed(case: Case, spoil: Spoil) -> Figures:
    interposer.check_interposed(case.paths)
    place, seconds = FaultPlace.of(case.paths), case.number("seconds")
    before = interposer.fired(place)
    with interposer.spoiling(place, spoil, case.within_s + seconds):
        _stay_on(case, lambda: interposer.fired(place) > before)
    return {"target": "requests", **_counted("requests", interposer.fired(place) - before)}


def _stay_on(case: Case, has_hit: Callable[[], bool]) -> None:
    """For so long from its first hit on: most of a step nobody asks a server or scores anything."""
    deadline = time.monotonic() + case.within_s
    while not has_hit() and time.monotonic() < deadline:
        case.sleep(LOOK_S)
    if has_hit():
        case.sleep(case.number("seconds"))


def _counted(what: str, times: int) -> Figures:
    if times == 0:
        raise Missed(f"no {what} met the fault while it was on", "give it longer with --within")
    return {what: times}


def crash_trainer(case: Case) -> Figures:
    trainer, moment = case.trainer(), case.word("moment")
    if moment == ANY:
        case.sleep(case.draw.uniform(0.0, RANDOM_MOMENT_S))
        return {"target": "trainer", "moment": moment, "doing": title(trainer), **signals.kill([trainer])}
    proof = catch(trainer, moment, case.paths, within_s=case.within_s, sleep=case.sleep)
    return {"target": "trainer", "moment": moment, "proof": proof, "pids": [trainer.pid]}


def hang_trainer(case: Case) -> Figures:
    return {"target": "trainer", **_hold(case, [case.trainer()])}


def damage_checkpoint(case: Case) -> Figures:
    trainer = case.trainer()
    (newest, *_) = files.whole_checkpoints(case.paths, enough=1) or (None,)
    if newest is None:
        raise Missed("there is no whole checkpoint", "wait for the first")
    done = files.damage(newest.path, case.word("damage"))
    figures: Figures = {"target": str(newest), "damage": done}
    if case.word("then") == "kill":
        figures |= signals.kill([trainer])
    return figures


def fill_disk(case: Case) -> Figures:
    folder = case.paths.default_checkpoints
    with files.full_disk(folder, free_bytes=int(case.number("free_kib") * 1024)) as size:
        case.sleep(case.number("seconds"))
    return {"target": str(folder), "ballast_bytes": size}


def switch_reward(kind: str) -> Callable[[Case], Figures]:
    """Have the reward function do what `kind` asks for, for a time."""

    def hand(case: Case) -> Figures:
        switch = find_switch(case.paths, case.found)
        what: dict[str, object] = {"do": DEEDS.get(kind) or case.word("how"), "seed": case.draw.randrange(2**31)}
        what |= {name: case.options[name] for name in ("share", "stall_s") if name in case.options}
        before = fired(switch)
        with switched_on(switch, what):
            _stay_on(case, lambda: fired(switch) > before)
        return {"target": "reward function", **what, **_counted("completions", fired(switch) - before)}

    return hand


def crash_supervisor(case: Case) -> Figures:
    who = case.word("who")
    if who == ANY:
        who = case.draw.choice(sorted(case.found.supervisors) or ["health_monitor"])
    process = case.found.supervisors.get(who)
    if process is None:
        raise Missed(f"{who} has no process now", f"there are: {', '.join(case.found.supervisors) or 'none'}")
    return {"target": who, **signals.kill([process])}


def end_driver(case: Case) -> Figures:
    number = DRIVER_SIGNALS[case.word("signal")]
    if not send_signal(case.found.driver, number):
        raise Missed("the driver had ended before the signal", "the run is over")
    return {"target": "driver", "pids": [case.found.driver.pid], "signal": number.name}


def lose_node(case: Case) -> Figures:
    return {"target": "raylet", **signals.kill([case.draw.choice(case.found.raylets)])}


def crash_while_recovering(case: Case) -> Figures:
    """Kill the trainer, and a server before the run can have got a trainer to step again."""
    server, trainer = case.server(), case.trainer()
    first = signals.kill([trainer])
    case.sleep(case.draw.uniform(0.0, RECOVERY_BEGINS_S))
    second = signals.kill(server.tree)
    pids = [pid for killed in (first, second) for pid in killed["pids"]]
    return {"target": f"trainer, {server.name}", **first, "pids": pids}


def long_generations(case: Case) -> Figures:
    server = case.server()
    until = time.monotonic() + case.number("seconds")
    sent = server_api.keep_busy(
        server.url,
        case.keys,
        tokens=int(case.number("tokens")),
        together=int(case.number("together")),
        prompt=8,
        until=until,
        alive=lambda: lives(server.http),
    )
    return {"target": server.name, "requests": sent}


HANDS: Mapping[str, Callable[[Case], Figures]] = {
    "C1": crash_server,
    "C2": hang_server,
    "C3": starve_server,
    "C4": slow_server,
    "C5": load_stale_weights,
    "C6": load_damaged_weights,
    "C7": crash_all_servers,
    "C8": spoil_requests,
    "T1": crash_trainer,
    "T2": hang_trainer,
    "T3": switch_reward("T3"),
    "T4": damage_checkpoint,
    "T5": fill_disk,
    "T6": starve_trainer(by_limit),
    "T7": starve_trainer(by_cgroup),
    "S1": switch_reward("S1"),
    "S2": switch_reward("S2"),
    "S3": switch_reward("S3"),
    "M1": crash_supervisor,
    "M2": end_driver,
    "N1": lose_node,
    "D1": crash_while_recovering,
    "X-long": long_generations,
    "X-reward": switch_reward("X-reward"),
    "X-load": slow_loads,
    "X-gc": hang_trainer,
    "X-busy": busy_health,
}
