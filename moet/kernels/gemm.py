"""Dense contractions. Every product of the reference goes through `matmul`, whose rows do not
depend on each other; the linear layers stand on it. Knows nothing of where weights come from."""

from __future__ import annotations

import torch
from torch import Tensor

from moet.kernels.quant import fp8_qdq
from moet.kernels.registry import op

TILE_ROWS = 16  # rows of one library call; fewer are padded with zeros
BLOCK_K = (
    256  # inputs of one library call; longer ones are split by thread count inside the library
)
FP8_BLOCK = 128  # inputs that share an activation scale


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T with a result per row that is a function of that row and weight alone.

    x: [n, K] fp32, n may be 0. weight: [N, K] fp32, any strides. Returns [n, N] fp32, contiguous.
    A CPU library picks its kernel by the number of rows and splits long sums over its threads, so
    the same row differs in the last bits between batches; fixed tiles of 16 rows by 256 inputs,
    summed in ascending order, do not.
    """
    num_rows, width = x.shape
    if num_rows % TILE_ROWS:
        x = torch.cat([x, x.new_zeros(-num_rows % TILE_ROWS, width)])
    x = x.contiguous()
    weight_t = weight.t()
    if x.shape[0] <= TILE_ROWS:
        return _tile(x, weight_t)[:num_rows]
    rows = range(0, x.shape[0], TILE_ROWS)
    return torch.cat([_tile(x[row : row + TILE_ROWS], weight_t) for row in rows])[:num_rows]


def streamed(weight: Tensor) -> Tensor:
    """The same [..., N, K] matrices in the memory order that `matmul` reads fastest."""
    return weight.mT.contiguous().mT


def _tile(x: Tensor, weight_t: Tensor) -> Tensor:
    """One tile of rows, the inputs in blocks."""
    width = x.shape[1]
    if width <= BLOCK_K:
        return torch.mm(x, weight_t)
    out = torch.mm(x[:, :BLOCK_K], weight_t[:BLOCK_K])
    for k in range(BLOCK_K, width, BLOCK_K):
        out.addmm_(x[:, k : k + BLOCK_K], weight_t[k : k + BLOCK_K])
    return out


@op(tolerance=2**-16)
def linear_fp32(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T, fp32 out whatever the input: router, compressors, mHC and the LM head.

    x: [n, K] fp32 or bf16. weight: [N, K] fp32 (values may be bf16 exact). Returns [n, N] fp32.
    """
    return matmul(x.float(), weight)


@op(tolerance=2**-8)
def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T, accumulated in fp32 and rounded once to the dtype of x.

    x: [n, K] fp32 or bf16. weight: [N, K] fp32 (values may be bf16 exact). Returns [n, N].
    """
    return matmul(x.float(), weight).to(x.dtype)


@op(tolerance=2**-8)
def linear_fp8(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T with x rounded to e4m3 per row and 128 inputs, power-of-two scales.

    x: [n, K] fp32 or bf16. weight: [N, K] fp32, the exact values of an fp8 block-128 weight.
    Returns [n, N] in the dtype of x, accumulated in fp32 and rounded once. This is the arithmetic
    that the checkpoints were trained for.
    """
    return matmul(fp8_qdq(x.float(), block=FP8_BLOCK), weight).to(x.dtype)


@op(tolerance=2**-8)
def grouped_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Each group of inputs through its own matrix: out[t, g] = weight[g] @ x[t, g].

    x: [n, G, K] fp32 or bf16. weight: [G, N, K] fp32. Returns [n, G, N] in the dtype of x.
    """
    parts = zip(x.float().unbind(1), weight.unbind(0), strict=True)
    return torch.stack([matmul(part, matrix) for part, matrix in parts], 1).to(x.dtype)
