"""The kernel of latent attention in emulation, against its reference."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch

from moet.kernels.cache import PlanedFormat
from moet.kernels.device_latents import LATENT, ROPE, attend_chosen
from moet.kernels.mla_attention import latent_attention
from moet.kernels.mla_cache import Fp8LatentRows, Nvfp4LatentRows
from tests.kernels import emulation
from tests.kernels.accelerated.world import assert_close, make_rows, paged

PAGE = 64


# Rows of one CTA, of which one has one key and one only fills; a rank's heads, and all.
@pytest.mark.parametrize(
    ("form", "heads"),
    [(Nvfp4LatentRows(LATENT, ROPE, PAGE), 16), (Fp8LatentRows(LATENT, ROPE, PAGE), 64)],
    ids=["nvfp4", "fp8"],
)
def test_rows_attend_as_the_reference_does(form: PlanedFormat, heads: int) -> None:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    launcher = emulation.build(("latent_attention",), 90, num_sms=1)
    torch.manual_seed(5)
    pieces, cpu = [(0, 1), (150, 151)], torch.device("cpu")
    rows = make_rows(pieces, short=True, device=cpu, page_size=PAGE, fill=1)
    nowhere = torch.full_like(rows.page_table[:1], -1)
    rows = replace(rows, page_table=torch.cat((rows.page_table, nowhere)))
    rows.page_rows[2] = 2
    selected = torch.full((3, 128), -1, dtype=torch.int32)
    selected[0, 0] = 0
    selected[1] = torch.randperm(151)[:128].sort().values
    query = torch.randn(3, heads, LATENT + ROPE).bfloat16()
    latents, scale = paged(form, rows), (LATENT + ROPE) ** -0.5
    want = latent_attention(query, latents, selected, rows, scale=scale, latent_dim=LATENT)
    got = attend_chosen(launcher, query, latents, selected, rows, scale=scale)
    assert_close(got, want, latent_attention.tolerance)
    assert (got[2] == 0).all()
