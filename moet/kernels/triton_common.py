# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, attr-defined, misc, assignment"
"""Small device functions that the Triton kernels share: number formats by bits, and rotation.

They hold for any shape of block and are the same in the interpreter and on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

CODED_ROWS = 256  # steps of more rows are multiplied in tiles that round their inputs themselves


def overlap(like: Tensor) -> dict[str, bool]:
    """How a kernel that calls `begin` is launched: on a GPU while the one ahead may still run."""
    return {"OVERLAP": like.is_cuda, "launch_pdl": like.is_cuda}


class Kernel:
    """A kernel whose roundings are those that its text says. Left to the compiler, a product and a
    sum become one here and not there, and not alike in all kernels that share a row's bits."""

    def __init__(self, function: Callable[..., None], unspecialised: Sequence[str]) -> None:
        self.jit = triton.jit(function, do_not_specialize=unspecialised)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        return partial(self.jit[grid], enable_fp_fusion=False)


def kernel(
    function: Callable[..., None] | None = None, *, do_not_specialize: Sequence[str] = ()
) -> Any:
    """Before what is launched, in place of triton.jit."""
    if function is None:
        return partial(Kernel, unspecialised=do_not_specialize)
    return Kernel(function, do_not_specialize)


@triton.jit
def begin(OVERLAP: tl.constexpr):
    """Comes first in a kernel: the next one may come, and what the one ahead wrote is there.

    The next one may read weights, but nothing that kernels write, before it has waited for the end
    of this one; then all that came before has ended, too.
    """
    let_next(OVERLAP)
    wait(OVERLAP)


@triton.jit
def let_next(OVERLAP: tl.constexpr):
    """The next kernel may come."""
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def wait(OVERLAP: tl.constexpr):
    """What the kernel ahead wrote is there."""
    if OVERLAP:
        gdc_wait()


@triton.jit
def as_here(x, OVERLAP: tl.constexpr):
    """x, of bytes or of two, which the compiler may place elsewhere only from here on: it would put
    what is loaded into shared memory at once, and wait for it ahead of the next load."""
    if OVERLAP:
        PACK: tl.constexpr = 4 // (x.dtype.primitive_bitwidth // 8)
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, False, PACK)
    return x


@triton.jit
def all_here(blocks, NUM: tl.constexpr, OVERLAP: tl.constexpr):
    """as_here of the first NUM of a tuple."""
    here = ()
    for b in tl.static_range(NUM):
        here = here + (as_here(blocks[b], OVERLAP),)  # noqa: RUF005  (no unpacking)
    return here


@triton.jit
def exponent_byte(amax, GRAIN: tl.constexpr, MANTISSA: tl.constexpr):
    """e8m0 byte of the smallest power of two that is not below amax / (m * 2^GRAIN), by bits.

    MANTISSA: the 23 mantissa bits of m. amax: fp32, positive, normal. Returns int32.
    """
    bits = amax.to(tl.int32, bitcast=True)
    return (bits >> 23) - GRAIN + ((bits & 0x7FFFFF) > MANTISSA).to(tl.int32)


@triton.jit
def power_of_two(byte):
    """2^(byte - 127) as fp32. byte: int32, 1..254."""
    return (byte << 23).to(tl.float32, bitcast=True)


@triton.jit
def e4m3_exponent(amax):
    """Byte of the scale of a block whose largest value this is, as in quant.fp8_encode."""
    return exponent_byte(tl.maximum(amax, 1e-4), 8, 0x600000)


@triton.jit
def e4m3_codes(x):
    """x (fp32, at most 448 in size) rounded to e4m3, nearest even. Returns int32 0..255."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Steps of 2^-9 below 2^-6: the sum's last bit is worth that.
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size >= 0x3C800000, normal, small)
    return code | ((bits >> 24) & 0x80)


@triton.jit
def mma_place(column):
    """Where layout.to_mma_order puts a column's byte."""
    word = (column >> 2) & 7
    return (column & -32) | ((word & 1) << 4) | ((word >> 1) << 2) | (column & 3)


