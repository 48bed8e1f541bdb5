"""One simulated run: the project's own Coordinator, HealthMonitor, trainer and server pool; its servers are made up.

    Coordinator ─ ActionExecutor ─► SimTrainer: `Training`, its step loop, gate, pool, publisher, states and checkpoints
                                 └► SimServer: holds what weights it was sent; its log-probs are those of its weights
    HealthMonitor ◄─ each batch of the trainer; ─► incidents to the Coordinator

Real are the decisions, the files and the weights. Made up are processes and the wire: a kill, a hang or a start is a
moment of the virtual clock (virtual_time.py). After the run the project's own auditor reads the files.
"""

import asyncio
import dataclasses
import shutil
import types
from pathlib import Path

from actors.cluster.node_identity import this_node
from actors.reward.reward_pool import Score
from actors.training import training as training_module
from actors.training.training import Training, TrainingParts
from actors.weights import servers as servers_module
from launcher.base.messages import Cause, TerminalStatus
from launcher.checkpoints.in_memory_checkpoints import memory_folder
from launcher.config.schema import ActorConfig, DatasetConfig, GenerationConfig, RecoverConfig, RunConfig
from launcher.run_files.journal import Journal, read_lines
from launcher.run_files.run_keys import ServerKeys
from launcher.run_files.run_memory import MemoryFile, RunMemory
from launcher.run_files.run_paths import RunPaths
from launcher.run_files.written_settings import write_settings
from scripts.check_ledger import audited_facts
from tests.sim.sim_disks import SimDisks
from tests.sim.sim_servers import SimClient, SimScorer, SimServer
from tests.sim.sim_supervisors import SimCoordinator, SimMonitor
from tests.sim.sim_trainer import SimTrainer
from tests.sim.truth import FalseReward, Truth
from tests.sim.virtual_time import OWNER, TurnLock, VirtualLoop, VirtualThread, use_virtual_time
from tests.support.mortal import Death, MortalJournal

ASSETS = Path(__file__).parents[2] / "assets" / "arithmetic"
PROMPTS, BATCH, SAMPLES, TOKENS = 12, 4, 2, 4
VIRTUAL_S = 3600.0
"""Virtual seconds; the longest that a run may take."""
_LOGPROBS: dict[tuple, list[float]] = {}
"""By weights, prompt and tokens. A run is the same as the one before it up to what befalls it, and asks the same."""


class SimulatedRun:
    """`lived` runs it to its end; `befalls` is a coroutine function that does harm to it meanwhile."""

    def __init__(self, folder, loop, parts, config, *, servers, death, mortal_from):
        self.loop = loop
        self.config = config
        self.paths = RunPaths.of(config)
        self.paths.prepare()
        ServerKeys.make(self.paths.keys)
        write_settings(config, self.paths.config)
        self.parts = parts
        self.death = death or Death()
        self.mortal_from = mortal_from
        self.changed = asyncio.Event()
        self.draws = 0
        self.is_judge_broken = self.is_template_wrong = False
        self.servers = {f"server-{i}": SimServer(self, f"server-{i}", i) for i in range(servers)}
        self.by_url = {server.url: server for server in self.servers.values()}
        self.truth = Truth(self)
        self.disks = SimDisks(self)
        self.trainer = SimTrainer(self)
        self.monitor = SimMonitor(self)
        self.coordinator = SimCoordinator(self)

    def break_judge(self):
        self.truth.befell(Cause.VERIFIER_BROKEN)
        self.is_judge_broken = True

    def mend_judge(self):
        self.is_judge_broken = False
        self.changed.set()

    def break_template(self):
        """The fall that it makes looks like a collapse, until the restored weights earn no more."""
        self.truth.befell(Cause.REWARD_COLLAPSE)
        self.truth.befell(Cause.OUTSIDE_WEIGHTS)
        self.is_template_wrong = True

    def reward_of(self, text):
        if self.is_judge_broken:
            return Score(value=FalseReward(0.0))
        return Score(value=sum(one in "56789" for one in text) / max(len(text), 1))

    def logprobs(self, prompt, tokens):
        """Of the trainer's weights."""
        key = (self.truth.digest_of_trainer(), prompt, tokens)
        if key not in _LOGPROBS:
            _LOGPROBS[key] = self.parts.model.logprobs(prompt, tokens)
        return _LOGPROBS[key]

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
            self.trainer.end_process()
        # as the driver ends a run
        Journal(self.paths.events, 1).record(f"run.{outcome.status.lower()}", subject="run", reason=outcome.reason)
        self.truth.check_end(outcome, [*self.events()])
        return outcome

    def events(self, *names):
        """Lines of the run's journal with these names; without any: all."""
        return [line for line in read_lines(self.paths.events) if not names or line["event"] in names]


