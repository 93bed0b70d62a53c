"""Every Triton op of a V4 layer against its reference: empty, single, verify and chunk steps,
window wrap, page borders, fill rows; and rows alone against rows in company, bit for bit."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moet.kernels import (
    triton_attention,
    triton_attention_inputs,
    triton_compressor,
    triton_hyper_connection,
    triton_index_queries,
    triton_index_scores,
    triton_indexer,
    triton_places,
    triton_rows,
)
from moet.kernels.attention import WindowKeys, window_attention
from moet.kernels.attention_inputs import CompressorSite, attention_inputs
from moet.kernels.cache import Cache, Fp8Rows, Mxfp4Rows, PlainRows, copy_entries, write_kv
from moet.kernels.compressor import compress
from moet.kernels.hyper_connection import Site, hc_enter, hc_head_norm, hc_pass, hc_post
from moet.kernels.indexer import index_query, index_select
from moet.kernels.norm import rms_norm
from moet.kernels.quant import fp8_qdq
from moet.kernels.query_heads import query_heads
from moet.kernels.rope import norm_rope_heads, rope_cos_sin, rope_frequencies
from moet.kernels.rows import Rows
from moet.kernels.window_places import window_places
from tests.kernels.accelerated.conftest import INTERPRETED
from tests.kernels.accelerated.world import (
    CHUNKS,
    STEPS,
    assert_close,
    assert_close_but_for_steps,
    make_rows,
    paged,
    ringed,
    twin,
    values,
)

EPS = 1e-6
NOPE, ROPE, DIM = 64, 64, 128  # of a KV row; released: 448, 64, 512
SIZES = [0, 1, 3, 8, 17]
FEW = [0, 1, 3] if INTERPRETED else SIZES  # of what takes the interpreter long
STEP_NAMES = [*STEPS, "chunks"]
LONG = ["three", "chunks"] if INTERPRETED else STEP_NAMES


def step(name: str, device: torch.device) -> Rows:
    if name == "chunks":
        return make_rows(CHUNKS, short=False, device=device)
    return make_rows(STEPS[name], short=True, device=device, fill=2 if name == "decode" else 0)


def randn(*shape: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device=device).to(dtype)


def angles(positions: Tensor) -> tuple[Tensor, Tensor]:
    return rope_cos_sin(positions, rope_frequencies(ROPE, 1e4).to(positions.device))


@pytest.mark.parametrize("name", STEP_NAMES)
def test_window_places(name: str, device: torch.device) -> None:
    rows = step(name, device)
    far = (rows.positions >= 0) * 70_000
    rows = replace(rows, positions=rows.positions + far, ends=rows.ends + far)
    tables = [rope_frequencies(ROPE, theta).to(device) for theta in (1e4, 1.6e5)]
    got, want = (
        fn(rows, *tables, ratios=(4, 128), num_entries=130)
        for fn in (triton_places.window_places, window_places)
    )
    real = rows.positions >= 0
    for found, wanted in zip(got[0], want[0], strict=True):
        for a, b in zip(found, wanted, strict=True):
            assert_close(a[real], b[real], window_places.tolerance)
    assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("n", SIZES)
def test_rms_norm(n: int, device: torch.device) -> None:
    x, weight = randn(n, 200, device=device), randn(96, device=device, dtype=torch.float32)
    x = x[:, :96]  # rows of a wider product
    for w in (weight, None):
        got, want = triton_rows.rms_norm(x, w, eps=EPS), rms_norm(x, w, eps=EPS)
        assert_close(got, want, rms_norm.tolerance)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("heads", [4, 16])
def test_norm_rope_heads(n: int, heads: int, device: torch.device) -> None:
    q = randn(n, heads * DIM + 32, device=device)[:, : heads * DIM]
    cos_sin = angles(torch.arange(n, device=device) * 1003)
    got = triton_rows.norm_rope_heads(q, *cos_sin, num_heads=heads, eps=EPS)
    want = norm_rope_heads(q, *cos_sin, num_heads=heads, eps=EPS)
    assert_close(got, want, norm_rope_heads.tolerance)


@pytest.mark.parametrize("name", STEP_NAMES)
@pytest.mark.parametrize("nope", [NOPE, 448])
def test_write_kv(name: str, nope: int, device: torch.device) -> None:
    rows = step(name, device)
    n, dim = len(rows.positions), nope + ROPE
    kv = randn(n, dim + 64, device=device)[:, 64:] * 3
    weight = randn(dim, device=device, dtype=torch.float32)
    got = ringed(Fp8Rows(nope, ROPE, 130), rows)
    want, slots = twin(got), rows.ring_slots(130)
    triton_rows.write_kv(kv, weight, *angles(rows.positions), got, slots, eps=EPS)
    write_kv(kv, weight, *angles(rows.positions), want, slots, eps=EPS)
    assert_close_but_for_steps(got, want, write_kv.tolerance)


@pytest.mark.parametrize("name", STEP_NAMES)
def test_copy_entries(name: str, device: torch.device) -> None:
    rows = step(name, device)
    got = ringed(Fp8Rows(NOPE, ROPE, 130), rows)
    source = Cache(got.pages[:1].clone(), got.form)
    want, slots = twin(got), rows.ring_slots(130)
    triton_rows.copy_entries(source, got, slots)
    copy_entries(source, want, slots)
    assert torch.equal(values(got), values(want))


def compression(
    rows: Rows, ratio: int, *, rotate: bool, device: torch.device
) -> tuple[tuple[Tensor, ...], Cache, Cache]:
    channels = DIM * (2 if ratio == 4 else 1)
    projected = randn(len(rows.positions), 2 * channels + 8, device=device, dtype=torch.float32)
    tensors = (
        projected[:, : 2 * channels],
        randn(ratio, channels, device=device, dtype=torch.float32),
        randn(DIM, device=device, dtype=torch.float32),
        *angles(rows.positions // ratio * ratio),
    )
    state = PlainRows(2 * channels, (8 if ratio == 4 else 128) + 2, torch.float32)
    form = Mxfp4Rows(DIM, 64) if rotate else Fp8Rows(NOPE, ROPE, 256 // ratio)
    return tensors, ringed(state, rows), paged(form, rows)


@pytest.mark.parametrize("name", STEP_NAMES)
@pytest.mark.parametrize(("ratio", "rotate"), [(4, False), (4, True), (128, False)])
def test_compress(name: str, ratio: int, rotate: bool, device: torch.device) -> None:
    rows = step(name, device)
    tensors, state, entries = compression(rows, ratio, rotate=rotate, device=device)
    other_state, other_entries = twin(state), twin(entries)
    settings = {"overlapped": ratio == 4, "rotate": rotate, "eps": EPS, "dtype": torch.bfloat16}
    triton_compressor.compress(*tensors, state, entries, rows, **settings)
    compress(*tensors, other_state, other_entries, rows, **settings)
    assert torch.equal(values(state), values(other_state))
    assert_close_but_for_steps(entries, other_entries, 2.0 if rotate else compress.tolerance)


@pytest.mark.parametrize("name", STEP_NAMES)
@pytest.mark.parametrize("kind", ["window", "csa", "hca"])
def test_attention_inputs(name: str, kind: str, device: torch.device) -> None:
    rows = step(name, device)
    n, rank = len(rows.positions), 256
    ratio = {"window": 0, "csa": 4, "hca": 128}[kind]
    qr_kv = randn(n, rank + DIM, device=device) * 3
    weights = [randn(size, device=device, dtype=torch.float32) for size in (rank, DIM)]
    window = ringed(Fp8Rows(NOPE, ROPE, 130), rows)
    rotations = {"window": [], "csa": [False, True], "hca": [False]}[kind]
    parts = [compression(rows, ratio, rotate=rotate, device=device) for rotate in rotations]
    projected = torch.cat([tensors[0] for tensors, _, _ in parts], 1) if parts else None
    sites, twins, column = [], [], 0
    for (tensors, state, entries), rotate in zip(parts, rotations, strict=True):
        columns = column, column + tensors[0].shape[1]
        column = columns[1]
        place = columns, ratio == 4, rotate
        sites.append(CompressorSite(*tensors[1:], state, entries, *place))
        twins.append(CompressorSite(*tensors[1:], twin(state), twin(entries), *place))
    other = twin(window)
    cos_sin, slots = angles(rows.positions), rows.ring_slots(130)
    got = triton_attention_inputs.attention_inputs(
        qr_kv, projected, *weights, *cos_sin, window, slots, tuple(sites), rows, eps=EPS
    )
    want = attention_inputs(
        qr_kv, projected, *weights, *cos_sin, other, slots, tuple(twins), rows, eps=EPS
    )
    assert_close(got.plain(), want.plain(), attention_inputs.tolerance)
    assert torch.equal(got.decoded(), fp8_qdq(got.plain().float(), block=128))
    assert_close_but_for_steps(window, other, write_kv.tolerance)
    for a, b in zip(sites, twins, strict=True):
        assert torch.equal(values(a.state), values(b.state))
        assert_close_but_for_steps(a.entries, b.entries, 2.0 if a.rotate else compress.tolerance)


def index_inputs(rows: Rows, device: torch.device) -> tuple[Tensor, Tensor, Cache]:
    n, heads = len(rows.positions), 8
    q = index_query(
        randn(n, heads * DIM, device=device),
        *angles(rows.positions),
        num_heads=heads,
        quantised=True,
    )
    weights = randn(n, 40 + heads, device=device, dtype=torch.float32)[:, 40:]
    return q, weights, paged(Mxfp4Rows(DIM, 64), rows)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("heads", [8, 32])
def test_index_query(
    n: int, heads: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if heads == 8:
        monkeypatch.setattr(triton_index_queries, "CODED_ROWS", 1)  # a program has several rows
    q = randn(n, heads * DIM + 32, device=device)[:, 32:]
    cos_sin = angles(torch.arange(n, device=device) * 77)
    got = triton_index_queries.index_query(q, *cos_sin, num_heads=heads, quantised=True)
    want = index_query(q, *cos_sin, num_heads=heads, quantised=True)
    assert got.shape == want.shape
    if n:
        assert (got != want).float().mean() < 0.01


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("index_heads", [0, 24])
def test_query_heads(n: int, index_heads: int, device: torch.device) -> None:
    q = randn(n, 4 * DIM + index_heads * 64, device=device)
    cos_sin = angles(torch.arange(n, device=device) * 77)
    settings = {"num_heads": 4, "head_dim": DIM, "index_heads": index_heads, "eps": EPS}
    heads, index = triton_rows.query_heads(q, *cos_sin, **settings)
    want, want_index = query_heads(q, *cos_sin, **settings, quantised=True)
    assert_close(heads, want, norm_rope_heads.tolerance)
    if index_heads and n:
        assert (index != want_index).float().mean() < 0.01
    elif not index_heads:
        assert index is None


def test_queries_of_many_rows_are_made_as_those_of_few(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = randn(3, 4 * DIM + 24 * 64, device=device)
    cos_sin = angles(torch.arange(3, device=device) * 77)
    settings = {"num_heads": 4, "head_dim": DIM, "index_heads": 24, "eps": EPS}
    few = triton_rows.query_heads(q, *cos_sin, **settings)
    monkeypatch.setattr(triton_rows, "CODED_ROWS", 2)
    many = triton_rows.query_heads(q, *cos_sin, **settings)
    assert torch.equal(many[0], few[0])
    assert torch.equal(many[1], few[1])


@pytest.mark.parametrize(
    ("name", "chunk"), [*((name, 64) for name in LONG), *((name, 8192) for name in STEP_NAMES)]
)
def test_index_select(
    name: str, chunk: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_indexer, "CHUNK", chunk)
    rows = step(name, device)
    q, weights, keys = index_inputs(rows, device)
    got = triton_indexer.index_select(q, weights, keys, rows, ratio=4, top_k=32, gate_scale=0.3)
    want = index_select(q, weights, keys, rows, ratio=4, top_k=32, gate_scale=0.3)
    real = rows.positions >= 0
    assert got.dtype == want.dtype
    assert torch.equal(got[real], want[real])


@pytest.mark.parametrize("name", STEP_NAMES)
def test_rows_that_share_a_program_are_scored_as_alone(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of one sequence share the keys they are compared with; at borders others come in."""
    rows = step(name, device)
    inputs = index_inputs(rows, device)
    settings = {"ratio": 4, "top_k": 32, "gate_scale": 0.3}
    alone = triton_indexer.index_select(*inputs, rows, **settings)
    monkeypatch.setattr(triton_index_scores, "CODED_ROWS", 0)
    monkeypatch.setattr(triton_index_scores, "ROWS_EACH", 4)
    assert torch.equal(triton_indexer.index_select(*inputs, rows, **settings), alone)


