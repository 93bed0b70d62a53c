"""The streaming GEMM, executed in emulation for both matrix back ends, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moet.kernels import layout, stream_gemm
from moet.kernels.layout import ExpertRows, Mxfp4Rows, W2Rows
from moet.kernels.moe import (
    ExpertTable,
    expert_mixture,
    expert_weights,
    route_by_bias,
    sigmoid_scores,
    sqrt_softplus,
    swiglu,
)
from moet.kernels.stream_experts import (
    ExpertPool,
    SharedExpert,
    Work,
    combine,
    plan,
    quantise,
    route,
)
from moet.kernels.stream_gemm import StreamLinear, Workspace, inverse
from tests.kernels.emulation import Emulator


def activations(t: int, k: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """e4m3 bytes in MMA order, scales, and the values they stand for (float64)."""
    rng = torch.Generator().manual_seed(seed)
    q = torch.randn(t, k, generator=rng).mul(60).to(torch.float8_e4m3fn)
    scale = 2.0 ** torch.randint(-4, 4, (t, -(-k // 128)), generator=rng).float()
    values = q.double() * scale.double().repeat_interleave(128, 1)[:, :k]
    return layout.to_mma_order(q.view(torch.uint8)).contiguous(), scale, values


def pool(
    format: ExpertRows, num_experts: int, seed: int, spread: int = 9
) -> tuple[ExpertPool, list[tuple[Tensor, Tensor, Tensor]]]:
    rng = torch.Generator().manual_seed(seed)
    d, i = format.hidden_size, format.moe_intermediate_size

    def matrix(n: int, k: int) -> tuple[Tensor, Tensor]:
        codes = torch.randint(0, len(format.levels), (n, k), dtype=torch.uint8, generator=rng)
        scales = torch.randint(120 - spread, 120, (n, k // 32), dtype=torch.uint8, generator=rng)
        return codes, scales

    rows = [format.pack(matrix(i, d), matrix(i, d), matrix(d, i)) for _ in range(num_experts)]
    bases = torch.stack([format.row_base(row) for row in rows])
    return ExpertPool(format, torch.stack(rows), bases), [format.unpack(row) for row in rows]


def work_for(ids: Tensor, rows: int) -> Work:
    """What the plan kernel makes of ids [T, top_k]: slots are expert ids."""
    flat = ids.flatten()
    entries: list[list[int]] = []
    pairs: list[int] = []
    for expert in sorted(set(flat.tolist())):
        places = torch.nonzero(flat == expert).flatten().tolist()
        for start in range(0, len(places), rows):
            entries.append([expert, expert, len(pairs), len(places[start : start + rows])])
            pairs += places[start : start + rows]
    as_int = lambda x: torch.tensor(x, dtype=torch.int32)  # noqa: E731
    return Work(as_int(entries).view(-1, 4), as_int([len(entries)]), as_int(pairs), rows)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


ERROR = torch.zeros(1, dtype=torch.int32)


@given(st.integers(1, 4096), st.integers(0, (1 << 32) - 1))
def test_kernels_divide_exactly(divisor: int, number: int) -> None:
    number //= divisor  # which keeps the product below 2^32
    factor = inverse(divisor)
    assert (number * factor >> 32 if factor else number) == number // divisor


@pytest.mark.parametrize("kind", [W2Rows, Mxfp4Rows])
@pytest.mark.parametrize(("d", "i"), [(256, 64), (160, 96), (512, 2048)])
def test_experts_match_float64(launcher: Emulator, kind: type[ExpertRows], d: int, i: int) -> None:
    if i == 2048 and kind is Mxfp4Rows:
        d = 64
    format = kind(d, i)
    experts, values = pool(format, 3, d + i)
    x_q, x_scale, x = activations(4, d, 1)
    ids = torch.tensor([[2, 0], [2, 1], [2, 0], [0, 2]])
    weight = torch.rand(8)
    work = work_for(ids, 8)
    error = ERROR.clone()
    limit = float(x.abs().mean() * 20)
    h = experts.gate_up(
        launcher, x_q, x_scale, work, top_k=2, pair_weight=weight, limit=limit, error=error
    )
    h.nan_to_num_(nan=float("inf"))
    for pair, expert in enumerate(ids.flatten().tolist()):
        w1, w3, _ = (w.double() for w in values[expert])
        gate = (w1 @ x[pair // 2]).clamp(max=limit)
        up = (w3 @ x[pair // 2]).clamp(-limit, limit)
        expected = torch.nn.functional.silu(gate) * up * weight[pair]
        assert relative(h[pair], expected) < 2**-7
    h = torch.randn(h.shape).bfloat16()
    y = experts.down(launcher, h, work, error=error)
    for pair, expert in enumerate(ids.flatten().tolist()):
        q, scale = quantised(h[pair])
        assert relative(y[pair], values[expert][2].double() @ (q * scale)) < 2**-8
    assert int(error) == 0


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """The recipe's e4m3 values and scales of a row, one scale per 128, as float64 [K]."""
    scales = []
    for group in x.float().split(128):
        scales += [2.0 ** torch.ceil(torch.log2(group.abs().max().clamp(min=1e-4) / 448))] * len(
            group
        )
    scale = torch.stack(scales)
    return (x.float() / scale).to(torch.float8_e4m3fn).double(), scale.double()


