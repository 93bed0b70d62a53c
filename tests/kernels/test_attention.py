"""Attention with a sink over window rows and compressed entries."""

import pytest
import torch
from torch import Tensor

from moet.kernels.attention import sparse_attention


def direct(q: Tensor, rows: Tensor, sink: Tensor, scale: float) -> Tensor:
    logits = torch.cat([q @ rows.t() * scale, sink[:, None]], 1)
    return logits.softmax(-1)[:, :-1] @ rows


@pytest.mark.parametrize("heads", [1, 4, 64])
def test_each_query_sees_exactly_its_rows(heads: int) -> None:
    q, window, compressed = torch.randn(3, heads, 32), torch.randn(9, 32), torch.randn(40, 32)
    sink = torch.randn(heads)
    spans = [(0, 3), (2, 9), (8, 9)]
    selected = [0, 17, torch.tensor([0, 5, 39])]
    got = sparse_attention(q, window, spans, compressed, selected, sink, scale=0.2)
    rows = [window[:3], torch.cat([window[2:], compressed[:17]])]
    rows.append(torch.cat([window[8:], compressed[[0, 5, 39]]]))
    for i in range(3):
        torch.testing.assert_close(got[i], direct(q[i], rows[i], sink, 0.2), atol=1e-5, rtol=1e-4)


def test_count_and_indices_are_the_same_choice() -> None:
    q, window, compressed = torch.randn(1, 4, 32), torch.randn(8, 32), torch.randn(300, 32)
    sink = torch.randn(4)
    by_count = sparse_attention(q, window, [(0, 8)], compressed, [300], sink, scale=0.1)
    every = torch.arange(300)
    by_index = sparse_attention(q, window, [(0, 8)], compressed, [every], sink, scale=0.1)
    assert torch.equal(by_count, by_index)


def test_sink_takes_weight_and_is_not_scaled() -> None:
    q, window = torch.zeros(1, 2, 16), torch.ones(3, 16)
    sink = torch.tensor([float("-inf"), 1.0])
    got = sparse_attention(q, window, [(0, 3)], window[:0], [0], sink, scale=0.01)[0]
    torch.testing.assert_close(got[0], torch.ones(16))
    torch.testing.assert_close(got[1], torch.full((16,), 3 / (3 + torch.e)))


def test_queries_do_not_depend_on_each_other() -> None:
    q, window, compressed = torch.randn(5, 4, 32), torch.randn(12, 32), torch.randn(700, 32)
    spans = [(i, i + 8) for i in range(5)]
    selected = [100 * i + 1 for i in range(5)]
    sink = torch.randn(4)
    whole = sparse_attention(q, window, spans, compressed, selected, sink, scale=0.2)
    for i in range(5):
        alone = sparse_attention(
            q[i : i + 1], window[i : i + 8], [(0, 8)], compressed, [selected[i]], sink, scale=0.2
        )
        assert torch.equal(alone[0], whole[i])
    none = sparse_attention(q[:0], window, [], compressed, [], sink, scale=0.2)
    assert none.shape == (0, 4, 32)
