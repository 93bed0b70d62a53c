"""A whole V4 model on the Triton ops, products left to the reference: verify rows, single rows
and chunks agree with the reference model."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from moet.kernels.registry import Op
from tests.kernels.accelerated.conftest import INTERPRETED
from tests.models.hash_weights import (
    DEPLOYED,
    GOLDEN_IDS,
    Piece,
    Rig,
    hash_source,
    load_rig,
    run_chunks,
    run_step,
)

CONFIG = replace(
    DEPLOYED, num_hidden_layers=3, num_hash_layers=1, compress_ratios=(0, 4, 128, 0), index_topk=8
)


def accelerated(op: Op[..., Any], *, arch: str, **facts: Any) -> Callable[..., Any]:
    """Triton where there is any, the reference where there is not."""
    for impl in op.impls:
        if impl.name.startswith("triton") and impl.supports(arch="sm90a", **facts):
            return impl.fn
    return op.reference


@pytest.fixture
def rigs(monkeypatch: pytest.MonkeyPatch) -> tuple[Rig, Rig]:
    if not INTERPRETED:
        pytest.skip("the reference products run on the CPU")
    source = hash_source(CONFIG, quantised=True)
    reference = load_rig(CONFIG, source, "deployed", num_spec_tokens=2)
    monkeypatch.setattr(Op, "bind", accelerated)
    return reference, load_rig(CONFIG, source, "deployed", num_spec_tokens=2)


def run_from(rig: Rig, start: int, chunks: list[int]) -> torch.Tensor:
    logits = []
    for size in chunks:
        logits += run_step(rig, [Piece(GOLDEN_IDS[start : start + size], start)])
        start += size
    return torch.cat(logits)


@pytest.mark.deep
def test_the_ops_make_a_model(rigs: tuple[Rig, Rig]) -> None:
    """Experts of a random model are chosen by a hair, so last-bit noise turns some rows over.

    On this model's own inputs every op has the bits of its reference, mixes of the streams but for
    1e-6; attention is off by 0.0012 to 0.0028 of its norm, half a step of bf16. The reference model
    with random noise of a part in 1024 in its attention agrees with itself no better than the ops
    do: medians of 0.9819 and 0.9810, 0.79 and 1.0 of the rows above 0.9; the ops have 0.9803, 0.93.
    The limits leave another processor's noise room.
    """
    reference, triton = rigs
    run_chunks(reference, GOLDEN_IDS[:124], [])
    for name, pages in triton.kv.items():  # both go on from here
        pages.copy_(reference.kv[name])
    want = run_from(reference, 124, [3, 1, 1, 9])
    got = run_from(triton, 124, [3, 1, 1, 9])
    agreement = torch.nn.functional.cosine_similarity(got, want, dim=1)
    assert agreement.median() > 0.97, agreement
    assert (agreement > 0.9).float().mean() > 0.7, agreement
