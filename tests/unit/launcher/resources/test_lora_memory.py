"""What a run with adapters is planned to take: gradients, moments and a checkpoint's state of the adapters alone."""

from launcher.resources.memory_estimate import checkpoint_bytes, learning, trainer
from launcher.resources.missing_files import find_shape


def sizes(config):
    return {item.what: item.bytes for item in trainer(config, find_shape(config), on_gpu=True)}


def test_what_learns_is_small_and_the_models_own_weights_have_its_type(config):
    config.actor.dtype = "bfloat16"
    whole, shape = sizes(config), find_shape(config)
    everything = checkpoint_bytes(config.actor, shape)
    config.actor.use_lora = True
    config.actor.lora_rank = 2
    small, adapters = sizes(config), learning(config.actor, shape)
    assert 0 < adapters < shape.parameters
    assert small["adapters"] == small["gradients"] == 4 * adapters
    assert small["optimizer"] == 8 * adapters
    assert (whole["weights"], small["weights"]) == (4 * shape.parameters, 2 * shape.parameters)
    assert "bfloat16 copy" in whole
    assert "bfloat16 copy" not in small
    assert everything == 14 * shape.parameters
    assert checkpoint_bytes(config.actor, shape) == 2 * shape.parameters + 12 * adapters
