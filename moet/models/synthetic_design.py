"""What a synthetic checkpoint is made of, before any weight is drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from moet.models.tensor_spec import TensorSpec

Size = Literal["tiny", "small", "full"]


@dataclass(frozen=True, slots=True)
class Design:
    """config: the model's own config value. parts: tensors by shard. texts: JSON files by name."""

    config: Any
    parts: Mapping[str, list[TensorSpec]]
    texts: Mapping[str, Any]