@triton.jit
def e2m1_codes(x):
    """x (fp32, at most 6 in size but for rounding) to e2m1, ties to even. Returns int32 0..15."""
    size = tl.abs(x)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def e2m1_values(code):
    """Value of e2m1 codes (int32). Returns fp32."""
    size = code & 7
    # As fp32 bits: exponent 2 bits, mantissa 1 bit; the two subnormal codes are 0 and 0.5.
    normal = ((size >> 1) + 126 << 23) | ((size & 1) << 22)
    value = tl.where(size < 2, size * 0.5, normal.to(tl.float32, bitcast=True))
    return tl.where((code & 8) != 0, -value, value)


@triton.jit
def rotate_pairs(x, cos, sin):
    """Rotate pairs (2i, 2i + 1) of the last dimension. x: fp32 [R, 2N]; cos, sin: [1, N].

    Products with sin are rounded, those with cos are not: which, the compiler may not choose, for
    it would not choose the same in all kernels that share a row's bits.
    """
    R: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1] // 2
    a, b = tl.split(tl.reshape(x, [R, N, 2]))
    cos = tl.broadcast_to(cos, [R, N])
    first, second = tl.fma(a, cos, b * -sin), tl.fma(b, cos, a * sin)
    return tl.reshape(tl.join(first, second), [R, 2 * N])


@triton.jit
def load_rotation(cos_ptr, sin_ptr, row, DIM: tl.constexpr, ROPE: tl.constexpr):
    """cos and sin of all DIM / 2 pairs of a row, [1, DIM / 2]; 1 and 0 ahead of the last ROPE."""
    pair = tl.arange(0, DIM // 2) - (DIM - ROPE) // 2
    at = row * (ROPE // 2) + pair
    cos = tl.load(cos_ptr + at, mask=pair >= 0, other=1.0)
    sin = tl.load(sin_ptr + at, mask=pair >= 0, other=0.0)
    return cos[None, :], sin[None, :]


@triton.jit
def store_fp8_row(
    row,
    pages,
    slot,
    PAGE_BYTES,
    ENTRIES,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
):
    """Encode one row ([DIM] fp32) in the layout of cache.Fp8Rows at a slot; all of its bytes, so
    that equal rows are equal bytes."""
    NOPE: tl.constexpr = DIM - ROPE
    DATA: tl.constexpr = NOPE + 2 * ROPE
    BLOCKS: tl.constexpr = DIM // 64
    page = pages + (slot // ENTRIES) * PAGE_BYTES
    place = slot % ENTRIES
    blocks = tl.reshape(row, [BLOCKS, 64])
    amax = tl.maximum(tl.max(tl.abs(blocks), 1), 1e-4)
    byte = exponent_byte(amax, 8, 0x600000)
    codes = e4m3_codes(blocks * power_of_two(254 - byte)[:, None])
    b = tl.arange(0, BLOCKS)
    d = b[:, None] * 64 + tl.arange(0, 64)[None, :]
    data = page + place * DATA
    tl.store(data + d, codes.to(tl.uint8), mask=d < NOPE)
    rope = (data + NOPE).to(tl.pointer_type(tl.bfloat16))
    tl.store(rope + (d - NOPE), blocks.to(tl.bfloat16), mask=d >= NOPE)
    scales = page + ENTRIES * DATA + place * SCALE_BYTES
    tl.store(scales + b, byte.to(tl.uint8), mask=b < NOPE // 64)
    s = tl.arange(0, SCALE_BYTES)
    tl.store(scales + s, tl.zeros([SCALE_BYTES], tl.uint8), mask=s >= NOPE // 64)


@triton.jit
def hadamard_sign(i, j):
    """Entry (i, j) of the Walsh-Hadamard matrix in natural order, +1 or -1 as fp32. Below 2^8."""
    x = i & j
    x = x ^ (x >> 4)
    x = x ^ (x >> 2)
    x = x ^ (x >> 1)
    return 1.0 - 2.0 * (x & 1).to(tl.float32)
