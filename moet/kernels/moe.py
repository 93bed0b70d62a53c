"""Routed experts: router scores, and the mixture over experts read through a slot table."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moet.kernels.gemm import matmul, matmul_slices, tree_sum
from moet.kernels.quant import FP8_BLOCK, fp8_qdq
from moet.kernels.registry import GPU_ARCHS, op
from moet.kernels.scalars import scalar

EXPERTS_AT_ONCE = 8  # unpacked together; bounds the memory of a prefill


class ExpertFormat(Protocol):
    """How one expert's three matrices are laid out in a row of bytes."""

    @property
    def name(self) -> str: ...

    @property
    def row_bytes(self) -> int: ...

    def unpack(self, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """row: [row_bytes] uint8. Returns w1 and w3 [I, D] and w2 [D, I], fp32, exact."""
        ...


@dataclass(frozen=True, slots=True)
class ExpertTable:
    """Where the experts of one layer are.

    rows: [num_slots, row_bytes] uint8, one expert a slot. slot_of: [num_experts] int64, -1 where an
    expert is not resident. All rows of a table have one format. bases: [num_experts, ...] uint8,
    ExpertRows.row_base of every expert, for kernels that count exponents from it.
    """

    format: ExpertFormat
    rows: Tensor
    slot_of: Tensor
    bases: Tensor | None = None

    def prepare(self, expert_ids: Tensor, *lists: tuple[Tensor, Tensor]) -> None:
        """On a GPU, before the experts are read: these will be. Nothing to do where all are there.

        expert_ids: [n, top_k] int64, contiguous. lists: what has listed them already, with lengths,
        and is to have their slots filled in (`expert_cache_device.resolve_on_device`).
        """

    def join(self) -> None:
        """On a GPU: work enqueued from here on may read what was prepared."""

    def matrices(self, expert_id: int) -> tuple[Tensor, Tensor, Tensor]:
        """w1, w3 and w2 of an expert, as the format unpacks them; of the reference ops."""
        slot = int(self.slot_of[expert_id])
        assert slot >= 0, f"expert {expert_id} is not resident"
        return self.format.unpack(self.rows[slot])


class F32Experts:
    """An expert row as plain fp32: w1, w3, then w2, each with its inputs outermost (the order that
    the reference product reads fastest). For weights that were never quantised."""

    name = "f32"

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.row_bytes = 12 * hidden_size * intermediate_size

    def pack(self, w1: Tensor, w3: Tensor, w2: Tensor) -> Tensor:
        """w1, w3: [I, D], w2: [D, I], fp32. Returns [row_bytes] uint8."""
        return torch.cat([w.t().flatten() for w in (w1, w3, w2)]).view(torch.uint8)

    def unpack(self, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        inner, outer = self.intermediate_size, self.hidden_size
        w1, w3, w2 = row.view(torch.float32).chunk(3)
        return w1.view(outer, inner).t(), w3.view(outer, inner).t(), w2.view(inner, outer).t()


@op(tolerance=2**-16)
def sqrt_softplus(logits: Tensor) -> Tensor:
    """Router scores sqrt(log(1 + e^x)). logits: [n, num_experts] fp32. Returns the same shape."""
    return (torch.log1p(torch.exp(-logits.abs())) + torch.relu(logits)).sqrt()


@op(tolerance=2**-16)
def sigmoid_scores(logits: Tensor) -> Tensor:
    """Router scores 1 / (1 + e^-x). logits: [n, num_experts] fp32. Returns the same shape."""
    return 1 / (1 + torch.exp(-logits))


@op(tolerance=0.0)
def route_by_bias(scores: Tensor, bias: Tensor, *, top_k: int) -> Tensor:
    """The top_k experts by score + bias, best first; of equal ones the lowest id wins.

    scores: [n, num_experts] fp32. bias: [num_experts] fp32; it chooses and does not weigh.
    Returns [n, top_k] int64.
    """
    return torch.sort(scores + bias, dim=-1, descending=True, stable=True).indices[:, :top_k]


@op(tolerance=0.0)
def route_by_token(token_ids: Tensor, table: Tensor) -> Tensor:
    """Experts listed for each token id. token_ids: [n] int64, table: [vocab, top_k] int64."""
    return table[token_ids]


@op(tolerance=2**-16)
def expert_weights(scores: Tensor, expert_ids: Tensor, *, scaling_factor: float) -> Tensor:
    """Scores of the chosen experts, normalised to the sum scaling_factor; a zero sum counts as 1.

    scores: [n, num_experts] fp32, without bias. expert_ids: [n, top_k]. Returns [n, top_k] fp32.
    """
    chosen = scores.gather(1, expert_ids)
    total = chosen[:, :1]
    for k in range(1, chosen.shape[1]):
        total = total + chosen[:, k : k + 1]
    return chosen / torch.where(total == 0, 1.0, total) * scaling_factor


@op(tolerance=2**-8)
def swiglu(gate: Tensor, up: Tensor, *, limit: float | None) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit), in fp32; no bounds if limit is None.

    gate, up: [n, I] fp32 or bf16. Returns [n, I] fp32. The gate is bounded from above only.
    """
    a, b = gate.float(), up.float()
    if limit is not None:
        a, b = a.clamp(max=limit), b.clamp(-limit, limit)
    return a / (scalar(1.0) + torch.exp(-a)) * b


@op(tolerance=2**-8)
def swiglu_halves(gate_up: Tensor, *, limit: float | None) -> Tensor:
    """swiglu of the two halves of each row. gate_up: [n, 2 I]. Returns [n, I] in its dtype."""
    gate, up = gate_up.chunk(2, 1)
    return swiglu(gate, up, limit=limit).to(gate_up.dtype)


def _on_gpu(*, arch: str) -> bool:
    return arch in GPU_ARCHS


swiglu_halves.impl_in("moet.kernels.triton_swiglu", "triton", supports=_on_gpu)


def _rounded(x: Tensor, round_activations: bool) -> Tensor:
    """The input of a product in fp32, as fp8 would carry it if asked."""
    return fp8_qdq(x.float(), block=FP8_BLOCK) if round_activations else x.float()


@op(tolerance=2**-7)
def expert_mixture(
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    table: ExpertTable,
    *,
    limit: float | None,
    round_activations: bool,
    weigh_output: bool = False,
    num_slices: int = 1,
) -> Tensor:
    """Sum over the chosen experts of w2 @ (swiglu(w1 @ x, w3 @ x) * weight).

    x: [n, D] fp32 or bf16. expert_ids: [n, top_k] int64, distinct in a row and resident in table.
    weights: [n, top_k] fp32; weigh_output applies them to the experts' outputs instead of their
    hidden values. round_activations: e4m3 per 128 inputs before each product. The last product is
    made in num_slices of its inputs; for each slice the sum runs over a row's choices in order,
    then by tree over the slices, all in fp32. Returns [n, D] fp32.
    """
    num_rows, top_k = expert_ids.shape
    choices: dict[int, list[int]] = {}  # expert -> places in the flattened ids
    for place, expert_id in enumerate(expert_ids.flatten().tolist()):
        choices.setdefault(expert_id, []).append(place)
    inputs = _rounded(x, round_activations)
    flat_weights = weights.reshape(-1, 1)
    parts = x.new_empty(num_slices, num_rows * top_k, x.shape[1], dtype=torch.float32)
    chosen = list(choices)
    for first in range(0, len(chosen), EXPERTS_AT_ONCE):
        group = chosen[first : first + EXPERTS_AT_ONCE]
        experts = [table.matrices(expert_id) for expert_id in group]
        sizes = [len(choices[expert_id]) for expert_id in group]
        places = torch.tensor([place for expert_id in group for place in choices[expert_id]])
        rows = torch.split(inputs[places // top_k], sizes)
        gate, up = (
            torch.cat([matmul(r, e[i]) for r, e in zip(rows, experts, strict=True)]).to(x.dtype)
            for i in (0, 1)
        )
        scale = flat_weights[places]
        hidden = swiglu(gate, up, limit=limit)
        hidden = _rounded(
            (hidden if weigh_output else hidden * scale).to(x.dtype), round_activations
        )
        rows = torch.split(hidden, sizes)
        products = [matmul_slices(r, e[2], num_slices) for r, e in zip(rows, experts, strict=True)]
        for part, of_slice in zip(parts, zip(*products, strict=True), strict=True):
            out = torch.cat(of_slice)
            part[places] = out * scale if weigh_output else out
    by_choice = parts.view(num_slices, num_rows, top_k, x.shape[1])
    return tree_sum([functools.reduce(torch.add, part.unbind(1)) for part in by_choice])
