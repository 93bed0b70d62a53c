"""A whole V4 model as a GPU runs it, packed weights and all: in the interpreter and the emulation
it shows that everything fits together, on a GPU what `tests/gpu` measures."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch

from moet.kernels.device_gemm import Device
from moet.kernels.rows import Rows
from tests.kernels import emulation
from tests.kernels.accelerated.conftest import INTERPRETED
from tests.kernels.accelerated.pair import Pair, make_pair
from tests.models.hash_weights import (
    DEPLOYED,
    GOLDEN_IDS,
    Piece,
    forward_input,
    hash_source,
    run_step,
)

CONFIG = replace(
    DEPLOYED,
    num_hidden_layers=3,
    num_hash_layers=1,
    compress_ratios=(0, 4, 128, 0),
    index_topk=8,
    q_lora_rank=128,
    o_lora_rank=128,
    moe_intermediate_size=128,
)


@pytest.fixture(scope="module")
def pair() -> Pair:
    if not INTERPRETED or shutil.which("g++") is None:
        pytest.skip("on a GPU tests/gpu compares logits")
    sources = (
        *("stream_gemm", "moe", "prefill_gemm", "hyper_connection", "projections"),
        "short_stream",
    )
    launcher = emulation.build(sources, 90, num_sms=3)
    device = Device.around(launcher, "sm90a", "cpu")
    return make_pair(CONFIG, hash_source(CONFIG, quantised=True), device)


def run(pair: Pair, pieces: list[Piece]) -> tuple[torch.Tensor, torch.Tensor]:
    wanted, found = run_step(pair.reference, pieces), run_step(pair.gpu, pieces)
    return torch.cat(wanted), torch.cat(found)


def test_chunks_and_decoded_rows_follow_the_reference(pair: Pair) -> None:
    agreement = []
    start = 0
    for size in (5, 1, 3):
        wanted, found = run(pair, [Piece(GOLDEN_IDS[start : start + size], start)])
        agreement.append(torch.nn.functional.cosine_similarity(found, wanted, dim=1))
        start += size
    together = torch.cat(agreement)
    assert together.median() > 0.97, together
    assert pair.gpu.model.device is not None
    assert int(pair.gpu.model.device.error) == 0


@pytest.mark.deep
def test_fill_rows_change_nothing(pair: Pair) -> None:
    model, kv = pair.gpu.model, pair.gpu.kv
    assert isinstance(model.device, Device)
    run_step(pair.gpu, [Piece(GOLDEN_IDS[:5], 0, 1, (3,))])
    kept = {name: tensor.clone() for name, tensor in kv.items()}
    inputs = forward_input([Piece(GOLDEN_IDS[5:6], 5, 1, (3,))])
    rows = model.rows(inputs)
    with torch.inference_mode():
        alone = model.compute(inputs.token_ids, rows, None, kv, pair.gpu.experts)
        after = {name: tensor.clone() for name, tensor in kv.items()}
        for name, tensor in kept.items():
            kv[name].copy_(tensor)
        filled = model.compute(
            torch.cat([inputs.token_ids, torch.zeros(2, dtype=torch.int64)]),
            filled_rows(rows, 2),
            None,
            kv,
            pair.gpu.experts,
        )
    assert torch.equal(filled.logits[0], alone.logits[0])
    assert filled.logits.isfinite().all()
    assert all(torch.equal(kv[name], after[name]) for name in kv)


def filled_rows(rows: Rows, count: int) -> Rows:
    """The rows of a step, and `count` that are only there to fill a bucket."""

    def longer(values: torch.Tensor, fill: int) -> torch.Tensor:
        return torch.cat([values, torch.full((count,), fill, device=values.device)])

    return replace(
        rows,
        positions=longer(rows.positions, -1),
        starts=longer(rows.starts, 0),
        ends=longer(rows.ends, 0),
        seq_slots=longer(rows.seq_slots, 0),
        page_rows=longer(rows.page_rows, 0),
    )
