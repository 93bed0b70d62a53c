"""The fused decode step of experts in emulation, against the separate kernels bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moet.errors import UnsupportedError
from moet.kernels import layout
from moet.kernels.decode_experts import Choice, Router, choose, given, mix
from moet.kernels.layout import ExpertRows, Mxfp4Rows, W2Rows
from moet.kernels.nvfp4_rows import Nvfp4Rows
from moet.kernels.stream_experts import ExpertPool, SharedExpert, combine, quantise, route
from moet.kernels.stream_gemm import StreamLinear, Workspace
from tests.kernels.emulation import Emulator

EXPERTS = 5
ERROR = torch.zeros(1, dtype=torch.int32)


def pool(format: ExpertRows, seed: int) -> ExpertPool:
    """EXPERTS random experts, the row of expert e in slot EXPERTS - 1 - e."""
    rng = torch.Generator().manual_seed(seed)
    d, i = format.hidden_size, format.moe_intermediate_size
    low, high = (60, 100) if isinstance(format, Nvfp4Rows) else (112, 118)

    def matrix(n: int, k: int) -> tuple[Tensor, Tensor]:
        codes = torch.randint(0, len(format.levels), (n, k), dtype=torch.uint8, generator=rng)
        shape = (n, k // format.scale_block)
        return codes, torch.randint(low, high, shape, dtype=torch.uint8, generator=rng)

    rows = []
    for _ in range(EXPERTS):
        matrices = matrix(i, d), matrix(i, d), matrix(d, i)
        if isinstance(format, Nvfp4Rows):
            scales = torch.rand(3, generator=rng) * 2**-8
            rows.append(format.pack_scaled(*matrices, scales))
        else:
            rows.append(format.pack(*matrices))
    bases = torch.stack([format.row_base(row) for row in rows])
    return ExpertPool(format, torch.stack(rows[::-1]), bases)


SLOTS = torch.arange(EXPERTS - 1, -1, -1)


def shared_expert(d: int, i: int) -> SharedExpert:
    rng = torch.Generator().manual_seed(3)

    def dense(n: int, k: int) -> tuple[Tensor, Tensor]:
        weight = torch.randn(n, k, generator=rng).to(torch.float8_e4m3fn)
        return weight, torch.full((-(-n // 128), -(-k // 128)), 2.0**-5)

    return SharedExpert.fp8(dense(i, d), dense(i, d), dense(d, i))


def step(t: int, d: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """x [t, d], ids [t, 2] distinct in a row, weights."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(t, d, generator=rng).bfloat16() * 4
    ids = torch.stack([torch.randperm(EXPERTS, generator=rng)[:2] for _ in range(t)])
    return x, ids, torch.rand(t, 2, generator=rng)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize(
    ("kind", "d", "i", "t", "weigh_output"),
    [
        (W2Rows, 256, 64, 8, False),
        (W2Rows, 416, 96, 3, True),
        (W2Rows, 64, 2048, 1, False),
        (Mxfp4Rows, 256, 64, 3, True),
        (Mxfp4Rows, 64, 2048, 1, False),
    ],
)
def test_a_step_has_the_bits_of_the_separate_kernels(
    launcher: Emulator, kind: type[ExpertRows], d: int, i: int, t: int, weigh_output: bool
) -> None:
    experts, shared = pool(kind(d, i), d + i), shared_expert(d, i)
    x, ids, weights = step(t, d)
    space, error = Workspace.allocate("cpu", 1 << 16, 64), ERROR.clone()
    q, scale = quantise(launcher, x)
    extra = shared(launcher, q, scale, limit=10.0, error=error, workspace=space)
    expected = experts.mixture(
        launcher,
        x,
        ids,
        weights,
        SLOTS,
        limit=10.0,
        error=error,
        weigh_output=weigh_output,
        shared=extra,
    )
    for source in ((x, None), (q, scale)):
        choice = given(launcher, ids, weights, SLOTS, d, error=error)
        found = mix(
            launcher,
            source[0],
            choice,
            experts,
            limit=10.0,
            error=error,
            x_scale=source[1],
            shared=shared,
            weigh_output=weigh_output,
            output="f32",
        )
        assert torch.equal(found, expected)
    assert int(error) == 0
    assert found.abs().sum() > 0


