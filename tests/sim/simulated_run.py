"""One simulated run: the project's own Coordinator, HealthMonitor, trainer and server pool; its servers are made up.

    Coordinator ─ ActionExecutor ─► SimTrainer: `Training`, its step loop, gate, pool, publisher, states and checkpoints
                                 └► SimServer: holds what weights it was sent; its log-probs are those of its weights
    HealthMonitor ◄─ each batch of the trainer; ─► incidents to the Coordinator

Real are the decisions, the files and the weights. Made up are processes and the wire: a kill, a hang or a start is a
moment of the virtual clock (virtual_time.py). After the run the project's own auditor reads the files.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import math
import random
import types
from pathlib import Path

import orjson
import yaml
from safetensors.torch import load_file

from actors.cluster.node_identity import this_node
from actors.monitoring.health_monitor import HealthMonitor
from actors.monitoring.reward_series import RewardSeries
from actors.reward.reward_pool import Score
from actors.supervision.action_executor import ActionExecutor
from actors.supervision.checkpoint_scan import CheckpointScan
from actors.supervision.coordinator import Coordinator
from actors.supervision.coordinator_actor import take_place
from actors.supervision.oom_backoff import OomBackoff
from actors.supervision.progress_tracker import ProgressTracker, furthest_step
from actors.supervision.run_history import RunHistory
from actors.training import training as training_module
from actors.training import training_servers
from actors.training.admission_gate import MonitorAway
from actors.training.training import Training
from actors.training.training_parts import TrainingParts
from launcher.base.errors import RequestFailed, ServerError, TrainerError
from launcher.base.messages import Cause, Health, ServerInfo, ServerState, TerminalStatus, TrainerView, Verdict
from launcher.base.rollouts import Completion
from launcher.checkpoints.checkpoint_catalog import CheckpointCatalog
from launcher.config.schema import ActorConfig, DatasetConfig, GenerationConfig, RecoverConfig, RunConfig
from launcher.policy.memory_backoff import Lengths
from launcher.policy.observed import Observed, ServerFacts, TrainerFacts
from launcher.policy.reconcile_trainer import TRAINER
from launcher.run_files.journal import Journal, plain
from launcher.run_files.run_keys import ServerKeys
from launcher.run_files.run_memory import MemoryFile, RunMemory
from launcher.run_files.run_paths import RunPaths
from scripts.check_ledger import audited_facts
from tests.sim.virtual_time import OWNER, Killed, TurnLock, VirtualLoop, VirtualThread, belongs_to, use_virtual_time
from tests.support.fake_actors import Call
from tests.support.mortal import Death, MortalFile, MortalJournal

ASSETS = Path(__file__).parents[2] / "assets" / "arithmetic"
PROMPTS, BATCH, SAMPLES, TOKENS, EPOCHS = 12, 4, 2, 4, 4
STEPS = PROMPTS // BATCH * EPOCHS
NOTICED_S = 0.05
HUNG_S = 5.0
START_S, LOAD_S, TOKEN_S, TRAINER_START_S = 1.5, 0.05, 0.02, 1.0
VIRTUAL_S = 3600.0
"""Virtual seconds; the last is the longest that a run may take."""
OTHER_WEIGHTS = 0.5
"""Nats by which the log-probs of other weights are off."""
SOUND = Verdict(health=Health.HEALTHY, reason="it answers")
UNKNOWN = Verdict(health=Health.UNKNOWN, reason="starting")


class Process:
    """Ends all that belongs to it when it is killed."""

    def __init__(self, run, kind):
        self.run = run
        self.kind = kind
        self.tasks = set()
        self.is_dead = False

    def reach_moment(self, what):
        """At each of these it may be killed (SimulatedRun.death); whether it is dead."""
        if not self.is_dead and self.run.death.comes((self.kind, what)):
            self.is_dead = True
            self.run.loop.call_soon_threadsafe(self.kill)
        return self.is_dead

    def has_ended(self):
        return self.is_dead

    def kill(self):
        self.is_dead = True
        for task in tuple(self.tasks):
            task.cancel()


# ── servers ──


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
        if self.state in (ServerState.STARTING, ServerState.READY):
            self.state = ServerState.DEAD
            self.ended.set()
            self.run.loop.call_later(NOTICED_S, self.run.changed.set)

    def hang(self):
        self.hung_at = self.run.loop.now
        self.run.loop.call_later(HUNG_S, self.run.changed.set)

    async def start(self, generation, weights, overrides):
        """Goes on where who ordered it is killed."""
        with belongs_to(None):
            return await asyncio.shield(asyncio.ensure_future(self._start(generation, weights)))

    async def _start(self, generation, weights):
        self.kill()
        self.generation, self.state = generation, ServerState.STARTING
        self.hung_at = None
        self.ended = asyncio.Event()
        self.version, self.start_lineage = weights.version, weights.lineage
        self.digest = digest_of(Path(weights.path))
        await asyncio.sleep(START_S)
        if self.breaks_starts:
            self.breaks_starts -= 1
            self.kill()
        if self.state is not ServerState.STARTING or self.generation != generation:
            raise ServerError(f"{self.name} ended while it started")
        self.state = ServerState.READY
        self.run.changed.set()
        return self.info

    def take_weights(self, digest, version):
        self.digest, self.version = digest, version

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
        drawn = random.Random(f"{tuple(tokens)} {server.version} {index} {self.run.draws}")
        self.run.draws += 1
        made = tuple(drawn.randrange(5, 15) for _ in range(sampling.max_new_tokens))
        logprobs = self.run.logprobs(tuple(tokens), made)
        if server.digest != self.run.digest_of_trainer():
            logprobs = [one - OTHER_WEIGHTS for one in logprobs]
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
    """In place of RewardPool: a reward that the tokens decide, until it is broken."""

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


# ── the trainer ──


class SimTrainer:
    """The trainer's actor and its handle in one: the process of `Training`, and what a TrainerHandle knows of it."""

    def __init__(self, run):
        self.run = run
        self.process = None
        self.training = None
        self.busy = ""
        self.has_ended = False
        self.lengths = Lengths()
        self.incarnation = 0
        self.stepping = None

    # the process

    def kill(self):
        if self.process is not None:
            self.process.kill()

    def end(self):
        """Its process was killed. What a thread of it was writing is written, or is not: the simulation waits for it,
        as nothing may write any more when the next one starts."""
        self.training._checkpointer.settle()
        self.training = self.stepping = None
        self.has_ended = True
        self.run.loop.call_later(NOTICED_S, self.run.changed.set)

    async def start(self, overrides):
        with belongs_to(None):
            return await asyncio.shield(asyncio.ensure_future(self._start()))

    async def _start(self):
        self.kill()
        self.busy = "starting"
        try:
            await asyncio.sleep(TRAINER_START_S)
            self.incarnation += 1
            process = TrainerProcess(self)
            with belongs_to(process):
                loading = asyncio.ensure_future(self.run.loop.run_guest(self._load, process))
            try:
                self.training = await loading
            except asyncio.CancelledError:
                if not process.is_dead:
                    raise
                self.has_ended = True
                raise TrainerError("the trainer ended while it started") from None
            self.process = process
            self.has_ended = False
        finally:
            self.busy = ""
        self.run.changed.set()
        return self.training.ready()

    def _load(self, process):
        made = Training(
            self.run.config, self.run.paths, 1, ask=lambda report: self._ask(process, report), parts=self.run.parts
        )
        made._gate._stop = TurnFlag(self.run.loop, process)
        write = made._records.write

        def write_down(report):
            process.reach_moment("before the ledger's line")
            if process.is_dead:
                raise Killed
            refusal = write(report)
            process.reach_moment("after the ledger's line")
            return refusal

        made._records.write = write_down
        return made

    def _ask(self, process, report):
        return VirtualThread(self.run.loop, process).call(self.run.monitor.ask(report))

    @property
    def view(self):
        if self.training is None:
            return TrainerView(pid=0, busy=self.busy)
        return self.training.view()

    # its handle

    def adopt(self):
        if self.training is not None and self.view.is_allowed:
            self._begin_to_step()

    def expect(self):
        self.busy = "starting"

    async def _guest(self, function, *arguments):
        if self.training is None or self.process.is_dead:
            raise TrainerError("the trainer has ended")
        with belongs_to(self.process):
            working = asyncio.ensure_future(self.run.loop.run_guest(function, *arguments))
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            if self.training is None or self.process.is_dead:
                raise TrainerError("the trainer has ended") from None
            raise

    async def restore(self, global_step, lineage, incident):
        return await self._guest(self.training.restore if self.training else None, global_step, lineage, incident)

    async def resume(self):
        if self.training is None:
            raise TrainerError("the trainer has ended")
        self.training.allow()
        self._begin_to_step()

    def reward_answers(self):
        pass

    def _begin_to_step(self):
        if self.stepping is None or self.stepping.done():
            with belongs_to(self.process):
                self.stepping = asyncio.ensure_future(self._step())

    async def _step(self):
        with contextlib.suppress(Exception):  # the view has it, and the Coordinator repairs by that
            await self.run.loop.run_guest(self.training.run)
        self.run.changed.set()

    async def pause(self, *, save, within_s=None):
        if self.training is None:
            raise TrainerError("the trainer has ended")
        self.training.pause(save=save)
        while self.training is not None and (self.view.is_running or self.view.is_allowed):
            if self.view.is_allowed and not self.view.is_running:
                self._begin_to_step()
            await asyncio.sleep(0.05)

    async def call(self, method, *arguments, within_s=None):
        if self.training is None:
            raise TrainerError("the trainer has ended")
        servers = self.training.servers
        known = {
            "set_servers": servers.set_servers,
            "send_weights": servers.send_weights,
            "admit": servers.admit,
            "limit_rollouts": servers.limit_rollouts,
            "score_canaries": self.training.score_canaries,
            "close": self.training._loop.forget,
        }
        return await self._guest(known[method], *arguments)

    def facts(self):
        view = self.view
        verdict = SOUND
        if self.busy or (self.training is None and not self.has_ended):
            verdict = UNKNOWN
        elif self.training is None:
            verdict = Verdict(health=Health.DEAD, reason="ended by SIGKILL", cause=Cause.TRAINER_CRASH)
        elif view.failure is not None:
            verdict = Verdict(health=Health.DEAD, reason=view.failure.message, cause=Cause.TRAINER_CRASH)
        return TrainerFacts(
            verdict=verdict,
            is_loaded=view.is_loaded,
            is_paused=not (view.is_allowed or view.is_running),
            policy_version=view.policy_version,
            lineage=view.lineage,
            next_step=view.next_step,
            is_publishing=view.phase == "publish",
            is_evaluating=view.phase == "evaluate",
            is_finished=view.is_finished,
        )


