"""The hyper-connection ops on a GPU, by csrc/hyper_connection.cu: one launch for few rows, two for
more. A row has the same bits whichever kernel does it. Knows tensors and a Launcher."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from moet.kernels.device_gemm import Device
from moet.kernels.hyper_connection import Logits, Site, balanced
from moet.kernels.mixture import MAX_CHOICES, Mixture
from moet.kernels.quant import Activations
from moet.kernels.stream_gemm import pointer

MULT, BLOCK, PARTS = 4, 128, 32
MAX_DIM = 4096
FUSED_ROWS = 4  # of one launch; a row's last CTA finishes it alone, so more rows get another
CODED_ROWS = 256  # steps of more rows are multiplied in tiles that round their inputs themselves
TILED_ROWS = 64  # beyond, a CTA has rows enough to read its part of fn only once
STEP_THREADS, TILE_THREADS = 288, 256
STEP_SHARED = (9 * PARTS + 4) * 4
STEP_GROUPS = 4  # of rows, which read the weights once each
TILE_PASS = {"sm90a": 48, "sm120a": 32}  # rows that the warps of a CTA take at once
TILE_SHARED = 24 * MULT * BLOCK * 4  # and for each of those rows
TILE_ROW_SHARED = (MULT + 1) * (BLOCK * 2 + 16)  # streams and y, gates
MIXED_TILE_SHARED = TILE_PASS["sm90a"] * MAX_CHOICES * BLOCK * 2 + 8 * 32  # parts, ids: more
TELL_ROWS = 4  # up to here each row has a CTA that is told its parts, and may be a mixture
TELL_THREADS, TELL_SHARED = 256, 34896

POINTERS = (
    "y streams post mix fn base scale weight mixed partial counters x codes code_scale next_post "
    "next_mix"
)


class StreamsArgs(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in POINTERS.split()),
        *((name, ctypes.c_float) for name in ("norm_eps", "hc_eps")),
        *((name, ctypes.c_int) for name in ("rows", "rows_each", "dim", "outs", "iters")),
        *((name, ctypes.c_void_p) for name in ("parts", "part_weights", "shared", "expert_ids")),
        ("top_k", ctypes.c_int),
        ("told", ctypes.c_void_p),
        ("takes_logits", ctypes.c_int),
    ]


@dataclass(frozen=True, slots=True)
class MixMatrix:
    """fn of a site, [outs, 4 * dim] fp32, contiguous, and the device that multiplies with it."""

    weight: Tensor
    device: Device

    def __post_init__(self) -> None:
        assert self.weight.is_contiguous()


@dataclass(frozen=True, slots=True)
class Pending:
    """What is not in the streams yet: y [n, dim] of a sublayer, its post [n, 4], mix [n, 4, 4].

    y may be a mixture's parts."""

    y: Tensor | Mixture
    post: Tensor
    mix: Tensor | Logits


def hc_enter(streams: Tensor, site: Site) -> tuple[Activations, Tensor, Tensor]:
    _, x, post, mix = collapse(streams, site)
    assert isinstance(mix, Tensor)
    return x, post, mix


def hc_pass(
    y: Tensor | Mixture, streams: Tensor, post: Tensor, mix: Tensor | Logits, site: Site
) -> tuple[Tensor, Activations, Tensor, Tensor | Logits]:
    return collapse(streams, site, Pending(y, post, mix))


def hc_head_norm(streams: Tensor, site: Site) -> Tensor:
    return collapse(streams, site)[1].plain()


def collapse(
    streams: Tensor, site: Site, pending: Pending | None = None
) -> tuple[Tensor, Activations, Tensor, Tensor | Logits]:
    """hc_pass, hc_enter without `pending`, or hc_head_norm if the site is a head.

    streams: [n, 4, dim] bf16, contiguous. Returns streams, x, post and mix; of a head, for which
    nothing is pending, the last two mean nothing. x has codes, too, up to CODED_ROWS rows, unless
    the site is a head. With `pending`, the mix of up to TELL_ROWS rows comes as its logits.
    """
    num_rows, mult, dim = streams.shape
    assert mult == MULT
    assert streams.is_contiguous()
    assert isinstance(site.fn, MixMatrix)
    blocks, device, is_head = dim // BLOCK, streams.device, site.num_iters == 0
    assert pending is None or not is_head
    mixed = streams if pending is None else torch.empty_like(streams)
    x = torch.empty(num_rows, dim, dtype=torch.bfloat16, device=device)
    sums = torch.empty(num_rows * blocks * PARTS, dtype=torch.float32, device=device)
    post = torch.empty(num_rows, MULT, dtype=torch.float32, device=device)
    mix = torch.empty(num_rows, MULT, MULT, dtype=torch.float32, device=device)
    made = Activations(x)
    if num_rows <= CODED_ROWS and not is_head:
        codes = torch.empty(num_rows, dim, dtype=torch.uint8, device=device)
        made = Activations(x, codes, x.new_empty(num_rows, blocks, dtype=torch.float32))
    if num_rows == 0:
        return mixed, made, post, mix
    args = StreamsArgs(
        streams=streams.data_ptr(),
        fn=site.fn.weight.data_ptr(),
        base=site.base.data_ptr(),
        scale=site.scale.data_ptr(),
        weight=site.weight.data_ptr(),
        mixed=mixed.data_ptr(),
        partial=sums.data_ptr(),
        x=x.data_ptr(),
        codes=pointer(made.codes),
        code_scale=pointer(made.scale),
        next_post=None if is_head else post.data_ptr(),
        next_mix=None if is_head else mix.data_ptr(),
        norm_eps=site.norm_eps,
        hc_eps=site.hc_eps,
        rows=num_rows,
        dim=dim,
        outs=len(site.fn.weight),
        iters=site.num_iters,
    )
    if pending is not None:
        given = pending.y
        if isinstance(given, Mixture) and not mixes_on_read(site.fn.device, given):
            given = given.add()
        if isinstance(given, Mixture):
            _fill(args, given)
        else:
            y = given.contiguous()
            args.y = y.data_ptr()
        old = pending.mix
        if isinstance(old, Logits) and _tells(args):
            args.takes_logits, old = True, old.values
        old_post, old_mix = pending.post.contiguous(), balanced(old).contiguous()
        args.post, args.mix = old_post.data_ptr(), old_mix.data_ptr()
    _launch(site.fn.device, args)
    if not _tells(args):
        return mixed, made, post, mix
    return mixed, made, post, Logits(mix, partial(_balance, mix, site))


