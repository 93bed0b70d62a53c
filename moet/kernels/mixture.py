"""A layer's output that is not summed yet, for whoever can sum it on the way in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

MAX_CHOICES = 8  # of a row


@dataclass(frozen=True, slots=True)
class Mixture:
    """parts: [T * top_k, D] bf16 of a row's experts, in the order of its choices; shared: [T, D]
    bf16, added last. weights: [T, top_k] fp32 of the parts, or None. expert_ids: [T, top_k] int64,
    where a row whose first one is below 0 has no parts. add: makes the sum, [T, D] bf16."""

    parts: Tensor
    shared: Tensor
    weights: Tensor | None
    expert_ids: Tensor
    add: Callable[[], Tensor]

    @property
    def top_k(self) -> int:
        return self.expert_ids.shape[1]
