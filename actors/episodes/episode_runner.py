"""Plays the samples of a prompt as episodes: the user's code in processes of its own, asking through the door.

    rollouts ─► an Episode each ─► UserProcess ─► the agent ─► EpisodeDoor ─► Episode ─► a server, as for any rollout
                                        └─ its reward ◄─┘

An episode that fails has no reward, and is run anew once; then its prompt returns to the queue as any other (P1). Where
its process ended, what the model had said of it is kept: the same requests get the same answers, token for token. One
that ends or blocks its process fails, and those beside it are run anew without that being counted. The time limit is on
the agent's own time: what servers take, or their repair, is not counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from actors.episodes.door import EpisodeDoor
from actors.episodes.episode import Complete, Episode, EpisodeFailed, Said
from actors.episodes.turn_tokens import TurnTokens
from actors.reward.user_process import Asked, ProcessGone, UserProcess, UserProcesses
from actors.serving.sglang_client import Sampling
from launcher.base.rollouts import Prompt, Rollout
from launcher.config.schema import RunConfig

TRIES = 2
TICK_S = 1.0
LET_GO_S = 2.0
"""A process whose loop doesn't answer by then is killed."""

log = logging.getLogger("episodes")


class Interrupted(Exception):
    """Its process ended, or was killed, for another episode's sake."""


class EpisodeRunner:
    """Used on one asyncio loop; `start` first. `longest`: tokens of one sequence that servers and trainer take."""

    def __init__(self, config: RunConfig, tokens: TurnTokens, *, longest: int) -> None:
        self._config = config
        self._tokens = tokens
        self._longest = longest
        self._door = EpisodeDoor()
        self._processes: UserProcesses | None = None
        self.progress = 0
        """Changes while an agent's own code or tool is within its time: no server answers meanwhile, and none hangs."""

    async def start(self) -> None:
        """Its processes begin to import the user's code."""
        reward, rollout = self._config.reward, self._config.rollout
        await self._door.start()
        self._processes = UserProcesses(
            lambda: UserProcess(reward, episode=rollout.episode),
            rollout.episode_workers,
            most_growth_gb=reward.max_growth_gb,
        )

    async def close(self) -> None:
        if self._processes is not None:
            await self._processes.close()
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
            try:
                return await self._play(prompt, sampling, complete, record)
            except Interrupted:
                continue
            except ProcessGone as gone:
                failure = EpisodeFailed(f"the process of the episodes ended: {gone}")
            except EpisodeFailed as failed:
                failure = failed
                record.clear()  # the same answers may lead to the same failure
            tries += 1
            if tries >= TRIES:
                raise EpisodeFailed(f"{failure} (rollout.episode={self._config.rollout.episode})") from failure
            log.warning("episode.again prompt=%s reason=%r", prompt.id, str(failure))

    async def _play(self, prompt: Prompt, sampling: Sampling, complete: Complete, record: list[Said]) -> Rollout:
        assert self._processes is not None
        with self._processes.place_of_least_busy() as place:
            process = await self._processes.ready_at(place)
            return await self._play_in(process, prompt, sampling, complete, record)

    async def _play_in(
        self, process: UserProcess, prompt: Prompt, sampling: Sampling, complete: Complete, record: list[Said]
    ) -> Rollout:
        rollout = self._config.rollout
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
        asked = process.ask(order)
        try:
            while not asked.done.done() and (left := rollout.episode_timeout - episode.own_s) > 0:
                ends = {asked.done, episode.broken}
                await asyncio.wait(ends, timeout=min(left, TICK_S), return_when=asyncio.FIRST_COMPLETED)
                self.progress += not episode.is_asking
                if episode.broken.done():
                    episode.broken.result()  # raises
            if not asked.done.done():
                if not (is_awake := await process.is_awake(LET_GO_S)) and not process.is_gone:
                    process.kill()  # code that never awaits can't be cancelled
                if is_awake or process.was_running(asked) is None:
                    limit = f"rollout.episode_timeout={rollout.episode_timeout:g} s"
                    raise EpisodeFailed(f"took longer than {limit}, without the model's time")
            await asked.done
        except ProcessGone as gone:
            raise _judged(gone, process, asked) from gone
        finally:
            asked.done.cancel()
            self._door.shut(key)
        (said,) = asked.answers
        if "error" in said:
            raise EpisodeFailed(str(said["error"]))
        return episode.rollout(said["value"], said.get("parts", {}))


def _judged(gone: ProcessGone, process: UserProcess, asked: Asked) -> Exception:
    """What the end of its process is to an episode: its own failure where its code was running just then."""
    is_own = process.was_running(asked)
    if not is_own and (is_own is False or process.is_killed):
        return Interrupted()
    blocked = EpisodeFailed("kept its process from all else: `await asyncio.to_thread(…)` what blocks")
    return blocked if process.is_killed else gone
