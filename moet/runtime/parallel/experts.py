"""A rank's share of a pack's routed experts, all in memory: the sub-rows of its columns of the
layers of its stage. Reads nothing else."""

from __future__ import annotations

import os
from dataclasses import replace

import torch
from torch import Tensor

from moet.errors import ConfigError
from moet.kernels.layout import ExpertRows
from moet.kernels.moe import ExpertFormat, ExpertTable
from moet.models.expert_encoder import Tier
from moet.models.pack import Pack
from moet.models.pipeline_stages import held_layers
from moet.models.progress import ProgressCallback, ProgressMeter
from moet.models.sharding import ColumnShare, Shard
from moet.models.tensor_files import read_into


def rank_experts(
    pack: Pack, tier: Tier, shard: Shard, progress: ProgressCallback | None = None
) -> RankExperts:
    """Read what a rank holds of a tier."""
    return RankExperts(pack, tier, shard, progress)


class RankExperts:
    """An ExpertProvider. Rows have one format: whole rows, or a rank's sub-rows of each.

    Where the intermediate size is too small to be read in parts, rows are whole and a rank uses its
    columns of them; where it cannot be divided at all, every rank has and uses all.
    """

    def __init__(
        self, pack: Pack, tier: Tier, shard: Shard, progress: ProgressCallback | None
    ) -> None:
        form, experts = pack.format(tier), pack.experts
        inter = experts.moe_intermediate_size
        self.form: ExpertFormat = form
        offset, row_bytes = 0, form.row_bytes
        if shard.size > 1 and shard.divides(inter):
            if form.num_sub_rows % shard.size == 0:
                part = sub_rows(form, form.num_sub_rows // shard.size)
                self.form, row_bytes = part, part.row_bytes
                offset = shard.rank * row_bytes
            else:
                self.form = ColumnShare(form, *shard.part(inter))
        layers = held_layers(pack.config, experts.layers, shard)
        self.rows = torch.empty(len(layers) * experts.num_experts, row_bytes, dtype=torch.uint8)
        self._tables: dict[int, ExpertTable] = {}
        meter = ProgressMeter(self.rows.numel(), progress)
        for place, layer_idx in enumerate(layers):
            first = place * experts.num_experts
            of_layer = self.rows[first : first + experts.num_experts]
            _read_parts(pack, tier, layer_idx, of_layer, offset, form.row_bytes)
            slot_of = torch.arange(first, first + experts.num_experts)
            self._tables[layer_idx] = ExpertTable(self.form, self.rows, slot_of)
            meter.advance(of_layer.numel(), f"{tier} experts of layer {layer_idx}")

    def resolve(self, layer_idx: int, expert_ids: Tensor) -> ExpertTable:
        """The table of a layer; expert_ids do not matter, for all are resident."""
        return self._tables[layer_idx]

    def resident(self, layer_idx: int, num_rows: int = 1) -> ExpertTable | None:
        """The table of a layer, for it never changes."""
        return self._tables[layer_idx]


def share_of(form: ExpertRows, shard: Shard) -> tuple[ExpertRows, int, int]:
    """What a rank has of rows for a GPU, as rows of their own: sub-rows first:last of each.

    Raises ConfigError if there are too few.
    """
    if form.num_sub_rows % shard.size:
        raise ConfigError(
            f"expert rows of {form.moe_intermediate_size} columns have {form.num_sub_rows} parts, "
            f"which -tp {shard.size} GPUs cannot share; use -pp or --device cpu"
        )
    first, last = shard.part(form.num_sub_rows)
    return (form if shard.size == 1 else sub_rows(form, last - first)), first, last


def sub_rows(form: ExpertRows, count: int) -> ExpertRows:
    """The format of `count` sub-rows of a row, as a row of their own."""
    columns = form.columns * count
    return replace(form, moe_intermediate_size=columns, fixed_sub_rows=count)


def _read_parts(
    pack: Pack, tier: Tier, layer_idx: int, out: Tensor, offset: int, stride: int
) -> None:
    """Bytes offset.. of each row of a layer, rows lying `stride` bytes apart."""
    path, start = pack.row_place(tier, layer_idx, 0)
    with path.open("rb", buffering=0) as file:
        if out.shape[1] == stride:
            read_into(file.fileno(), out.view(-1), start, path)
            return
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for expert_id, row in enumerate(out):
            read_into(file.fileno(), row, start + expert_id * stride + offset, path)
