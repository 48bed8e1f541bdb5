"""The models of actor.path and ref.path as they are on the disk."""

from __future__ import annotations

from transformers import PreTrainedModel

from actors.model import model_folder
from actors.model.lora import add_adapters
from actors.model.torch_settings import own_dtype, torch_dtype
from launcher.config.schema import ActorConfig, RefConfig


class Sources:
    """The models as they are on the disk, read by rank 0 alone, before the ranks meet. Raises ModelError."""

    def __init__(self, actor: ActorConfig, ref: RefConfig) -> None:
        self.folder = model_folder.local_folder(actor.path, key="actor.path")
        self.policy = self.read_policy(actor)
        self.reference = None
        if actor.needs_reference:
            folder = model_folder.local_folder(ref.path, key="ref.path")
            self.reference = model_folder.load_model(
                folder, dtype=torch_dtype(ref.dtype), attn_implementation=actor.attn_implementation, key="ref.path"
            )

    @staticmethod
    def read_policy(actor: ActorConfig) -> PreTrainedModel:
        folder = model_folder.local_folder(actor.path, key="actor.path")
        model = model_folder.load_model(
            folder, dtype=own_dtype(actor), attn_implementation=actor.attn_implementation, key="actor.path"
        )
        if actor.use_lora:
            add_adapters(model, actor)
        return model
