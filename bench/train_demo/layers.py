"""What both training graphs are made of: linears, norms, rotation, experts, losses. Batched
[B, T, ...] and differentiable; knows no cache and no serving."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHAINED_SHARE = 0.4  # of the draft loss, for drafts that stand on drafts

Store = Literal["keep", "dense", "expert"]
"""How an exported tensor is stored: as it is, as the dense format, as the expert format."""


class Linear(nn.Module):
    """x @ weight.T in the dtype of x. `store` tells the exporter which format the weight takes."""

    def __init__(
        self, num_in: int, num_out: int, *, store: Store = "dense", gain: float = 1.0
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_out, num_in) * (gain * num_in**-0.5))
        self.store = store

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Norm(nn.Module):
    """RMS norm over the last dimension in fp32, one rounding at the end."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return (rms(x.float(), self.eps) * self.weight.float()).to(x.dtype)


class LayerNorm(nn.Module):
    """Mean-subtracting norm with bias, in fp32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.float(), self.bias.float()
        return F.layer_norm(x.float(), weight.shape, weight, bias, self.eps).to(x.dtype)


def rms(x: Tensor, eps: float) -> Tensor:
    """x over its root mean square, without a weight."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, at_end: bool, inverse: bool = False) -> Tensor:
    """Rotate pairs (2i, 2i + 1) of the first or last dimensions of x.

    x: [B, T, dim] or [B, T, heads, dim]. cos, sin: [T, rope_dim / 2] fp32.
    """
    width = 2 * cos.shape[-1]
    if x.dim() == 4:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if inverse:
        sin = -sin
    rope, rest = (x[..., -width:], x[..., :-width]) if at_end else (x[..., :width], x[..., width:])
    a, b = rope.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2).to(x.dtype)
    return torch.cat([rest, turned] if at_end else [turned, rest], -1)


def angles(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, [n, rope_dim / 2] fp32 each."""
    turn = positions.float().unsqueeze(-1) * frequencies
    return turn.cos(), turn.sin()


def swiglu(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    """silu(gate) * up with the clamps of the served models, in fp32."""
    a, b = gate.float(), up.float()
    if limit is not None:
        a, b = a.clamp(max=limit), b.clamp(-limit, limit)
    return F.silu(a) * b


class Experts(nn.Module):
    """All experts of a layer, computed densely: a token's unchosen experts get the weight zero.

    With 16 small experts one wide product is faster than a grouped one and has the same result.
    """

    def __init__(self, num_experts: int, dim: int, inter: int, *, out_gain: float) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(num_experts, inter, dim) * dim**-0.5)
        self.w3 = nn.Parameter(torch.randn(num_experts, inter, dim) * dim**-0.5)
        self.w2 = nn.Parameter(torch.randn(num_experts, dim, inter) * (out_gain * inter**-0.5))

    def forward(self, x: Tensor, weights: Tensor, limit: float | None) -> Tensor:
        """x: [B, T, dim]; weights: [B, T, num_experts], zero where unchosen."""
        num_experts, inter, dim = self.w1.shape
        gate = F.linear(x, self.w1.reshape(-1, dim).to(x.dtype))
        up = F.linear(x, self.w3.reshape(-1, dim).to(x.dtype))
        hidden = swiglu(gate, up, limit).unflatten(-1, (num_experts, inter))
        hidden = (hidden * weights.unsqueeze(-1)).to(x.dtype).flatten(-2)
        return F.linear(hidden, self.w2.permute(1, 0, 2).reshape(dim, -1).to(x.dtype))


def mixture_weights(scores: Tensor, chosen: Tensor, scaling: float) -> Tensor:
    """Scores [B, T, E] of the chosen [B, T, k], normalised to `scaling`, as [B, T, E] fp32."""
    picked = scores.gather(-1, chosen)
    picked = picked / picked.sum(-1, keepdim=True) * scaling
    return torch.zeros_like(scores).scatter(-1, chosen, picked)


@dataclass(frozen=True)
class Losses:
    """Sums over a batch, to be divided by `weight`; `loads`: tokens per expert of each router."""

    main: Tensor
    draft: Tensor
    index: Tensor
    weight: Tensor
    loads: list[Tensor]


def token_loss(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of cross entropies. logits: [B, T, V]; targets: [B, T]; weights: [B, T] fp32."""
    loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
    return (loss * weights.flatten()).sum()


def index_loss(scores: Tensor, target: Tensor, visible: Tensor) -> Tensor:
    """KL divergence of the index scores' softmax from where attention really went, averaged.

    scores, target: [B, q, n] fp32, target unnormalised and not negative. visible: bool, broadcasts
    to them; rows that see nothing count as zero. Source: DeepSeek-V3.2's indexer training.
    """
    target = target.masked_fill(~visible, 0.0)
    total = target.sum(-1, keepdim=True)
    target = target / total.clamp(min=1e-9)
    logp = torch.log_softmax(scores.masked_fill(~visible, -1e9), -1)
    kl = (target * (target.clamp(min=1e-9).log() - logp)).sum(-1)
    return (kl * (total.squeeze(-1) > 1e-6)).mean()


def top_mask(scores: Tensor, k: int) -> Tensor:
    """Which entries are among the k highest of their row. scores: [..., n] fp32. bool."""
    if scores.shape[-1] <= k:
        return torch.ones_like(scores, dtype=torch.bool)
    return scores >= scores.topk(k, -1).values[..., -1:]
