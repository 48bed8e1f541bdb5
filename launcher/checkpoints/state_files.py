"""Names in a checkpoint beside the model folder: what a trainer writes and what a verification looks for."""

from __future__ import annotations

STATE_FORMAT = "grpo-training-state/1"
FACTS_FILE = "training_state.json"
TENSORS_FILE = "training_state.tensors"
"""safetensors under another ending: SGLang loads every `*.safetensors` of a folder as weights of the model."""
POSITION_FILE = "position.json"
WEIGHTS_FILE = "model.safetensors"
MASTER = "master."
MOMENTS = ("exp_avg", "exp_avg_sq")
RANDOM_STATE = "random.torch"
