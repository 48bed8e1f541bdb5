"""What `pip install .` puts in place: an installed launcher finds the same files as a checkout."""

import re

import pytest
from setuptools import Distribution

from launcher.config.compose import CONFIG_FOLDER, REPOSITORY, presets

pytestmark = pytest.mark.filterwarnings("ignore:.*is still \\*beta\\*")


@pytest.fixture(scope="module")
def installed():
    """The files of a wheel, by their paths in it; nothing is built or written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(REPOSITORY)
        distribution = Distribution({"script_name": "setup.py"})
        distribution.parse_config_files(["pyproject.toml"])
        distribution.include_package_data = False  # else setuptools writes an egg-info folder to find it out
        build = distribution.get_command_obj("build_py")
        build.ensure_finalized()
        prefix = f"{build.build_lib}/"
        return {path.removeprefix(prefix) for path in build.get_outputs(include_bytecode=False)}


@pytest.mark.parametrize("preset", presets())
def test_what_a_preset_takes_from_the_repository_is_installed(installed, preset):
    named = re.findall(r"\$\{repo:([^}]+)\}", (CONFIG_FOLDER / "conf" / f"{preset}.yaml").read_text())
    missing = [path for path in named if not any(file == path or file.startswith(f"{path}/") for file in installed)]
    assert not missing
    assert f"conf/conf/{preset}.yaml" in installed


@pytest.mark.parametrize("top", ["actors", "assets", "conf", "hydra_plugins", "launcher", "scripts"])
def test_no_file_is_left_behind(installed, top):
    files = [path for path in (REPOSITORY / top).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert files
    assert {str(path.relative_to(REPOSITORY)) for path in files} <= installed
