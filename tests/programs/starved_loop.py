"""A step loop whose process is refused memory at a moment of one step: `python -m tests.programs.starved_loop ROOT
STEPS MOMENT STEP [MOMENT STEP …]`.

Each of them in a fork, below ROOT/MOMENT: importing torch takes longer than the loop. The limit is RLIMIT_DATA at what
the process holds at that moment. Start it with MALLOC_MMAP_THRESHOLD_=65536, so that tensors are mapped again and not
taken from what the process has kept. The error that ended the loop is in ROOT/MOMENT/ended.
"""

import os
import resource
import sys
from pathlib import Path

import torch

from actors.model.objective import Objective
from actors.model.policy_model import PolicyModel
from launcher.checkpoints import in_memory_checkpoints
from tests.support.worlds.training import Trial

AFTERWARDS = 16 * 2**20
MOMENTS = {"forward": (Objective, "run"), "backward": (torch.Tensor, "backward"), "optimizer": (PolicyModel, "commit")}


def main() -> None:
    root, steps = Path(sys.argv[1]), int(sys.argv[2])
    for moment, step in zip(sys.argv[3::2], sys.argv[4::2], strict=True):
        child = os.fork()
        if not child:
            starve(root / moment, steps, moment, int(step))
            os._exit(0)  # nothing more is sure to work here
        os.waitpid(child, 0)


def starve(root: Path, steps: int, moment: str, step: int) -> None:
    root.mkdir()
    ended = (root / "ended").open("w")
    in_memory_checkpoints.MEMORY_BACKED = root
    trial = Trial(root, steps=steps)
    owner, name = MOMENTS[moment]
    work = getattr(owner, name)

    def starved(*arguments, **more):
        if trial.loop.next_step != step:
            return work(*arguments, **more)
        trial.loop._checkpointer.settle()  # what a save beside the step frees, the step would find
        allow_no_more()
        try:
            return work(*arguments, **more)
        except Exception:
            allow_no_more(AFTERWARDS)  # what follows saves files: Rust aborts where its buffers find no memory
            raise

    setattr(owner, name, starved)
    try:
        trial.run()
    except Exception as error:  # noqa: BLE001 - whatever it was: who started this looks at it
        print(f"{type(error).__name__}: {error}", file=ended, flush=True)


def allow_no_more(beyond: int = 0) -> None:
    words = Path("/proc/self/status").read_text().split()
    held = int(words[words.index("VmData:") + 1]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (held + beyond, resource.RLIM_INFINITY))


if __name__ == "__main__":
    main()
