"""The kernel that chooses the best entries of a row, in emulation: exact at every border."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor

from moet.kernels import device_choice
from moet.kernels.indexer import select_top_k
from tests.kernels import emulation
from tests.kernels.emulation import Emulator

NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def launcher() -> Emulator:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    return emulation.build(("choose_entries",), 90, num_sms=3)


def chosen(launcher: Emulator, scores: Tensor, visible: list[int], top_k: int) -> Tensor:
    """Of rows that see so many entries of two tokens each."""
    positions = 2 * torch.tensor(visible) + (torch.tensor(visible) > 0).long() - 1
    positions = torch.where(torch.tensor(visible) > 0, positions, -1)
    out = torch.full((len(scores), top_k), 7, dtype=torch.int32)
    assert device_choice.fits(scores.shape[1], top_k)
    device_choice.run(launcher, scores.clone(), positions, out, ratio=2)
    return out


@pytest.mark.parametrize(("slices", "most_bytes", "num_rows"), [(3, 232448, 9), (2, 9500, 4)])
def test_the_best_are_chosen_ascending(
    slices: int, most_bytes: int, num_rows: int, launcher: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores that differ, that are equal in part or all, of either sign and endless, from shared
    memory and from the device's; what a row does not see is no score."""
    monkeypatch.setattr(device_choice, "SLICES", slices)
    monkeypatch.setitem(emulation.SHARED_BYTES, 90, most_bytes)
    top_k, width = 96, 4484
    scores = torch.randn(9, width)
    scores[1] = scores[1].round()  # few values, -0 among them
    scores[2] = torch.tensor([0.0, -0.0]).repeat(width // 2)
    scores[3] = -scores[3].abs() - 1
    scores[4, 5::9], scores[4, 7::11] = INF, -INF
    scores[5] *= 1e-42  # below all normal numbers
    scores[6, :200], scores[6, 300:] = 3.0, 2.0
    visible = [4484, 4301, 4484, 1300, 2051, 97, 310, 96, 0][:num_rows]
    for row, seen in enumerate(visible):
        scores[row, seen:] = NAN
    found = chosen(launcher, scores[:num_rows], visible, top_k)
    for row, seen in enumerate(visible):
        if seen > top_k:
            want = select_top_k(scores[row, :seen], k=top_k)
        else:
            want = torch.where(torch.arange(top_k) < seen, torch.arange(top_k), -1)
        assert torch.equal(found[row].long(), want), row


def test_what_is_no_number_comes_first(launcher: Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_choice, "SLICES", 2)
    scores = torch.arange(1024.0)[None].repeat(2, 1)
    scores[0, 3], scores[0, 500], scores[1] = NAN, INF, NAN
    found = chosen(launcher, scores, [1000, 1000], 4)
    assert found.tolist() == [[3, 500, 998, 999], [0, 1, 2, 3]]
