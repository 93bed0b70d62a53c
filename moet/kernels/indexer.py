"""Choice of the compressed entries that a query attends to."""

from __future__ import annotations

import torch
from torch import Tensor

from moet.kernels.gemm import matmul
from moet.kernels.registry import op


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
