"""The kinds of faults, their options, and which of them can't be produced from outside a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from launcher.base.errors import UsageError

Value = str | float
FOR_EVER = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option of a kind: a choice among `choices`, or where there are none a number of at least `least`."""

    default: Value
    meaning: str
    choices: tuple[str, ...] = ()
    least: float = 0.0

    def read(self, name: str, text: str) -> Value:
        """Raises UsageError naming the option."""
        if self.choices:
            if text not in self.choices:
                raise UsageError(f"{name}={text} is none of {', '.join(self.choices)}", f"set {name} to one of these")
            return text
        try:
            number = float(text)
        except ValueError as error:
            raise UsageError(f"{name}={text} is not a number", f"write e.g. {name}={self.default}") from error
        if not self.least <= number < float("inf"):
            raise UsageError(f"{name}={text} is less than {self.least:g}, or endless", f"write {name}={self.default}")
        return number


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultKind:
    """One kind of fault. `role` is what must not be recovering when it comes; `out_of_reach` says why it can't."""

    id: str
    what: str
    role: str = "run"  # server, trainer, supervisor or run
    options: Mapping[str, Option] = field(default_factory=dict)
    needs: str = ""  # "switch": the reward function of scripts.faults; "interposer": the proxy between run and servers
    out_of_reach: str = ""


ANY = "any"
PARTS = ("scheduler", "http", "detokenizer", "tree")
MOMENTS = (ANY, "rollout", "backward", "optimizer", "publish", "save", "saved")
SERVER = Option(default=-1.0, meaning="index of the server; -1: drawn by the seed", least=-1)


def seconds(default: float, meaning: str, least: float = 0.1) -> Option:
    return Option(default=default, meaning=meaning, least=least)


def part(*more: str) -> Option:
    return Option(default=ANY, meaning="which of the server's processes; any: drawn by the seed", choices=(*PARTS, ANY))


UNTIL_REPLACED = seconds(FOR_EVER, "then it goes on; 0: stopped until it is replaced", FOR_EVER)

STARVED = {
    "share": Option(default=0.5, meaning="of what a step takes, it is left", least=0.01),
    "seconds": seconds(60.0, "for so long it may live on"),
}