def test_nvfp4_matches_float64(launcher: Emulator) -> None:
    format = Nvfp4Rows(64, 2048)
    experts = pool(format, 2)
    x, ids, weights = step(3, 64)
    error = ERROR.clone()
    choice = given(launcher, ids, weights, SLOTS, 64, error=error)
    found = mix(launcher, x, choice, experts, limit=10.0, error=error, output="f32")
    expected = torch.zeros(3, 64, dtype=torch.float64)
    rounded = rounding(launcher, x)
    for token in range(3):
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            w1, w3, w2 = (w.double() for w in format.unpack(experts.rows[SLOTS[expert]]))
            gate = (w1 @ rounded[token]).bfloat16().double().clamp(max=10.0)
            up = (w3 @ rounded[token]).bfloat16().double().clamp(-10.0, 10.0)
            h = (torch.nn.functional.silu(gate) * up * weight).bfloat16()
            expected[token] += w2 @ rounding(launcher, h[None])[0]
    assert relative(found, expected) < 2**-7
    assert int(error) == 0


def rounding(launcher: Emulator, x: Tensor) -> Tensor:
    """What e4m3 per 128 leaves of x, float64."""
    q, scale = quantise(launcher, x)
    words = q.view(*q.shape[:-1], -1, 2, 4, 4).transpose(-3, -2).reshape(q.shape)
    values = words.view(torch.float8_e4m3fn).double()
    return values * scale.double().repeat_interleave(128, 1)[:, : x.shape[1]]


def test_two_formats_in_one_step_are_each_their_own(launcher: Emulator) -> None:
    d, i = 256, 64
    base, exact = pool(W2Rows(d, i), 4), pool(Mxfp4Rows(d, i), 5)
    x, ids, weights = step(3, d)
    error, one = ERROR.clone(), torch.full((EXPERTS,), -1)
    one[2] = int(SLOTS[2])
    options = {"limit": 10.0, "error": error, "output": "f32"}
    choice = given(launcher, ids, weights, SLOTS, d, error=error, preferred=one)
    found = mix(launcher, x, choice, base, preferred=exact, **options)  # type: ignore[arg-type]
    expected = []
    for token in range(3):
        parts = []
        for k in range(2):
            which = exact if int(ids[token, k]) == 2 else base
            alone = given(
                launcher,
                ids[token : token + 1, k : k + 1].contiguous(),
                weights[token : token + 1, k : k + 1].contiguous(),
                SLOTS,
                d,
                error=error,
            )
            row = x[token : token + 1]
            parts.append(mix(launcher, row, alone, which, **options))  # type: ignore[arg-type]
        expected.append(parts[0] + parts[1])
    assert torch.equal(found, torch.cat(expected))
    assert int(error) == 0


def test_a_row_does_not_depend_on_its_batch(launcher: Emulator) -> None:
    d = 256
    experts, shared = pool(W2Rows(d, 64), 6), shared_expert(d, 64)
    x, ids, weights = step(8, d)
    error = ERROR.clone()

    def run(rows: slice) -> Tensor:
        ids_, weights_ = ids[rows].contiguous(), weights[rows].contiguous()
        choice = given(launcher, ids_, weights_, SLOTS, d, error=error)
        return mix(
            launcher,
            x[rows],
            choice,
            experts,
            limit=10.0,
            error=error,
            shared=shared,
        )

    together = run(slice(0, 8))
    for t in (0, 3, 7):
        assert torch.equal(run(slice(t, t + 1)), together[t : t + 1])
    assert torch.equal(run(slice(2, 5)), together[2:5])


@pytest.mark.parametrize("sigmoid", [False, True])
def test_choose_is_the_router_of_the_separate_kernels(launcher: Emulator, sigmoid: bool) -> None:
    rng = torch.Generator().manual_seed(7)
    x = torch.randn(5, 1024, generator=rng).bfloat16()
    weight = StreamLinear.bf16(torch.randn(70, 1024, generator=rng).bfloat16())
    bias = torch.randn(70, generator=rng)
    space, error = Workspace.allocate("cpu", 1 << 14, 64), ERROR.clone()
    logits = weight(launcher, x, None, error=error, workspace=space, output="f32")
    ids, weights = route(launcher, logits, top_k=6, scaling_factor=1.5, bias=bias, sigmoid=sigmoid)
    router = Router(weight, 6, 1.5, bias, sigmoid=sigmoid)
    slot_of = torch.randperm(70, generator=rng)
    positions = torch.tensor([4, 9, -1, 0, 7])
    for _ in range(2):  # counters are as they were
        choice = choose(
            launcher, x, router, slot_of, error=error, workspace=space, positions=positions
        )
        valid = positions >= 0
        assert torch.equal(choice.expert_ids[valid], ids[valid])
        assert torch.equal(choice.weights[valid], weights[valid])
        assert (choice.expert_ids[2] == -1).all()
        assert (choice.weights[2] == 0).all()
        check_list(choice, slot_of)
    assert not space.counters.any()
    table = torch.stack([torch.randperm(70, generator=rng)[:6] for _ in range(9)])
    tokens = torch.tensor([8, 0, 3, 3, 1])
    hashed = Router(weight, 6, 1.5, table=table, sigmoid=sigmoid)
    choice = choose(launcher, x, hashed, slot_of, error=error, workspace=space, token_ids=tokens)
    chosen = table[tokens]
    _, weights = route(launcher, logits, top_k=6, scaling_factor=1.5, given=chosen, sigmoid=sigmoid)
    assert torch.equal(choice.expert_ids, chosen)
    assert torch.equal(choice.weights, weights)
    check_list(choice, slot_of)
    assert int(error) == 0


