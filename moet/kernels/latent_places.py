"""What every layer of a step with latent attention asks of a row's position: its angles, and where
its state goes. Knows nothing of layers."""

from __future__ import annotations

from torch import Tensor

from moet.kernels.registry import GPU_ARCHS, op
from moet.kernels.rope import rope_cos_sin
from moet.kernels.rows import Rows


@op(tolerance=2**-16)
def latent_places(rows: Rows, frequencies: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """frequencies: [rope / 2] fp32. Returns cos and sin, [n, rope / 2] fp32, and [n] int64, the
    slot of each row in pages of one entry a token; -1 for fill rows."""
    return *rope_cos_sin(rows.positions, frequencies), rows.closed_slots(1)


def _fits(*, arch: str, rope_dim: int) -> bool:
    return arch in GPU_ARCHS and rope_dim & (rope_dim - 1) == 0


latent_places.impl_in("moet.kernels.triton_places", "triton", supports=_fits)