def findings_of(run, ends=TerminalStatus.FINISHED):
    """What breaks a promise: seen by the project's own auditor, by an end that is another one, and by the truth."""
    if run.outcome.status is not ends:
        return (f"{run.outcome.status}: {run.outcome.reason}", *run.truth.breaches)
    found = audited_facts(run.paths).audit
    if ends is not TerminalStatus.FINISHED:  # of steps after its newest checkpoint it may be unknown what became
        return (*(one for one in found.doubts if not one.startswith("not known: ")), *run.truth.breaches)
    epochs = run.config.total_train_epochs
    steps = PROMPTS // BATCH * epochs
    # a disk that is full to the end has no line of the end, and the auditor takes no plan for what was done
    of_all = f"{steps} steps" if run.disks.of_the_run.fault is not None else f"{steps} of {steps} steps"
    whole = f"{PROMPTS} prompts, each exactly {epochs} times; {of_all}"
    return (*found.doubts, *([] if found.counts == whole else [found.counts]), *run.truth.breaches)


def forget_in_memory(paths):
    """On a virtual clock each run begins at the same time: the states that one left were those of the next one at its
    path, which took them up."""
    for kind in ("state", "weights"):
        shutil.rmtree(memory_folder(paths, kind), ignore_errors=True)


def settings(folder, epochs):
    """Of a run of 12 prompts, three steps an epoch. Of supervision all is as it is for every user (P10)."""
    data = folder / "data.jsonl"
    lines = (ASSETS / "train.jsonl").read_text().splitlines()[:PROMPTS]
    data.write_text("\n".join(lines) + "\n")
    config = RunConfig(
        experiment_name="simulated",
        seed=3,
        total_train_epochs=epochs,
        train_dataset=DatasetConfig(path=str(data), batch_size=BATCH),
        gconfig=GenerationConfig(n_samples=SAMPLES, max_new_tokens=TOKENS),
        actor=ActorConfig(path=str(ASSETS / "model"), dtype="float32", device="cpu", threads=1),
        recover=RecoverConfig(freq_steps=3, first_steps=None, keep_last=2, memory=True, memory_share=1.0),
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

    def live(self, folder, befalls=None, *, death=None, mortal_from=0, servers=2, epochs=4):
        """A whole run. Returns it with its outcome, as `outcome`. Before step `mortal_from` nobody meets a `death`."""
        folder.mkdir(exist_ok=True)
        loop = VirtualLoop()
        asyncio.set_event_loop(loop)
        config = settings(folder, epochs)
        config.sglang.n_servers = servers
        forget_in_memory(RunPaths.of(config))
        with self._monkeypatch.context() as patch:
            use_virtual_time(patch, loop)
            run = SimulatedRun(folder, loop, None, config, servers=servers, death=death, mortal_from=mortal_from)
            run.disks.take_the_place_of_real_ones(patch)
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
            patch.setattr(servers_module, "SGLangClient", lambda keys: SimClient(run))
            run.truth.watch_steps(patch)
            try:
                run.outcome = loop.run_until_complete(run.lived(befalls))
            finally:
                for task in asyncio.all_tasks(loop):
                    task.cancel()
                loop.run_until_complete(asyncio.sleep(0.1))
                asyncio.set_event_loop(None)
                loop.close()
                forget_in_memory(run.paths)
        return run
