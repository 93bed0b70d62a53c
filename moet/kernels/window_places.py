"""What every layer of a step with a sliding window asks of a row's position: its angles, those of
the windows that compressors close, and where its state goes. Knows nothing of layers."""

from __future__ import annotations

from torch import Tensor

from moet.kernels.registry import GPU_ARCHS, op
from moet.kernels.rope import rope_cos_sin
from moet.kernels.rows import Rows

CosSin = tuple[Tensor, Tensor]
MAX_RATIOS = 2


@op(tolerance=2**-16)
def window_places(
    rows: Rows, main: Tensor, compress: Tensor, *, ratios: tuple[int, ...], num_entries: int
) -> tuple[list[CosSin], Tensor]:
    """main, compress: [rope / 2] fp32, frequencies. num_entries: of a ring.

    Returns cos and sin, [n, rope / 2] fp32 each, of each row's position for `main` and `compress`,
    then for `compress` of the first position of the window of `ratio` tokens that the row is in,
    for each of the ratios; and Rows.ring_slots.
    """
    p = rows.positions
    angles = [rope_cos_sin(p, main), rope_cos_sin(p, compress)]
    angles += [rope_cos_sin(p // ratio * ratio, compress) for ratio in ratios]
    return angles, rows.ring_slots(num_entries)


def _fits(*, arch: str, rope_dim: int, num_ratios: int) -> bool:
    power_of_two = rope_dim & (rope_dim - 1) == 0
    return arch in GPU_ARCHS and power_of_two and num_ratios <= MAX_RATIOS


window_places.impl_in("moet.kernels.triton_places", "triton", supports=_fits)
