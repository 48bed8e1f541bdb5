"""The CPU entry without its server: the stand-in kernels, the arguments, the model files left out."""

import json
import os
import subprocess
import sys

import pytest

from actors.serving.sglang_cpu import argument, leave_out_other_models, with_cpu_arguments


def python(code, **environment):
    """Run in a fresh interpreter, since what is imported stays imported."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ | environment
    )
    return done.returncode, done.stdout + done.stderr


def test_the_stand_in_can_be_imported_from_and_not_called():
    code, said = python("""
from actors.serving import sgl_kernel_stand_in
sgl_kernel_stand_in.install()
sgl_kernel_stand_in.install()
import copy, sys
assert sum(type(f).__module__ == "actors.serving.sgl_kernel_stand_in" for f in sys.meta_path) == 1
import sgl_kernel.flash_attn
from sgl_kernel import rmsnorm
from sgl_kernel.scalar_type import ScalarType, scalar_types
assert not hasattr(rmsnorm, "__len__") and not hasattr(sgl_kernel, "__all__")
within = (scalar_types.int4, "sgl_kernel.scalar_type.scalar_types.int4")
for kernel, name in ((rmsnorm, "sgl_kernel.rmsnorm"), (copy.copy(rmsnorm), "sgl_kernel.rmsnorm"), within):
    try:
        kernel(1, out=2)
    except sgl_kernel_stand_in.KernelMissing as missing:
        assert str(missing).startswith(name + " is a compiled kernel"), missing
    else:
        raise SystemExit("called")
""")
    assert code == 0, said


def test_the_stand_in_never_shadows_a_loaded_extension():
    code, said = python("""
import sys, types
sys.modules["sgl_kernel"] = types.ModuleType("sgl_kernel")
sys.modules["sgl_kernel"].__file__ = "/real/sgl_kernel/__init__.py"
from actors.serving import sgl_kernel_stand_in
sgl_kernel_stand_in.install()
""")
    assert code == 1
    assert "ImportError: sgl_kernel is already loaded from /real/sgl_kernel/__init__.py" in said


@pytest.mark.parametrize("device", [["--device", "cuda"], ["--device=cuda"]])
def test_a_gpu_is_refused(device):
    done = subprocess.run(
        [sys.executable, "-m", "actors.serving.sglang_cpu", *device], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "serves on the CPU and was given --device cuda: use actors.serving.sglang_gpu" in done.stderr


def test_gpus_are_hidden_from_a_cpu_server():
    code, said = python(
        "import os; from actors.serving.sglang_cpu import prepare\n"
        "prepare(); print(repr(os.environ['CUDA_VISIBLE_DEVICES']))"
    )
    assert (code, said.strip()) == (0, "''")


def test_needed_arguments_are_added_and_given_ones_kept():
    given = with_cpu_arguments(["--model-path", "m", "--attention-backend=triton"])
    assert given[:3] == ["--model-path", "m", "--attention-backend=triton"]
    assert given[3:] == ["--device", "cpu", "--disable-overlap-schedule", "--sleep-on-idle"]
    assert with_cpu_arguments(given) == given


def test_arguments_are_read_in_both_spellings():
    assert argument(["--a", "1", "--b=2", "--c"], "--a") == "1"
    assert argument(["--a", "1", "--b=2", "--c"], "--b") == "2"
    assert argument(["--a", "1", "--b=2", "--c"], "--c") == ""
    assert argument(["--a", "1"], "--d") is None


@pytest.fixture
def no_setting(monkeypatch):
    monkeypatch.setenv("SGLANG_DISABLED_MODEL_ARCHS", "")
    monkeypatch.delenv("SGLANG_DISABLED_MODEL_ARCHS")
    return lambda: os.environ.get("SGLANG_DISABLED_MODEL_ARCHS")


@pytest.mark.parametrize(
    ("architecture", "file"),
    [("Qwen2ForCausalLM", "qwen2"), ("Qwen3ForCausalLM", "qwen3"), ("LlamaForCausalLM", "llama")],
)
def test_only_the_models_own_file_is_left_in(tmp_path, no_setting, architecture, file):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    leave_out_other_models(str(tmp_path))
    left_out = no_setting().split(",")
    assert len(left_out) > 100
    assert file not in left_out


@pytest.mark.parametrize(
    "config", [None, "{", "[]", "{}", '{"architectures": ["NobodyKnowsIt"]}', '{"architectures": null}']
)
def test_a_model_that_is_not_known_changes_nothing(tmp_path, no_setting, config):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    leave_out_other_models(str(tmp_path))
    leave_out_other_models(None)
    assert no_setting() is None


@pytest.mark.slow
def test_the_fork_is_chosen_only_while_there_is_one_thread():
    for threads, method in ((0, "fork"), (1, "spawn")):
        code, said = python(f"""
import multiprocessing, threading
from actors.serving.sglang_cpu import fork_children
for _ in range({threads}):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
fork_children()
multiprocessing.set_start_method("spawn", force=True)
print(multiprocessing.get_start_method())
""")
        assert (code, said.strip()) == (0, method)
