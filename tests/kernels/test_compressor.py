"""Pooling by a softmax per channel, plain and overlapped."""

import pytest
import torch

from moet.kernels.compressor import pool_overlapped_windows, pool_windows


@pytest.mark.parametrize("ratio", [1, 4, 128])
@pytest.mark.parametrize("num_windows", [0, 1, 3])
def test_pool_is_a_softmax_per_channel(ratio: int, num_windows: int) -> None:
    values, scores = torch.randn(num_windows, ratio, 24), torch.randn(num_windows, ratio, 24) * 3
    expected = (values * scores.softmax(1)).sum(1)
    torch.testing.assert_close(pool_windows(values, scores), expected, atol=1e-5, rtol=1e-5)


def test_overlap_takes_the_first_half_of_before_and_the_second_of_now() -> None:
    values, scores = torch.randn(2, 8, 48), torch.randn(2, 8, 48)
    v = torch.cat([values[:, :4, :24], values[:, 4:, 24:]], 1)
    s = torch.cat([scores[:, :4, :24], scores[:, 4:, 24:]], 1)
    expected = (v * s.softmax(1)).sum(1)
    got = pool_overlapped_windows(values, scores)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_absent_rows_do_not_count() -> None:
    values, scores = torch.randn(1, 8, 48), torch.randn(1, 8, 48)
    values[:, :4], scores[:, :4] = 0, float("-inf")
    expected = (values[:, 4:, 24:] * scores[:, 4:, 24:].softmax(1)).sum(1)
    got = pool_overlapped_windows(values, scores)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_large_scores_stay_finite() -> None:
    values, scores = torch.randn(1, 4, 8), torch.full((1, 4, 8), 1e4)
    torch.testing.assert_close(pool_windows(values, scores), values.mean(1))


def test_windows_do_not_depend_on_each_other() -> None:
    values, scores = torch.randn(9, 128, 33), torch.randn(9, 128, 33)
    whole = pool_windows(values, scores)
    for i in range(9):
        assert torch.equal(pool_windows(values[i : i + 1], scores[i : i + 1])[0], whole[i])
