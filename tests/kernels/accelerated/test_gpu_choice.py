"""Scores and choice of entries on a GPU at released shapes and long contexts: the same bits by
whatever form scores, the same entries by whatever form chooses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moet.kernels import device_choice, triton_index_scores, triton_indexer
from moet.kernels.cache import Cache, Mxfp4Rows
from moet.kernels.cubin import device_arch
from moet.kernels.device_gemm import Device
from moet.kernels.mla_cache import Fp8IndexKeys
from tests.kernels.accelerated.conftest import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="emulation tests it on a CPU")

NAN, INF = float("nan"), float("inf")


def kinds_of_scores(width: int, device: torch.device) -> Tensor:
    scores = torch.randn(7, width, device=device)
    scores[1] = scores[1].round()
    scores[2] = torch.tensor([0.0, -0.0], device=device).repeat(width // 2)
    scores[3] = -scores[3].abs()
    scores[4, 5::9], scores[4, 7::11], scores[4, 100] = INF, -INF, NAN
    scores[5] = 1.0 + scores[5] * 1e-4
    return scores


@pytest.mark.parametrize("top_k", [512, 2048])
@pytest.mark.parametrize("width", [4096, 32896, 262144, 1 << 20])
def test_a_cluster_chooses_as_programs_do(width: int, top_k: int, device: torch.device) -> None:
    launcher = Device.open(device_arch(device), device).launcher
    scores = kinds_of_scores(width, device)
    for seen in (width, width // 2 + 3, top_k + 1, top_k, 3):
        positions = torch.full((len(scores),), 4 * seen + 2, device=device)
        positions[-1] = -1
        want, found = (
            torch.full((len(scores), top_k), 9, dtype=torch.int32, device=device) for _ in "ab"
        )
        triton_indexer._choose(scores, positions, 4, want)
        device_choice.run(launcher, scores, positions, found, ratio=4)
        assert torch.equal(found, want), seen


@pytest.mark.parametrize("glm", [False, True])
def test_rows_of_steps_have_the_scores_of_rows_of_chunks(
    glm: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys read ahead of the kernel that makes queries, keys read with queries, and chunks."""
    heads, ratio, top_k, pages = (32, 1, 2048, 129) if glm else (64, 4, 512, 129)
    form = Fp8IndexKeys(128, 64) if glm else Mxfp4Rows(128, 64)
    shape = 3 * pages, form.page_bytes
    held = torch.randint(64, shape, dtype=torch.uint8, device=device)
    if not glm:
        held[:, : 64 * 64] = torch.randint(256, (len(held), 64 * 64), device=device).byte()
        held[:, 64 * 64 :] += 100  # scales
    where = (
        torch.tensor([pages * 64 * ratio - 1, 5000 * ratio, -1], device=device),
        torch.arange(3, device=device),
    )
    table = torch.randperm(3 * pages, device=device).view(3, pages)
    q = torch.randn(3, heads, 128, device=device).bfloat16()
    gate = torch.randn(3, 128 + heads, device=device)[:, 128:]
    made = []
    for limit, most in (("STREAMED_ROWS", 8), ("STREAMED_ROWS", 2), ("CODED_ROWS", 2)):
        monkeypatch.setattr(triton_index_scores, limit, most)
        scores = torch.zeros(3, 64 * pages, device=device)
        facts = (q, (gate, 0.01), Cache(held, form), where, table, ratio, scores, top_k)
        triton_index_scores.score_entries(*facts)
        made.append(scores)
    assert all(torch.equal(scores, made[0]) for scores in made)
    assert made[0][0].isfinite().all()
    assert (made[0][0] != 0).any()
