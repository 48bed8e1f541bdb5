"""How a run looks on a terminal: pure functions from a RunView to rich renderables and to plain lines."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from rich.box import ROUNDED
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from launcher.base.messages import ServerInfo, ServerState
from launcher.base.wording import in_one_line
from launcher.reporting.formats import duration, held_out
from launcher.reporting.run_view import MEAN_OVER_STEPS, RunView

BARS = "▁▂▃▄▅▆▇█"
WIDEST = 110
LABEL_WIDTH = 10
FRAME_WIDTH = 4
LEAST_SPAN = 0.2
"""Of rewards, from the lowest bar to the highest: noise of a few hundredths is not drawn as a mountain range."""

LONGEST_REASON = 60
"""Of a server, in characters; all of it is in the journal."""
SERVER_STYLES = {
    ServerState.READY: "green",
    ServerState.STARTING: "yellow",
    ServerState.STALE: "yellow",
    ServerState.SUSPECT: "yellow",
    ServerState.DEAD: "bold red",
    ServerState.FAILED: "bold red",
    ServerState.STOPPED: "dim",
}
PUBLISHING, LOADING = "publish", "LOADING"
SERVERS_BY_NAME = 3
"""Up to so many servers are shown separately; of more, how many are in each state."""


def render_panel(view: RunView, width: int) -> RenderableType:
    """The live display: one row for each thing, none ever wraps, so that its height does not jump."""
    width = min(width, WIDEST)
    inner = width - FRAME_WIDTH - LABEL_WIDTH
    rows = [
        ("step", _step_row(view, inner)),
        ("reward", _reward_row(view, inner)),
        ("held-out", Text(held_out(view.evals))),
        ("now", _phase_row(view)),
        ("servers", _server_row(view)),
        ("time", _time_row(view)),
        ("last", Text(in_one_line(view.last_event, longest=WIDEST))),
    ]
    grid = Table.grid(padding=0, expand=True)
    grid.add_column(width=LABEL_WIDTH, style="dim")
    grid.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    for label, row in rows:
        if row.plain:
            grid.add_row(label, row)
    title = view.title + (f" · attempt {view.attempt}" if view.attempt > 1 else "")
    return Group(Panel(grid, title=Text(title, style="bold"), title_align="left", box=ROUNDED, width=width))


def render_line(view: RunView) -> str:
    """The same as one line of text, for a log."""
    total = view.status.total_steps  # of another project's trainer it is not known
    parts = [f"step {view.steps_done}/{total}" if total else f"step {view.steps_done}"]
    if epochs := view.epochs:
        parts.append(f"epoch {epochs}")
    if view.reward is not None:
        parts.append(f"reward {view.reward:.3f}")
    if view.recent_reward is not None:
        parts.append(f"last {min(MEAN_OVER_STEPS, len(view.rewards))}: {view.recent_reward:.3f}")
    if view.tokens_per_s is not None:
        parts.append(f"{view.tokens_per_s:.0f} tokens/s")
    parts.append(f"now: {view.status.phase} ({duration(view.status.seconds_in_phase)})")
    if total:
        servers = _server_row(view).plain or "none yet"
        parts.append(servers if 0 < len(view.servers) <= SERVERS_BY_NAME else f"servers: {servers}")
    if view.left_s is not None:
        parts.append(f"{duration(view.left_s)} left")
    return "  ".join(parts)


def sparkline(values: Sequence[float], width: int) -> str:
    """The last `width` values as bars; a gap where a value is NaN."""
    shown = [value for value in values[-width:] if math.isfinite(value)] if width > 0 else []
    if not shown:
        return ""
    low = min(shown)
    span = max(max(shown) - low, LEAST_SPAN)
    return "".join(_bar(value, low, span) for value in values[-width:])


def _bar(value: float, low: float, span: float) -> str:
    return BARS[round((value - low) / span * (len(BARS) - 1))] if math.isfinite(value) else " "


def _step_row(view: RunView, width: int) -> Text:
    total = view.status.total_steps
    if not total:
        return Text(str(view.steps_done), "bold")
    count = f"{view.steps_done}/{total}"
    share = view.steps_done / total if total else 0.0
    tail = f"  {share:4.0%}" + (f"   epoch {view.epochs}" if view.epochs else "")
    bar = max(width - len(count) - 2 - len(tail), 0)
    full = round(bar * share)
    return Text.assemble((count, "bold"), "  ", ("━" * full, "cyan"), ("━" * (bar - full), "bright_black"), tail)


def _reward_row(view: RunView, width: int) -> Text:
    if view.recent_reward is None:
        return Text("none yet", style="dim")
    now = "–" if view.reward is None else f"{view.reward:.3f}"
    mean = f"   last {min(MEAN_OVER_STEPS, len(view.rewards))}: {view.recent_reward:.3f}   "
    return Text.assemble((now, "bold"), mean, (sparkline(view.rewards, width - len(now) - len(mean)), "green"))


def _phase_row(view: RunView) -> Text:
    speed = "" if view.tokens_per_s is None else f"   {view.tokens_per_s:,.0f} tokens/s"
    after = f" {duration(view.status.seconds_in_phase)}{speed}   policy version {view.status.policy_version}"
    return Text.assemble((view.status.phase, "bold"), after)


def _server_row(view: RunView) -> Text:
    is_publishing = view.status.phase == PUBLISHING
    if len(view.servers) > SERVERS_BY_NAME:
        counts = Counter(server.state for server in view.servers)
        pieces = [
            Text(f"{counts[state]} {_state_text(state, is_publishing)}", style=SERVER_STYLES[state])
            for state in ServerState
            if counts[state]
        ]
    else:
        pieces = [_one_server(server, is_publishing) for server in view.servers]
    return Text(" · ").join(pieces)


def _state_text(state: ServerState, is_publishing: bool) -> str:
    """Between two steps each server's weights are old: that is no trouble, and reads like one."""
    return LOADING if is_publishing and state is ServerState.STALE else state.value


def _one_server(server: ServerInfo, is_publishing: bool) -> Text:
    version = "" if server.weight_version is None else f" v{server.weight_version}"
    reason = "" if server.state is ServerState.READY else in_one_line(server.reason, longest=LONGEST_REASON)
    return Text.assemble(
        f"{server.name} ",
        (_state_text(server.state, is_publishing), SERVER_STYLES[server.state]),
        version,
        f" ({reason})" if reason else "",
    )


def _time_row(view: RunView) -> Text:
    left = "" if view.left_s is None else f"   about {duration(view.left_s)} left"
    return Text(f"{duration(view.elapsed_s)}{left}")
