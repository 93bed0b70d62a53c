"""The random experts of the kernel bench are within their formats."""

from __future__ import annotations

import pytest

from bench.kernels.rig import random_pool
from moet.kernels.layout import ExpertRows, Mxfp4Rows, W2Rows


@pytest.mark.parametrize("format", [W2Rows(512, 128), Mxfp4Rows(512, 128)])
def test_no_scale_lies_above_what_its_base_reaches(format: ExpertRows) -> None:
    pool = random_pool(format, 3, "cpu")
    for row, base in zip(pool.rows, pool.bases, strict=True):
        assert (base >= format.row_base(row)).all()
