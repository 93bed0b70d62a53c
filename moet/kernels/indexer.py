"""Choice of the compressed entries that a query attends to."""

from __future__ import annotations

import torch
from torch import Tensor

from moet.kernels.cache import Cache, EntryFormat, Mxfp4Rows
from moet.kernels.gemm import matmul
from moet.kernels.mla_cache import Fp8IndexKeys
from moet.kernels.quant import fp4_qdq, hadamard
from moet.kernels.registry import GPU_ARCHS, op
from moet.kernels.rope import rope
from moet.kernels.rows import Rows
from moet.kernels.stream_gemm import Launcher


@op(tolerance=2**-8)
def index_scores(q: Tensor, keys: Tensor, head_weights: Tensor) -> Tensor:
    """How much a query wants each entry: sum over heads of weight * relu(q . key).

    q: [num_heads, dim] fp32, one query. keys: [n, dim] fp32, exactly the entries it may see.
    head_weights: [num_heads] fp32, may be negative. Returns [n] fp32.
    """
    scores = matmul(q, keys).relu_()
    return (scores * head_weights.unsqueeze(1)).sum(0)


@op(tolerance=0.0)
def select_top_k(scores: Tensor, *, k: int) -> Tensor:
    """Indices of the k highest scores, ascending; of equal scores the lowest index wins.

    scores: [n] fp32, n >= k. Returns [k] int64.
    """
    border = scores.topk(k).values[-1]
    chosen = (scores > border).nonzero().squeeze(1)
    ties = (scores == border).nonzero().squeeze(1)
    return torch.cat([chosen, ties[: k - len(chosen)]]).sort().values


@op(tolerance=2**-1)  # one step of e2m1: a last-bit difference may round the other way
def index_query(q: Tensor, cos: Tensor, sin: Tensor, *, num_heads: int, quantised: bool) -> Tensor:
    """Rotate the end of each head by the row's position; if quantised, Hadamard and MXFP4 follow.

    q: [T, num_heads * dim] fp32 or bf16, rows may be strided. cos, sin: [T, rope_dim / 2] fp32.
    Returns [T, num_heads, dim] in the dtype of q; every part rounds to it.
    """
    heads = rope(torch.unflatten(q, 1, (num_heads, -1)), cos, sin)
    return fp4_qdq(hadamard(heads)) if quantised else heads


@op(tolerance=2**-8)  # of the chosen scores; which entries are chosen may differ at the border
def index_select(
    q: Tensor,
    gate: Tensor,
    keys: Cache,
    rows: Rows,
    *,
    ratio: int,
    top_k: int,
    gate_scale: float,
    launcher: Launcher | None = None,
) -> Tensor:
    """The entries that each row attends to: the top_k by score of those it sees.

    q: [T, num_heads, dim] fp32 or bf16. gate: [T, num_heads] fp32, rows may be strided; rounded to
    the dtype of q and scaled by gate_scale it weighs the heads. keys: one entry per `ratio`
    tokens, those that the step's rows close already written. Returns [T, top_k] int32:
    entry numbers, ascending, then -1 where fewer are visible. Of equal scores the lowest entry
    wins. launcher: of kernels beside Triton's.
    """
    chosen = torch.full((len(q), top_k), -1, dtype=torch.int32, device=q.device)
    head_weights = gate.to(q.dtype).float() * gate_scale
    visible = rows.visible(ratio).tolist()
    every = torch.arange(top_k, dtype=torch.int32, device=q.device)
    for first, last in rows.sequences():
        stored = None
        for row in range(first, last):
            count = visible[row]
            if count <= top_k:
                chosen[row, :count] = every[:count]
                continue
            if stored is None:
                entries = torch.arange(visible[last - 1], device=q.device)
                stored = keys.read(rows.entry_slots(rows.page_rows[first], entries, ratio))
            scores = index_scores(q[row].float(), stored[:count], head_weights[row])
            chosen[row] = select_top_k(scores, k=top_k)
    return chosen


def _query_fits(*, arch: str, head_dim: int, rope_dim: int, quantised: bool) -> bool:
    fits = head_dim in (32, 64, 128) and rope_dim % 2 == 0
    return arch in GPU_ARCHS and quantised and fits


index_query.impl_in("moet.kernels.triton_index_queries", "triton_mxfp4", supports=_query_fits)


def _keys_fit(*, arch: str, keys: EntryFormat, num_heads: int, top_k: int) -> bool:
    form = isinstance(keys, Mxfp4Rows | Fp8IndexKeys) and keys.width in (32, 64, 128)
    return arch in GPU_ARCHS and form and top_k & (top_k - 1) == 0 and num_heads <= 128


index_select.impl_in("moet.kernels.triton_indexer", "triton", supports=_keys_fit)
