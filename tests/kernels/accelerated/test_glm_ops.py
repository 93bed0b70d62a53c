"""GLM's Triton ops give what their references give, for rows of any number and place."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moet.kernels import (
    triton_indexer,
    triton_mla,
    triton_mla_attention,
    triton_mla_inputs,
    triton_places,
    triton_swiglu,
)
from moet.kernels.cache import Cache, PlanedFormat
from moet.kernels.cubin import device_arch
from moet.kernels.device_gemm import Device
from moet.kernels.indexer import index_select
from moet.kernels.latent_places import latent_places
from moet.kernels.mla_attention import (
    HeadMatrices,
    IndexKeys,
    head_products,
    latent_attention,
    latent_inputs,
    latent_queries,
)
from moet.kernels.mla_cache import Fp8IndexKeys, Fp8LatentRows, Nvfp4LatentRows
from moet.kernels.moe import swiglu_halves
from moet.kernels.quant import fp8_qdq
from moet.kernels.rope import rope_cos_sin, rope_frequencies
from moet.kernels.rows import Rows
from tests.kernels.accelerated.conftest import INTERPRETED
from tests.kernels.accelerated.world import (
    DECODE,
    VERIFY,
    assert_close,
    assert_close_but_for_steps,
    make_rows,
    paged,
    twin,
    values,
)

EPS = 1e-5
PAGE = 64
LATENT, ROPE, NOPE, RANK, INDEX_DIM, INDEX_HEADS = 128, 64, 64, 256, 128, 16
FORMS = {"fp8": Fp8LatentRows(LATENT, ROPE, PAGE), "nvfp4": Nvfp4LatentRows(LATENT, ROPE, PAGE)}
if not INTERPRETED:  # as released
    LATENT, NOPE, RANK, INDEX_HEADS = 512, 192, 2048, 32
    FORMS = {"fp8": Fp8LatentRows(512, ROPE, PAGE), "nvfp4": Nvfp4LatentRows(512, ROPE, PAGE)}
STEPS = {"none": [], "decode": DECODE, "verify": VERIFY, "chunk": [(60, 75)]}
if INTERPRETED:  # which takes its time
    STEPS |= {"decode": [(0, 1), (500, 501)], "verify": [(1, 3), (255, 257)], "chunk": [(62, 66)]}


def step(name: str, device: torch.device) -> Rows:
    fill = 2 if name == "decode" else 0
    return make_rows(STEPS[name], short=True, device=device, fill=fill, page_size=PAGE)


def bf16(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(*shape, device=device).bfloat16()


def fp32(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(*shape, device=device)


def angles(rows: Rows) -> tuple[Tensor, Tensor]:
    frequencies = rope_frequencies(ROPE, 8e6).to(rows.positions.device)
    return rope_cos_sin(rows.positions, frequencies)


def test_places(device: torch.device) -> None:
    frequencies = rope_frequencies(ROPE, 8e6).to(device)
    for name in ("none", "decode", "chunk"):
        rows = step(name, device)
        got, want = (fn(rows, frequencies) for fn in (triton_places.latent_places, latent_places))
        real = rows.positions >= 0
        for a, b in zip(got[:2], want[:2], strict=True):
            assert_close(a[real], b[real], latent_places.tolerance)
        assert torch.equal(got[2], want[2])


@pytest.mark.parametrize("limit", [None, 0.5])
def test_swiglu(limit: float | None, device: torch.device) -> None:
    gate_up = 3 * bf16(3, 2 * 1100, device=device)
    gate_up[0, 0] = -200.0  # whose exponential is infinite
    got = triton_swiglu.swiglu_halves(gate_up, limit=limit)
    assert_close(got, swiglu_halves(gate_up, limit=limit), swiglu_halves.tolerance)
    assert triton_swiglu.swiglu_halves(gate_up[:0], limit=limit).shape == (0, 1100)


def empty(form: PlanedFormat, rows: Rows) -> Cache:
    """Pages of bytes that read as nothing that was meant."""
    num_pages = int(rows.page_table.max()) + 1
    shape = num_pages, form.page_bytes
    pages = torch.full(shape, 0x22, dtype=torch.uint8, device=rows.positions.device)
    return Cache(pages, form)


@pytest.mark.parametrize("name", ["decode", "chunk"])
@pytest.mark.parametrize("kv_dtype", FORMS)
def test_latent_inputs(name: str, kv_dtype: str, device: torch.device) -> None:
    rows = step(name, device)
    n = len(rows.positions)
    q_kv = bf16(n, RANK + LATENT + ROPE, device=device)
    projected = fp32(n, INDEX_DIM + INDEX_HEADS, device=device)
    norms = fp32(RANK, device=device), fp32(LATENT, device=device)
    own = empty(FORMS[kv_dtype], rows), empty(Fp8IndexKeys(INDEX_DIM, PAGE), rows)
    others = twin(own[0]), twin(own[1])
    weights = fp32(INDEX_DIM, device=device), fp32(INDEX_DIM, device=device)
    made = []
    for fn, (latents, keys) in ((triton_mla_inputs.latent_inputs, own), (latent_inputs, others)):
        index = IndexKeys(*weights, keys)
        args = (q_kv, projected, *norms, *angles(rows), latents, index, rows.closed_slots(1))
        made.append(fn(*args, eps=EPS))
    got, want = made
    assert_close(got.plain(), want.plain(), 2**-7)
    assert torch.equal(got.decoded(), fp8_qdq(got.plain().float(), block=128))
    assert_close_but_for_steps(own[1], others[1], 2**-3)
    if kv_dtype == "fp8":
        assert_close_but_for_steps(own[0], others[0], 2**-3)
    else:  # a step of e2m1 is up to a half, of a scale an eighth
        a, b = values(own[0]), values(others[0])
        assert (a != b).float().mean() < 0.01
        assert ((a - b).abs() <= b.abs() / 2 + 0.5).all()


@pytest.mark.parametrize(("n", "index_heads"), [(0, 16), (3, INDEX_HEADS), (17, 0)])
def test_latent_queries(n: int, index_heads: int, device: torch.device) -> None:
    heads = 6 if INTERPRETED else 64
    q = bf16(n, heads * (NOPE + ROPE) + index_heads * INDEX_DIM, device=device)
    w_uk, exact = matrices(heads, LATENT, NOPE, fp8=n > 3, device=device)
    rows = replace(step("none", device), positions=torch.arange(n, device=device) * 1003)
    facts = {"index_heads": index_heads, "index_dim": INDEX_DIM if index_heads else 0}
    form = Fp8IndexKeys(INDEX_DIM, PAGE) if index_heads else None
    got, got_index = triton_mla.latent_queries(q, w_uk, *angles(rows), **facts, index_form=form)
    wanted = latent_queries(q, exact, *angles(rows), **facts, index_form=form)
    want, want_index = wanted
    assert_close(got, want, 2**-7)
    assert (got_index is None) == (want_index is None)
    if got_index is not None and n:
        assert want_index is not None
        assert (got_index != want_index).float().mean() < 0.01
        assert_close(got_index.float(), want_index, latent_queries.tolerance)


def matrices(
    heads: int, n: int, k: int, *, fp8: bool, device: torch.device
) -> tuple[HeadMatrices, HeadMatrices]:
    """Random ones as a GPU keeps them, and what they stand for."""
    if not fp8:
        values = bf16(heads, n, k, device=device)
        return HeadMatrices(values), HeadMatrices(values.float())
    codes = fp32(heads, n, k, device=device).to(torch.float8_e4m3fn)
    scales = torch.rand(heads, n // 64, k // 64, device=device) + 0.5
    spread = scales.repeat_interleave(64, 1).repeat_interleave(64, 2)
    return HeadMatrices(codes, scales), HeadMatrices(codes.float() * spread)


@pytest.mark.parametrize(("rows", "n", "fp8"), [(1, 80, False), (17, 256, True)])
def test_head_products(rows: int, n: int, fp8: bool, device: torch.device) -> None:
    x = bf16(rows, 3, 192, device=device)[..., :128]
    weight, exact = matrices(3, n, 128, fp8=fp8, device=device)
    want = head_products(x, exact, quantised=fp8).plain()
    plain = triton_mla.head_products(x, weight, quantised=False).plain()
    assert_close(plain, want, 2**-8)
    if fp8:
        coded = triton_mla.head_products(x, weight, quantised=True)
        assert coded.values is None
        assert torch.equal(coded.decoded(), fp8_qdq(plain.float(), block=128))
    few = triton_mla.head_products(x[:3], weight, quantised=False).plain()
    assert_close(few, plain[:3], 0.0 if device.type == "cuda" else 2**-8)


@pytest.mark.parametrize(("chunk", "candidates"), [(1024, 16384), (64, 64)])
def test_selection(
    chunk: int, candidates: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64: of chunks that are joined in pairs, three times over."""
    monkeypatch.setattr(triton_indexer, "CHUNK", chunk)
    monkeypatch.setattr(triton_indexer, "CANDIDATES", candidates)
    rows = step("decode", device)
    n = len(rows.positions)
    form = Fp8IndexKeys(INDEX_DIM, PAGE)
    q = form.round(fp32(n, INDEX_HEADS, INDEX_DIM, device=device))
    assert torch.equal(q.bfloat16().float(), q)
    gate = fp32(n, INDEX_DIM + INDEX_HEADS, device=device)[:, INDEX_DIM:]
    args = (q, gate, paged(form, rows), rows)
    settings = {"ratio": 1, "top_k": 32, "gate_scale": 0.3}
    got = triton_indexer.index_select(q.bfloat16(), *args[1:], **settings)
    want = index_select(*args, **settings)
    real = rows.positions >= 0
    assert torch.equal(got[real], want[real])


