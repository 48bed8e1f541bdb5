"""Writes docs/configuration.md from the schema: `python -m scripts.document_settings`.

A test holds the page equal to what this prints, so that it can't fall behind the code.
"""

from __future__ import annotations

import json
import sys
import textwrap

from launcher.config.compose import REPOSITORY, presets
from launcher.config.schema import RunConfig
from launcher.config.settings import MISSING, Setting, settings_of
from scripts.checkpoints.arguments import Parser
from scripts.ending import DONE, ended

PAGE = REPOSITORY / "docs" / "configuration.md"

HEAD = """# Configuration

This page lists every setting of a run with its type, default, allowed values and meaning. It is written from
`launcher/config/` by `python -m scripts.document_settings`.

```bash
python -m launcher conf=arithmetic_cpu total_train_steps=20 actor.optimizer.lr=1e-4
```

| command | what it does |
|---|---|
| `python -m launcher conf=<preset> [key=value ...]` | trains with a preset and your changes |
| `python -m launcher conf=<preset> dry_run=true` | prints the plan of processes and memory; starts nothing |
| `python -m launcher conf=<preset> --cfg job` | prints every setting as composed |
| `python -m launcher conf=<preset> -m seed=1,2,3` | runs one trial for each value ([sweeps](clusters.md)) |
| `python -m launcher init my_run.yaml conf=<preset>` | writes a preset of your own, with a comment at each value |

## Rules

- A preset is a file `conf/conf/<preset>.yaml`. These exist:
  {presets}.
- A preset of your own begins with `# @package _global_` and is the file `<folder>/conf/<name>.yaml`. Choose it with
  `--config-dir <folder> conf=<name>`. One that `init` has written is found in the folder of the command.
- The launcher refuses an unknown key, a value of the wrong type or out of range, and settings that contradict each
  other. You get one message and exit code 2, and nothing is started.
- A default `as <key>` follows that setting until it gets a value of its own. *required* means that a preset or the
  command line must give a value.
- Times are in seconds; `run.walltime` also takes Slurm's forms.
- `${{fitted:0.6}}` in a preset marks a memory setting that is
  [fitted to the GPU](gpu.md#memory-settings-are-fitted-to-the-card), with its value where it can't be.
- `${{repo:path}}` in a preset is a path below the folder that holds the `launcher` package. Relative paths start from
  the folder in which the command is given.
- To train without held-out data, leave all of `valid_dataset` out.
- Arguments of SGLang that have no setting here are given as `+sglang.extra_args.<name>=<value>`.
- Checkpoints of `saver` are kept for good. Those of `recover` are for resuming, and older ones make room.
- Names are AReaL's where AReaL has the setting.
"""


def page() -> str:
    """The complete page."""
    listed = textwrap.fill(", ".join(f"`{name}`" for name in presets()), 112, subsequent_indent="  ")
    lines = [HEAD.format(presets=listed)]
    sections: dict[str, list[Setting]] = {}  # one heading each, though nested sections stand amid their parent's keys
    for setting in settings_of(RunConfig):
        sections.setdefault(_section(setting), []).append(setting)
    for section, settings in sections.items():
        lines += [
            f"## {section or 'The run'}",
            "",
            "| key | type | default | allowed | meaning |",
            "|---|---|---|---|---|",
        ]
        lines += [_row(setting) for setting in settings]
        lines.append("")
    return "\n".join(lines)


def _section(setting: Setting) -> str:
    return setting.key.rpartition(".")[0]


def _row(setting: Setting) -> str:
    cells = (f"`{setting.key}`", setting.type, _default(setting), setting.allowed, setting.meaning)
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _default(setting: Setting) -> str:
    value = setting.default
    if value == MISSING:
        return "*required*"
    if isinstance(value, str):
        return f"as `{value[2:-1]}`" if value.startswith("${") else f"`{value}`"
    return json.dumps(value)


def main() -> int:
    return ended(_write)


def _write() -> int:
    Parser("document_settings", "Write docs/configuration.md from the schema of the settings.").parse_args()
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
    return DONE


if __name__ == "__main__":
    sys.exit(main())
