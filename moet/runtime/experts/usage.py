"""How often each routed expert is asked for, and where it is: counts around any ExpertProvider.

Knows tables and ids; knows nothing of formats' insides or of why an expert is where it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moet.kernels.moe import ExpertTable
from moet.models.base import ExpertProvider
from moet.runtime.metrics import ExpertStats, LayerExperts


class CountedExperts:
    """An ExpertProvider that passes everything on and counts rows by layer and expert."""

    def __init__(self, provider: ExpertProvider) -> None:
        self._provider = provider
        self._counts: dict[int, Tensor] = {}
        self._tables: dict[int, ExpertTable] = {}

    def resolve(self, layer_idx: int, expert_ids: Tensor) -> ExpertTable:
        """As the provider's. Counts on the device of the ids; reads nothing back."""
        table = self._provider.resolve(layer_idx, expert_ids)
        counts = self._counts.get(layer_idx)
        if counts is None:
            with torch.inference_mode(False):  # to stay writable outside of a forward pass
                shape, device = len(table.slot_of), expert_ids.device
                counts = torch.zeros(shape, dtype=torch.int64, device=device)
            self._counts[layer_idx] = counts
        ids = expert_ids.flatten()
        counts.index_add_(0, ids.clamp(min=0), (ids >= 0).long())
        self._tables[layer_idx] = table
        return table

    def stats(self) -> ExpertStats:
        """The counts so far. Layers appear when they are first asked for."""
        return ExpertStats(
            layers=[
                LayerExperts(
                    layer=layer_idx,
                    format=table.format.name,
                    num_resident=int((table.slot_of >= 0).sum()),
                    rows=self._counts[layer_idx].tolist(),
                    resident=(table.slot_of >= 0).tolist(),
                )
                for layer_idx, table in sorted(dict(self._tables).items())
            ]
        )
