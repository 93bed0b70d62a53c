"""The queries of attention and of its indexer, from one product to what scores are made of."""

from __future__ import annotations

from torch import Tensor

from moet.kernels.indexer import index_query
from moet.kernels.registry import GPU_ARCHS, op
from moet.kernels.rope import norm_rope_heads


@op(tolerance=2**-1)  # one step of e2m1, as index_query
def query_heads(
    q: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    num_heads: int,
    head_dim: int,
    index_heads: int,
    eps: float,
    quantised: bool,
) -> tuple[Tensor, Tensor | None]:
    """norm_rope_heads of the first heads, index_query of the rest; both turn by the same angles.

    q: [T, num_heads * head_dim + index_heads * index_dim] fp32 or bf16, rows may be strided.
    cos, sin: [T, rope_dim / 2] fp32. Returns [T, num_heads, head_dim] and [T, index_heads,
    index_dim], or None if index_heads is 0.
    """
    width = num_heads * head_dim
    heads = norm_rope_heads(q[:, :width], cos, sin, num_heads=num_heads, eps=eps)
    if not index_heads:
        return heads, None
    return heads, index_query(q[:, width:], cos, sin, num_heads=index_heads, quantised=quantised)


def _heads_fit(*, arch: str, head_dim: int, rope_dim: int, index_dim: int, quantised: bool) -> bool:
    """index_dim: 0 without an indexer."""
    index_fits = index_dim == 0 or (quantised and index_dim in (32, 64, 128))
    power_of_two = head_dim & (head_dim - 1) == 0
    in_one_half = rope_dim % 2 == 0 and 2 * rope_dim <= head_dim
    return arch in GPU_ARCHS and power_of_two and in_one_half and index_fits


@query_heads.impl("triton", supports=_heads_fit)
def _query_heads(
    q: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    num_heads: int,
    head_dim: int,
    index_heads: int,
    eps: float,
    quantised: bool,
) -> tuple[Tensor, Tensor | None]:
    from moet.kernels import triton_rows

    assert quantised or not index_heads  # by the predicate
    return triton_rows.query_heads(
        q, cos, sin, num_heads=num_heads, head_dim=head_dim, index_heads=index_heads, eps=eps
    )
