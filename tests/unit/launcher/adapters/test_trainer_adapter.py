"""How an adapter is found by its name: those of the launcher, and one that an installed package registers."""

import importlib
import re

import pytest

from launcher.adapters.command_adapter import CommandAdapter
from launcher.adapters.trainer_adapter import GROUP, adapter_of
from launcher.base.errors import ConfigError
from launcher.config.compose import REPOSITORY
from launcher.config.foreign import ForeignTrainerConfig


def test_a_package_registers_an_adapter_by_an_entry_point(tmp_path, monkeypatch):
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\ntheirs = their_adapter:TheirAdapter\n")
    (tmp_path / "their_adapter.py").write_text(
        "from launcher.adapters.command_adapter import CommandAdapter\nclass TheirAdapter(CommandAdapter):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    made = adapter_of(ForeignTrainerConfig(adapter="theirs", command="x", pattern="(?P<step>1)"))
    assert type(made).__name__ == "TheirAdapter"
    assert isinstance(made, CommandAdapter)


def test_an_unknown_name_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match=r"trainer\.adapter=verl: allowed: own, command, trl"):
        adapter_of(ForeignTrainerConfig(adapter="verl"))


def test_the_example_of_the_page_is_an_adapter(tmp_path, monkeypatch):
    (code,) = [
        text
        for text in re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs" / "adapters.md").read_text(), re.DOTALL)
        if "class MyTrainerAdapter" in text
    ]
    (tmp_path / "my_trainer_adapter.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    adapter = importlib.import_module("my_trainer_adapter").MyTrainerAdapter
    made = adapter(ForeignTrainerConfig(command="python t.py", cwd=str(tmp_path)))
    seen, _ = made.read("iter=12 | ret=0.41\n")
    assert [(one.step, one.reward) for one in seen] == [(12, 0.41)]
    for name in ("ckpt-12.pt", "ckpt-12.ok", "ckpt-24.pt"):
        (tmp_path / "ckpt").mkdir(exist_ok=True)
        (tmp_path / "ckpt" / name).touch()
    assert [(one.step, one.is_whole) for one in made.checkpoints()] == [(12, True), (24, False)]
    assert made.command(tmp_path / "ckpt" / "ckpt-12.pt").words[-2:] == ("--load", f"{tmp_path}/ckpt/ckpt-12.pt")
