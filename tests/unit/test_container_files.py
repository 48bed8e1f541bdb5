"""Dockerfile, .dockerignore and compose.yaml: linted, of their schema, and what they name exists. No image is built."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jsonschema
import pytest
import yaml
from packaging.specifiers import SpecifierSet

from launcher.config.compose import REPOSITORY, presets

PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
COMPOSE = yaml.safe_load((REPOSITORY / "compose.yaml").read_text())
COMPOSE_SCHEMA = yaml.safe_load((REPOSITORY / "tests" / "support" / "compose_schema.yaml").read_text())
BUILT_FROM = ["actors", "assets", "conf", "constraints.txt", "hydra_plugins", "launcher", "pyproject.toml", "scripts"]


def stages():
    """Of each stage its name, its base, and its instructions as (name, words)."""
    text = re.sub(r"^\s*#.*\n", "", (REPOSITORY / "Dockerfile").read_text(), flags=re.M).replace("\\\n", " ")
    found = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        name, _, words = line.partition(" ")
        if name == "FROM":
            base, _, stage = words.split()
            found[stage] = (base, [])
        else:
            found[stage][1].append((name, words))
    return found


def test_the_linter_has_nothing_to_say():
    linter = Path(sys.executable).parent / "hadolint"
    done = subprocess.run(
        [linter, "--no-color", REPOSITORY / "Dockerfile"], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.returncode) == ("", 0)


def test_what_is_copied_exists():
    sent = [line[1:] for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert set(BUILT_FROM) <= set(sent)
    for base, instructions in stages().values():
        for words in (words.split() for name, words in instructions if name == "COPY"):
            if words[0].startswith("--from="):
                assert words[0].removeprefix("--from=") in stages(), base
            else:
                assert all(source == "." or source in sent for source in words[:-1])
                assert all((REPOSITORY / source).exists() for source in words[:-1])


def test_what_the_wheel_needs_is_sent_to_the_builder():
    project = PYPROJECT["project"]
    named = [project.get("readme"), *project.get("license-files", [])]
    sent = (REPOSITORY / ".dockerignore").read_text().splitlines()
    assert [name for name in named if name is not None and f"!{name}" not in sent] == []


def test_its_python_is_one_that_the_launcher_runs_on():
    bases = {base for base, _ in stages().values() if base not in stages()}
    assert len(bases) == 1
    version = re.fullmatch(r"python:(3\.\d+)-slim-bookworm", bases.pop())
    assert version is not None
    assert version[1] in SpecifierSet(PYPROJECT["project"]["requires-python"])
    assert version[1] == PYPROJECT["tool"]["mypy"]["python_version"]


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_an_image_runs_the_command_as_an_ordinary_user(target):
    base, own = stages()[target]
    settings = dict([*stages().get(base, (None, []))[1], *own])
    assert settings["USER"] == "10001"
    assert settings["ENTRYPOINT"] == '["tini", "--", "python", "-m", "launcher"]'
    assert (REPOSITORY / "launcher" / "__main__.py").exists()
    assert settings["CMD"] in [f'["conf={preset}"]' for preset in presets()]


def test_the_user_may_write_to_each_volume_and_to_the_folder_of_caches():
    """`install -d` gives its owner to the folders that are named, and those it makes on the way to root."""
    runs = " ".join(words for name, words in stages()["cpu"][1] if name == "RUN")
    made = {Path(word) for word in re.search(r"install -d -o grpo -g grpo ([^&]+)", runs)[1].split()}
    assert {Path(volume.partition(":")[2]) for volume in COMPOSE["x-run"]["volumes"]} <= made
    home = Path("/home/grpo")
    assert {parent for folder in made for parent in folder.parents if home in parent.parents} <= made


def test_a_user_id_without_a_name_has_one():
    """`getpass.getuser()`, which torch calls as it is imported, raises without."""
    assert "USER=grpo" in " ".join(words for name, words in stages()["cpu"][1] if name == "ENV").split()


def test_bytecode_stays_valid_where_a_builder_rounds_dates(tmp_path):
    """The user may not write where the packages lie: what is stale there is compiled again by each process."""
    words = " ".join(words for name, words in stages()["packages"][1] if name == "ENV")
    epoch = dict(word.split("=", 1) for word in words.split())["SOURCE_DATE_EPOCH"]
    assert int(epoch) >= 315532800, "1980, the first year that a wheel, which is a zip file, can hold"
    (tmp_path / "module.py").write_text("value = 1\n")
    subprocess.run([sys.executable, "-m", "compileall", "-q", tmp_path], env={"SOURCE_DATE_EPOCH": epoch}, check=True)
    (written,) = (tmp_path / "__pycache__").iterdir()
    assert written.read_bytes()[4] == 0b11, "PEP 552: by the hash of the source, and checked"
    (compiled,) = re.findall(r"python -m compileall -q (\S+ \S+) /usr/local/lib/python3\.\*", str(stages()["cpu"]))
    assert compiled == "--invalidation-mode checked-hash"


def test_compose_names_targets_presets_and_volumes_that_exist():
    assert COMPOSE["services"].keys() == {"cpu", "cuda"}
    for name, service in COMPOSE["services"].items():
        assert service["build"] == {"context": ".", "target": name}
        assert [f'["{word}"]' for word in service["command"]] == [dict(stages()[name][1])["CMD"]]
        assert {volume.partition(":")[0] for volume in service["volumes"]} == COMPOSE["volumes"].keys()


@pytest.mark.parametrize(
    ("written", "instead"),
    [
        ("stop_grace_period: 2m", "stop_grace_period: 120"),
        ("shm_size: 64gb", "shm-size: 64gb"),
        ("build: {context: ., target: cpu}", "build: {context: ., stage: cpu}"),
        ("count: all, capabilities: [gpu]", "count: all"),
        ("profiles: [cuda]", "profiles: cuda"),
    ],
)
def test_the_compose_file_is_of_compose_s_schema_and_a_wrong_one_is_not(written, instead):
    text = (REPOSITORY / "compose.yaml").read_text()
    jsonschema.validate(COMPOSE, COMPOSE_SCHEMA)
    assert written in text
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(yaml.safe_load(text.replace(written, instead)), COMPOSE_SCHEMA)


def test_no_file_holds_a_secret():
    passed_on = [word for service in COMPOSE["services"].values() for word in service["environment"]]
    assert set(passed_on) == {"HF_TOKEN", "WANDB_API_KEY"}, "by name: a value would be `NAME=value`"
    assert not re.search(r"(?i)(token|key|secret|password)\s*[=:]", (REPOSITORY / "Dockerfile").read_text())
