"""Streams: collapse, doubly stochastic mixing, expansion."""

import pytest
import torch
from torch import Tensor

from moet.kernels.hyper_connection import hc_head, hc_post, hc_pre, sinkhorn


def site(dim: int = 24) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(24, 4 * dim) * 0.2, torch.randn(24), torch.rand(3) + 0.5


def pre(streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return hc_pre(streams, fn, base, scale, norm_eps=1e-6, hc_eps=1e-6, num_iters=20)


def test_sinkhorn_golden() -> None:
    rows = [[-2, -1, 0, 1], [2.25, -1.75, -0.75, 0.25], [1.5, 2.5, -1.5, -0.5]]
    logits = torch.tensor([[*rows, [0.75, 1.75, 2.75, -1.25]]])
    mix = sinkhorn(logits, num_iters=20, eps=1e-6)[0]
    expected = [
        [0.0168942, 0.0589653, 0.2058068, 0.7183328],
        [0.7183332, 0.0168946, 0.0589654, 0.2058058],
    ]
    torch.testing.assert_close(mix[:2], torch.tensor(expected), atol=1e-6, rtol=0)


def test_sinkhorn_ends_on_columns() -> None:
    one = sinkhorn(torch.randn(3, 4, 4), num_iters=1, eps=1e-6)
    torch.testing.assert_close(one.sum(1), torch.ones(3, 4), atol=1e-4, rtol=0)
    assert (one.sum(2) - 1).abs().max() > 1e-2  # rows are only right in the limit
    many = sinkhorn(torch.randn(3, 4, 4), num_iters=50, eps=1e-6)
    torch.testing.assert_close(many.sum(2), torch.ones(3, 4), atol=1e-2, rtol=0)


def test_post_may_vanish_and_reaches_two() -> None:
    fn, base, scale = site()
    base[4:8] = torch.tensor([-200.0, 200.0, 0.0, 0.0])
    _, post, _ = pre(torch.randn(3, 4, 24), fn * 0, base, scale)
    assert (post[:, 0] == 0).all()  # no floor here, unlike the collapse
    assert (post[:, 1] == 2).all()
    assert (post[:, 2:] == 1).all()


def test_collapse_has_a_floor() -> None:
    fn, base, scale = site()
    base[:4] = -200.0
    streams = torch.ones(1, 4, 24)
    x, _, _ = pre(streams, fn * 0, base, scale)
    torch.testing.assert_close(x, torch.full((1, 24), 4e-6))


def test_mixing_sums_over_the_first_index() -> None:
    streams, y = torch.randn(2, 4, 24), torch.randn(2, 24)
    post, mix = torch.rand(2, 4), torch.rand(2, 4, 4)
    expected = post[..., None] * y[:, None] + torch.einsum("tjk,tjd->tkd", mix, streams)
    torch.testing.assert_close(hc_post(y, streams, post, mix), expected)


def test_logits_use_the_mean_square_over_all_streams() -> None:
    streams = torch.randn(2, 4, 24)
    fn, base, scale = site()
    z = streams.flatten(1)
    m = (z @ fn.t()) * torch.rsqrt(z.square().mean(1, keepdim=True) + 1e-6)
    expected = 2 * torch.sigmoid(m[:, 4:8] * scale[1] + base[4:8])
    torch.testing.assert_close(pre(streams, fn, base, scale)[1], expected)


def test_head_is_a_collapse_alone() -> None:
    streams = torch.randn(3, 4, 24)
    fn, base, scale = torch.randn(4, 96) * 0.1, torch.randn(4), torch.tensor([1.3])
    z = streams.flatten(1)
    m = (z @ fn.t()) * torch.rsqrt(z.square().mean(1, keepdim=True) + 1e-6)
    weights = torch.sigmoid(m * 1.3 + base) + 1e-6
    got = hc_head(streams, fn, base, scale, norm_eps=1e-6, hc_eps=1e-6)
    torch.testing.assert_close(got, torch.einsum("th,thd->td", weights, streams))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_depend_on_each_other(dtype: torch.dtype) -> None:
    streams, parameters = torch.randn(37, 4, 24).to(dtype), site()
    whole = pre(streams, *parameters)
    y = torch.randn(37, 24).to(dtype)
    expanded = hc_post(y, streams, *whole[1:])
    for size in (1, 3, 17):
        parts = [pre(part, *parameters) for part in torch.split(streams, size)]
        for got, expected in zip(zip(*parts, strict=True), whole, strict=True):
            assert torch.equal(torch.cat(got), expected)
        posts = zip(
            torch.split(y, size), torch.split(streams, size), (p[1:] for p in parts), strict=True
        )
        assert torch.equal(torch.cat([hc_post(a, b, *c) for a, b, c in posts]), expanded)


def test_no_rows() -> None:
    x, post, mix = pre(torch.zeros(0, 4, 24), *site())
    assert (x.shape, post.shape, mix.shape) == ((0, 24), (0, 4), (0, 4, 4))
    assert hc_post(x, torch.zeros(0, 4, 24), post, mix).shape == (0, 4, 24)
