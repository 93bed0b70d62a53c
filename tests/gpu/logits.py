"""How far a GPU's logits are from the reference's, and what that means for the choice of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.kernels.accelerated.pair import Pair
from tests.models.hash_weights import Piece, run_step

MARGIN = 4.0  # errors that the best logit must lead by to be judged


@dataclass(frozen=True, slots=True)
class Agreement:
    """error: root mean square of the logits' differences. clear: positions whose best logit leads
    by MARGIN errors; wrong: those of them where the GPU prefers another token."""

    positions: int
    error: float
    deviation: float
    clear: int
    wrong: int
    cosine_median: float
    cosine_min: float

    def __str__(self) -> str:
        return (
            f"{self.positions} positions: rms error {self.error:.4f} of logits with deviation "
            f"{self.deviation:.3f}; {self.clear} clear, of which {self.wrong} differ; "
            f"cosine {self.cosine_median:.5f} median, {self.cosine_min:.5f} least"
        )


def compare(wanted: Tensor, found: Tensor) -> Agreement:
    """wanted, found: [positions, vocab_size] fp32, of the reference and of the GPU."""
    difference = found - wanted
    error = float(difference.square().mean().sqrt())
    best = wanted.topk(2, dim=1).values
    clear = best[:, 0] - best[:, 1] > MARGIN * error
    differs = wanted.argmax(1) != found.argmax(1)
    cosine = torch.nn.functional.cosine_similarity(found, wanted, dim=1)
    return Agreement(
        positions=len(wanted),
        error=error,
        deviation=float(wanted.std()),
        clear=int(clear.sum()),
        wrong=int((clear & differs).sum()),
        cosine_median=float(cosine.median()),
        cosine_min=float(cosine.min()),
    )


def teacher_forced(pair: Pair, tokens: list[int], sizes: list[int]) -> tuple[Tensor, Tensor]:
    """Logits of every position on both, fed in steps of these sizes, the last one repeated."""
    wanted, found, start = [], [], 0
    for step in range(len(tokens)):
        size = sizes[min(step, len(sizes) - 1)]
        piece = [Piece(tokens[start : start + size], start, 0, (0, 1, 2, 3))]
        wanted += run_step(pair.reference, piece)
        found += [part.cpu() for part in run_step(pair.gpu, piece)]
        start += size
        if start >= len(tokens):
            break
    return torch.cat(wanted), torch.cat(found)
