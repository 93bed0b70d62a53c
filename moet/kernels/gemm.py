"""Dense contractions. Every product of the reference goes through `matmul`, whose rows do not
depend on each other; the linear layers stand on it. Knows nothing of where weights come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from moet.kernels.quant import FP8_BLOCK, Activations, e4m3_values, plain_values
from moet.kernels.registry import GPU_ARCHS, op

if TYPE_CHECKING:
    from moet.kernels.device_gemm import PackedGroups, PackedMatrix

TILE_ROWS = 16  # rows of one library call; fewer are padded with zeros
BLOCK_K = (
    256  # inputs of one library call; longer ones are split by thread count inside the library
)
MIN_OUT = 16  # outputs that a tile has at least
MAX_SLICES = 4  # of a product's inputs, the most ranks that can share it


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T with a result per row that is a function of that row and weight alone.

    x: [n, K] fp32, n may be 0. weight: [N, K] fp32, any strides. Returns [n, N] fp32, contiguous.
    A CPU library picks its kernel by the number of rows and splits long sums over its threads, so
    the same row differs in the last bits between batches; fixed tiles of 16 rows by 256 inputs,
    summed in ascending order, do not. Nor do tiles of 16 outputs and more; with AVX2, fewer show
    a row's place and the memory order of the weight.
    """
    num_rows, width = x.shape
    num_out = weight.shape[0]
    if num_out < MIN_OUT:
        padded = F.pad(weight, (0, 0, 0, MIN_OUT - num_out))
        return matmul(x, padded)[:, :num_out].contiguous()
    if num_rows == 1:  # the other rows of a tile may be anything
        return _tile(x.expand(TILE_ROWS, width), weight.t())[:1]
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


def slices_of(width: int) -> int:
    """In how many slices a product over `width` inputs is summed if ranks may share it: 4, 2 or 1.

    A slice is a multiple of FP8_BLOCK inputs, so that it has its activation scales to itself.
    """
    slices = MAX_SLICES
    while width % (slices * FP8_BLOCK) and slices > 1:
        slices //= 2
    return slices


def tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """(0 + 1) + (2 + 3): the one order in which slices are added, in one process or in many.

    parts: 1, 2 or 4 of one shape.
    """
    if len(parts) == 1:
        return parts[0]
    return tree_sum([a + b for a, b in zip(parts[::2], parts[1::2], strict=True)])


def matmul_slices(x: Tensor, weight: Tensor, count: int) -> list[Tensor]:
    """As matmul, the inputs in `count` equal slices; returns the product of each."""
    if count == 1:
        return [matmul(x, weight)]
    parts = zip(x.chunk(count, 1), weight.chunk(count, 1), strict=True)
    return [matmul(part, columns) for part, columns in parts]


Matrix: TypeAlias = "Tensor | PackedMatrix"
"""A weight: fp32 in torch for the references, packed on its device for a GPU's kernels."""
Groups: TypeAlias = "Tensor | PackedGroups"


def _tensor(weight: Matrix | Groups) -> Tensor:
    assert isinstance(weight, Tensor), "a packed weight, and the reference of an op"
    return weight


@op(tolerance=2**-16)
def linear_fp32(x: Tensor | Activations, weight: Matrix) -> Tensor:
    """x @ weight.T, fp32 out whatever the input: router, compressors, mHC and the LM head.

    x: [n, K] fp32 or bf16. weight: [N, K] fp32 (values may be bf16 exact). Returns [n, N] fp32.
    """
    return matmul(plain_values(x).float(), _tensor(weight))


@op(tolerance=2**-8)
def linear(x: Tensor | Activations, weight: Matrix) -> Tensor:
    """x @ weight.T, accumulated in fp32 and rounded once to the dtype of x.

    x: [n, K] fp32 or bf16. weight: [N, K] fp32 (values may be bf16 exact). Returns [n, N].
    """
    x = plain_values(x)
    return matmul(x.float(), _tensor(weight)).to(x.dtype)


@op(tolerance=2**-8)
def linear_fp8(x: Tensor | Activations, weight: Matrix) -> Tensor:
    """x @ weight.T with x rounded to e4m3 per row and 128 inputs, power-of-two scales.

    x: [n, K] fp32 or bf16. weight: [N, K] fp32, the exact values of an fp8 block-128 weight.
    Returns [n, N] in the dtype of x, accumulated in fp32 and rounded once. This is the arithmetic
    that the checkpoints were trained for.
    """
    values, dtype = e4m3_values(x)
    return matmul(values, _tensor(weight)).to(dtype)


@op(tolerance=2**-8)
def linear_fp8_fp32(x: Tensor | Activations, weight: Matrix) -> Tensor:
    """As linear_fp8, but not rounded: [n, N] fp32. For logits that are guesses."""
    return matmul(e4m3_values(x)[0], _tensor(weight))


@op(tolerance=2**-8)
def linear_pair(x: Tensor | Activations, first: Matrix, second: Matrix) -> tuple[Tensor, Tensor]:
    """linear_fp8 with the first weight and linear_fp32 with the second, of one input."""
    return linear_fp8(x, first), linear_fp32(x, second)


