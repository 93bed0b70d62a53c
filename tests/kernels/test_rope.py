"""Rotation of interleaved pairs, both frequency tables, and the way back."""

import math

import pytest
import torch

from moet.kernels.rope import Yarn, rope, rope_cos_sin, rope_frequencies

YARN = Yarn(factor=16, original_max_position_embeddings=65536, beta_fast=32, beta_slow=1)


def test_plain_frequencies() -> None:
    f = rope_frequencies(64, 1e4)
    assert f[0] == 1
    assert f[1].item() == pytest.approx(0.749894202, rel=1e-7)
    assert f[31].item() == pytest.approx(1.33352150e-4, rel=1e-7)


def test_yarn_frequencies() -> None:
    f = rope_frequencies(64, 1.6e5, YARN)
    expected = {
        0: 1.0,
        1: 0.687656045,
        15: 3.63553851e-3,
        16: 2.26562493e-3,
        20: 2.96977785e-4,
        24: 1.95312532e-5,
        25: 5.37231244e-6,
        31: 5.6805294e-7,
    }
    for pair, value in expected.items():
        assert f[pair].item() == pytest.approx(value, rel=1e-6)
    plain = rope_frequencies(64, 1.6e5)
    assert torch.equal(f[:16], plain[:16])
    assert torch.equal(f[25:], plain[25:] / 16)


def test_pairs_are_neighbours_and_only_the_last_dims_turn() -> None:
    x = torch.arange(1.0, 13.0).view(1, 12)
    cos, sin = rope_cos_sin(torch.tensor([3]), torch.tensor([1.0, 0.25]))
    y = rope(x, cos, sin)[0]
    assert torch.equal(y[:8], x[0, :8])
    for pair, angle in ((8, 3.0), (10, 0.75)):
        a, b = float(x[0, pair]), float(x[0, pair + 1])
        assert float(y[pair]) == pytest.approx(a * math.cos(angle) - b * math.sin(angle), rel=1e-5)
        assert float(y[pair + 1]) == pytest.approx(
            b * math.cos(angle) + a * math.sin(angle), rel=1e-5
        )


@pytest.mark.parametrize("num_rows", [0, 1, 3, 17])
def test_inverse_turns_back_and_sizes_stay(num_rows: int) -> None:
    x = torch.randn(num_rows, 4, 96)
    positions = torch.arange(num_rows) * 61_681  # up to about a million
    cos, sin = rope_cos_sin(positions, rope_frequencies(64, 1.6e5, YARN))
    y = rope(x, cos, sin)
    torch.testing.assert_close(rope(y, cos, sin, inverse=True), x, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))  # no magnitude factor


def test_rows_do_not_depend_on_each_other() -> None:
    x, positions = torch.randn(17, 2, 72), torch.randint(0, 1 << 20, (17,))
    frequencies = rope_frequencies(64, 1e4)
    whole = rope(x, *rope_cos_sin(positions, frequencies))
    for i in range(17):
        alone = rope(x[i : i + 1], *rope_cos_sin(positions[i : i + 1], frequencies))
        assert torch.equal(alone[0], whole[i])


def test_large_positions_keep_their_angle() -> None:
    cos, _ = rope_cos_sin(torch.tensor([1_048_575]), torch.tensor([1.0]))
    assert float(cos[0, 0]) == pytest.approx(math.cos(1_048_575), abs=1e-6)


def test_bf16_is_rounded_once() -> None:
    x = torch.randn(3, 80).bfloat16()
    cos, sin = rope_cos_sin(torch.arange(3), rope_frequencies(64, 1e4))
    assert torch.equal(rope(x, cos, sin), rope(x.float(), cos, sin).bfloat16())