class TrainerProcess(Process):
    def __init__(self, trainer):
        super().__init__(trainer.run, "trainer")
        self._trainer = trainer

    def kill(self):
        super().kill()
        if self._trainer.process is self and self._trainer.training is not None:
            self._trainer.end()


class TurnFlag:
    """In place of a threading.Event: `wait` lets the virtual clock go on."""

    def __init__(self, loop, process):
        self._thread = VirtualThread(loop, process)
        self._is_set = False

    def set(self):
        self._is_set = True

    def clear(self):
        self._is_set = False

    def wait(self, timeout):
        self._thread.call(asyncio.sleep(timeout))
        return self._is_set


# ── HealthMonitor ──


async def _nobody(name, work, hold_s):
    """The monitor is given no server to ask."""
    raise AssertionError(name)


class SimMonitor:
    """The HealthMonitor's actor and its handle: of the servers it knows nothing here, of the rewards all."""

    def __init__(self, run):
        self.run = run
        self.process = None
        self.monitor = None
        self._begin()

    def _begin(self):
        run = self.run
        self.process = Process(run, "monitor")
        journal = MortalJournal(run.paths.events, 1, lambda: run.loop.now, self.process.has_ended)
        series = RewardSeries.read(run.paths)
        self.monitor = HealthMonitor(run.config, journal, _nobody, series=series, clock=lambda: run.loop.now)

    def kill(self):
        self.process.is_dead = True
        self.monitor = None
        self.run.loop.call_later(1.0, self._begin)

    async def ask(self, report):
        if self.monitor is None:
            raise MonitorAway("it was killed")
        self.process.reach_moment("before an answer")
        if self.process.is_dead:
            self.kill()
            raise MonitorAway("it was killed")
        answer = self.monitor.admit(report)
        self.process.reach_moment("after an answer")
        if self.process.is_dead:
            self.kill()
            raise MonitorAway("it was killed")
        self.run.changed.set()
        return answer

    @property
    def is_heard(self):
        return self.monitor is not None

    @property
    def incident(self):
        return None if self.monitor is None else self.monitor.report().incident

    async def canaries(self, scored):
        if self.monitor is not None:
            self.monitor.canaries(scored)

    async def trust(self, name):
        if self.monitor is not None:
            self.monitor.trust(name)

    async def restored(self, global_step, onset_step, lineage):
        if self.monitor is not None:
            self.monitor.restored(global_step, onset_step, lineage)

    async def release(self):
        pass


