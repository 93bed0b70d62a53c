"""Where the rows of a step keep their state, by sequence and by group. Knows no model."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from moet.kernels.cache import Cache, PlanedFormat
from moet.kernels.rows import Rows
from moet.models.base import ForwardInput, KVTensors


@dataclass(frozen=True, slots=True)
class Place:
    """One kind of state of one layer, before the step's tensors are known."""

    group: str
    idx: int
    form: PlanedFormat

    def cache(self, kv: KVTensors) -> Cache:
        return Cache(kv[self.group][self.idx], self.form)


def check_pages(inputs: ForwardInput, page_size: int) -> None:
    """Raise AssertionError if a sequence with rows has a token without a page."""
    for i, (first, last) in enumerate(pairwise(inputs.cu_seqlens_q)):
        if first == last:
            continue
        end, pages = inputs.seq_lens[i], inputs.page_table[i]
        needed = pages[: -(-end // page_size)].tolist()
        enough = len(needed) * page_size >= end and min(needed) >= 0
        assert enough, f"sequence {i} of the step has {end} tokens but the pages {needed}"


def step_rows(
    inputs: ForwardInput, page_size: int, *, max_short: int, device: torch.device | None = None
) -> Rows:
    """The rows of a step as tensors of the device (None: where the inputs are).

    max_short: rows of one sequence that its rings hold beside what these rows need. Inputs in host
    memory are cheapest: they are checked here.
    """
    check_pages(inputs, page_size)
    device = device or inputs.positions.device
    lengths = [last - first for first, last in pairwise(inputs.cu_seqlens_q)]
    starts = [end - length for end, length in zip(inputs.seq_lens, lengths, strict=True)]
    repeats = torch.tensor(lengths)

    def per_row(values: Tensor) -> Tensor:
        rows = values.cpu().repeat_interleave(repeats, output_size=len(inputs.positions))
        return rows.to(device)

    return Rows(
        positions=inputs.positions.to(device),
        starts=per_row(torch.tensor(starts)),
        ends=per_row(torch.tensor(inputs.seq_lens)),
        seq_slots=per_row(inputs.seq_slots),
        page_rows=per_row(torch.arange(len(lengths))),
        page_table=inputs.page_table.to(device),
        page_size=page_size,
        short=max(lengths, default=0) <= max_short,
    )
