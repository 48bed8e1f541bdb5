"""A second trainer rank as a real process, driven over a pipe in place of Ray; the exchanges between the two are real.

It serves one model after the other, so that its imports are paid for once.
"""

import multiprocessing
import multiprocessing.connection
import traceback
from functools import partial

import torch
import torch.distributed as dist

from actors.model.learner import Learner
from actors.model.rank_collectives import MeetingPlace, RankGroup
from tests.support.machine import scaled

ADDRESS = "127.0.0.1"
deadline_s = partial(scaled, 120.0)


def serve(pipe: multiprocessing.connection.Connection) -> None:
    torch.set_num_threads(1)
    part = group = None
    while True:
        try:
            work, arguments, named = pipe.recv()
        except EOFError:
            return
        answer, failure = None, ""
        try:
            match work:
                case "meet":
                    meeting, actor, ref, temperature = arguments
                    group = RankGroup.join(meeting, 1, own_address=ADDRESS, device=torch.device("cpu"))
                    part = Learner(
                        actor, ref, temperature=temperature, device=torch.device("cpu"), sources=None, group=group
                    )
                case "leave":
                    part = None
                    torch.distributed.destroy_process_group()
                case "gradients":
                    gradients(part)
                case _:
                    answer = getattr(part, work)(*arguments, **named)
                    answer = None if isinstance(answer, torch.Tensor | list) else answer  # rank 0's alone counts
        except Exception:  # noqa: BLE001 - whatever it is, the other process says it
            failure = traceback.format_exc()
        pipe.send((failure, answer))


def gradients(part: Learner) -> dict[str, torch.Tensor]:
    """Whole, by the names of the parameters; nothing on the second."""
    return {name: part._group.whole(parameter.grad).clone() for name, parameter in part.parameters.items()}


class Second:
    """The process of rank 1."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def close(self) -> None:
        self.pipe.close()
        self.process.join(deadline_s())
        assert self.process.exitcode == 0


class Pair:
    """The ranks of rank 0 (actors/model/policy_model.py): this process and the second one."""

    size = 2
    lost = ""

    def __init__(self, second: Second, actor, ref, temperature: float) -> None:
        self._pipe = second.pipe
        self._settings = (actor, ref, temperature)
        self.works: list[str] = []
        self._has_met = self._has_left = False

    def meet(self, device: torch.device) -> RankGroup:
        self._place = MeetingPlace(ADDRESS, size=2, timeout_s=deadline_s())
        self._pipe.send(("meet", (self._place.rendezvous, *self._settings), {}))
        return RankGroup.join(self._place.rendezvous, 0, own_address=ADDRESS, device=device, place=self._place)

    def call(self, part: Learner, work: str, arguments):
        self._hear_of_meeting()
        self.works.append(work)
        self._pipe.send((work, arguments[1], {}))
        answer = getattr(part, work)(*arguments[0])
        self._hear()
        return answer

    def ask_each(self, part: Learner, work: str, *arguments, **named):
        """In the real run these go on beside `call`; here one after the other."""
        self._hear_of_meeting()
        self._pipe.send((work, arguments, named))
        answer = getattr(part, work)(*arguments, **named)
        return [answer, self._hear()]

    def gradients(self, part: Learner) -> dict[str, torch.Tensor]:
        self._pipe.send(("gradients", (), {}))
        found = gradients(part)
        self._hear()
        return found

    def _hear_of_meeting(self) -> None:
        if not self._has_met:
            self._has_met = True
            self._hear()

    def _hear(self):
        assert self._pipe.poll(deadline_s())
        failure, answer = self._pipe.recv()
        assert failure == "", failure
        return answer

    def close(self) -> None:
        """May be called again."""
        if self._has_left:
            return
        self._has_left = True
        if not self._has_met:
            assert self._pipe.poll(deadline_s())
            self._pipe.recv()  # a meeting that failed is told by rank 0
        self._pipe.send(("leave", (), {}))
        dist.destroy_process_group()
        self._hear()
