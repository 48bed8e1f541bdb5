"""Writes docs/configuration.md from the schema: `python -m scripts.document_settings`.

A test holds the page equal to what this prints, so that it can't fall behind the code.
"""

from __future__ import annotations

import json
from itertools import groupby

from launcher.config.compose import REPOSITORY, presets
from launcher.config.schema import RunConfig
from launcher.config.settings import MISSING, Setting, settings_of

PAGE = REPOSITORY / "docs" / "configuration.md"

HEAD = """# Configuration

Every setting with its type, default and meaning. This page is written from `launcher/config/schema.py` by
`python -m scripts.document_settings`.

```
python -m launcher conf=<preset> [key=value ...]
python -m launcher conf=<preset> dry_run=true     # the plan of placement and memory; starts nothing
python -m launcher conf=<preset> --cfg job        # every setting as composed
python -m launcher conf=<preset> -m seed=1,2,3    # one run after the other
```

- A preset is a file `conf/conf/<preset>.yaml`; there are {presets}. One of your own begins with
  `# @package _global_`, lies in `<folder>/conf/<name>.yaml`, and is chosen with `--config-dir <folder> conf=<name>`.
- An unknown key, a value of the wrong type or out of its range, and settings that contradict each other end in one
  message and exit code 2, before anything is started.
- `as <key>` means: follows that setting until it is given a value of its own. *required* means that a preset or the
  command line must give it. Times are seconds.
- `${{repo:path}}` in a preset is a path below the folder that holds the `launcher` package; relative paths start from
  the folder in which the command is given.
- No held-out data: leave all of `valid_dataset` out. Arguments of SGLang that have no setting here:
  `+sglang.extra_args.<name>=<value>`.
"""


def page() -> str:
    """The complete page."""
    lines = [HEAD.format(presets=", ".join(f"`{name}`" for name in presets()))]
    for section, settings in groupby(settings_of(RunConfig), key=_section):
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
    allowed = "" if setting.allowed is None else str(setting.allowed)
    cells = (f"`{setting.key}`", setting.type, _default(setting), allowed, setting.meaning)
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _default(setting: Setting) -> str:
    value = setting.default
    if value == MISSING:
        return "*required*"
    if isinstance(value, str):
        return f"as `{value[2:-1]}`" if value.startswith("${") else f"`{value}`"
    return json.dumps(value)


def main() -> None:
    PAGE.write_text(page())
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