@pytest.mark.parametrize(("n", "k", "t"), [(1600, 128, 1), (24, 1024, 9), (130, 416, 3)])
def test_fp8_linear_matches_float64(launcher: Emulator, n: int, k: int, t: int) -> None:
    rng = torch.Generator().manual_seed(n)
    w = torch.randn(n, k, generator=rng).to(torch.float8_e4m3fn)
    scale = 2.0 ** torch.randint(-3, 3, (-(-n // 128), -(-k // 128)), generator=rng).float()
    linear = StreamLinear.fp8(w, scale)
    full = scale.double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    x_q, x_scale, x = activations(t, k, n)
    space = Workspace.allocate("cpu", 8 * t * n, 64)
    for rows in (8, 16):
        y = linear(launcher, x_q, x_scale, error=ERROR, workspace=space, rows=rows)
        assert y.shape == (t, n)
        assert relative(y, x @ (w.double() * full).T) < 2**-8
        assert not space.counters.any()
    x_bf16 = torch.randn(t, k, generator=rng).bfloat16()
    values = torch.stack([a * b for a, b in map(quantised, x_bf16)])
    y = linear(launcher, x_bf16, None, error=ERROR, workspace=space)
    assert relative(y, values @ (w.double() * full).T) < 2**-8


def test_bf16_linear_matches_float64(launcher: Emulator) -> None:
    w, x = torch.randn(72, 1024).bfloat16(), torch.randn(3, 1024).bfloat16()
    linear = StreamLinear.bf16(w)
    space = Workspace.allocate("cpu", 8 * 3 * 72, 64)
    y = linear(launcher, x, None, error=ERROR, workspace=space, output="f32")
    assert relative(y, x.double() @ w.double().T) < 2**-20


def test_a_row_does_not_depend_on_its_batch(launcher: Emulator) -> None:
    experts, _ = pool(W2Rows(256, 64), 1, 5)
    x_q, x_scale, _ = activations(11, 256, 2)
    run = lambda q, s, rows: experts.gate_up(  # noqa: E731
        launcher,
        q,
        s,
        work_for(torch.zeros(len(q), 1, dtype=torch.int64), rows),
        top_k=1,
        pair_weight=None,
        limit=1e9,
        error=ERROR,
    )
    together = run(x_q, x_scale, 8)
    assert torch.equal(together, run(x_q, x_scale, 16))
    for t in (0, 7, 10):
        assert torch.equal(together[t : t + 1], run(x_q[t : t + 1], x_scale[t : t + 1], 8))


def test_a_block_below_its_rows_range_stays_negligible(launcher: Emulator) -> None:
    """Scales of one row may span every exponent: blocks far below the largest vanish."""
    experts, values = pool(W2Rows(256, 64), 1, 6, spread=110)
    x_q, x_scale, x = activations(1, 256, 3)
    h = experts.gate_up(
        launcher,
        x_q,
        x_scale,
        work_for(torch.zeros(1, 1, dtype=torch.int64), 8),
        top_k=1,
        pair_weight=None,
        limit=1e30,
        error=ERROR,
    )
    w1, w3, _ = (w.double() for w in values[0])
    expected = torch.nn.functional.silu(w1 @ x[0]) * (w3 @ x[0])
    assert relative(h[0], expected) < 2**-7


def test_an_invalid_slot_sets_the_error_word_and_the_rows_are_nan(launcher: Emulator) -> None:
    experts, _ = pool(W2Rows(128, 64), 1, 7)
    x_q, x_scale, _ = activations(1, 128, 4)
    work = work_for(torch.tensor([[0, 0]]), 1)
    work.entries[1, 0] = 5
    error = ERROR.clone()
    h = experts.gate_up(
        launcher, x_q, x_scale, work, top_k=2, pair_weight=None, limit=10.0, error=error
    )
    assert int(error) == 1
    assert h[0].isfinite().all()
    assert h[1].isnan().all()


def test_no_rows_and_no_entries_are_no_work(launcher: Emulator) -> None:
    experts, _ = pool(W2Rows(128, 64), 1, 8)
    x_q, x_scale, _ = activations(0, 128, 4)
    work = Work(torch.zeros(4, 4, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), ERROR)
    h = experts.gate_up(
        launcher, x_q, x_scale, work, top_k=2, pair_weight=None, limit=10.0, error=ERROR
    )
    assert h.shape == (0, 64)


def test_quantise_is_the_recipe(launcher: Emulator) -> None:
    x = (torch.randn(5, 416) * torch.logspace(-6, 3, 5)[:, None]).bfloat16()
    x[3, 128:256] = 0
    q, scale = quantise(launcher, x)
    for row in range(5):
        values, scales = quantised(x[row])
        expected = values.float().to(torch.float8_e4m3fn).view(torch.uint8)
        assert torch.equal(q[row], layout.to_mma_order(expected))
        assert torch.equal(scale[row].double(), scales[::128])


def test_plan_covers_every_pair_once_in_order(launcher: Emulator) -> None:
    rng = torch.Generator().manual_seed(9)
    ids = torch.randint(0, 13, (40, 3), generator=rng)
    slot_of = torch.randperm(13, generator=rng)
    error = ERROR.clone()
    work = plan(launcher, ids, slot_of, error=error, rows=8)
    n = int(work.num_entries)
    seen: list[int] = []
    for slot, expert, first, count in work.entries[:n].tolist():
        assert 1 <= count <= 8
        assert slot == slot_of[expert]
        places = work.pairs[first : first + count].tolist()
        assert all(ids.flatten()[p] == expert for p in places)
        seen += places
    assert sorted(seen) == list(range(120))
    assert seen == torch.argsort(ids.flatten(), stable=True).tolist()
    assert n == sum(-(-int(c) // 8) for c in ids.flatten().bincount())
    assert int(error) == 0


@pytest.mark.parametrize(("tokens", "dim"), [(4, 66), (260, 24)])
def test_combine_sums_choices_in_order(tokens: int, dim: int, launcher: Emulator) -> None:
    parts, weights = torch.randn(3 * tokens, dim).bfloat16(), torch.rand(tokens, 3)
    shared = torch.randn(tokens, dim).bfloat16()
    out = combine(launcher, parts, top_k=3, weights=weights, shared=shared)
    weighted = parts.float().view(tokens, 3, dim) * weights[..., None]
    expected = weighted[:, 0] + weighted[:, 1] + weighted[:, 2] + shared.float()
    assert torch.equal(out, expected)
    plain = combine(launcher, parts, top_k=3, dtype=torch.bfloat16)
    each = parts.float().view(tokens, 3, dim)
    assert torch.equal(plain, (each[:, 0] + each[:, 1] + each[:, 2]).bfloat16())


def test_combine_takes_more_choices_than_it_asks_for_at_once(launcher: Emulator) -> None:
    parts, weights = torch.randn(11 * 260, 24).bfloat16(), torch.rand(260, 11)
    expected = torch.zeros(260, 24)
    for k in range(11):
        expected += parts.float().view(260, 11, 24)[:, k] * weights[:, k : k + 1]
    assert torch.equal(combine(launcher, parts, top_k=11, weights=weights), expected)


@pytest.mark.parametrize("weigh_output", [False, True])
def test_mixture_matches_the_reference_op(launcher: Emulator, weigh_output: bool) -> None:
    experts, _ = pool(W2Rows(256, 128), 5, 11, spread=4)
    slot_of = torch.tensor([3, 1, 4, 0, 2])
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(3, 256, generator=rng).bfloat16() * 16
    ids = torch.stack([torch.randperm(5, generator=rng)[:2] for _ in range(3)])
    weights, error = torch.rand(3, 2, generator=rng), ERROR.clone()
    bases = torch.empty_like(experts.bases)
    bases[torch.arange(5)] = experts.bases[slot_of]  # bases are by expert, rows by slot
    placed = ExpertPool(experts.format, experts.rows, bases)
    found = placed.mixture(
        launcher,
        x,
        ids,
        weights,
        slot_of,
        limit=10.0,
        error=error,
        weigh_output=weigh_output,
    )
    expected = expert_mixture(
        x,
        ids,
        weights,
        ExpertTable(experts.format, experts.rows, slot_of),
        limit=10.0,
        round_activations=True,
        weigh_output=weigh_output,
    )
    assert relative(found, expected.double()) < expert_mixture.tolerance
    assert int(error) == 0
    slot_of[ids[1, 1]] = -1
    lost = placed.mixture(launcher, x, ids, weights, slot_of, limit=10.0, error=error)
    assert int(error) == 1
    assert lost[1].isnan().all()


@pytest.mark.parametrize("sigmoid", [False, True])
def test_route_is_the_reference_choice(launcher: Emulator, sigmoid: bool) -> None:
    rng = torch.Generator().manual_seed(12)
    logits, bias = torch.randn(5, 70, generator=rng) * 4, torch.randn(70, generator=rng)
    logits[2, 10:20] = logits[2, 9]  # equals
    bias[10:20] = bias[9] = 3.0
    ids, weights = route(launcher, logits, top_k=6, scaling_factor=1.5, bias=bias, sigmoid=sigmoid)
    scores = sigmoid_scores(logits) if sigmoid else sqrt_softplus(logits)
    assert torch.equal(ids, route_by_bias(scores, bias, top_k=6))
    expected = expert_weights(scores, ids, scaling_factor=1.5)
    assert relative(weights, expected.double()) < expert_weights.tolerance
    given = torch.randint(0, 70, (5, 6), generator=rng)
    same, weights = route(launcher, logits, top_k=6, scaling_factor=1.5, given=given)
    assert torch.equal(same, given)
    expected = expert_weights(sqrt_softplus(logits), given, scaling_factor=1.5)
    assert relative(weights, expected.double()) < expert_weights.tolerance


def test_shared_expert_matches_float64(launcher: Emulator) -> None:
    rng = torch.Generator().manual_seed(13)

    def dense(n: int, k: int) -> tuple[Tensor, Tensor]:
        weight = torch.randn(n, k, generator=rng).to(torch.float8_e4m3fn)
        return weight, torch.full((-(-n // 128), -(-k // 128)), 2.0**-4)

    w1, w3, w2 = dense(192, 256), dense(192, 256), dense(256, 192)
    x_q, x_scale, x = activations(3, 256, 14)
    x_scale, x = x_scale * 2**-6, x * 2**-6
    space = Workspace.allocate("cpu", 4096, 64)
    out = SharedExpert.fp8(w1, w3, w2)(
        launcher, x_q, x_scale, limit=10.0, error=ERROR, workspace=space
    )
    a, b = (x @ (w.double() * 2.0**-4).T for w, _ in (w1, w3))
    h = swiglu(a.bfloat16(), b.bfloat16(), limit=10.0).bfloat16()
    values = torch.stack([v * s for v, s in map(quantised, h)])
    assert relative(out, values @ (w2[0].double() * 2.0**-4).T) < 2**-7


def test_clusters_sum_slices_like_the_last_to_arrive(
    launcher: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = replace(launcher, num_sms=16)
    weight = torch.randn(64, 4096, generator=torch.Generator().manual_seed(2))
    linear = StreamLinear.fp8(weight.to(torch.float8_e4m3fn), torch.ones(1, 32))
    assert linear.slices(wide) == stream_gemm.SPLIT_SLICES
    q, scale, _ = activations(3, 4096, 1)
    space, launched = Workspace.allocate("cpu", 8 * 3 * 64, 8), []
    monkeypatch.setattr(
        Emulator,
        "launch",
        lambda self, name, launch=Emulator.launch, **how: (
            launched.append(name),
            launch(self, name, **how),
        ),
    )
    apart = linear(wide, q, scale, error=ERROR, workspace=space)
    monkeypatch.setattr(stream_gemm, "SPLITS", ())
    assert torch.equal(linear(wide, q, scale, error=ERROR, workspace=space), apart)
    assert launched == ["stream_fp8_n8_bf16_split", "stream_fp8_n8_bf16_wide"]


def test_a_shared_expert_of_many_rows_has_their_bits(launcher: Emulator) -> None:
    rng = torch.Generator().manual_seed(4)

    def dense(n: int, k: int) -> tuple[Tensor, Tensor]:
        weight = torch.randn(n, k, generator=rng).to(torch.float8_e4m3fn)
        return weight, torch.full((-(-n // 128), -(-k // 128)), 2.0**-4)

    expert = SharedExpert.fp8(dense(96, 160), dense(96, 160), dense(160, 96))
    x = torch.randn(30, 160, generator=rng).bfloat16()
    codes, scale = quantise(launcher, x)
    options = {"limit": 10.0, "error": ERROR, "workspace": None}
    together = expert(launcher, codes, scale, **options)  # type: ignore[arg-type]
    for rows in (slice(0, 1), slice(22, 30)):
        some = expert(launcher, codes[rows], scale[rows], **options)  # type: ignore[arg-type]
        assert torch.equal(some, together[rows])
