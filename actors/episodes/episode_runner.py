"""Plays the samples of a prompt as episodes: the user's code in processes of its own, asking through the door.

    rollouts ─► an Episode each ─► EpisodeProcess ─► the agent ─► EpisodeDoor ─► Episode ─► a server, as for any rollout
                                        └─ its reward ◄─┘

An episode that fails has no reward, and is run anew once; then its prompt returns to the queue as any other (P1). Where
its process ended, what the model had said of it is kept: the same requests get the same answers, token for token. The
time limit is on the agent's own time: what servers take, or their repair, is not counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from actors.episodes.door import EpisodeDoor
from actors.episodes.episode import Complete, Episode, EpisodeFailed, Said
from actors.episodes.episode_process import EpisodeProcess
from actors.episodes.turn_tokens import TurnTokens
from actors.reward.reward_process import ProcessGone
from actors.serving.sglang_client import Sampling
from launcher.base.rollouts import Prompt, Rollout
from launcher.config.schema import RunConfig

TRIES = 2
TICK_S = 1.0
LET_GO_S = 2.0
"""A process whose loop doesn't answer by then is killed: code that never awaits can't be cancelled."""

log = logging.getLogger("episodes")


class EpisodeRunner:
    """Used on one asyncio loop; `start` first. `longest`: tokens of one sequence that servers and trainer take."""

    def __init__(self, config: RunConfig, tokens: TurnTokens, *, longest: int) -> None:
        self._config = config
        self._tokens = tokens
        self._longest = longest
        self._door = EpisodeDoor()
        self._processes: list[EpisodeProcess] = []
        self._burials: set[asyncio.Task[None]] = set()
        self.progress = 0
        """Changes while an agent's own code or tool is within its time: no server answers meanwhile, and none hangs."""

    async def start(self) -> None:
        """Its processes begin to import the user's code."""
        await self._door.start()
        self._processes = [EpisodeProcess(self._config) for _ in range(self._config.rollout.episode_workers)]

    async def close(self) -> None:
        await asyncio.gather(*(process.close() for process in self._processes), *self._burials)
        await self._door.close()

    async def rollouts(self, prompt: Prompt, samplings: Sequence[Sampling], complete: Complete) -> list[Rollout]:
        """One for each of `samplings`. Raises EpisodeFailed, RewardImportError, and what `complete` raises."""
        tasks = [asyncio.create_task(self._rollout(prompt, sampling, complete)) for sampling in samplings]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _rollout(self, prompt: Prompt, sampling: Sampling, complete: Complete) -> Rollout:
        tries = 0
        record: list[Said] = []
        while True:
            process = self._least_busy()
            try:
                return await self._play(process, prompt, sampling, complete, record)
            except ProcessGone as gone:
                tries += not process.is_killed  # for another episode's sake: no fault of this one
                failure = EpisodeFailed(f"the process of the episodes ended: {gone}")
            except EpisodeFailed as failed:
                tries += 1
                failure = failed
                record.clear()  # the same answers may lead to the same failure
            if failure.is_final or tries >= TRIES:
                raise failure
            log.warning("episode.again prompt=%s reason=%r", prompt.id, str(failure))

    async def _play(
        self, process: EpisodeProcess, prompt: Prompt, sampling: Sampling, complete: Complete, record: list[Said]
    ) -> Rollout:
        rollout = self._config.rollout
        await process.ready()
        limits = {"longest": self._longest, "max_turns": rollout.max_turns}
        episode = Episode(self._tokens, complete, sampling, **limits, record=record)
        key = self._door.open(episode)
        order = {
            "record": dict(prompt.record),
            "answer": prompt.answer,
            "prompt_id": prompt.id,
            "base_url": self._door.url,
            "api_key": key,
        }
        playing = asyncio.ensure_future(process.play(order))
        try:
            while not playing.done() and (left := rollout.episode_timeout - episode.own_s) > 0:
                ends: set[asyncio.Future[Any]] = {playing, episode.broken}
                await asyncio.wait(ends, timeout=min(left, TICK_S), return_when=asyncio.FIRST_COMPLETED)
                self.progress += not episode.is_asking
                if episode.broken.done():
                    episode.broken.result()  # raises
            if not playing.done():
                await self._end(process, playing)
                what = (
                    f"took longer than rollout.episode_timeout={rollout.episode_timeout:g} s, without the model's time"
                )
                raise EpisodeFailed(what, is_final=True)
            said = playing.result()
        finally:
            playing.cancel()
            self._door.shut(key)
        if "error" in said:
            raise EpisodeFailed(str(said["error"]))
        return episode.rollout(said["value"], said.get("parts", {}))

    async def _end(self, process: EpisodeProcess, playing: asyncio.Future[Any]) -> None:
        """Cancel it; kill its process where that is of no use."""
        playing.cancel()
        await asyncio.wait({playing})
        if not await process.is_awake(LET_GO_S):
            process.kill()

    def _least_busy(self) -> EpisodeProcess:
        for place, process in enumerate(self._processes):
            if process.is_gone or process.is_killed:
                burial = asyncio.create_task(process.close())
                self._burials.add(burial)
                burial.add_done_callback(self._burials.discard)
                self._processes[place] = EpisodeProcess(self._config)
        return min(self._processes, key=lambda process: process.playing)
