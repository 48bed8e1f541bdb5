"""One simulated run: the project's own Coordinator, HealthMonitor, trainer and server pool; its servers are made up.

    Coordinator ─ ActionExecutor ─► SimTrainer: `Training`, its step loop, gate, pool, publisher, states and checkpoints
                                 └► SimServer: holds what weights it was sent; its log-probs are those of its weights
    HealthMonitor ◄─ each batch of the trainer; ─► incidents to the Coordinator

Real are the decisions, the files and the weights. Made up are processes and the wire: a kill, a hang or a start is a
moment of the virtual clock (virtual_time.py). After the run the project's own auditor reads the files.
"""

import asyncio
import dataclasses
import hashlib
import types
from pathlib import Path

import yaml

from actors.cluster.node_identity import this_node
from actors.reward.reward_pool import Score
from actors.training import training as training_module
from actors.training import training_servers
from actors.training.training import Training
from actors.training.training_parts import TrainingParts
from launcher.base.messages import TerminalStatus
from launcher.config.schema import ActorConfig, DatasetConfig, GenerationConfig, RecoverConfig, RunConfig
from launcher.run_files.journal import Journal, plain
from launcher.run_files.run_keys import ServerKeys
from launcher.run_files.run_memory import MemoryFile, RunMemory
from launcher.run_files.run_paths import RunPaths
from scripts.check_ledger import audited_facts
from tests.sim.sim_servers import SimClient, SimScorer, SimServer, digest_of_weights
from tests.sim.sim_supervisors import SimCoordinator, SimMonitor
from tests.sim.sim_trainer import SimTrainer
from tests.sim.virtual_time import OWNER, TurnLock, VirtualLoop, VirtualThread, use_virtual_time
from tests.support.mortal import Death, MortalJournal

ASSETS = Path(__file__).parents[2] / "assets" / "arithmetic"
PROMPTS, BATCH, SAMPLES, TOKENS, EPOCHS = 12, 4, 2, 4, 4
STEPS = PROMPTS // BATCH * EPOCHS
VIRTUAL_S = 3600.0
"""Virtual seconds; the longest that a run may take."""


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
