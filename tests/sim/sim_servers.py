"""The servers of a simulated run, its client and its reward function: made up, but for the weights that they hold."""

import asyncio
import hashlib
import math
import random
from pathlib import Path

import orjson
from safetensors.torch import load_file

from launcher.base.errors import RequestFailed, ServerError
from launcher.base.messages import Cause, Health, ServerInfo, ServerState, Verdict
from launcher.base.rollouts import Completion
from launcher.policy.observed import ServerFacts
from tests.sim.virtual_time import OWNER, belongs_to
from tests.support.fake_actors import Call

NOTICED_S = 0.05
HUNG_S = 5.0
START_S, LOAD_S, TOKEN_S = 1.5, 0.05, 0.02
"""Virtual seconds."""
OTHER_WEIGHTS = 0.5
"""Nats by which the log-probs of other weights are off."""
DIGITS, JUNK = range(15, 25), range(5, 15)
"""Tokens that sound weights and a sound template make, and those that damaged ones do."""
SOUND = Verdict(health=Health.HEALTHY, reason="it answers")
UNKNOWN = Verdict(health=Health.UNKNOWN, reason="starting")


class SimServer:
    """Of one name: its incarnations, and the weights that it holds."""

    def __init__(self, run, name, index):
        self.run = run
        self.name = name
        self.index = index
        self.url = f"http://{name}"
        self.generation = -1
        self.state = ServerState.STOPPED
        self.version = None
        self.digest = ""
        self.start_lineage = None
        self.hung_at = None
        self.ended = asyncio.Event()
        self.breaks_starts = 0
        self.lies_at = None
        """The version that it says it holds, and does not load."""

    @property
    def info(self):
        if self.generation < 0:
            return None
        return ServerInfo(
            name=self.name,
            index=self.index,
            generation=self.generation,
            state=self.state,
            url=self.url,
            pid=1000 + self.generation,
            weight_version=self.version,
            lineage=self.start_lineage,
        )

    def kill(self):
        self.run.truth.befell(Cause.SERVER_CRASH)
        self.end()

    def end(self):
        if self.state in (ServerState.STARTING, ServerState.READY):
            self.state = ServerState.DEAD
            self.ended.set()
            self.run.loop.call_later(NOTICED_S, self.run.changed.set)

    def hang(self):
        self.run.truth.befell(Cause.SERVER_HANG)
        self.hung_at = self.run.loop.now
        self.run.loop.call_later(HUNG_S, self.run.changed.set)

    async def start(self, generation, weights, overrides):
        """Goes on where who ordered it is killed. What a process orders once it is dead never arrives: its tasks end a
        moment after its death, which a thread may have met."""
        orderer = OWNER.get()
        if orderer is not None and orderer.is_dead:
            await asyncio.Event().wait()
        with belongs_to(None):
            return await asyncio.shield(asyncio.ensure_future(self._start(generation, weights)))

    async def _start(self, generation, weights):
        self.run.truth.check_restart_of_server(self)
        self.end()
        self.generation = generation
        self.state = ServerState.STARTING
        self.hung_at = None
        self.ended = asyncio.Event()
        self.version = weights.version
        self.start_lineage = weights.lineage
        self.digest = digest_of(Path(weights.path))
        await asyncio.sleep(START_S)
        if self.breaks_starts:
            self.breaks_starts -= 1
            self.end()
        if self.state is not ServerState.STARTING or self.generation != generation:
            raise ServerError(f"{self.name} ended while it started")
        self.state = ServerState.READY
        self.run.changed.set()
        return self.info

    def take_weights(self, digest, version):
        if version == self.lies_at:
            self.run.truth.befell(Cause.SERVER_CORRUPT)
            digest = self.digest
        self.digest = digest
        self.version = version

    async def stop(self):
        self.state = ServerState.STOPPED
        self.ended.set()

    # what a ServerHandle is asked beside these

    async def adopt(self, generation, lineage):
        pass

    def expect(self):
        pass

    def not_started(self, why):
        pass

    def give_up(self):
        self.state = ServerState.FAILED

    def recovered_after_s(self):
        return None

    def facts(self, in_pool, *, is_publishing):
        if in_pool is not None and in_pool.generation != self.generation:
            in_pool = None
        state, verdict = self.state, SOUND
        if state is ServerState.READY:
            is_admitted = in_pool is not None and in_pool.state in (ServerState.READY, ServerState.SUSPECT)
            state = in_pool.state if is_admitted else ServerState.STALE
            if is_publishing and in_pool is not None and state is ServerState.STALE:
                state = ServerState.READY
        if state is ServerState.DEAD:
            verdict = Verdict(health=Health.DEAD, reason="ended by SIGKILL", cause=Cause.SERVER_CRASH)
        elif state in (ServerState.STARTING, ServerState.STOPPED):
            verdict = UNKNOWN
        elif self.hung_at is not None and self.run.loop.now - self.hung_at >= HUNG_S:
            verdict = Verdict(health=Health.DEAD, reason="it answers nobody", cause=Cause.SERVER_HANG)
        weights = in_pool or self.info
        return ServerFacts(
            name=self.name,
            state=state,
            verdict=verdict,
            weight_version=None if weights is None else weights.weight_version,
            lineage=None if weights is None else weights.lineage,
            stale_reason=in_pool.reason if in_pool is not None and in_pool.state is ServerState.STALE else "",
        )


