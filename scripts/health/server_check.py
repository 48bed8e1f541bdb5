"""Each server: its processes, one real token, its weight version, its queue and its KV cache.

Asks what any client may ask: one greedy token of a prompt of one token. Nothing is paused or flushed, no weights are
touched. Publishing weights aborts running requests, so the token is asked for twice at most.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from dataclasses import dataclass

from actors.serving.generation_probe import PROMPT, SAMPLING
from actors.serving.sglang_client import SGLangClient
from launcher.base.errors import RequestFailed
from launcher.run_files.run_keys import ServerKeys
from launcher.run_files.written_settings import foreign_trainer
from launcher.run_log.last_attempt import ServerRecord
from launcher.run_log.line_values import as_integer
from launcher.run_log.run_log import RunLogFiles
from scripts.health.findings import ABSENT, BAD, NOTE, OK, UNKNOWN, CheckResult, Finding
from scripts.health.run_check import Subject
from scripts.run_processes import state

SHARE_OF_DEADLINE = 0.8
"""Of the check's: the rest is for what comes after the answer."""
RUNNING, QUEUED, KV_USE = "sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage"
WORST = "ZTtDRSI"
"""Letters of proc(5), the one that says most first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSeen:
    """`state` is the journal's (ServerRecord). `process`: the worst letter of proc(5) of its processes, "" where they
    are gone, None where they can't be seen from here. Without an answer a figure is None.

    `expected`: lowest and highest weight version that is current, read before and after the server was asked.
    """

    name: str
    state: str
    url: str
    process: str | None
    weight_version: int | None = None
    expected: tuple[int, int] | None = None
    generated_s: float | None = None
    failure: str = ""
    running: float | None = None
    queued: float | None = None
    kv_use: float | None = None


def judge_server(seen: ServerSeen) -> Finding:
    facts = dataclasses.asdict(seen)
    result, text = _verdict(seen)
    return Finding("servers", facts.pop("name"), result, text, facts)


def _verdict(seen: ServerSeen) -> tuple[CheckResult, str]:
    match seen.state:
        case "ABANDONED":
            return BAD, "given up; the run continues without it"
        case "LEAVING":
            return NOTE, "leaving, as requested"
        case "STARTING":
            return UNKNOWN, "it is starting"
        case "DEAD":
            return BAD, "it died, and has not been restarted yet"
    if seen.process == "":
        return BAD, "its process is gone"
    if seen.process in ("T", "t", "Z"):
        return BAD, "one of its processes has ended" if seen.process == "Z" else "one of its processes is stopped"
    if seen.generated_s is None:
        return _no_token(seen)
    if seen.expected and seen.weight_version is not None:
        low, high = seen.expected
        if not low <= seen.weight_version <= high:
            wanted = f"{low}" if low == high else f"{low} {'or' if high == low + 1 else 'to'} {high}"
            return BAD, f"it holds weight_version {seen.weight_version}, by metrics.jsonl the trainer is at {wanted}"
    return OK, f"a token in {seen.generated_s:.2f} s{_load(seen)}, weight_version {seen.weight_version}"


def _no_token(seen: ServerSeen) -> tuple[CheckResult, str]:
    """A server that is busy with other requests may keep this one waiting: whether it is healthy is not known then."""
    if seen.running:
        return UNKNOWN, f"no token for this check, while it reports to be busy{_load(seen)}: {seen.failure}"
    if seen.weight_version is not None:
        return BAD, f"it answers and generates nothing: {seen.failure}"
    return BAD, seen.failure or "no answer"


def _load(seen: ServerSeen) -> str:
    load = ((seen.running, "{:.0f} running"), (seen.queued, "{:.0f} queued"), (seen.kv_use, "KV cache {:.0%} used"))
    return "".join(f", {words.format(value)}" for value, words in load if value is not None)


def check_servers(subject: Subject) -> list[Finding]:
    servers = dict(sorted(subject.view.servers.items())) if subject.may_be_live else {}
    servers |= {url: ServerRecord(state="READY", url=url) for url in subject.extra_servers}
    if not servers and not subject.may_be_live:
        return [Finding("servers", "servers", ABSENT, "the run has ended")]
    if not servers and foreign_trainer(subject.view.settings):
        return [Finding("servers", "servers", ABSENT, "another project's trainer has its own, which are not looked at")]
    if not servers:
        return [Finding("servers", "servers", UNKNOWN, "the journal names none yet")]
    return asyncio.run(_check_all(subject, servers))


async def _check_all(subject: Subject, servers: dict[str, ServerRecord]) -> list[Finding]:
    """Only the run's own servers are sent its keys. Raises StorageError where they are another user's."""
    keys = ServerKeys.read(subject.paths.keys) if subject.paths.keys.exists() else None
    run = RunLogFiles(subject.paths)
    async with SGLangClient(keys) as own, SGLangClient() as stranger:
        looks = (_look(subject, run, stranger if name == one.url else own, name, one) for name, one in servers.items())
        return [judge_server(seen) for seen in await asyncio.gather(*looks)]


async def _look(
    subject: Subject, run: RunLogFiles, client: SGLangClient, name: str, record: ServerRecord
) -> ServerSeen:
    seen = ServerSeen(
        name=name,
        state=record.state,
        url=record.url,
        process=_process_state(subject, name, record),
    )
    if record.state != "READY" or not record.url or seen.process == "":
        return seen
    before = run.refresh().policy_version()
    timeout_s = SHARE_OF_DEADLINE * subject.timeout_s
    version, load, (generated_s, failure) = await asyncio.gather(
        _version(client, record.url, timeout_s),
        _metrics(client, record.url, timeout_s),
        _token(client, record.url, timeout_s),
    )
    after = run.refresh().policy_version()
    expected = None
    if before is not None and after is not None and name != record.url:  # a publish or a restore may come in between
        staleness = as_integer(subject.view.setting("rollout.max_head_offpolicyness")) or 0
        expected = min(before, after) - staleness, max(before, after) + 1
    return dataclasses.replace(
        seen,
        weight_version=version,
        expected=expected,
        generated_s=generated_s,
        failure=failure,
        running=load.get(RUNNING),
        queued=load.get(QUEUED),
        kv_use=load.get(KV_USE),
    )


def _process_state(subject: Subject, name: str, record: ServerRecord) -> str | None:
    """The worst of its processes'; None where they are another machine's, or nobody named them."""
    if subject.processes is None or name == record.url:
        return None
    found = next((one for one in subject.processes.servers if one.name == name), None)
    if found is None or (record.pid is not None and found.http.pid != record.pid):
        return "" if record.state == "READY" else None
    letters = {letter for process in found.tree if (letter := state(process))}
    return min(letters, key=lambda letter: WORST.find(letter) % (len(WORST) + 1), default="")


async def _version(client: SGLangClient, url: str, timeout_s: float) -> int | None:
    try:
        return (await client.model_info(url, timeout_s=timeout_s)).weight_version
    except RequestFailed:
        return None


async def _metrics(client: SGLangClient, url: str, timeout_s: float) -> dict[str, float]:
    try:
        return await client.metrics(url, timeout_s=timeout_s)
    except (RequestFailed, ValueError):  # without --enable-metrics there is no such page
        return {}


async def _token(client: SGLangClient, url: str, timeout_s: float) -> tuple[float | None, str]:
    """(seconds that a token took, "") or (None, why there is none)."""
    give_up_at = time.monotonic() + timeout_s
    failure = ""
    for _ in range(2):
        began = time.monotonic()
        try:
            await client.generate(url, token_ids=PROMPT, sampling=SAMPLING, timeout_s=max(give_up_at - began, 0.1))
        except RequestFailed as error:
            failure = error.message
            continue
        return time.monotonic() - began, ""
    return None, failure