KINDS: Mapping[str, FaultKind] = {
    kind.id: kind
    for kind in (
        FaultKind(id="C1", what="server crashes: SIGKILL", role="server", options={"part": part(), "server": SERVER}),
        FaultKind(
            id="C2",
            what="server hangs: SIGSTOP",
            role="server",
            options={"part": part(), "server": SERVER, "seconds": UNTIL_REPLACED},
        ),
        FaultKind(
            id="C3",
            what="server out of memory: RLIMIT_AS of its scheduler, then requests that need more",
            role="server",
            options={
                "server": SERVER,
                "headroom_mib": Option(default=0.0, meaning="above the address space that it has now"),
                "seconds": seconds(60.0, "for so long requests are sent"),
            },
        ),
        FaultKind(
            id="C4",
            what="server slower: SIGSTOP and SIGCONT of its scheduler in turn",
            role="server",
            options={
                "server": SERVER,
                "slower": Option(default=4.0, meaning="times", least=1.1),
                "period_s": seconds(0.2, "of one stop and go", 0.01),
                "seconds": seconds(20.0, "for so long"),
            },
        ),
        FaultKind(
            id="C5",
            what="stale weights: a server is made to load those that the run began with",
            role="server",
            options={
                "server": SERVER,
                "label": Option(
                    default="false",
                    meaning="true: it says the old version; false: it goes on saying the new one",
                    choices=("true", "false"),
                ),
            },
        ),
        FaultKind(
            id="C6",
            what="damaged weights: a server is made to load the current ones with one tensor's signs turned",
            role="server",
            options={"server": SERVER},
        ),
        FaultKind(id="C7", what="every server dies at once: SIGKILL of all their trees", role="server"),
        FaultKind(
            id="C8",
            what="request errors: a share of the generations is reset, refused, cut or emptied on the way",
            role="server",
            needs="interposer",
            options={
                "share": Option(default=0.2, meaning="of the requests", least=0.001),
                "seconds": seconds(60.0, "for so long"),
            },
        ),
        FaultKind(
            id="T1",
            what="trainer killed: SIGKILL at a moment that its own stack or files prove",
            role="trainer",
            options={
                "moment": Option(default=ANY, meaning="any: a random one; saved: right after a save", choices=MOMENTS)
            },
        ),
        FaultKind(id="T2", what="trainer hangs: SIGSTOP", role="trainer", options={"seconds": UNTIL_REPLACED}),
        FaultKind(
            id="T3",
            what="poisoned batch: rewards whose sum overflows (a poisoned parameter is out of reach: the trainer "
            "has no call that would write one)",
            role="trainer",
            needs="switch",
            options={
                "share": Option(default=0.25, meaning="of the prompts", least=0.001),
                "seconds": seconds(0.5, "for so long"),
            },
        ),
        FaultKind(
            id="T4",
            what="newest checkpoint damaged, then T1",
            role="trainer",
            options={
                "damage": Option(
                    default="flip",
                    meaning="torn: its largest file cut in half; flip: one bit of it; manifest: gone",
                    choices=("torn", "flip", "manifest"),
                ),
                "then": Option(default="kill", meaning="nothing: leave the trainer alone", choices=("kill", "nothing")),
            },
        ),
        FaultKind(
            id="T5",
            what="disk full: a file takes what is free where the checkpoints lie; on a small filesystem alone",
            role="trainer",
            options={
                "free_kib": Option(default=64.0, meaning="that stay free"),
                "seconds": seconds(60.0, "then it is removed"),
            },
        ),
        FaultKind(
            id="T6",
            what="trainer out of memory: RLIMIT_DATA of its process, below what its next step needs",
            role="trainer",
            options=STARVED,
        ),
        FaultKind(
            id="T7",
            what="trainer killed for memory: by the kernel, in a cgroup with less room than its next step needs",
            role="trainer",
            options=STARVED,
        ),
        FaultKind(id="S1", what="rewards always 0", needs="switch", options={"seconds": seconds(60.0, "for so long")}),
        FaultKind(
            id="S2",
            what="a share of the rewards silently 0",
            needs="switch",
            options={
                "share": Option(default=0.3, meaning="of the completions", least=0.001),
                "seconds": seconds(60.0, "for so long"),
            },
        ),
        FaultKind(
            id="S3",
            what="rewards always 1, or the reward function raises, or never returns",
            needs="switch",
            options={
                "how": Option(default="one", meaning="which of them", choices=("one", "raise", "hang")),
                "seconds": seconds(60.0, "for so long"),
            },
        ),
        FaultKind(
            id="S4",
            what="policy collapse: learning rate × 20",
            out_of_reach="a run takes no new learning rate from outside; start one with a higher actor.optimizer.lr",
        ),
        FaultKind(
            id="M1",
            what="HealthMonitor or Coordinator killed: SIGKILL",
            role="supervisor",
            options={
                "who": Option(
                    default=ANY, meaning="any: drawn by the seed", choices=("health_monitor", "coordinator", ANY)
                )
            },
        ),
        FaultKind(
            id="M2",
            what="driver killed, interrupted or terminated; this ends the run",
            options={"signal": Option(default="kill", meaning="which", choices=("kill", "int", "term"))},
        ),
        FaultKind(id="N1", what="a node is lost: SIGKILL of a raylet"),
        FaultKind(id="D1", what="a server is killed while the trainer recovers from a kill", role="trainer"),
        FaultKind(
            id="X-long",
            what="trap: long generations of a stranger keep a server busy",
            role="server",
            options={
                "server": SERVER,
                "tokens": Option(default=200.0, meaning="of each", least=1),
                "together": Option(default=8.0, meaning="requests at once", least=1),
                "seconds": seconds(20.0, "for so long"),
            },
        ),
        FaultKind(
            id="X-reward",
            what="trap: the reward function stalls, once in each of its processes",
            needs="switch",
            options={"stall_s": seconds(5.0, "of one stall"), "seconds": seconds(10.0, "in which it may begin")},
        ),
        FaultKind(
            id="X-hard",
            what="trap: a harder batch",
            out_of_reach="a reward function that is made stricter is broken for known answers too, so that an alarm "
            "would be right; start a run on harder records (train_dataset.path) instead",
        ),
        FaultKind(
            id="X-load",
            what="trap: loads of weights take longer",
            role="server",
            needs="interposer",
            options={"load_s": seconds(5.0, "of each, more"), "seconds": seconds(30.0, "for so long")},
        ),
        FaultKind(
            id="X-gc",
            what="trap: the trainer pauses, as in a garbage collection",
            role="trainer",
            options={"seconds": seconds(1.5, "of the pause")},
        ),
        FaultKind(
            id="X-busy",
            what="trap: the server answers 503 to health while it generates",
            role="server",
            needs="interposer",
            options={"seconds": seconds(30.0, "for so long")},
        ),
    )
}


def describe() -> str:
    """All kinds with their options, for `--list`."""
    lines = []
    for kind in KINDS.values():
        needs = {"switch": " [needs the switched reward function]", "interposer": " [needs --interpose]", "": ""}
        lines.append(f"{kind.id:9}{kind.what}{needs[kind.needs]}")
        if kind.out_of_reach:
            lines.append(f"{'':11}can't be injected: {kind.out_of_reach}")
        for name, option in kind.options.items():
            allowed = f" ({'|'.join(option.choices)})" if option.choices else ""
            shown = option.default if isinstance(option.default, str) else f"{option.default:g}"
            lines.append(f"{'':11}{name}={shown}  {option.meaning}{allowed}")
    return "\n".join(lines)
