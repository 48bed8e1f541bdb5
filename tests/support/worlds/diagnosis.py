"""Logs of made runs, and what the diagnosis says of them."""

import numpy as np
from safetensors.numpy import save_file

from launcher.diagnosis.judging.verdict import diagnose
from launcher.diagnosis.reading.inputs import find_inputs, read_inputs
from launcher.diagnosis.reading.run_folders import look_around
from tests.support.made_logs import Made, RunMaker


def diagnosis_of(*paths, checkpoints=None):
    contents = read_inputs(find_inputs(paths))
    return diagnose(contents, look_around(paths, contents.log_events, checkpoints))


def made_run(folder, made, *, merged=False, steps=(), settings=""):
    """Logs in AReaL's layout below `folder`, with exports of `steps` beside them; the folder of the logs."""
    logs = RunMaker(made).write(folder / "logs" / "me" / "exp" / "t0", merged=merged)
    if settings:
        (logs / "config.yaml").write_text(settings)
    for step in steps:
        export(folder / "checkpoints" / "me" / "exp" / "t0" / "default", step)
    return logs


def export(root, step, *, is_whole=True):
    path = root / f"epoch0epochstep{step}globalstep{step}"
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    save_file({"weight": np.zeros(1, dtype=np.float32)}, path / "model.safetensors")
    if is_whole:
        (path / "tokenizer_config.json").write_text("{}")
    return path


STEPS = 60
LAUNCHER = "20251111-{at}.000 Launcher ERROR: "
CHILD_FAILED = LAUNCHER + "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: trainer.py FAILED"
EXIT_CODE = LAUNCHER + "exitcode  : -9 (pid: 4242)"


def run_that_stops(folder, *, trainer=(), server=(), last_tokens="09:59:58", talks_until=""):
    """A run of steps of 60 s whose last ended at 10:00:00; each line as (time, text)."""
    folder.mkdir(parents=True)
    lines = list(RunMaker(Made(steps=STEPS, plain=True)).trainer())
    text = "".join(lines).replace(f"/{STEPS} done", f"/{STEPS * 2} done")
    more = [(at, line) for at, line in trainer] + ([(talks_until, LAUNCHER + "waiting")] if talks_until else [])
    (folder / "trainer.log").write_text(text + "".join(line.format(at=at) + "\n" for at, line in more))
    maker = RunMaker(Made(steps=STEPS, plain=True))
    tokens = [line for line in maker.server() if "Decode" not in line or line[12:20] <= last_tokens]
    (folder / "llm_server.log").write_text("".join(tokens) + "".join(f"{line.format(at=at)}\n" for at, line in server))
    return folder