# ── what the Coordinator sees ──


class SimObserver:
    """In place of the ClusterObserver, for one Coordinator."""

    def __init__(self, run, history):
        self.changed = run.changed
        self.run = run
        self.slots = run.servers
        self.trainer = run.trainer
        self.monitor = run.monitor
        self.memory = OomBackoff(run.config, history, None, on_gpu=False, shares_gpu=False)
        self.catalog = CheckpointCatalog.of_run(run.config, run.paths)
        self.checkpoints = CheckpointScan(
            lambda: self.catalog.facts(-1, dict(history.memory.damaged_checkpoints)),
            unreadable=lambda reason: None,
            patience_s=60.0,
        )
        self.loads = types.SimpleNamespace(loads=lambda name: contextlib.nullcontext())
        self._progress = ProgressTracker(history, furthest_step(run.paths.metrics, 1))

    async def refresh(self):
        self.checkpoints.invalidate()

    def begin_looking(self):
        pass

    def ran_out(self, slot):
        return None

    def incident(self, now):
        return self.monitor.incident

    async def look(self, *, is_stopped, with_checkpoints=False):
        found = await self.checkpoints.read() if with_checkpoints else None
        view, trainer = self.trainer.view, self.trainer.facts()
        in_pool = {one.name: one for one in view.servers}
        self._progress.note(
            trainer.next_step, [n for n, s in in_pool.items() if s.state is ServerState.READY], self.run.loop.now
        )
        if found is not None:
            healthy_until = trainer.next_step - 1
            found = tuple(
                dataclasses.replace(one, status=self.catalog.status_at(one.global_step, healthy_until)) for one in found
            )
        return Observed(
            servers=tuple(
                dataclasses.replace(
                    server.facts(in_pool.get(name), is_publishing=trainer.is_publishing or name in view.loading),
                    is_loading=name in view.loading,
                    progress_at=self._progress.at(name),
                )
                for name, server in self.slots.items()
            ),
            trainer=trainer,
            checkpoints=found,
            memory=self.memory.settings(Lengths()),
            incident=self.incident(self.run.loop.now),
            is_judged=self.monitor.is_heard,
            progress_at=self._progress.at(TRAINER),
            is_stopped=is_stopped,
            evals=view.evals,
            rejections=view.rejections,
        )

    async def close(self):
        self.checkpoints.close()


