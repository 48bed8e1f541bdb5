"""The models that plans are made for."""

from launcher.checkpoints.model_shape import known_shape
from launcher.config.compose import REPOSITORY
from launcher.resources.gpus import Gpu
from launcher.resources.hardware import Hardware
from launcher.resources.memory_estimate import GIB
from tests.support.composed import composed

ARITHMETIC = composed("conf=arithmetic_cpu", "sglang.max_total_tokens=20000")


GSM8K = composed("conf=gsm8k_h200")


QWEN = known_shape("Qwen/Qwen2.5-1.5B-Instruct")
MODEL = REPOSITORY / "assets/arithmetic/model"


H200 = Gpu(name="NVIDIA H200", memory=140 * GIB, free=139 * GIB)


LARGE = Hardware(gpus=(H200,), cpus=16, memory=128 * GIB, memory_free=120 * GIB)
