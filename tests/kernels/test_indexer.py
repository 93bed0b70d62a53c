"""Index scores and the choice of entries."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moet.kernels.indexer import index_scores, select_top_k


def test_scores_sum_weighted_relu_over_heads() -> None:
    q, keys, weights = torch.randn(32, 16), torch.randn(21, 16), torch.randn(32)
    expected = (torch.relu(keys @ q.t()) * weights).sum(1)
    torch.testing.assert_close(index_scores(q, keys, weights), expected, atol=1e-4, rtol=1e-4)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=40), st.integers(1, 40))
def test_highest_scores_win_and_of_equal_ones_the_lowest_index(
    scores: list[int], wanted: int
) -> None:
    k = min(wanted, len(scores))
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    got = select_top_k(torch.tensor([float(s) for s in scores]), k=k)
    assert got.tolist() == sorted(order[:k])