class SimExecutor(ActionExecutor):
    """With the moments at which its Coordinator may be killed."""

    def __init__(self, run, history, observer, process):
        super().__init__(run.config, history, observer, shares_gpu=False)
        self._process = process

    async def perform(self, action):
        try:
            facts = await super().perform(action)
        finally:
            self._process.reach_moment("after an action")
        if self._process.is_dead:
            await asyncio.Event().wait()
        return facts


class SimCoordinator:
    """One incarnation after the other."""

    def __init__(self, run):
        self.run = run
        self.deaths = 0
        self.history = self.process = None

    async def lead(self):
        """To the run's end."""
        while True:
            self.process = process = Process(self.run, "coordinator")
            with belongs_to(process):
                working = asyncio.ensure_future(self._one_life(process))
            try:
                return await working
            except asyncio.CancelledError:
                if not process.is_dead:
                    raise
            self.deaths += 1
            await asyncio.sleep(1.0)

    async def _one_life(self, process):
        run = self.run
        file = MortalFile(run.paths.run_memory, this_node(), process.reach_moment)
        journal = MortalJournal(run.paths.events, 1, lambda: run.loop.now, process.has_ended)
        self.history = history = RunHistory(journal, await take_place(run.config, file, 1, run.paths.events), file)
        observer = SimObserver(run, history)
        executor = SimExecutor(run, history, observer, process)
        return await Coordinator(run.config, executor, history, clock=lambda: run.loop.now).run()

    def kill(self):
        self.process.kill()


