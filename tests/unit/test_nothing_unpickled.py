"""What could run code when it reads a file or a message is called nowhere, but on a line between parent and child."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(file for room in ("launcher", "actors", "scripts") for file in (ROOT / room).rglob("*.py"))
LOADERS = {
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "_pickle.load", "_pickle.loads", "marshal.load"),
    *("marshal.loads", "shelve.open", "dill.load", "dill.loads", "cloudpickle.load", "cloudpickle.loads"),
    *("joblib.load", "pandas.read_pickle", "pd.read_pickle", "torch.load", "torch.jit.load", "torch.hub.load"),
    *("torch.package.PackageImporter", "np.load", "numpy.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load"),
    *("eval", "exec", "runpy.run_path", "multiprocessing.connection.Client", "multiprocessing.connection.Listener"),
    *("tarfile.open", "zipfile.ZipFile", "shutil.unpack_archive"),
}
"""Archives too: a name in one may lead anywhere."""
HUGGING_FACE = re.compile(r"(from_pretrained|\bload_dataset|Auto\w+\.from_config)$")
ALLOWED = {
    (
        "actors/reward/reward_worker.py",
        "pickle.load",
    ),  # from an open socket pair of the parent's: nobody else writes there
    ("launcher/base/yaml_text.py", "yaml.load"),  # by the safe loaders alone: test_yaml_text.py
    ("launcher/diagnosis/reading/unpacked.py", "tarfile.open"),  # regular files only, each below the scratch folder
    ("launcher/diagnosis/reading/unpacked.py", "zipfile.ZipFile"),  # the same
    ("scripts/lab/gpu_kit/unpack.py", "tarfile.open"),  # build.sh's own archive, which travels beside it
}


def written(node):
    """`a.b.c` of an attribute or a name; "" of anything else."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr) if before := written(value):
            return f"{before}.{attr}"
    return ""


def loaders_in(source):
    """Those named in a file by their own names, however they were imported; with trust in a model's own code, which is
    refused explicitly: not to say it makes transformers ask.
    """
    tree = ast.parse(source)
    real = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            real |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            real |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            head, dot, rest = written(node).partition(".")
            if (name := real.get(head, head) + dot + rest) in LOADERS:
                yield name
        elif isinstance(node, ast.Call):
            said = [ast.unparse(word.value) for word in node.keywords if word.arg == "trust_remote_code"]
            if said != ["False"] and (said or HUGGING_FACE.search(ast.unparse(node.func))):
                yield "trust_remote_code"


@pytest.mark.slow
def test_no_file_of_ours_unpickles():
    assert len(SOURCES) > 100
    found = {
        (file.relative_to(ROOT).as_posix(), name) for file in SOURCES for name in loaders_in(file.read_text("utf-8"))
    }
    assert found == ALLOWED


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch\ntorch.load('x', weights_only=True)", "torch.load"),
        ("import torch as t\nt.load('x')", "torch.load"),
        ("from pickle import loads as read\nread(b'')", "pickle.loads"),
        ("import numpy as np\nread = np.load", "numpy.load"),
        ("eval('1')", "eval"),
        ("AutoModel.from_pretrained('x', trust_remote_code=True)", "trust_remote_code"),
        ("AutoModel.from_pretrained('x')", "trust_remote_code"),
        ("datasets.load_dataset('x', trust_remote_code=told)", "trust_remote_code"),
    ],
)
def test_the_search_finds(source, name):
    assert name in set(loaders_in(source))


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "A.from_pretrained(x, trust_remote_code=False)",
        "import json\njson.load(f)",
        "from safetensors.torch import load_file",
    ],
)
def test_the_search_finds_nothing_else(source):
    assert list(loaders_in(source)) == []
