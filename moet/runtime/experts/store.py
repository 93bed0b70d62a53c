"""Experts of one tier, all in memory, behind the slot table that every tier of memory has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moet.kernels.layout import ExpertRows
from moet.kernels.moe import ExpertTable
from moet.models.expert_encoder import Tier
from moet.models.progress import ProgressCallback, ProgressMeter

if TYPE_CHECKING:
    from moet.models.pack import Pack


class ResidentExpertStore:
    """Every row of a pack's tier in one tensor; nothing ever moves. An ExpertProvider.

    rows: [layers * num_experts, row_bytes] uint8.
    """

    def __init__(self, pack: Pack, tier: Tier, progress: ProgressCallback | None = None) -> None:
        form, experts = pack.format(tier), pack.experts
        self.rows = torch.empty(experts.num_rows, form.row_bytes, dtype=torch.uint8)
        self._tables: dict[int, ExpertTable] = {}
        meter = ProgressMeter(self.rows.numel(), progress)
        for layer_idx in experts.layers:
            first = experts.row(layer_idx, 0)
            of_layer = self.rows[first : first + experts.num_experts]
            pack.read_layer(tier, layer_idx, of_layer)
            slot_of = torch.arange(first, first + experts.num_experts)
            self._tables[layer_idx] = ExpertTable(form, self.rows, slot_of)
            meter.advance(of_layer.numel(), f"{tier} experts of layer {layer_idx}")

    def resolve(self, layer_idx: int, expert_ids: Tensor) -> ExpertTable:
        """The table of a layer; expert_ids do not matter, for all are resident."""
        return self._tables[layer_idx]

    def check(self) -> None:
        """Raise AssertionError unless the tables use every slot exactly once."""
        slots = torch.cat([table.slot_of for table in self._tables.values()])
        assert torch.equal(slots.sort().values, torch.arange(len(self.rows)))


class DeviceExperts:
    """Every expert of every layer on a GPU for good. A ResidentProvider.

    rows: [layers * num_experts, row_bytes] uint8; bases: [layers * num_experts, ...] uint8, what
    ExpertRows.row_base makes of each. layers: their numbers, in the order of the rows.
    """

    def __init__(
        self, form: ExpertRows, rows: Tensor, bases: Tensor, layers: Sequence[int]
    ) -> None:
        num_experts = len(rows) // len(layers)
        assert len(rows) == len(bases) == num_experts * len(layers)
        self.rows = rows
        self._tables = {}
        for n, layer_idx in enumerate(layers):
            first = n * num_experts
            slot_of = torch.arange(first, first + num_experts, device=rows.device)
            of_layer = bases[first : first + num_experts]
            self._tables[layer_idx] = ExpertTable(form, rows, slot_of, of_layer)

    def resident(self, layer_idx: int, num_rows: int = 1) -> ExpertTable:
        """The table of a layer, the same one at any time."""
        return self._tables[layer_idx]

    def resolve(self, layer_idx: int, expert_ids: Tensor) -> ExpertTable:
        """The table of a layer; expert_ids do not matter, for all are resident."""
        return self._tables[layer_idx]
