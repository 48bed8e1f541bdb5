"""Rollouts from running servers for the step loop: runs asyncio code on a separate thread.

That loop holds the client, the pool and the reward workers. `collect` and `evaluate` wait for it; `stop` cancels them.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from actors.data.prompt_queue import PromptQueue
from actors.processes.loop_thread import LoopThread
from actors.rollout.rollout_engine import RolloutEngine
from actors.rollout.rollout_stream import RolloutStream
from actors.serving.sglang_client import Sampling
from launcher.base.messages import EvalReport
from launcher.base.rollouts import Prompt, RolloutBatch, mean_of
from launcher.config.schema import RunConfig

T = TypeVar("T")


class Stopped(Exception):
    """Raised by a source of rollouts when the run is to stop."""


class LiveRollouts:
    """Rollouts at the training temperature, and held-out accuracy, through a `RolloutEngine`."""

    def __init__(
        self,
        thread: LoopThread,
        engine: RolloutEngine,
        *,
        config: RunConfig,
        prompts: Mapping[str, Prompt],
        held_out: Mapping[str, Prompt],
        newest: Callable[[], int] | None = None,
    ) -> None:
        """`newest`: the version that is served now, for what is made ahead of the trainer."""
        self._thread = thread
        self._engine = engine
        self._config = config
        self._prompts = prompts
        self._held_out = held_out
        self._newest = newest
        self._stream: RolloutStream | None = None
        self._sampling = Sampling.from_config(config.gconfig)
        self._stopping = threading.Event()
        self._waiting: Future[Any] | None = None
        self._turn = threading.RLock()

    def collect(self, queue: PromptQueue, *, want: int, weight_version: int) -> RolloutBatch:
        """The next batch; with rollout.max_head_offpolicyness those after it are begun, and made meanwhile."""
        return self._wait(self._next_batch(queue, want, weight_version))

    async def _next_batch(self, queue: PromptQueue, want: int, weight_version: int) -> RolloutBatch:
        if self._stream is None or self._stream.queue is not queue:
            self._stream = self._stream_of(
                queue,
                ahead=self._config.rollout.max_head_offpolicyness,
                most_batches=self._config.actor.dynamic_sampling,
            )
        return await self._stream.next_batch(want, version=weight_version)

    def collect_apart(self, queue: PromptQueue, *, want: int, weight_version: int) -> RolloutBatch:
        """Prompts of another queue than the run's, at these weights only; what is made ahead is left alone."""
        return self._wait(self._stream_of(queue).next_batch(want, version=weight_version))

    def _stream_of(self, queue: PromptQueue, *, ahead: int = 0, most_batches: int | None = None) -> RolloutStream:
        return self._engine.stream(
            queue,
            self._prompts,
            n_samples=self._config.gconfig.n_samples,
            sampling=self._sampling,
            concurrent_prompts=self._config.rollout.max_concurrent_rollouts,
            ahead=ahead,
            newest=self._newest,
            most_batches=most_batches,
        )

    def abandon(self) -> None:
        """Drop what is being made ahead, as it is of weights that the trainer leaves."""
        if self._stream is not None:
            self._thread.call(self._stream.close())

    def evaluate(self, weight_version: int) -> EvalReport | None:
        """Mean reward on the held-out prompts, sampled as in training and greedy; None where there are none."""
        if not self._held_out:
            return None
        greedy = dataclasses.replace(self._sampling, temperature=0.0)
        sampled_n = self._config.evaluator.n_samples
        sampled = self._wait(self._evaluate(self._sampling, sampled_n, weight_version))
        best = self._wait(self._evaluate(greedy, 1, weight_version))
        return EvalReport(
            policy_version=weight_version,
            prompts=len(self._held_out),
            sampled=mean_reward(sampled),
            greedy=mean_reward(best),
            by_dataset={
                name: [mean, best.rewards_by_dataset[name]] for name, mean in sampled.rewards_by_dataset.items()
            },
        )

    def stop(self) -> None:
        """The current wait raises Stopped, and so does every later one until `allow`. What is being made is dropped;
        what is made stays in the queue."""
        with self._turn:
            self._stopping.set()
            waiting = self._waiting
        if waiting is not None:
            waiting.cancel()
        if self._stream is not None:  # after that: a wait must not see its work cancelled before itself
            self._thread.submit(self._stream.close())

    def allow(self) -> None:
        """Undo a stop."""
        self._stopping.clear()

    def _evaluate(self, sampling: Sampling, n_samples: int, weight_version: int) -> Coroutine[Any, Any, RolloutBatch]:
        in_flight = self._config.rollout.max_concurrent_rollouts * self._config.gconfig.n_samples
        return self._engine.collect(
            PromptQueue(list(self._held_out), seed=0, shuffle=False),
            self._held_out,
            want=len(self._held_out),
            n_samples=n_samples,
            sampling=sampling,
            weight_version=weight_version,
            concurrent_prompts=max(1, in_flight // n_samples),
        )

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        with self._turn:  # a stop must find the wait that it stops
            if self._stopping.is_set():
                work.close()
                raise Stopped
            self._waiting = waiting = self._thread.submit(work)
        try:
            return waiting.result()
        except CancelledError as cancelled:
            raise Stopped from cancelled
        finally:
            self._waiting = None


def mean_reward(batch: RolloutBatch) -> float:
    return mean_of([rollout.reward for rollout in batch.rollouts if rollout.reward is not None])
