"""The prefill GEMM in emulation: bit for bit the streaming GEMM, whatever shares the tile."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moet.kernels import prefill_gemm
from moet.kernels.decode_experts import given as given_experts
from moet.kernels.decode_experts import mix
from moet.kernels.layout import ExpertRows, Mxfp4Rows, W2Rows
from moet.kernels.nvfp4_rows import Nvfp4Rows
from moet.kernels.stream_experts import ExpertPool, SharedExpert, Work, quantise
from moet.kernels.stream_gemm import StreamLinear, Workspace
from tests.kernels.emulation import Emulator
from tests.kernels.test_stream_gemm import ERROR, pool, quantised, relative


def routed(t: int, experts: int, seed: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(experts, generator=rng)[:2] for _ in range(t)])
    return ids, torch.rand(t, 2, generator=rng)


@pytest.mark.parametrize(
    ("kind", "d", "i", "few"),
    [(W2Rows, 640, 64, 24), (Mxfp4Rows, 640, 96, 24), (W2Rows, 64, 2048, 0)],
)
def test_prefilled_rows_have_the_bits_of_decoded_rows(
    launcher: Emulator,
    kind: type[ExpertRows],
    d: int,
    i: int,
    few: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefill_gemm, "FEW_FOR_EXPERTS", few)
    experts, _ = pool(kind(d, i), 3, 1)
    slot_of, error = torch.arange(3), ERROR.clone()
    ids, weights = routed(9, 3, 2)
    x = torch.randn(9, d, generator=torch.Generator().manual_seed(3)).bfloat16()
    arguments = (x, ids, weights, slot_of)
    decoded = experts.mixture(launcher, *arguments, limit=10.0, error=error)
    found = prefill_gemm.mixture(launcher, experts, *arguments, limit=10.0, error=error)
    assert torch.equal(found, decoded)
    assert int(error) == 0


@pytest.mark.parametrize(("d", "i"), [(416, 96), (64, 2048)])
def test_nvfp4_experts_have_the_bits_of_the_decode_step(launcher: Emulator, d: int, i: int) -> None:
    format, rng = Nvfp4Rows(d, i), torch.Generator().manual_seed(d)

    def matrix(n: int, k: int) -> tuple[Tensor, Tensor]:
        codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=rng)
        return codes, torch.randint(60, 100, (n, k // 16), dtype=torch.uint8, generator=rng)

    rows = [
        format.pack_scaled(matrix(i, d), matrix(i, d), matrix(d, i), torch.rand(3, generator=rng))
        for _ in range(2)
    ]
    experts = ExpertPool(format, torch.stack(rows), torch.empty(2, 0, dtype=torch.uint8))
    ids, weights = routed(5, 2, 8)
    x, slot_of, error = torch.randn(5, d, generator=rng).bfloat16(), torch.arange(2), ERROR.clone()
    choice = given_experts(launcher, ids, weights, slot_of, d, error=error)
    decoded = mix(launcher, x, choice, experts, limit=10.0, error=error, output="f32")
    found = prefill_gemm.mixture(
        launcher, experts, x, ids, weights, slot_of, limit=10.0, error=error
    )
    assert torch.equal(found, decoded)
    streamed = experts.mixture(launcher, x, ids, weights, slot_of, limit=10.0, error=error)
    assert torch.equal(found, streamed)
    assert found.isfinite().all()
    assert int(error) == 0


def test_an_entry_of_too_many_rows_is_reported(launcher: Emulator) -> None:
    experts, _ = pool(W2Rows(128, 64), 2, 4)
    rows = prefill_gemm.tile_rows(launcher)
    entries = torch.tensor([[0, 0, 0, rows + 1]], dtype=torch.int32)
    work = Work(entries, torch.ones(1, dtype=torch.int32), torch.arange(rows + 1).int())
    x, error = torch.randn(rows + 1, 128).bfloat16(), ERROR.clone()
    tiles = prefill_gemm.make_tiles(launcher, x, work=work)
    prefill_gemm.gate_up(launcher, experts, tiles, work, pair_weight=None, limit=None, error=error)
    assert int(error) == 2


def test_tiles_of_many_rows_are_cut_and_ragged(launcher: Emulator) -> None:
    experts, values = pool(W2Rows(128, 64), 2, 4)
    t = prefill_gemm.tile_rows(launcher) + 3
    ids = torch.zeros(t, 1, dtype=torch.int64)
    ids[5] = 1
    work = prefill_gemm.plan_rows(ids, torch.arange(2), prefill_gemm.tile_rows(launcher))
    assert int(work.num_entries) == 3
    x = torch.randn(t, 128, generator=torch.Generator().manual_seed(5)).bfloat16()
    tiles = prefill_gemm.make_tiles(launcher, x, work=work)
    h = prefill_gemm.gate_up(
        launcher, experts, tiles, work, pair_weight=None, limit=None, error=ERROR
    )
    for row in range(t):
        w1, w3, _ = (w.double() for w in values[int(ids[row])])
        exact = torch.mul(*quantised(x[row]))
        expected = torch.nn.functional.silu(w1 @ exact) * (w3 @ exact)
        assert relative(h[row], expected) < 2**-6


@given(st.lists(st.integers(0, 6), max_size=120), st.sampled_from([8, 16, 64]))
def test_plan_rows_cuts_each_expert_into_few_even_entries(chosen: list[int], rows: int) -> None:
    ids = torch.tensor(chosen, dtype=torch.int64).view(-1, 1)
    slot_of = torch.arange(7).flip(0)
    work = prefill_gemm.plan_rows(ids, slot_of, rows)
    entries = work.entries[: int(work.num_entries)].tolist()
    assert work.pairs.tolist() == sorted(range(len(chosen)), key=lambda i: chosen[i])
    place = 0
    for slot, expert, first, count in entries:
        assert first == place
        assert slot == int(slot_of[expert])
        assert 0 < count <= rows
        assert all(chosen[int(work.pairs[p])] == expert for p in range(first, first + count))
        place += count
    assert place == len(chosen)
    for expert in set(chosen):
        counts = [count for _, e, _, count in entries if e == expert]
        assert len(counts) == -(-sum(counts) // rows)
        assert len(set(counts[:-1])) <= 1
        assert all(count % 8 == 0 for count in counts[:-1])


@pytest.mark.parametrize("pairs", [6, 2500])
def test_a_chunk_is_planned_in_one_launch(pairs: int, launcher: Emulator) -> None:
    ids = torch.randint(3, (pairs, 1), generator=torch.Generator().manual_seed(pairs)) * 2 % 5
    slot_of = torch.arange(5).flip(0)  # experts 1 and 3 have no pairs
    work = prefill_gemm.plan_chunk(launcher, ids, slot_of, 64)
    wanted = prefill_gemm.plan_rows(ids, slot_of, 64)
    count = int(wanted.num_entries)
    assert int(work.num_entries) == count
    assert torch.equal(work.entries[:count], wanted.entries[:count])
    assert torch.equal(work.pairs, wanted.pairs)


@pytest.mark.parametrize(("n", "k"), [(64, 1024), (200, 416)])
def test_fp8_linear_has_the_bits_of_the_streaming_kernel(
    launcher: Emulator, n: int, k: int
) -> None:
    rng = torch.Generator().manual_seed(n)
    weight = torch.randn(n, k, generator=rng).to(torch.float8_e4m3fn)
    scale = 2.0 ** torch.randint(-3, 3, (-(-n // 128), -(-k // 128)), generator=rng).float()
    linear = StreamLinear.fp8(weight, scale)
    x = torch.randn(5, k, generator=rng).bfloat16()
    x_q, x_scale = quantise(launcher, x)
    space = Workspace.allocate("cpu", 8 * 5 * n, 64)
    streamed = linear(launcher, x_q, x_scale, error=ERROR, workspace=space)
    tiles = prefill_gemm.make_tiles(launcher, x)
    assert torch.equal(prefill_gemm.linear(launcher, linear, tiles, 5, error=ERROR), streamed)
    streamed = linear(launcher, x_q, x_scale, error=ERROR, workspace=space, output="f32")
    found = prefill_gemm.linear(launcher, linear, tiles, 5, error=ERROR, output="f32")
    assert torch.equal(found, streamed)


def test_bf16_linear_has_the_bits_of_the_streaming_kernel(launcher: Emulator) -> None:
    weight, x = torch.randn(72, 192).bfloat16(), torch.randn(3, 192).bfloat16()
    linear = StreamLinear.bf16(weight)
    space = Workspace.allocate("cpu", 8 * 3 * 72, 64)
    streamed = linear(launcher, x, None, error=ERROR, workspace=space)
    tiles = prefill_gemm.make_tiles(launcher, x, fp8=False)
    assert torch.equal(prefill_gemm.linear(launcher, linear, tiles, 3, error=ERROR), streamed)
    streamed = linear(launcher, x, None, error=ERROR, workspace=space, output="f32")
    few = prefill_gemm.rows_of(launcher, linear, 3, "f32")
    assert few == (32 if launcher.sm == 90 else None)
    tiles = prefill_gemm.make_tiles(launcher, x, fp8=False, rows=few)
    found = prefill_gemm.linear(launcher, linear, tiles, 3, error=ERROR, output="f32")
    assert torch.equal(found, streamed)


@pytest.mark.parametrize("codec", ["fp8", "bf16"])
def test_a_row_has_the_same_bits_in_a_full_tile_and_alone(launcher: Emulator, codec: str) -> None:
    """Several slices of several chunks; the last tiles of both sides are not full."""
    n, k, rng = 72, 1024, torch.Generator().manual_seed(6)
    t = prefill_gemm.tile_rows(launcher) + 3
    weight, fp8 = torch.randn(n, k, generator=rng), codec == "fp8"
    if fp8:
        scale = torch.rand(-(-n // 128), k // 128, generator=rng)
        linear = StreamLinear.fp8(weight.to(torch.float8_e4m3fn), scale)
    else:
        linear = StreamLinear.bf16(weight.bfloat16())
    assert linear.slices(launcher) > 1
    x = torch.randn(t, k, generator=rng).bfloat16()
    tiles = prefill_gemm.make_tiles(launcher, x, fp8=fp8)
    together = prefill_gemm.linear(launcher, linear, tiles, t, error=ERROR)
    for row in (0, 77 % t, t - 1):
        tiles = prefill_gemm.make_tiles(launcher, x[row : row + 1], fp8=fp8)
        alone = prefill_gemm.linear(launcher, linear, tiles, 1, error=ERROR)
        assert torch.equal(together[row], alone[0])


@pytest.mark.parametrize("kind", [W2Rows, Mxfp4Rows])
def test_experts_with_full_tiles_have_the_bits_of_few_rows(
    launcher: Emulator, kind: type[ExpertRows]
) -> None:
    """Hidden values of several segments; an expert without rows, one with one, one with many."""
    experts, _ = pool(kind(64, 2048), 3, 7)
    t = prefill_gemm.tile_rows(launcher) + 1
    x, error = torch.randn(t, 64, generator=torch.Generator().manual_seed(8)).bfloat16(), ERROR
    ids = torch.full((t, 1), 2)
    ids[0] = 0
    arguments = (torch.ones(t, 1), torch.arange(3))
    together = prefill_gemm.mixture(launcher, experts, x, ids, *arguments, limit=10.0, error=error)
    for row in (0, t - 1):
        one = slice(row, row + 1)
        alone = experts.mixture(
            launcher, x[one], ids[one], arguments[0][one], arguments[1], limit=10.0, error=error
        )
        assert torch.equal(together[row], alone[0])


def test_shared_expert_has_the_bits_of_the_streaming_kernel(launcher: Emulator) -> None:
    rng = torch.Generator().manual_seed(15)

    def dense(n: int, k: int) -> tuple[Tensor, Tensor]:
        weight = torch.randn(n, k, generator=rng).to(torch.float8_e4m3fn)
        return weight, torch.full((-(-n // 128), -(-k // 128)), 2.0**-4)

    expert = SharedExpert.fp8(dense(96, 256), dense(96, 256), dense(256, 96))
    x = torch.randn(3, 256, generator=rng).bfloat16()
    space = Workspace.allocate("cpu", 4096, 64)
    q, scale = quantise(launcher, x)
    streamed = expert(launcher, q, scale, limit=10.0, error=ERROR, workspace=space)
    tiles = prefill_gemm.make_tiles(launcher, x)
    found = prefill_gemm.shared_expert(launcher, expert, tiles, 3, limit=10.0, error=ERROR)
    assert torch.equal(found, streamed)
