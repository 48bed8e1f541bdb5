"""Where a trainer rank beside the first one runs."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLocation:
    """The id of its node in the cluster, its process there, and its GPUs as CUDA_VISIBLE_DEVICES has them."""

    node: str
    pid: int
    gpus: str = ""
