"""One tensor of a checkpoint as a safetensors header describes it. Knows no model."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

DTYPE_BYTES = {"F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BF16": 2, "F32": 4, "I64": 8}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """dtype as safetensors spells it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype] * prod(self.shape)