def check_list(choice: Choice, slot_of: Tensor) -> None:
    """The list holds every pair once, experts in order, and the counters are zero."""
    count = int(choice.num_chosen)
    found = set()
    raw = choice.chosen[:count].contiguous().view(torch.uint8).view(count, 16)
    experts = choice.chosen[:count, 1].tolist()
    assert experts == sorted(set(experts))
    for row, (slot, expert, _, _) in zip(raw, choice.chosen[:count].tolist(), strict=True):
        assert slot == slot_of[expert]
        found |= {(t, int(c), expert) for t, c in enumerate(row[8:]) if c != 255}
    ids = choice.expert_ids
    expected = {
        (t, k, int(e)) for t, row in enumerate(ids) for k, e in enumerate(row) if int(e) >= 0
    }
    assert found == expected
    assert not choice.counters.any()


def test_what_is_not_resident_is_an_error_and_never_silent(launcher: Emulator) -> None:
    d = 128
    experts = pool(W2Rows(d, 64), 8)
    x, ids, weights = step(4, d)
    ids[0], ids[1], ids[2], ids[3] = (torch.tensor(v) for v in ([0, 1], [1, 2], [3, 4], [-1, -1]))
    slots = SLOTS.clone()
    slots[2] = -1
    error = ERROR.clone()
    choice = given(launcher, ids, weights, slots, d, error=error)
    out = mix(launcher, x, choice, experts, limit=10.0, error=error)
    assert int(error) == 1
    assert out[0].isfinite().all()
    assert out[1].isnan().all()
    assert out[2].isfinite().all()
    assert (out[3] == 0).all()
    error.zero_()
    ids[2, 1] = 99
    choice = given(
        launcher, ids[2:3].contiguous(), weights[2:3].contiguous(), SLOTS, d, error=error
    )
    out = mix(launcher, x[2:3], choice, experts, limit=10.0, error=error)
    assert int(error) == 1
    assert out.isnan().all()
    error.zero_()
    ids[2, 1] = ids[2, 0]
    given(launcher, ids[2:3].contiguous(), weights[2:3].contiguous(), SLOTS, d, error=error)
    assert int(error) == 2


def test_no_tokens_and_only_tokens_without_experts_are_no_work(launcher: Emulator) -> None:
    d = 128
    experts = pool(W2Rows(d, 64), 9)
    x, ids, weights = step(2, d)
    ids.fill_(-1)
    error = ERROR.clone()
    choice = given(launcher, ids, weights, SLOTS, d, error=error)
    out = mix(launcher, x, choice, experts, limit=10.0, error=error)
    assert (out == 0).all()
    choice = given(launcher, ids[:0], weights[:0], SLOTS, d, error=error)
    assert mix(launcher, x[:0], choice, experts, limit=10.0, error=error).shape == (0, d)
    assert int(error) == 0


def test_too_many_tokens_are_refused_by_name(launcher: Emulator) -> None:
    _, ids, weights = step(9, 128)
    with pytest.raises(UnsupportedError, match="9 tokens"):
        given(launcher, ids, weights, SLOTS, 128, error=ERROR)


def test_combining_agrees_with_the_separate_kernel(launcher: Emulator) -> None:
    """Shared expert alone: what is left when no token has experts."""
    d = 256
    experts, shared = pool(W2Rows(d, 64), 10), shared_expert(d, 64)
    x, ids, weights = step(2, d)
    ids.fill_(-1)
    error, space = ERROR.clone(), Workspace.allocate("cpu", 1 << 14, 64)
    choice = given(launcher, ids, weights, SLOTS, d, error=error)
    out = mix(launcher, x, choice, experts, limit=10.0, error=error, shared=shared)
    extra = shared(launcher, *quantise(launcher, x), limit=10.0, error=error, workspace=space)
    nothing = torch.zeros(2, d).bfloat16()
    alone = combine(launcher, nothing, top_k=1, shared=extra, dtype=torch.bfloat16)
    assert torch.equal(out, alone)


def test_activations_in_matrix_order_are_the_recipe() -> None:
    x = torch.arange(64, dtype=torch.uint8).view(1, 64)
    assert layout.to_mma_order(x)[0, 4:8].tolist() == [8, 9, 10, 11]