def mixes_on_read(device: Device, mixture: Mixture) -> bool:
    """Whether a pass sums a mixture itself: of few rows, or of tiles where a CTA has room for the
    parts."""
    (num_rows, dim), tiled = mixture.shared.shape, device.arch == "sm90a"
    if dim > MAX_DIM or mixture.top_k > MAX_CHOICES:
        return False
    return num_rows <= TELL_ROWS or (tiled and num_rows > TILED_ROWS and mixture.weights is None)


def _fill(args: StreamsArgs, mixture: Mixture) -> None:
    args.parts, args.shared = mixture.parts.data_ptr(), mixture.shared.data_ptr()
    args.part_weights, args.top_k = pointer(mixture.weights), mixture.top_k
    args.expert_ids = mixture.expert_ids.data_ptr()


def _launch(device: Device, args: StreamsArgs) -> None:
    """Sums over blocks of channels, then rows: in one launch if they are few."""
    launcher, blocks = device.launcher, args.dim // BLOCK
    fused = args.rows <= FUSED_ROWS
    if _tells(args):
        _run_telling(device, args)
        return
    if fused:
        args.counters = device.counters.data_ptr()
    if args.rows <= TILED_ROWS or args.outs != MULT * (2 + MULT):
        args.rows_each = 1 if fused else -(-args.rows // STEP_GROUPS)
        grid = (blocks * -(-args.outs // 8), -(-args.rows // args.rows_each))
        # A row alone, which nothing joins, has CTAs few enough to hold what they finish with.
        name = "streams_step_held" if args.rows == 1 else "streams_step"
        launcher.launch(name, grid=grid, threads=STEP_THREADS, shared_bytes=STEP_SHARED, args=args)
    else:
        tile_pass, mixed = TILE_PASS[device.arch], bool(args.parts)
        args.rows_each = _tile_rows(args.rows, tile_pass, blocks, launcher.num_sms)
        launcher.launch(
            "streams_tiles_mixed" if mixed else "streams_tiles",
            grid=(blocks, -(-args.rows // args.rows_each)),
            threads=TILE_THREADS,
            shared_bytes=TILE_SHARED + tile_pass * TILE_ROW_SHARED + mixed * MIXED_TILE_SHARED,
            args=args,
        )
    if not fused:
        launcher.launch(
            "streams_finish",
            grid=args.rows,
            threads=STEP_THREADS,
            shared_bytes=STEP_SHARED,
            args=args,
        )


def _tells(args: StreamsArgs) -> bool:
    """Few rows that something joins; the next pass balances their matrices while it waits."""
    return args.rows <= TELL_ROWS and bool(args.parts or args.y)


def _run_telling(device: Device, args: StreamsArgs) -> None:
    """The CTAs that multiply, and one a row that finishes it."""
    args.told = device.counters.data_ptr()
    device.launcher.launch(
        "streams_tell_mixed" if args.parts else "streams_tell",
        grid=args.dim // BLOCK * (args.outs // 8) + args.rows,
        threads=TELL_THREADS,
        shared_bytes=TELL_SHARED,
        args=args,
    )


def _balance(logits: Tensor, site: Site) -> Tensor:
    """[n, 4, 4], as the pass that mixes by it would."""
    assert isinstance(site.fn, MixMatrix)
    mix = torch.empty_like(logits)
    args = StreamsArgs(mix=logits.data_ptr(), next_mix=mix.data_ptr(), hc_eps=site.hc_eps)
    args.iters = site.num_iters
    launcher = site.fn.device.launcher
    launcher.launch("streams_balance", grid=len(mix), threads=32, shared_bytes=0, args=args)
    return mix


def _tile_rows(num_rows: int, tile_pass: int, blocks: int, num_sms: int) -> int:
    """Rows of a CTA: whole passes, as many as give every SM one CTA."""
    passes = -(-num_rows // tile_pass)
    return -(-passes // max(1, num_sms // blocks)) * tile_pass
