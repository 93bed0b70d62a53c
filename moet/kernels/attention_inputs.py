"""Everything that attention does to its first projections before the queries are multiplied: the
norm of the query's latent, the window's KV row and the compressors, in one op."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moet.kernels.cache import Cache, EntryFormat, fp8_rows_fit, write_kv
from moet.kernels.compressor import compress, encodings_fit
from moet.kernels.norm import rms_norm
from moet.kernels.quant import Activations
from moet.kernels.registry import GPU_ARCHS, op
from moet.kernels.rows import Rows


@dataclass(frozen=True, slots=True)
class CompressorSite:
    """One compressor of a layer, as `compressor.compress` takes it.

    columns: first and one past the last of the columns of the projections that are its own.
    cos, sin: [T, rope_dim / 2] fp32 of the first token of each row's window.
    """

    ape: Tensor
    norm_weight: Tensor
    cos: Tensor
    sin: Tensor
    state: Cache
    entries: Cache
    columns: tuple[int, int]
    overlapped: bool
    rotate: bool


@op(tolerance=2**-7)
def attention_inputs(
    qr_kv: Tensor,
    projected: Tensor | None,
    q_norm_weight: Tensor,
    kv_norm_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    window: Cache,
    places: Tensor,
    compressors: tuple[CompressorSite, ...],
    rows: Rows,
    *,
    eps: float,
) -> Activations:
    """Norm of the query's latent; the step's KV rows and closed windows stored.

    qr_kv: [T, rank + dim] bf16 or fp32, the query's latent and the KV row. projected: [T, P] fp32,
    the products of all compressors side by side. cos, sin: [T, rope_dim / 2] fp32 of the rows.
    window: where KV rows go, at places [T] int64, -1 for none. Returns the latent [T, rank].
    """
    rank = len(q_norm_weight)
    write_kv(qr_kv[:, rank:], kv_norm_weight, cos, sin, window, places, eps=eps)
    for site in compressors:
        assert projected is not None
        first, last = site.columns
        compress(
            projected[:, first:last],
            site.ape,
            site.norm_weight,
            site.cos,
            site.sin,
            site.state,
            site.entries,
            rows,
            overlapped=site.overlapped,
            rotate=site.rotate,
            eps=eps,
            dtype=qr_kv.dtype,
        )
    return Activations(rms_norm(qr_kv[:, :rank].contiguous(), q_norm_weight, eps=eps))


def _fits(
    *,
    arch: str,
    rank: int,
    form: EntryFormat,
    compressors: tuple[tuple[EntryFormat, EntryFormat, int, bool], ...],
) -> bool:
    """form: of the window. compressors: state, entries, ratio and rotation of each."""
    ratios = {ratio for _, _, ratio, _ in compressors}
    known = len(compressors) <= 2 and len(ratios) <= 1 and fp8_rows_fit(form)
    return (
        arch in GPU_ARCHS
        and known
        and rank % 128 == 0
        and all(
            encodings_fit(arch=arch, state=state, entries=entries, ratio=ratio, rotate=rotate)
            for state, entries, ratio, rotate in compressors
        )
    )


attention_inputs.impl_in("moet.kernels.triton_attention_inputs", "triton_fp8", supports=_fits)
