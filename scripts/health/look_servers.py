"""Each server: its processes, a real generation of one token, its weight version, its queue, its KV cache.

Asks what any client may ask, and takes nothing from the run: one token, greedy, of a prompt of one token. No weights
are touched, nothing is paused or flushed. A publish aborts what is under way; so a question is asked twice at most.
"""

from __future__ import annotations

import asyncio
import time

from actors.monitoring.generation_probe import PROMPT, SAMPLING
from actors.serving.sglang_client import SGLangClient
from launcher.base.errors import RequestFailed
from launcher.diagnosis.health.finding import CheckResult, Finding
from launcher.diagnosis.health.judge_server import ServerSeen, judge_server
from launcher.reporting.run_reader import as_integer
from launcher.run_files.run_keys import ServerKeys
from launcher.run_files.run_paths import RunPaths
from scripts.faults.find import Server, state
from scripts.health.look_run import Subject
from scripts.health.view import ServerSaid, trainer_version

SHARE_OF_DEADLINE = 0.8
"""Of the check's: the rest is for what comes after the answer."""
RUNNING, QUEUED, KV_USE = "sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:token_usage"
WORST = "ZTtDRSI"
"""Letters of proc(5), the one that says most first."""


def check_servers(subject: Subject) -> list[Finding]:
    servers = dict(subject.view.servers) if subject.is_live is not False else {}
    servers |= {url: ServerSaid(state="READY", url=url) for url in subject.extra_servers}
    if not servers:
        said = "the run has ended" if subject.is_live is False else "the journal names none yet"
        verdict = CheckResult.ABSENT if subject.is_live is False else CheckResult.UNKNOWN
        return [Finding(check="servers", subject="servers", verdict=verdict, said=said)]
    return asyncio.run(_all(subject, servers))


async def _all(subject: Subject, servers: dict[str, ServerSaid]) -> list[Finding]:
    async with SGLangClient(_keys(subject.paths)) as client, SGLangClient() as stranger:
        asked = ((stranger if name == said.url else client, name, said) for name, said in servers.items())
        return list(await asyncio.gather(*(_one(subject, *one) for one in asked)))


def _keys(paths: RunPaths) -> ServerKeys | None:
    """Of the run's own servers; others are never sent them. Raises StorageError where they are another user's."""
    return ServerKeys.read(paths.keys) if paths.keys.exists() else None


async def _one(subject: Subject, client: SGLangClient, name: str, said: ServerSaid) -> Finding:
    process = _process_state(subject, name, said)
    before = trainer_version(subject.paths)
    timeout_s = SHARE_OF_DEADLINE * subject.timeout_s
    version: int | None = None
    load: dict[str, float] = {}
    generated_s, failure = None, ""
    if said.state == "READY" and said.url and process != "":
        version, load, (generated_s, failure) = await asyncio.gather(
            _version(client, said.url, timeout_s),
            _load(client, said.url, timeout_s),
            _token(client, said.url, timeout_s),
        )
    after = trainer_version(subject.paths)
    allowed = as_integer(subject.view.setting("rollout", "max_head_offpolicyness")) or 0
    expected = None
    if before is not None and after is not None and name != said.url:  # a publish or a restore may come in between
        expected = min(before, after) - allowed, max(before, after) + 1
    return judge_server(
        ServerSeen(
            name=name,
            said_state=said.state,
            url=said.url,
            process=process,
            weight_version=version,
            expected=expected,
            generated_s=generated_s,
            failure=failure,
            running=load.get(RUNNING),
            queued=load.get(QUEUED),
            kv_use=load.get(KV_USE),
        )
    )


def _process_state(subject: Subject, name: str, said: ServerSaid) -> str | None:
    """The worst of its processes'; None where they are another machine's, or nobody named them."""
    if subject.processes is None or name == said.url:
        return None
    found: Server | None = next((one for one in subject.processes.servers if one.name == name), None)
    if found is None or (said.pid is not None and found.http.pid != said.pid):
        return "" if said.state == "READY" else None
    letters = {letter for process in found.tree if (letter := state(process))}
    return min(letters, key=lambda letter: WORST.find(letter) % (len(WORST) + 1), default="")


async def _version(client: SGLangClient, url: str, timeout_s: float) -> int | None:
    try:
        return (await client.model_info(url, timeout_s=timeout_s)).weight_version
    except RequestFailed:
        return None


async def _load(client: SGLangClient, url: str, timeout_s: float) -> dict[str, float]:
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
