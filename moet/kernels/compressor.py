"""Pooling of consecutive KV rows into one entry, by a softmax per channel over their scores."""

from __future__ import annotations

import torch
from torch import Tensor

from moet.kernels.registry import op


def _pool(values: Tensor, scores: Tensor) -> Tensor:
    """[n, rows, dim] twice, rows a power of two -> [n, dim]. A halving tree, so that the order of
    the sums is the same for any n."""
    weights = torch.exp(scores - scores.amax(1, keepdim=True))
    both = torch.stack([weights * values, weights])
    while both.shape[2] > 1:
        half = both.shape[2] // 2
        both = both[:, :, :half] + both[:, :, half:]
    return both[0, :, 0] / both[1, :, 0]


@op(tolerance=2**-16)
def pool_windows(values: Tensor, scores: Tensor) -> Tensor:
    """Pool each window of `ratio` tokens into one entry.

    values, scores: [n, ratio, dim] fp32, ratio a power of two; scores hold the position bias.
    Returns [n, dim] fp32: per channel, values weighted by the softmax of scores over the window.
    """
    return _pool(values, scores)


@op(tolerance=2**-16)
def pool_overlapped_windows(values: Tensor, scores: Tensor) -> Tensor:
    """Pool windows that reach back over the previous one.

    values, scores: [n, 2 * ratio, 2 * dim] fp32: the rows of the previous window, then those of
    the current one. The first dim channels of the previous rows and the last dim channels of the
    current rows take part. Absent previous rows carry score -inf and value 0.
    Returns [n, dim] fp32.
    """
    ratio, dim = values.shape[1] // 2, values.shape[2] // 2

    def halves(x: Tensor) -> Tensor:
        return torch.cat([x[:, :ratio, :dim], x[:, ratio:, dim:]], 1)

    return _pool(halves(values), halves(scores))