# ── the run ──


class SimulatedRun:
    """`lived` runs it to its end; `befalls` is a coroutine function that does harm to it meanwhile."""

    def __init__(self, folder, loop, parts, config, *, servers=2, death=None):
        self.loop = loop
        self.config = config
        self.paths = RunPaths.of(config)
        self.paths.prepare()
        ServerKeys.make(self.paths.keys)
        self.paths.config.write_text(yaml.safe_dump(plain(dataclasses.asdict(config))))
        self.parts = parts
        self.death = death or Death()
        self.changed = asyncio.Event()
        self.draws = 0
        self.is_judge_broken = False
        self.servers = {f"server-{i}": SimServer(self, f"server-{i}", i) for i in range(servers)}
        self.by_url = {server.url: server for server in self.servers.values()}
        self._digest = (None, "")
        self.trainer = SimTrainer(self)
        self.monitor = SimMonitor(self)
        self.coordinator = SimCoordinator(self)

    def reward_of(self, text):
        if self.is_judge_broken:
            return Score(value=0.0)
        return Score(value=float(hashlib.sha256(text.encode()).digest()[0] % 2))

    def logprobs(self, prompt, tokens):
        return self.parts.model.logprobs(prompt, tokens)

    def digest_of_trainer(self):
        training = self.trainer.training
        model = self.parts.model
        lineage = None if training is None else training.servers.publisher.lineage
        key = (self.trainer.incarnation, lineage, model.policy_version)
        if self._digest[0] != key:
            import torch

            self._digest = (key, digest_of_weights(model.named_weights(torch.float32)))
        return self._digest[1]

    async def until(self, step):
        """Returns when the trainer has committed so many steps."""
        while self.trainer.view.next_step < step:
            await asyncio.sleep(0.02)

    async def lived(self, befalls=None):
        harm = None if befalls is None else asyncio.ensure_future(befalls(self))
        try:
            async with asyncio.timeout(VIRTUAL_S):
                outcome = await self.coordinator.lead()
        finally:
            if harm is not None:
                harm.cancel()
                await asyncio.gather(harm, return_exceptions=True)
            self.trainer.kill()
        # as the driver ends a run
        Journal(self.paths.events, 1).record(f"run.{outcome.status.lower()}", subject="run", reason=outcome.reason)
        return outcome


