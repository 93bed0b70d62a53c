"""How far a GPU's logits are from the reference's, and what that means for the choice of tokens.

Rounding to e4m3 and the choice of experts and entries turn the last bit of a sum into steps, so a
model has a floor: what its own reference does when every product is off by fp32's rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from moet.kernels import gemm
from tests.kernels.accelerated.pair import Pair
from tests.models.hash_weights import Piece, Rig, run_step

MARGIN = 4.0  # errors that the best logit must lead by to be judged


@dataclass(frozen=True, slots=True)
class Agreement:
    """error: root mean square of the logits' differences. clear: positions whose best logit leads
    by MARGIN errors; wrong: those of them where the GPU prefers another token. own_clear and
    own_wrong: the same by the error of each position itself."""

    positions: int
    error: float
    deviation: float
    clear: int
    wrong: int
    own_clear: int
    own_wrong: int
    cosine_median: float
    cosine_min: float

    def __str__(self) -> str:
        return (
            f"{self.positions} positions: rms error {self.error:.4f} of logits with deviation "
            f"{self.deviation:.3f}; {self.clear} clear, of which {self.wrong} differ; by their own "
            f"error {self.own_clear}, of which {self.own_wrong}; "
            f"cosine {self.cosine_median:.5f} median, {self.cosine_min:.5f} least"
        )


def compare(wanted: Tensor, found: Tensor) -> Agreement:
    """wanted, found: [positions, vocab_size] fp32, of the reference and of the GPU."""
    difference = found - wanted
    error = float(difference.square().mean().sqrt())
    best = wanted.topk(2, dim=1).values
    lead = best[:, 0] - best[:, 1]
    clear = lead > MARGIN * error
    own = lead > MARGIN * difference.square().mean(1).sqrt()
    differs = wanted.argmax(1) != found.argmax(1)
    cosine = torch.nn.functional.cosine_similarity(found, wanted, dim=1)
    return Agreement(
        positions=len(wanted),
        error=error,
        deviation=float(wanted.std()),
        clear=int(clear.sum()),
        wrong=int((clear & differs).sum()),
        own_clear=int(own.sum()),
        own_wrong=int((own & differs).sum()),
        cosine_median=float(cosine.median()),
        cosine_min=float(cosine.min()),
    )


def teacher_forced(pair: Pair, tokens: list[int], sizes: list[int]) -> tuple[Tensor, Tensor]:
    """Logits of every position on both, fed in steps of these sizes, the last one repeated."""
    return forced(pair.reference, tokens, sizes), forced(pair.gpu, tokens, sizes)


def forced(rig: Rig, tokens: list[int], sizes: list[int]) -> Tensor:
    """Logits of every position, fed in steps of these sizes, the last one repeated."""
    found, start = [], 0
    for step in range(len(tokens)):
        size = sizes[min(step, len(sizes) - 1)]
        piece = [Piece(tokens[start : start + size], start, 0, (0, 1, 2, 3))]
        found += [part.cpu() for part in run_step(rig, piece)]
        start += size
        if start >= len(tokens):
            break
    return torch.cat(found)


def floor(rig: Rig, tokens: list[int], patch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor]:
    """The reference's logits as they are, and with every product off by about fp32's rounding."""
    exact, draw = gemm.matmul, torch.Generator().manual_seed(0)

    def nearly(x: Tensor, weight: Tensor) -> Tensor:
        product = exact(x, weight)
        return product * (1 + 2**-23 * torch.randn(product.shape, generator=draw))

    plain = forced(rig, tokens, [len(tokens)])
    with patch.context() as patched:
        patched.setattr(gemm, "matmul", nearly)
        return plain, forced(rig, tokens, [len(tokens)])
