"""What a conversion will write, settled before any weight is read: files, sizes, units of work."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from moet.kernels.layout import ExpertRows
from moet.models.expert_encoder import TIERS, Tier, row_formats
from moet.models.expert_map import ExpertMap
from moet.models.pack import DENSE_NAME, bases_name, rows_name
from moet.models.release import DenseDtype
from moet.models.tensor_files import TensorEntry
from moet.models.tensor_spec import TensorSpec
from moet.models.tensor_writer import plan_file
from moet.models.w2 import ScaleRule

_UNIT_BYTES = 256 << 20  # work between two journal entries, roughly
_MIN_ROW_BYTES = 1 << 20  # what a smaller row counts for, so that small models have units too


def _default_workers() -> int:
    return max(1, min(8, (os.cpu_count() or 1) // 2))


class ConvertSource(Protocol):
    """What conversion asks of an opened checkpoint."""

    folder: Path

    @property
    def experts(self) -> ExpertMap: ...

    def names(self) -> Iterator[str]: ...

    def dense_specs(self, dtype: DenseDtype) -> Sequence[TensorSpec]: ...

    def load(self, name: str) -> Tensor: ...

    def identity(self) -> str: ...

    def form(self) -> str: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertOptions:
    """How to quantise.

    dense_dtype: how the linears outside of routed experts are kept, where the model offers more
    than the checkpoint's own. num_workers: experts in flight; each holds a few copies of one.
    """

    scale_rule: ScaleRule = "mse"
    tiers: tuple[Tier, ...] = TIERS
    dense_dtype: DenseDtype = "keep"
    num_workers: int = field(default_factory=_default_workers)


@dataclass(frozen=True, slots=True)
class Unit:
    """Work done as one: dense tensors, or a run of expert rows. Names or row numbers."""

    dense: tuple[str, ...] = ()
    rows: range = range(0)


@dataclass(frozen=True, slots=True)
class PackLayout:
    """Everything about the pack's files that is known before any weight is read."""

    experts: ExpertMap
    formats: Mapping[Tier, ExpertRows]
    dense_head: bytes
    dense: Mapping[str, TensorEntry]
    base_bytes: Mapping[Tier, int]
    units: tuple[Unit, ...]

    def sizes(self) -> dict[str, int]:
        """Bytes of the big files."""
        dense = len(self.dense_head) + sum(entry.num_bytes for entry in self.dense.values())
        sizes = {DENSE_NAME: dense}
        for tier, form in self.formats.items():
            sizes[rows_name(tier)] = self.experts.num_rows * form.row_bytes
            if self.base_bytes[tier]:
                sizes[bases_name(tier)] = self.experts.num_rows * self.base_bytes[tier]
        return sizes

    def unit_bytes(self, unit: Unit) -> int:
        row_bytes = sum(
            form.row_bytes + self.base_bytes[tier] for tier, form in self.formats.items()
        )
        return sum(self.dense[name].num_bytes for name in unit.dense) + row_bytes * len(unit.rows)


def plan_pack(source: ConvertSource, options: ConvertOptions) -> PackLayout:
    experts = source.experts
    known = row_formats(experts.hidden_size, experts.moe_intermediate_size, experts.fp4)
    formats = {tier: known[tier] for tier in options.tiers}
    head, dense = plan_file(Path(DENSE_NAME), source.dense_specs(options.dense_dtype))
    bases = {
        tier: form.row_base(torch.zeros(form.row_bytes, dtype=torch.uint8)).numel()
        for tier, form in formats.items()
    }
    row_bytes = sum(form.row_bytes for form in formats.values())
    step = max(1, _UNIT_BYTES // max(row_bytes, _MIN_ROW_BYTES))
    rows = range(experts.num_rows)
    units = [*_dense_units(dense), *(Unit(rows=rows[i : i + step]) for i in rows[::step])]
    return PackLayout(experts, formats, head, dense, bases, tuple(units))


def _dense_units(dense: Mapping[str, TensorEntry]) -> Iterator[Unit]:
    names: list[str] = []
    held = 0
    for name, entry in dense.items():
        names.append(name)
        held += entry.num_bytes
        if held >= _UNIT_BYTES:
            yield Unit(dense=tuple(names))
            names, held = [], 0
    if names:
        yield Unit(dense=tuple(names))