def test_equal_scores_choose_the_first_entries(device: torch.device) -> None:
    rows = make_rows([(767, 768)], short=True, device=device)
    q, weights, keys = index_inputs(rows, device)
    for monkeyed in (weights * 0, weights * -0.0):
        got = triton_indexer.index_select(
            q, monkeyed, keys, rows, ratio=4, top_k=32, gate_scale=0.3
        )
        assert got[0].tolist() == list(range(32))


@pytest.mark.parametrize(
    ("name", "heads"), [*((name, 4) for name in STEP_NAMES), *((name, 64) for name in LONG)]
)
@pytest.mark.parametrize("kind", ["window", "csa", "hca"])
def test_window_attention(
    name: str, kind: str, heads: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = step(name, device)
    if not rows.short:
        monkeypatch.setattr(triton_attention, "MAX_PARTS", 0)
    ratio = {"window": 0, "csa": 4, "hca": 128}[kind]
    n, window_size = len(rows.positions), 40
    q = randn(n, heads, DIM, device=device)
    sink = randn(heads, device=device, dtype=torch.float32)
    window = ringed(Fp8Rows(NOPE, ROPE, window_size + 2), rows)
    chunk = None
    if not rows.short:
        chunk = paged(window.form.with_entries(n), rows)
        chunk = Cache(chunk.pages[:1], chunk.form)
    entries = paged(Fp8Rows(NOPE, ROPE, 256 // ratio), rows) if ratio else None
    selected = None
    if kind == "csa":
        selected = index_select(
            *index_inputs(rows, device), rows, ratio=4, top_k=32, gate_scale=0.3
        )
    keys = WindowKeys(rows, window, chunk, entries, selected, window_size, ratio)
    args, scale = (q, sink, keys, *angles(rows.positions)), 1 / math.sqrt(DIM)
    got = triton_attention.window_attention(*args, scale=scale)
    want = window_attention(*args, scale=scale)
    assert_close(got, want, window_attention.tolerance)
    coded = triton_attention.window_attention_q(*args, scale=scale, num_groups=2)
    rounded = fp8_qdq(got.view(2 * n, heads * DIM // 2).float(), block=128)
    assert torch.equal(coded.decoded(), rounded)
    assert (got[rows.positions < 0] == 0).all()


def hc_site(rows_out: int, device: torch.device) -> Site:
    fn = randn(rows_out, 4 * 256, device=device, dtype=torch.float32) * 0.05
    base = randn(rows_out, device=device, dtype=torch.float32)
    scale = torch.tensor([1.0, 0.7, 1.3][: 3 if rows_out > 4 else 1], device=device)
    weight = randn(256, device=device, dtype=torch.float32)
    num_iters = 20 if rows_out > 4 else 0
    return Site(fn.t().contiguous().t(), base, scale, weight, EPS, EPS, num_iters)


@pytest.mark.parametrize("n", FEW)
def test_hyper_connections(n: int, device: torch.device) -> None:
    streams, site = randn(n, 4, 256, device=device), hc_site(24, device)
    got = triton_hyper_connection.hc_enter(streams, site)
    want = hc_enter(streams, site)
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, hc_enter.tolerance)
    y = randn(n, 256, device=device)
    _, post, mix = want
    got = triton_hyper_connection.hc_pass(y, streams, post, mix, site)
    want = hc_pass(y, streams, post, mix, site)
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, hc_pass.tolerance)
    assert_close(
        triton_hyper_connection.hc_post(y, streams, post, mix),
        hc_post(y, streams, post, mix),
        hc_post.tolerance,
    )
    head = hc_site(4, device)
    assert_close(
        triton_hyper_connection.hc_head_norm(streams, head),
        hc_head_norm(streams, head),
        hc_head_norm.tolerance,
    )


def test_rows_do_not_depend_on_company(device: torch.device) -> None:
    many = 9 if INTERPRETED else 96  # more than one row a program
    streams, site = randn(many, 4, 256, device=device), hc_site(24, device)
    whole = triton_hyper_connection.hc_enter(streams, site)
    alone = triton_hyper_connection.hc_enter(streams[7:8], site)
    for a, b in zip(whole, alone, strict=True):
        assert torch.equal(a[7:8], b)
    rows = step("decode", device)
    q, weights, keys = index_inputs(rows, device)
    chosen = triton_indexer.index_select(q, weights, keys, rows, ratio=4, top_k=32, gate_scale=0.3)
    window = ringed(Fp8Rows(NOPE, ROPE, 42), rows)
    entries = paged(Fp8Rows(NOPE, ROPE, 64), rows)
    heads = randn(len(q), 64, DIM, device=device)
    sink = randn(64, device=device, dtype=torch.float32)

    def attend(part: slice) -> Tensor:
        some = Rows(
            **{
                name: getattr(rows, name)[part]
                for name in ("positions", "starts", "ends", "seq_slots", "page_rows")
            },
            page_table=rows.page_table,
            page_size=rows.page_size,
            short=True,
        )
        keys = WindowKeys(some, window, None, entries, chosen[part], 40, 4)
        cos_sin = angles(some.positions)
        return triton_attention.window_attention(heads[part], sink, keys, *cos_sin, scale=0.1)

    assert torch.equal(attend(slice(7, 8)), attend(slice(0, None))[7:8])


@pytest.mark.parametrize("kind", ["window", "csa", "hca"])
def test_long_steps_compute_a_row_as_short_ones_do(
    kind: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = make_rows([(700, 703)], short=True, device=device)
    long = Rows(
        **{
            name: getattr(short, name)
            for name in ("positions", "starts", "ends", "seq_slots", "page_rows", "page_table")
        },
        page_size=short.page_size,
        short=False,
    )
    ratio = {"window": 0, "csa": 4, "hca": 128}[kind]
    n, cos_sin = 3, angles(short.positions)
    ring = ringed(Fp8Rows(NOPE, ROPE, 42), short)
    chunk, written = ring.scratch(n), twin(ring)
    kv, weight = randn(n, DIM, device=device), randn(DIM, device=device, dtype=torch.float32)
    triton_rows.write_kv(kv, weight, *cos_sin, chunk, long.row_ids, eps=EPS)
    triton_rows.write_kv(kv, weight, *cos_sin, written, short.ring_slots(42), eps=EPS)
    entries = paged(Fp8Rows(NOPE, ROPE, 256 // ratio), short) if ratio else None
    selected = None
    if kind == "csa":
        selected = index_select(
            *index_inputs(short, device), short, ratio=4, top_k=160, gate_scale=0.3
        )
    state = randn(64, device=device, dtype=torch.float32), randn(n, 64, DIM, device=device)

    def attend(window: Cache, own: Cache | None, rows: Rows) -> Tensor:
        sink, q = state
        keys = WindowKeys(rows, window, own, entries, selected, 40, ratio)
        return triton_attention.window_attention(q, sink, keys, *cos_sin, scale=0.1)

    tiles = attend(written, None, short)
    assert torch.equal(tiles, attend(ring, chunk, long))
    monkeypatch.setattr(triton_attention, "MAX_PARTS", 0)  # one program takes a row's tiles in turn
    assert torch.equal(tiles, attend(written, None, short))
    assert torch.equal(tiles, attend(ring, chunk, long))