@op(tolerance=2**-8)
def linear_share(x: Tensor | Activations, weight: Matrix, *, num_slices: int) -> Tensor:
    """As linear for a rank's share of the inputs, summed by tree over its slices, not rounded.

    x: [n, K] fp32 or bf16. weight: [N, K] fp32. Returns [n, N] fp32; a GPU's kernels round to bf16,
    so that half as much travels.
    """
    return tree_sum(matmul_slices(plain_values(x).float(), _tensor(weight), num_slices))


@op(tolerance=2**-8)
def linear_share_fp8(x: Tensor | Activations, weight: Matrix, *, num_slices: int) -> Tensor:
    """As linear_fp8 for a rank's share of the inputs, summed by tree, not rounded.

    x: [n, K] fp32 or bf16. weight: [N, K] fp32. Returns [n, N] fp32; on a GPU as linear_share.
    """
    values, _ = e4m3_values(x)
    return tree_sum(matmul_slices(values, _tensor(weight), num_slices))


@op(tolerance=2**-8)
def grouped_linear(x: Tensor | Activations, weight: Groups) -> Tensor:
    """Each group of inputs through its own matrix: out[t, g] = weight[g] @ x[t, g].

    x: [n, G, K] fp32 or bf16, or its rows [n * G, K]. weight: [G, N, K] fp32. Returns [n, G, N] in
    the dtype of x.
    """
    matrices = _tensor(weight)
    values = plain_values(x).reshape(-1, matrices.shape[0], matrices.shape[2])
    return _each_group(values.float(), matrices).to(values.dtype)


@op(tolerance=2**-8)
def grouped_linear_fp8(x: Tensor | Activations, weight: Groups) -> Tensor:
    """As grouped_linear, with x rounded as in linear_fp8; weight holds values of fp8 block-128.

    x: [n, G, K] fp32 or bf16, or its rows [n * G, K]. Returns [n, G, N] in the dtype of x.
    """
    matrices = _tensor(weight)
    values, dtype = e4m3_values(x)
    groups = values.reshape(-1, matrices.shape[0], matrices.shape[2])
    return _each_group(groups, matrices).to(dtype)


def _each_group(x: Tensor, matrices: Tensor) -> Tensor:
    parts = zip(x.unbind(1), matrices.unbind(0), strict=True)
    return torch.stack([matmul(part, matrix) for part, matrix in parts], 1)


def _on_gpu(*, arch: str, num_out: int | None = None, num_in: int | None = None) -> bool:
    return arch in GPU_ARCHS and (num_in or 0) % 32 == 0


@linear_fp32.impl("stream_bf16", supports=_on_gpu)
def _linear_fp32(x: Tensor | Activations, weight: Matrix) -> Tensor:
    return _packed(x, weight, output="f32")


@linear.impl("stream_bf16", supports=_on_gpu)
def _linear(x: Tensor | Activations, weight: Matrix) -> Tensor:
    return _packed(x, weight, output="bf16")


@linear_fp8.impl("stream_fp8", supports=_on_gpu)
def _linear_fp8(x: Tensor | Activations, weight: Matrix) -> Tensor:
    return _packed(x, weight, output="bf16")


@linear_fp8_fp32.impl("stream_fp8", supports=_on_gpu)
def _linear_fp8_fp32(x: Tensor | Activations, weight: Matrix) -> Tensor:
    return _packed(x, weight, output="f32")


@linear_share.impl("stream_bf16", supports=_on_gpu)
def _linear_share(x: Tensor | Activations, weight: Matrix, *, num_slices: int) -> Tensor:
    return _packed(x, weight, output="bf16")


@linear_share_fp8.impl("stream_fp8", supports=_on_gpu)
def _linear_share_fp8(x: Tensor | Activations, weight: Matrix, *, num_slices: int) -> Tensor:
    return _packed(x, weight, output="bf16")


@linear_pair.impl("stream_pair", supports=_on_gpu)
def _linear_pair(x: Tensor | Activations, first: Matrix, second: Matrix) -> tuple[Tensor, Tensor]:
    from moet.kernels.projections import multiply_both

    assert not isinstance(first, Tensor), "a GPU multiplies with packed weights"
    assert not isinstance(second, Tensor), "a GPU multiplies with packed weights"
    return multiply_both(x, first, second)


@grouped_linear_fp8.impl("stream_fp8", supports=_on_gpu)
def _grouped_linear_fp8(x: Tensor | Activations, weight: Groups) -> Tensor:
    from moet.kernels.device_gemm import multiply_groups

    assert not isinstance(weight, Tensor), "a GPU multiplies with packed weights"
    return multiply_groups(x, weight)


def _packed(x: Tensor | Activations, weight: Matrix, *, output: Literal["f32", "bf16"]) -> Tensor:
    from moet.kernels.device_gemm import multiply

    assert not isinstance(weight, Tensor), "a GPU multiplies with packed weights"
    return multiply(x, weight, output=output)
