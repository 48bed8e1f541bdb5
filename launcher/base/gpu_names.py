"""Names one GPU so that it is found again after a restart of Ray or of the machine."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuName:
    """`host`: its node's host name. `number`: as CUDA_VISIBLE_DEVICES has it. `uuid`: "" where NVML does not say.
    `fault`: what NVML finds wrong with it now."""

    host: str
    number: str
    uuid: str = ""
    fault: str = field(default="", compare=False)

    def is_same(self, other: GpuName) -> bool:
        """By UUID where both are known: a restart may number them anew."""
        if self.uuid and other.uuid:
            return self.uuid == other.uuid
        return (self.host, self.number) == (other.host, other.number)

    def __str__(self) -> str:
        return f"GPU {self.number} of {self.host}"
