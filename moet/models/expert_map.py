"""Which tensors of a checkpoint are routed experts, and how they are numbered; no bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Fp4Format = Literal["mxfp4", "nvfp4"]


@dataclass(frozen=True, slots=True)
class ExpertMap:
    """Routed experts of a model. Draft blocks count as layers after the decoder's.

    prefixes: for each of `layers`, what precedes the expert id in tensor names. names: what gate,
    up and down projections are called. fp8_scale: the suffix of block scales of fp8 weights.
    fp4: the format of the FP4 tier, the source's own if that is a 4-bit one.
    """

    hidden_size: int
    moe_intermediate_size: int
    num_experts: int
    layers: tuple[int, ...]
    prefixes: tuple[str, ...]
    names: tuple[str, str, str] = ("w1", "w3", "w2")
    fp8_scale: str = "scale"
    fp4: Fp4Format = "mxfp4"

    @property
    def num_rows(self) -> int:
        """Experts of all layers."""
        return len(self.layers) * self.num_experts

    def row(self, layer_idx: int, expert_id: int) -> int:
        """Number of an expert among all, layer by layer."""
        if not 0 <= expert_id < self.num_experts:
            raise IndexError(f"expert {expert_id} of {self.num_experts}")
        return self.layers.index(layer_idx) * self.num_experts + expert_id

    def matrices(self, row: int) -> tuple[str, str, str]:
        """Names, without `.weight`, of gate, up and down of the expert with that number."""
        place, expert_id = divmod(row, self.num_experts)
        gate, up, down = (f"{self.prefixes[place]}{expert_id}.{name}" for name in self.names)
        return gate, up, down

    def is_expert(self, name: str) -> bool:
        """Whether a tensor belongs to a routed expert."""
        return name.startswith(self.prefixes)
