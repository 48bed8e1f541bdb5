"""Which prompts are trained on next: every prompt exactly once per epoch, across any number of faults (P2).

    take_prompts ─► in flight ─► commit (trained on)
         ▲              │
         └──────────────┴ requeue (failed or rejected), or a restore: what was in flight is taken again, first

What has been made of a prompt in flight may be kept with it (`keep`), so that a state holds it too.

Which prompts an epoch has, and in which order, is `launcher/base/prompt_order.py`'s.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

from launcher.base.errors import CheckpointError, DataError
from launcher.base.prompt_order import Circle, PromptOrder
from launcher.base.rollouts import Completion

FORMAT = 1
BEGIN_ANEW = "resume from another checkpoint, or start over with recover.mode=off"


class PromptQueue:
    """Raises ValueError where it is misused: ids that repeat or aren't in flight, a batch of less than one."""

    def __init__(self, ids: Sequence[str], *, seed: int, shuffle: bool, circles: Sequence[Circle] = ()) -> None:
        """`circles`: of some ids, of which each epoch has the next few, in an order drawn from the seed alone."""
        self.prompt_order = PromptOrder(ids, seed=seed, shuffle=shuffle, circles=circles)
        self._keeping = threading.Lock()  # what is made is kept on another thread than the one that restores
        self._begin(epoch=0)

    def _begin(self, epoch: int) -> None:
        self.epoch = epoch
        self._order = self.prompt_order.ids_of(epoch)
        self._cursor = 0  # of _order: what is before it has been taken at least once
        self._first: deque[str] = deque()  # in flight when the queue was saved
        self._last: deque[str] = deque()  # requeued; at the end, so that a prompt that always fails holds nothing up
        self._in_flight: dict[str, None] = {}  # in the order in which they were taken
        self._kept: dict[str, tuple[Completion, ...]] = {}

    def __len__(self) -> int:
        """Prompts in an epoch."""
        return len(self.prompt_order)

    @property
    def waiting(self) -> int:
        """Prompts of this epoch that can be taken now."""
        return len(self._first) + len(self._order) - self._cursor + len(self._last)

    @property
    def in_flight(self) -> tuple[str, ...]:
        return tuple(self._in_flight)

    def steps_per_epoch(self, batch_size: int) -> int:
        """Where every batch but the last is full."""
        return -(-len(self) // batch_size)

    def take_prompts(self, n: int) -> list[str]:
        """Up to `n` prompts. Fewer, or none, where the epoch has no more waiting: the next one begins only when
        the last prompt of this one is committed."""
        if n < 1:
            raise ValueError(f"a batch of {n} prompts")
        taken = [self._next() for _ in range(min(n, self.waiting))]
        self._in_flight.update(dict.fromkeys(taken))
        return taken

    def _next(self) -> str:
        if self._first:
            return self._first.popleft()
        if self._cursor < len(self._order):
            self._cursor += 1
            return self._order[self._cursor - 1]
        return self._last.popleft()

    def keep(self, prompt_id: str, completions: Iterable[Completion]) -> None:
        """What was made of a prompt in flight; of another one it is dropped, as of before a restore."""
        with self._keeping:
            if prompt_id in self._in_flight:
                self._kept[prompt_id] = tuple(completions)

    def kept(self, prompt_id: str) -> tuple[Completion, ...]:
        return self._kept.get(prompt_id, ())

    def abandon(self) -> None:
        """All in flight are taken again, first, and what was made of them is dropped."""
        with self._keeping:
            self._first.extendleft(reversed(self._in_flight))
            self._in_flight = {}
            self._kept = {}

    def bring_forward(self, made: Mapping[str, Iterable[Completion]]) -> None:
        """Of these, the prompts that were given back are taken next, with what was made of them."""
        with self._keeping:
            given_back = {*self._first, *self._last}
            kept = {prompt_id: tuple(some) for prompt_id, some in made.items() if prompt_id in given_back}
            self._first = deque([*kept, *(one for one in self._first if one not in kept)])
            self._last = deque(one for one in self._last if one not in kept)
            self._kept |= kept

    def requeue(self, ids: Iterable[str]) -> None:
        """Back to the end of this epoch's queue: they were not trained on."""
        self._last.extend(self._land(ids))

    def commit(self, ids: Iterable[str]) -> None:
        """They were trained on. With the last prompt of an epoch the next one begins."""
        self._land(ids)
        if not self._in_flight and not self.waiting:
            self._begin(self.epoch + 1)

    def _land(self, ids: Iterable[str]) -> list[str]:
        landing = list(ids)
        strangers = [prompt_id for prompt_id in landing if prompt_id not in self._in_flight]
        if strangers or len(set(landing)) != len(landing):
            raise ValueError(f"not in flight, or named twice: {strangers or landing}")
        with self._keeping:
            for prompt_id in landing:
                del self._in_flight[prompt_id]
                self._kept.pop(prompt_id, None)
        return landing

    def state_dict(self) -> dict[str, Any]:
        """For JSON; small but for what is kept, since the order is worked out again. In flight counts as not taken."""
        with self._keeping:
            kept = {prompt_id: [one.to_json() for one in made] for prompt_id, made in self._kept.items()}
        return {
            **self._data(),
            "epoch": self.epoch,
            "cursor": self._cursor,
            "first": [*self._in_flight, *self._first],
            "last": list(self._last),
            **({"kept": kept} if kept else {}),
        }

    def _data(self) -> dict[str, Any]:
        """What a state must be of, to be continued from."""
        return {
            "format": FORMAT,
            "prompts": len(self),
            "seed": self.prompt_order.seed,
            "shuffle": self.prompt_order.shuffle,
            "fingerprint": self.prompt_order.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. Raises, changing nothing, CheckpointError where it is damaged; DataError where it is
        of another data set, order or seed, and as good as it was."""
        self._check_same(state)
        epoch, cursor, first, last = (state.get(name) for name in ("epoch", "cursor", "first", "last"))
        if not (_is_count(epoch) and _is_count(cursor) and _are_ids(first) and _are_ids(last)):
            raise CheckpointError(f"the data position is damaged: {_shortened(state)}", BEGIN_ANEW)
        order, returned = self.prompt_order.ids_of(epoch), [*first, *last]
        nothing_left = cursor == len(order) and not returned
        if cursor > len(order) or nothing_left or len({*returned} & {*order[:cursor]}) != len(returned):
            raise CheckpointError(f"the data position contradicts itself: {_shortened(state)}", BEGIN_ANEW)
        try:
            here = {*first} & state.get("kept", {}).keys()
            kept = {name: tuple(map(Completion.from_json, state["kept"][name])) for name in here}
        except (AttributeError, TypeError, KeyError, ValueError) as error:
            raise CheckpointError(f"what was kept of prompts in flight is damaged: {error!r}", BEGIN_ANEW) from error
        with self._keeping:
            self.epoch = epoch
            self._order = order
            self._cursor = cursor
            self._first = deque(first)
            self._last = deque(last)
            self._in_flight = {}
            self._kept = kept

    def _check_same(self, state: Mapping[str, Any]) -> None:
        now = self._data()
        changed = [f"{name} was {state.get(name)!r}, is {now[name]!r}" for name in now if state.get(name) != now[name]]
        if changed:
            raise DataError(
                f"the data set, its order or the seed is not the checkpoint's: {'; '.join(changed)}",
                f"set train_dataset.* and seed as they were, and train_datasets.*; {BEGIN_ANEW}",
            )


def _is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and value >= 0


def _are_ids(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _shortened(state: Mapping[str, Any]) -> str:
    return repr({name: state.get(name) for name in ("epoch", "cursor", "first", "last")})[:300]
