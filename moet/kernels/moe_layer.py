"""A whole layer of experts as one op: router, routed experts and the shared one. Where experts that
do not all fit are is not its affair: it reads one table in which they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moet.kernels.gemm import Matrix, linear_fp32, linear_share, linear_share_fp8
from moet.kernels.mixture import Mixture
from moet.kernels.moe import (
    ExpertTable,
    expert_mixture,
    expert_weights,
    route_by_bias,
    route_by_token,
    sigmoid_scores,
    sqrt_softplus,
    swiglu,
)
from moet.kernels.quant import Activations, plain_values
from moet.kernels.registry import GPU_ARCHS, op

if TYPE_CHECKING:
    from moet.kernels.stream_experts import SharedExpert


@dataclass(frozen=True, slots=True)
class RouterWeights:
    """weight: [E, D]. bias: [E] fp32, which chooses and does not weigh; or table: [vocab, top_k]
    int64, the experts of each token. sigmoid: those scores, else sqrt(softplus)."""

    weight: Matrix
    bias: Tensor | None
    table: Tensor | None
    top_k: int
    scaling_factor: float
    sigmoid: bool


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """Gate and up stacked [2 I, D], then down [D, I]: fp32 for the reference, bf16 for a GPU, which
    has fp8 ones in `packed`.

    quantised: whether they hold values of fp8 weights.
    """

    gate_up: Matrix | None
    down: Matrix | None
    quantised: bool
    packed: SharedExpert | None = None


@op(tolerance=2**-16)
def route(
    x: Tensor | Activations, token_ids: Tensor, positions: Tensor, router: RouterWeights
) -> tuple[Tensor, Tensor]:
    """The experts of each row and their weights, which sum to the scaling factor.

    x: [T, D]; token_ids, positions: [T] int64. Returns [T, top_k] int64, best first, and fp32.
    Rows at position -1 mean nothing and name no expert that the first row does not.
    """
    logits = linear_fp32(x, router.weight)
    scores = sigmoid_scores(logits) if router.sigmoid else sqrt_softplus(logits)
    if router.table is not None:
        expert_ids = route_by_token(token_ids, router.table)
    else:
        assert router.bias is not None
        expert_ids = route_by_bias(scores, router.bias, top_k=router.top_k)
    expert_ids = torch.where((positions < 0).unsqueeze(1), expert_ids[:1], expert_ids)
    return expert_ids, expert_weights(scores, expert_ids, scaling_factor=router.scaling_factor)


@op(tolerance=2**-7)
def moe(
    x: Tensor | Activations,
    token_ids: Tensor,
    positions: Tensor,
    router: RouterWeights,
    table: ExpertTable,
    shared: SharedWeights,
    *,
    limit: float | None,
    round_activations: bool,
    weigh_output: bool,
    num_slices: int,
    on_read: bool = False,
) -> Tensor | Mixture:
    """Routed experts plus the shared one. table: every expert of the layer is resident.

    x, token_ids, positions: as in `route`. num_slices: of the down projections' inputs, as in
    expert_mixture and linear_share. Returns [T, D] in the dtype of x; rows at position -1
    mean nothing. on_read: whoever reads it can sum a mixture, if few rows have one.
    """
    values = plain_values(x)
    expert_ids, weights = route(values, token_ids, positions, router)
    assert shared.gate_up is not None
    assert shared.down is not None
    routed = expert_mixture(
        values,
        expert_ids,
        weights,
        table,
        limit=limit,
        round_activations=round_activations,
        weigh_output=weigh_output,
        num_slices=num_slices,
    )
    product = linear_share_fp8 if shared.quantised and round_activations else linear_share
    gate, up = product(values, shared.gate_up, num_slices=1).to(values.dtype).chunk(2, 1)
    hidden = swiglu(gate, up, limit=limit).to(values.dtype)
    return (routed + product(hidden, shared.down, num_slices=num_slices)).to(values.dtype)


def _on_gpu(*, arch: str) -> bool:
    return arch in GPU_ARCHS


route.impl_in("moet.kernels.device_moe", "stream", supports=_on_gpu)


@moe.impl("stream", supports=_on_gpu)
def _moe(
    x: Tensor | Activations,
    token_ids: Tensor,
    positions: Tensor,
    router: RouterWeights,
    table: ExpertTable,
    shared: SharedWeights,
    *,
    limit: float | None,
    round_activations: bool,
    weigh_output: bool,
    num_slices: int,  # kernels sum all slices of a row in an order of their own
    on_read: bool = False,
) -> Tensor | Mixture:
    from moet.kernels import device_moe

    assert round_activations, "a GPU's kernels round activations"
    return device_moe.moe(
        x,
        token_ids,
        positions,
        router,
        table,
        shared,
        limit=limit,
        weigh_output=weigh_output,
        on_read=on_read,
    )
