"""Weights of any size made on the device from a config alone, for measuring speed: the numbers are
random, everything that reads them is real.

Dense tensors follow the distributions of synthetic checkpoints, so that activations stay near 1
and logits finite. Which experts are chosen follows from the weights: router rows are random, and
`skew` makes some experts popular through the router bias and the hash table. Knows no engine.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log2, prod, sqrt
from typing import Any

import torch
from torch import Tensor

from moet.errors import CheckpointError, ConfigError
from moet.kernels.layout import ExpertRows, Mxfp4Rows, W2Rows
from moet.models.expert_map import ExpertMap
from moet.models.footprint import release_of
from moet.models.synthetic_values import element_table
from moet.models.tensor_spec import TensorSpec

CHUNK_ELEMENTS = 1 << 26  # made at once; bounds the memory of the random indices
BIAS_PER_OCTAVE = 0.12  # of popularity rank, at skew 1
_DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "I64": torch.int64,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DummyOptions:
    """seed: of every number. skew: popularity of the expert at rank r falls as r^-skew in hash
    tables, and its router bias is -0.12 * skew * log2(r) in the other layers; 0: all alike."""

    seed: int = 0
    skew: float = 0.0


class DummySource:
    """A TensorSource of the dense tensors that a config.json describes, made when asked for.

    A tensor is a function of (seed, name) and of the kind of device.
    """

    def __init__(
        self,
        raw_config: Mapping[str, Any],
        options: DummyOptions,
        device: torch.device | str,
    ) -> None:
        release = release_of(raw_config)
        self.experts: ExpertMap = release.experts
        self._specs = {spec.name: spec for spec in release.dense_specs("keep")}
        self._options = options
        self._device = torch.device(device)
        self._tables: dict[tuple[str, ...], Tensor] = {}

    def names(self) -> Iterator[str]:
        """Names of all tensors."""
        return iter(self._specs)

    def load(self, name: str) -> Tensor:
        """Make one tensor, on the device."""
        spec = self._specs.get(name)
        if spec is None:
            raise CheckpointError(f"config.json describes no tensor {name}")
        rng = self._generator(name)
        num_experts = self.experts.num_experts
        if spec.dtype == "I64":
            return hash_table(spec.shape, num_experts, self._options.skew, rng, self._device)
        if spec.shape == (num_experts,) and name.endswith(("gate.bias", "correction_bias")):
            return _bias(num_experts, self._options.skew, rng, self._device)
        table = self._table(spec)
        flat = torch.empty(prod(spec.shape), dtype=table.dtype, device=self._device)
        for part in torch.split(flat, CHUNK_ELEMENTS):
            index = torch.randint(
                len(table), part.shape, dtype=torch.int32, device=self._device, generator=rng
            )
            torch.index_select(table, 0, index, out=part)
        return flat.view(_DTYPES[spec.dtype]).view(spec.shape)

    def _generator(self, name: str) -> torch.Generator:
        key = hashlib.sha256(f"{self._options.seed}/{name}".encode()).digest()
        seed = int.from_bytes(key[:8], "little") >> 1
        return torch.Generator(self._device).manual_seed(seed)

    def _table(self, spec: TensorSpec) -> Tensor:
        """Equally likely elements; those of layers that differ in their number alone are shared."""
        key = re.sub(r"\d+", "", spec.name), spec.dtype, str(spec.shape)
        if key not in self._tables:
            table = torch.from_numpy(element_table(spec, self._specs))
            self._tables[key] = table.to(self._device)
        return self._tables[key]


def _popularity(num_experts: int, rng: torch.Generator, device: torch.device) -> Tensor:
    """[num_experts] fp32: log2 of each expert's rank, ranks at random."""
    rank = torch.randperm(num_experts, device=device, generator=rng) + 1
    return rank.float().log2()


def _bias(num_experts: int, skew: float, rng: torch.Generator, device: torch.device) -> Tensor:
    return -BIAS_PER_OCTAVE * skew * _popularity(num_experts, rng, device)


def hash_table(
    shape: tuple[int, ...],
    num_experts: int,
    skew: float,
    rng: torch.Generator,
    device: torch.device,
) -> Tensor:
    """[vocab_size, top_k] int64: distinct experts in a row, drawn by popularity."""
    rows, top_k = shape
    log_weight = -skew * 0.6931472 * _popularity(num_experts, rng, device)
    drawn = []
    for first in range(0, rows, 1 << 14):
        noise = torch.rand(min(rows - first, 1 << 14), num_experts, device=device, generator=rng)
        drawn.append((log_weight - noise.log().neg().log()).topk(top_k, dim=1).indices)
    return torch.cat(drawn)


def dummy_rows(
    form: ExpertRows,
    num_rows: int,
    *,
    seed: int,
    device: torch.device | str,
) -> tuple[Tensor, Tensor]:
    """Random experts in the layout of packs: rows [num_rows, row_bytes] and bases, uint8.

    Codes are random bits, of which every pattern is valid; scales give each matrix the deviation of
    1 over the root of its inputs, a quarter of the blocks half of it.
    """
    if form.name not in (W2Rows.name, Mxfp4Rows.name):
        raise ConfigError(f"dummy experts are w2 or mxfp4, not {form.name}")
    rng = torch.Generator(device).manual_seed(seed)
    rows = torch.empty(num_rows, form.row_bytes, dtype=torch.uint8, device=device)
    low, high = -(2**63), 2**63 - 1
    for part in torch.split(rows.view(-1).view(torch.int64), 1 << 28):
        part.random_(low, high, generator=rng)
    sub_rows = rows.view(num_rows, form.num_sub_rows, form.sub_row_bytes)
    start = sum(form.part_bytes[:3])
    bases = []
    for byte, size, (n, _) in zip(_scale_bytes(form), form.scale_bytes, form.shapes, strict=True):
        for part in torch.split(sub_rows[..., start : start + size], 256):
            part.copy_(byte - (part & 3 == 0).to(torch.uint8))
        start += size
        bases += [max(byte - form.exponent_span, 0)] * n
    base = torch.tensor(bases, dtype=torch.uint8, device=device)
    return rows, base.expand(num_rows, form.num_sub_rows, -1).contiguous()


def _scale_bytes(form: ExpertRows) -> Sequence[int]:
    """The larger scale of gate, up and down."""
    levels = torch.tensor(form.levels)
    size = float(levels.square().mean().sqrt())
    inputs = form.hidden_size, form.hidden_size, form.moe_intermediate_size
    return [127 + round(log2(1 / sqrt(width) / size)) for width in inputs]