def findings_of(run):
    """What the project's own auditor finds, or why it can't say; and whatever else is not as a whole run ends."""
    if run.outcome.status is not TerminalStatus.FINISHED:
        return (f"{run.outcome.status}: {run.outcome.reason}",)
    found = audited_facts(run.paths).audit
    whole = f"{PROMPTS} prompts, each exactly {EPOCHS} times; {STEPS} of {STEPS} steps"
    return (*found.doubts, *([] if found.counts == whole else [found.counts]))


def settings(folder, **changed):
    """Of a run of 12 prompts, three steps an epoch."""
    data = folder / "data.jsonl"
    lines = (ASSETS / "train.jsonl").read_text().splitlines()[:PROMPTS]
    data.write_text("\n".join(lines) + "\n")
    config = RunConfig(
        experiment_name="simulated",
        seed=3,
        total_train_epochs=EPOCHS,
        train_dataset=DatasetConfig(path=str(data), batch_size=BATCH),
        gconfig=GenerationConfig(n_samples=SAMPLES, max_new_tokens=TOKENS),
        actor=ActorConfig(path=str(ASSETS / "model"), dtype="float32", device="cpu", threads=1),
        recover=RecoverConfig(freq_steps=3, first_steps=None, keep_last=2, memory=True, memory_share=1.0),
        **changed,
    )
    config.tokenizer_path = config.sglang.model_path = config.ref.path = config.actor.path
    config.sglang.dtype = config.ref.dtype = config.actor.dtype
    config.sglang.context_length = 256
    config.cluster.fileroot = str(folder)
    return config


class Simulator:
    """Makes runs on a loop of their own; the model is loaded once."""

    parts = None

    def __init__(self, monkeypatch):
        self._monkeypatch = monkeypatch

    def _parts_of(self, config, run):
        """Each trainer loads its own; here all share one model, which every restore sets back as a whole."""
        if Simulator.parts is None:
            Simulator.parts = TrainingParts.load(config, Journal(run.paths.events, 1))
        return dataclasses.replace(Simulator.parts, config=config)

    def live(self, folder, befalls=None, *, death=None, servers=2, **changed):
        """A whole run. Returns it with its outcome, as `outcome`."""
        folder.mkdir(exist_ok=True)
        loop = VirtualLoop()
        asyncio.set_event_loop(loop)
        config = settings(folder, **changed)
        config.sglang.n_servers = servers
        with self._monkeypatch.context() as patch:
            use_virtual_time(patch, loop)
            patch.setattr("os.fsync", lambda fd: None)  # nothing here loses its page cache
            run = SimulatedRun(folder, loop, None, config, servers=servers, death=death)
            run.parts = self._parts_of(config, run)
            MemoryFile(run.paths.run_memory, this_node()).write(RunMemory(attempt=1))
            patch.setattr(training_module, "LoopThread", lambda name: VirtualThread(loop, OWNER.get()))
            patch.setattr(training_module, "RewardPool", lambda *_, **__: SimScorer(run))
            patch.setattr(training_module, "threading", types.SimpleNamespace(RLock=lambda: TurnLock(loop)))
            patch.setattr(
                training_module,
                "Journal",
                lambda path, attempt, clock: MortalJournal(path, attempt, clock, OWNER.get().has_ended),
            )
            patch.setattr(Training, "_log_to_file", lambda training: None)
            patch.setattr(training_servers, "SGLangClient", lambda keys: SimClient(run))
            try:
                run.outcome = loop.run_until_complete(run.lived(befalls))
            finally:
                for task in asyncio.all_tasks(loop):
                    task.cancel()
                loop.run_until_complete(asyncio.sleep(0.1))
                asyncio.set_event_loop(None)
                loop.close()
        return run
