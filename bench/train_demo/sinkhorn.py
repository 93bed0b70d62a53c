"""The doubly stochastic mixing matrix of mHC with an exact gradient. The iteration is run backwards
from its result, so only its divisors are kept; on a GPU one small kernel does each direction."""

from __future__ import annotations

import torch
from torch import Tensor

STREAMS = 4


def _steps(iters: int) -> list[int]:
    """The dimension each step sums over: columns first and last."""
    return [-2] + [-1, -2] * (iters - 1)


@torch.library.custom_op("moet_demo::sinkhorn", mutates_args=())
def _balance(mix: Tensor, iters: int, eps: float) -> tuple[Tensor, Tensor]:
    """mix: [n, 4, 4] fp32, positive. Returns the balanced matrix and the divisors [steps, n, 4]."""
    mix = mix.contiguous()
    n = mix.shape[0]
    divisors = mix.new_empty(2 * iters - 1, n, STREAMS)
    out = torch.empty_like(mix)
    if mix.is_cuda:
        from bench.train_demo import sinkhorn_kernels

        sinkhorn_kernels.forward(mix, out, divisors, iters, eps)
        return out, divisors
    for step, dim in enumerate(_steps(iters)):
        total = mix.sum(dim) + eps
        divisors[step] = total
        mix = mix / total.unsqueeze(dim)
    return out.copy_(mix), divisors


@torch.library.custom_op("moet_demo::sinkhorn_backward", mutates_args=())
def _unbalance(grad: Tensor, out: Tensor, divisors: Tensor, iters: int) -> Tensor:
    grad = grad.contiguous()
    result = torch.empty_like(out)
    if out.is_cuda:
        from bench.train_demo import sinkhorn_kernels

        sinkhorn_kernels.backward(grad, out, divisors, result, iters)
        return result
    steps = _steps(iters)
    for step in range(len(steps) - 1, -1, -1):
        dim = steps[step]
        total = divisors[step].unsqueeze(dim)
        grad = (grad - (grad * out).sum(dim, keepdim=True)) / total
        out = out * total
    return result.copy_(grad)


@_balance.register_fake
def _(mix: Tensor, iters: int, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(mix), mix.new_empty(2 * iters - 1, mix.shape[0], STREAMS)


@_unbalance.register_fake
def _(grad: Tensor, out: Tensor, divisors: Tensor, iters: int) -> Tensor:
    return torch.empty_like(out)


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*output)
    ctx.iters = inputs[1]


def _grad(ctx, grad, _divisors):  # type: ignore[no-untyped-def]
    out, divisors = ctx.saved_tensors
    return _unbalance(grad, out, divisors, ctx.iters), None, None


_balance.register_autograd(_grad, setup_context=_setup)


def sinkhorn(logits: Tensor, iters: int, eps: float) -> Tensor:
    """Row softmax plus eps, then `iters` column and `iters - 1` row normalisations.

    logits: [n, 4, 4] fp32. Returns the same shape.
    """
    return _balance(logits.softmax(-1) + eps, iters, eps)[0]
