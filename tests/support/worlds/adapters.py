"""An AReaL trainer's YAML, and the pattern of a command's log."""

from launcher.adapters.command_adapter import CommandAdapter
from launcher.adapters.trainer_adapter import adapter_of
from launcher.config.foreign import ForeignTrainerConfig
from tests.support.checkpoint_makers import EXPERIMENT, TRIAL

YAML = """
experiment_name: {experiment}
trial_name: {trial}
allocation_mode: sglang:d1p1t1+fsdp:d2p1t1c2
total_train_steps: null
cluster: {{n_nodes: 1, fileroot: "{root}"}}
scheduler: {{type: null}}
rollout: {{backend: "sglang:d1p1t1"}}
actor: {{backend: "fsdp:d2p1t1c2", weight_update_mode: disk}}
saver: {{experiment_name: "${{experiment_name}}", freq_epochs: null, freq_steps: 5, freq_secs: null}}
recover: {{mode: on, trial_name: "${{trial_name}}", freq_epochs: 1, freq_steps: 5, freq_secs: null}}
"""


def trainer(folder, *overrides, **settings):
    python = folder / "venv" / "bin" / "python3"
    if not python.exists():
        python.parent.mkdir(parents=True)
        python.touch(mode=0o755)
        launcher = folder / "venv/lib/python3.11/site-packages/areal/infra/launcher/local.py"
        launcher.parent.mkdir(parents=True)
        launcher.touch()
        (launcher.parents[3] / "areal-1.0.4.dist-info").mkdir()
        (folder / "train.py").touch()
        text = YAML.format(experiment=EXPERIMENT, trial=TRIAL, root=folder / "out")
        (folder / "their.yaml").write_text(text)
    given = {"cwd": str(folder), "config": "their.yaml", "python": str(python), "command": "train.py"}
    return ForeignTrainerConfig(adapter="areal", overrides=list(overrides), **(given | settings))


def missing(given):
    return [str(error) for error in adapter_of(given).missing()]


PATTERN = r"step (?P<step>\d+).*reward (?P<reward>\S+)"


def adapter(tmp_path, **settings):
    given = {"adapter": "command", "command": "python train.py", "cwd": str(tmp_path), "pattern": PATTERN, **settings}
    return CommandAdapter(ForeignTrainerConfig(**given))
