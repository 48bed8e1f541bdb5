"""One incarnation (generation) of an SGLang server process, from its launch to the report of its end; and the host that
runs it (actors/processes/process_host.py), one for each server's actor.

On a CPU the host has imported SGLang, and each incarnation is a fork of it. The first start waits for its imports,
which it would otherwise make itself. A host that is gone, or that was made with another environment or for another
architecture of model, is made anew by the next start, which then takes as long as the first. Where that does not come
about, servers are run as programs for a while, as on a GPU always, and the log says why.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shlex
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from actors.processes.hosted_process import PLAIN, Ended, HostedProcess, ProcessHost, ProcessLaunch
from actors.serving.auth_middleware import VARIABLE
from actors.serving.completions import CompletionStream
from actors.serving.group_address import LOOPBACK
from actors.serving.server_log_tail import decisive_lines, last_line, size_of, tail
from actors.serving.sglang_client import Sampling, SGLangClient
from actors.serving.sglang_command import (
    CPU_ENTRY,
    GPU_ENTRY,
    choose_port,
    command,
    environment,
    memory_limit,
    url,
)
from launcher.base.errors import RequestFailed, ResourceError, ServerError
from launcher.base.messages import Cause, ServerExit
from launcher.base.wording import signal_name
from launcher.config.schema import RunConfig, SGLangConfig
from launcher.config.supervision import HealthConfig
from launcher.policy.exit_cause import find_server_cause
from launcher.resources.hardware import device_for, find_hardware
from launcher.resources.toolchain import server_tools
from launcher.run_files.run_id import mark_in

MOST_SAMPLES = 8
USUAL_PROMPT = 256
MOST_TOKENS = 8
LEAST_TOKENS = 2
"""The first comes from the prefill, the second from a decode step."""
PLENTY = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadinessProof:
    """The generation that makes a server READY: `samples` completions of one prompt of `prompt_tokens`, asked as the
    run will ask. Kernels that are compiled at their first use are compiled before the server has traffic then, and its
    silence meanwhile is that of a start and not of a hang.

    On a GPU the first use of `top_p` or `top_k` has FlashInfer build its sampling module, and the first batch of
    several sequences another kernel: tens of seconds in which a server answers nobody.
    """

    sampling: Sampling
    samples: int
    prompt_tokens: int

    @classmethod
    def of(cls, config: RunConfig) -> ReadinessProof:
        """With the run's own sampling, and as many samples and tokens as its settings leave room for."""
        samples = min(config.gconfig.n_samples, MOST_SAMPLES)
        tokens = max(LEAST_TOKENS, min(config.gconfig.max_new_tokens, MOST_TOKENS))
        pool = (config.sglang.max_total_tokens or PLENTY) - samples * tokens
        context = (config.sglang.context_length or PLENTY) - tokens
        longest = min(config.train_dataset.max_length or USUAL_PROMPT, USUAL_PROMPT)
        sampling = Sampling.from_config(config.gconfig)
        return cls(
            sampling=replace(sampling, max_new_tokens=tokens, min_new_tokens=LEAST_TOKENS),
            samples=samples,
            prompt_tokens=max(1, min(longest, context // 2, pool // (samples + 1))),
        )

    async def give(self, client: SGLangClient, url: str, *, timeout_s: float) -> int:
        """The weight version that the tokens came from. Raises RequestFailed."""
        answer = await client.generate_samples(
            url,
            CompletionStream(self.samples, server=url),
            inputs=[[0] * self.prompt_tokens] * self.samples,
            samplings=[self.sampling] * self.samples,
            timeout_s=timeout_s,
        )
        if answer.failure is not None:
            raise answer.failure
        versions = {completion.weight_version for completion in answer.completions.values()}
        if len(versions) > 1:
            raise RequestFailed(f"{url} generated with several weight versions: {sorted(versions)}")
        return versions.pop()


SHORT = ReadinessProof(
    sampling=Sampling(temperature=0.0, top_p=1.0, top_k=-1, max_new_tokens=2, min_new_tokens=2),
    samples=1,
    prompt_tokens=1,
)
"""Of a server without a run."""


POLL_S = 0.1
HOST_PAUSE_S = 300.0
"""After a host whose imports came to nothing; until then servers are run as programs."""
GRACE_S = 0.0
"""No grace: on SIGTERM SGLang takes 7.6 s to end even when idle, 52 s with a long request, and saves nothing."""
VITAL = "sglang::"
"""Scheduler and detokenizer. The server itself notices a dead one after 1.3 s, and takes up to 6 s more to end."""
SHARED_MEMORY = "/dev/shm/sglang_"


def server_mark(log: Path) -> str:
    """In the environment of all processes of the server that writes this log."""
    return mark_in(log.parent, "GRPO_SERVER_LOG", log)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """What all incarnations of one server share. `entry` replaces SGLang's command in tests.

    `keys`: the file of its keys (launcher/run_files/run_keys.py), which the server reads itself. `meets_at`: this
    node's address in a group with the trainer. `health`: when it counts as hung.
    """

    index: int
    config: SGLangConfig
    log: Path
    keys: Path
    setup_timeout_s: float
    gpu_ids: tuple[str, ...] = ()
    entry: tuple[str, ...] | None = None
    node: str = ""
    meets_at: str = LOOPBACK
    proof: ReadinessProof = SHORT
    health: HealthConfig = field(default_factory=HealthConfig)

    @property
    def name(self) -> str:
        return f"server-{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOrder:
    """Which incarnation to launch, with which weights."""

    generation: int
    model_path: str
    weight_version: int


class ServerHost:
    """`entry`: how the command of a server begins that can be forked; a GPU's is never. `importing` is set while a
    start waits for imports."""

    def __init__(self, entry: Sequence[str] = CPU_ENTRY, *, within_s: float) -> None:
        """`within_s`: for its imports."""
        self._entry = tuple(entry)
        self._within_s = within_s
        self._host: ProcessHost | None = None
        self._forks = False
        self._architectures: object = None
        self._paused_until = 0.0
        self._stopped: asyncio.Future[None] | None = None
        self.importing = asyncio.Event()

    def stop_waiting(self) -> None:
        """The start that waits for the imports fails; they go on, for the next one."""
        if self._stopped is not None and not self._stopped.done():
            self._stopped.set_result(None)

    async def start(self, launch: ProcessLaunch, *, model_path: str) -> HostedProcess:
        """Raises ServerError."""
        forks = tuple(launch.command[: len(self._entry)]) == self._entry and time.monotonic() >= self._paused_until
        self._stopped = None
        try:
            return await (await self._ready(launch, model_path, forks=forks)).start(launch)
        except (ServerError, OSError) as error:
            if not forks or (self._stopped is not None and self._stopped.done()):
                raise
            _say(launch.log, f"run as a program: {error}")
        await self.end()
        self._paused_until = time.monotonic() + HOST_PAUSE_S
        return await (await self._ready(launch, model_path, forks=False)).start(launch)

    async def end(self) -> None:
        """With what runs in it. Harmless where there is none. Raises ServerError where it survives SIGKILL."""
        host = self._host
        self._host = None
        if host is not None:
            await host.end()

    async def _ready(self, launch: ProcessLaunch, model_path: str, *, forks: bool) -> ProcessHost:
        """A host for `launch`. Raises ServerError, OSError."""
        architectures = _architectures(model_path) if forks else None
        if self._host is not None and (why := self._why_not(self._host, launch, architectures, forks=forks)):
            if self._forks:
                _say(launch.log, f"a new host: {why}")
            await self.end()
        if self._host is None:
            command = (*self._entry, "--model-path", model_path) if forks else PLAIN
            if forks:
                _say(launch.log, f"host: {shlex.join(command)}")
            self._host = await ProcessHost.begin(launch, command)
            self._architectures = architectures
            self._forks = forks
        host = self._host
        if not host.ready.done():
            await self._wait(host)
        return host

    def _why_not(self, host: ProcessHost, launch: ProcessLaunch, architectures: object, *, forks: bool) -> str:
        if host.is_gone():
            return "it is gone"
        if forks != self._forks:
            return "servers are forked" if forks else "servers are run as programs"
        if self._architectures not in (None, architectures):
            return f"it was made for {self._architectures}, not {architectures}"
        return host.why_no_fork(launch) if forks else ""

    async def _wait(self, host: ProcessHost) -> None:
        self._stopped = asyncio.get_running_loop().create_future()
        if self._forks:
            self.importing.set()
        try:
            waits = (host.ready, self._stopped)
            done, _ = await asyncio.wait(waits, timeout=self._within_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.importing.clear()
        if self._stopped in done:
            raise ServerError("it was stopped while its host imported")
        if not done:
            raise ServerError(f"its host did not import within {self._within_s:g} s")


def _architectures(model_path: str) -> object:
    """As its config.json has them; None where they can't be read, and SGLang imports the files of all."""
    try:
        return json.loads((Path(model_path) / "config.json").read_text())["architectures"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _say(log: Path, what: str) -> None:
    """In the server's log, where the disk takes it."""
    now = datetime.now().astimezone().isoformat(timespec="seconds")  # as the lines around it, and with their zone
    with contextlib.suppress(OSError), log.open("ab", buffering=0) as file:
        file.write(f"==== {now}: {what}\n".encode())


class ServerIncarnation:
    """A launched server: starting, serving or ended. `url` and `pid` belong to this incarnation alone."""

    def __init__(
        self, spec: ServerSpec, process: HostedProcess, order: LaunchOrder, *, port: int, log_start: int
    ) -> None:
        self._spec = spec
        self._process = process
        self._started = time.monotonic()
        self._log_start = log_start
        self.generation = order.generation
        self.weight_version = order.weight_version
        self.pid = process.pid
        self.url = url(spec.config, port)

    @classmethod
    async def launch(
        cls, spec: ServerSpec, owners: Sequence[int], order: LaunchOrder, host: ServerHost
    ) -> ServerIncarnation:
        """Raises ResourceError where the port is in use or CUDA's tools can't be had, ServerError where it fails."""
        port = choose_port(spec.config, spec.index)
        device = device_for(spec.config.device, await asyncio.to_thread(find_hardware))
        model = str(Path(order.model_path).absolute()) if Path(order.model_path).is_dir() else order.model_path
        words = command(
            spec.config,
            entry=spec.entry or (CPU_ENTRY if device == "cpu" else GPU_ENTRY),
            device=device,
            index=spec.index,
            generation=order.generation,
            model_path=model,
            weight_version=order.weight_version,
            port=port,
        )
        log_start = _mark(spec.log, order.generation, words)
        tools = _tools() if device == "cuda" else {}

        # short: the path of a socket in it may have 107 characters
        scratch = Path(tempfile.gettempdir()) / f"sgl-{secrets.token_hex(6)}"
        own = environment(
            spec.config,
            os.environ,
            device=device,
            gpu_ids=spec.gpu_ids,
            scratch=scratch,
            model_path=model,
            meets_at=spec.meets_at,
        )
        launch = ProcessLaunch(
            command=words,
            environment={**own, **tools, VARIABLE: str(spec.keys)},
            log=spec.log,
            mark=server_mark(spec.log),
            watch=owners,
            grace_s=GRACE_S,
            vital=VITAL,
            files=SHARED_MEMORY,
            scratch=scratch,
            memory_limit=memory_limit(spec.config, device=device),
        )
        process = await host.start(launch, model_path=model)
        return cls(spec, process, order, port=port, log_start=log_start)

    # ── becoming ready ──

    async def wait_answers(self, client: SGLangClient) -> None:
        """Until the HTTP process answers; it does so only when its scheduler has loaded the weights."""
        while True:
            try:
                await client.model_info(self.url, timeout_s=self._left())
            except RequestFailed as failure:
                if not failure.retryable:
                    raise
                await asyncio.sleep(POLL_S)
            else:
                return

    async def generate(self, client: SGLangClient) -> int:
        """Generate, and return the weight version that the tokens came from."""
        return await self._spec.proof.give(client, self.url, timeout_s=self._left())

    def _left(self) -> float:
        return max(self._started + self._spec.setup_timeout_s - time.monotonic(), POLL_S)

    # ── the end ──

    async def wait_exit(self) -> ServerExit:
        ended = await self._process.wait_ended()
        return ServerExit(
            name=self._spec.name,
            generation=self.generation,
            pid=self.pid,
            exit_code=ended.exit_code,
            reason=self._describe(ended),
            age_s=time.monotonic() - ended.monotonic,
            was_told=ended.was_told,
        )

    async def end(self) -> None:
        """End the process tree; returns when it is gone and its port is free. Harmless where it has ended."""
        if left := await self._process.end():
            raise ServerError(
                f"processes {left} of {self._spec.name} (generation {self.generation}) survive SIGKILL",
                "they wait in the kernel, for a disk or a GPU's driver; they may hold the port and GPU memory",
            )

    def why_not_ready(self, what: str) -> ServerError:
        """The error that reports `what` happened, with the log's decisive lines or else its last one."""
        text = tail(self._spec.log, self._log_start)
        said = decisive_lines(text) or [last_line(text) or "it wrote nothing to its log"]
        return ServerError(
            f"{self._spec.name} (generation {self.generation}) did not become ready: {what}: {' | '.join(said)}",
            f"see {self._spec.log}; rollout.setup_timeout={self._spec.setup_timeout_s:g} is its deadline",
        )

    def _describe(self, ended: Ended) -> str:
        what = ended.cause or f"its process ended with {exit_words(ended.exit_code)}"
        lines = decisive_lines(tail(self._spec.log, self._log_start))
        if self._spec.gpu_ids and find_server_cause(lines, None).cause is Cause.GPU_FAULT:
            what += f" on GPU {', '.join(self._spec.gpu_ids)} of node {self._spec.node[:8]}"
        return ": ".join([what, *filter(None, [" | ".join(lines)])])


def _tools() -> dict[str, str]:
    try:
        return server_tools(os.environ)
    except OSError as error:
        where = error.filename or tempfile.gettempdir()
        raise ResourceError(
            f"no CUDA toolkit can be put together: {where}: {error}", "set CUDA_HOME, or TMPDIR"
        ) from error


def exit_words(code: int | None) -> str:
    """An exit code as a person reads it."""
    if code is None:
        return "an unknown exit code"
    return f"exit code {code}" if code >= 0 else f"exit code {code} ({signal_name(-code)})"


def _mark(log: Path, generation: int, words: Sequence[str]) -> int:
    """Write the line that begins this incarnation's part of the log; returns the byte after it. A disk that refuses it
    refuses nothing else: the log's present end is the beginning then."""
    now = datetime.now().astimezone().isoformat(timespec="seconds")  # as the lines around it, and with their zone
    try:
        with log.open("ab", buffering=0) as file:
            file.write(f"==== generation {generation}, {now}: {shlex.join(words)}\n".encode())
            return file.tell()
    except OSError:
        return size_of(log)
