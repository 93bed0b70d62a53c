"""A model whose steps may stop between layers, for steps of other sequences to run there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence

from torch import Tensor

from moet.kernels.rows import Rows
from moet.models.base import ExpertProvider, KVTensors, ModelOutput, finished
from moet.models.sharding import Shard


class InParts(ABC):
    """layers: those of this process, whose part of the model `shard` tells."""

    layers: Sequence[object]
    shard: Shard

    @property
    def num_parts(self) -> int:
        """Of compute_parts: a layer each. Stages wait for one another, and so have but one."""
        return len(self.layers) if self.shard.num_stages == 1 else 1

    def compute(
        self,
        token_ids: Tensor,
        rows: Rows,
        logits_indices: Tensor | None,
        kv: KVTensors,
        experts: ExpertProvider,
    ) -> ModelOutput:
        """A step on tensors alone: with rows.short on a GPU no decision is the host's, so that it
        can be captured. token_ids: [n] int64. logits_indices: as in ForwardInput; None: all rows.
        """
        return finished(self.compute_parts(token_ids, rows, logits_indices, kv, experts))

    @abstractmethod
    def compute_parts(
        self,
        token_ids: Tensor,
        rows: Rows,
        logits_indices: Tensor | None,
        kv: KVTensors,
        experts: ExpertProvider,
    ) -> Generator[None, None, ModelOutput]:
        """`compute`, which stops between its parts: steps of other sequences may run there."""


def rows_wanted(hidden_states: Tensor, indices: Tensor | None) -> Tensor:
    """The rows whose logits are wanted; None: all."""
    return hidden_states if indices is None else hidden_states[indices]