_DIGESTS = {}


def digest_of(folder):
    path = folder / "model.safetensors"
    facts = path.stat()
    key = (str(path), facts.st_ino, facts.st_mtime_ns)
    if key not in _DIGESTS:
        _DIGESTS[key] = digest_of_weights(load_file(path).items())
    return _DIGESTS[key]


def digest_of_weights(named):
    found = hashlib.sha256()
    for name, tensor in sorted(named):
        found.update(name.encode())
        found.update(tensor.float().contiguous().numpy().tobytes())
    return found.hexdigest()


def _asked(method):
    """A request that nobody has to wait for: whoever is killed asks it, and never does."""
    return lambda *arguments, **options: Call(lambda: method(*arguments, **options))


class SimClient:
    """In place of SGLangClient, for one trainer."""

    vocabulary = None

    def __init__(self, run):
        self.run = run

    async def close(self):
        pass

    def _server(self, url):
        server = self.run.by_url[url]
        if server.state not in (ServerState.READY, ServerState.STARTING):
            raise RequestFailed(f"{url} refuses", kind="refused", retryable=True)
        return server

    async def _while_alive(self, server, seconds):
        """Raises RequestFailed where it ends meanwhile; never returns where it hangs."""
        ended = server.ended
        if server.hung_at is not None:
            seconds = math.inf
        try:
            async with asyncio.timeout(None if math.isinf(seconds) else seconds):
                await ended.wait()
        except TimeoutError:
            if server.hung_at is not None:
                await ended.wait()
            else:
                return
        raise RequestFailed(f"{server.url} reset the connection", kind="reset", retryable=True)

    @_asked
    async def generate(self, url, *, token_ids, sampling, timeout_s):
        server = self._server(url)
        try:
            async with asyncio.timeout(timeout_s):
                await self._while_alive(server, TOKEN_S)
        except TimeoutError as error:
            raise RequestFailed(f"{url} is silent", kind="timeout", retryable=True) from error
        return self._completion(server, token_ids, sampling, 0)

    @_asked
    async def generate_samples(self, url, stream, *, inputs, samplings, timeout_s, stream_interval=1):
        try:
            server = self._server(url)
            self.run.truth.check_traffic(server)
            async with asyncio.timeout(timeout_s):
                for index, (tokens, sampling) in enumerate(zip(inputs, samplings, strict=True)):
                    made = self._completion(server, tokens, sampling, index)
                    for place in range(len(made.token_ids)):
                        await self._while_alive(server, TOKEN_S)
                        stream.feed(self._event(made, index, place, server))
        except TimeoutError:
            return stream.samples(broken_off=RequestFailed(f"{url} is silent", kind="timeout", retryable=True))
        except RequestFailed as failure:
            return stream.samples(broken_off=failure)
        return stream.samples()

    def _event(self, made, index, place, server):
        is_last = place == len(made.token_ids) - 1
        meta = {
            "finish_reason": {"type": made.finish_reason} if is_last else None,
            "output_token_logprobs": [[made.logprobs[place], made.token_ids[place], None]],
            "weight_version": str(server.version),
            "completion_tokens": place + 1,
        }
        return (
            b"data: "
            + orjson.dumps({"index": index, "output_ids": [made.token_ids[place]], "meta_info": meta})
            + b"\n\n"
        )

    def _completion(self, server, tokens, sampling, index):
        truth = self.run.truth
        drawn = random.Random(f"{tuple(tokens)} {server.version} {index} {self.run.draws}")
        self.run.draws += 1
        policy = truth.policy_of(server.digest)
        quality = 0.0 if self.run.is_template_wrong else policy.quality
        made = policy.text or tuple(
            drawn.choice(DIGITS if drawn.random() < quality else JUNK) for _ in range(sampling.max_new_tokens)
        )
        logprobs = self.run.logprobs(tuple(tokens), made)
        if server.digest != truth.digest_of_trainer():
            logprobs = [one - OTHER_WEIGHTS for one in logprobs]
        truth.made_by[made, tuple(logprobs)] = server.digest
        return Completion(
            token_ids=made,
            logprobs=tuple(logprobs),
            weight_version=server.version,
            finish_reason="length",
            server=server.url,
        )

    @_asked
    async def update_weights_from_disk(self, url, *, path, weight_version, timeout_s):
        server = self._server(url)
        await self._while_alive(server, LOAD_S)
        server.take_weights(digest_of(Path(path)), weight_version)


class SimScorer:
    """In place of RewardPool: the share of large digits in a text, until it is broken."""

    def __init__(self, run):
        self.run = run

    async def score(self, completions, prompt, *, whole_or_none=False, made=(), group=()):
        await asyncio.sleep(0.001)
        return [self.run.reward_of(text) for text in completions]

    def check(self, prompt):
        return 1.0

    def find_bad_answers(self, answers):
        return {}

    def close(self):
        pass
