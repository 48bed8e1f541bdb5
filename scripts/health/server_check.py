"""Each server: of a run of ours as now.json has it, of any other as it answers.

The run's own HealthMonitor sees a server's processes, its tokens and its weights from where it runs, and it is not
asked again here. A server that nobody watches (AReaL's, `--server`) is asked for what any client may ask: one greedy
token of a prompt of one token. Publishing weights aborts running requests, so the token is asked for twice at most.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from dataclasses import dataclass

from actors.serving.server_watch import PROBE_PROMPT, PROBE_SAMPLING
from actors.serving.sglang_client import SGLangClient
from launcher.base.errors import RequestFailed
from launcher.base.findings import Finding, Severity
from launcher.base.messages import Health, ServerState
from launcher.reporting.current_status import RunHealth, ServerHealth
from scripts.health.findings import ABSENT, BAD, NOTE, OK, UNKNOWN
from scripts.health.run_check import RESULTS, SHARE_OF_DEADLINE, Subject

RUNNING = "sglang:num_running_reqs"


def check_servers(subject: Subject) -> list[Finding]:
    asked = asyncio.run(_ask_all(subject.extra_servers, SHARE_OF_DEADLINE * subject.timeout_s))
    if subject.areal is not None and asked:
        return asked
    return [*_recorded(subject), *asked]


def _recorded(subject: Subject) -> list[Finding]:
    if not subject.may_be_live:
        text = "the run has ended" if subject.view.status else "no run is seen that has any"
        return [Finding("servers", text, ABSENT)]
    if subject.has_own_servers:
        return [Finding("servers", "another project's trainer has its own, which are not looked at", ABSENT)]
    if subject.health is None:
        return [Finding("servers", "now.json does not say how they are", UNKNOWN)]
    leaving = {name for name, one in subject.view.servers.items() if one.state == "LEAVING"}
    if not subject.health.servers:
        return [Finding("servers", "now.json names none yet", UNKNOWN)]
    return [judge_server(one, subject.health, is_leaving=one.name in leaving) for one in subject.health.servers]


def judge_server(server: ServerHealth, health: RunHealth, *, is_leaving: bool = False) -> Finding:
    age_s = health.age_s + server.silent_s
    result, text = _verdict(server, is_leaving=is_leaving)
    return Finding(server.name, text, result, facts=dataclasses.asdict(server) | {"age_s": age_s})


def _verdict(server: ServerHealth, *, is_leaving: bool) -> tuple[Severity, str]:
    verdict, weights = server.verdict, ""
    if server.weight_version is not None:
        weights = f"weight_version {server.weight_version}"
    match server.state:
        case ServerState.FAILED:
            return BAD, "given up; the run continues without it"
        case _ if is_leaving:
            return NOTE, "leaving, as requested"
        case ServerState.READY:
            return RESULTS[verdict.health], _joined(verdict.reason, weights)
        case ServerState.STARTING | ServerState.STALE if verdict.health is not Health.DEAD:
            return UNKNOWN, _joined(f"{server.state}, it gets no requests", server.reason, weights)
        case ServerState.SUSPECT:
            return BAD, _joined("SUSPECT", server.reason, verdict.reason)
    return BAD, f"{server.state}: {verdict.reason}"


def _joined(*parts: str) -> str:
    return "; ".join(filter(None, parts))


# ── a server that no run of ours watches ──


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """Without an answer a figure is None."""

    url: str
    weight_version: int | None = None
    generated_s: float | None = None
    failure: str = ""
    running: float | None = None


def judge_answer(seen: Answered) -> Finding:
    """One that is busy with other requests may keep this one waiting: whether it is healthy is not known then."""
    result: Severity = BAD
    text = seen.failure or "no answer"
    if seen.generated_s is not None:
        result, text = OK, f"a token in {seen.generated_s:.2f} s, weight_version {seen.weight_version}"
    elif seen.running:
        result = UNKNOWN
        text = f"no token for this check, while it reports to be busy, {seen.running:.0f} running: {seen.failure}"
    elif seen.weight_version is not None:
        text = f"it answers and generates nothing: {seen.failure}"
    return Finding(seen.url, text, result, facts=dataclasses.asdict(seen))


async def _ask_all(urls: tuple[str, ...], timeout_s: float) -> list[Finding]:
    """A run's keys are never sent: what answers there may be anybody's."""
    if not urls:
        return []
    async with SGLangClient() as client:
        return [judge_answer(one) for one in await asyncio.gather(*(_ask(client, url, timeout_s) for url in urls))]


async def _ask(client: SGLangClient, url: str, timeout_s: float) -> Answered:
    version, running, (generated_s, failure) = await asyncio.gather(
        _version(client, url, timeout_s), _running(client, url, timeout_s), _token(client, url, timeout_s)
    )
    return Answered(url=url, weight_version=version, generated_s=generated_s, failure=failure, running=running)


async def _version(client: SGLangClient, url: str, timeout_s: float) -> int | None:
    try:
        return (await client.model_info(url, timeout_s=timeout_s)).weight_version
    except RequestFailed:
        return None


async def _running(client: SGLangClient, url: str, timeout_s: float) -> float | None:
    try:
        return (await client.metrics(url, timeout_s=timeout_s)).get(RUNNING)
    except (RequestFailed, ValueError):  # without --enable-metrics there is no such page
        return None


async def _token(client: SGLangClient, url: str, timeout_s: float) -> tuple[float | None, str]:
    """(seconds that a token took, "") or (None, why there is none)."""
    give_up_at = time.monotonic() + timeout_s
    failure = ""
    for _ in range(2):
        began = time.monotonic()
        try:
            await client.generate(
                url, token_ids=PROBE_PROMPT, sampling=PROBE_SAMPLING, timeout_s=max(give_up_at - began, 0.1)
            )
        except RequestFailed as error:
            failure = error.message
            continue
        return time.monotonic() - began, ""
    return None, failure