def selection(rows: Rows, top_k: int) -> Tensor:
    """Some of the positions that each row sees, ascending."""
    chosen = torch.full((len(rows.positions), top_k), -1, dtype=torch.int32)
    for i, position in enumerate(rows.positions.tolist()):
        some = torch.randperm(position + 1)[:top_k].sort().values
        chosen[i, : len(some)] = some
    return chosen.to(rows.positions.device)


@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [("none", "fp8"), ("decode", "fp8"), ("verify", "nvfp4"), ("chunk", "fp8"), ("chunk", "nvfp4")],
)
def test_latent_attention(
    name: str, kv_dtype: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, heads = step(name, device), 4 if INTERPRETED else 64
    latents = paged(FORMS[kv_dtype], rows)
    query = bf16(len(rows.positions), heads, LATENT + ROPE, device=device)
    selected = selection(rows, 256)
    settings = {"scale": (LATENT + ROPE) ** -0.5, "latent_dim": LATENT}
    got = triton_mla_attention.latent_attention(query, latents, selected, rows, **settings)
    real = rows.positions >= 0
    want = latent_attention(query, latents, selected, rows, **settings)
    assert_close(got[real], want[real], latent_attention.tolerance)
    assert got.isfinite().all()
    if device.type == "cuda":  # whose rows are as wide as that kernel's
        launcher = Device.open(device_arch(device), device).launcher
        joined = triton_mla_attention.latent_attention(
            query, latents, selected, rows, **settings, launcher=launcher
        )
        assert torch.equal(joined, got)
    monkeypatch.setattr(triton_mla_attention, "MAX_PARTS", 0)  # one program takes tiles in turn
    whole = triton_mla_attention.latent_attention(query, latents, selected, rows, **settings)
    assert torch.equal(whole, got)
