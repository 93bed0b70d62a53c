"""A row's logits are a function of its own sequence's tokens, bit for bit: not of chunks, batch
mates, placement, what the memory held before, rejected drafts, or a resume from a page border."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moet.config import Rounding
from tests.models.hash_weights import (
    DEPLOYED,
    GOLDEN,
    GOLDEN_IDS,
    Piece,
    Rig,
    dirty_kv,
    forward_input,
    hash_source,
    load_rig,
    run_chunks,
    run_step,
)

RATIOS = (0, 4, 128, 4, 0)  # every kind of layer, and the draft block
OTHER_IDS = [(91 * i + 5) % 255 + 2 for i in range(300)]


@pytest.fixture(scope="module", params=["none", "deployed"])
def loaded(request: pytest.FixtureRequest) -> Rig:
    rounding: Rounding = request.param
    base = GOLDEN if rounding == "none" else DEPLOYED
    config = replace(base, num_hidden_layers=4, num_hash_layers=1, compress_ratios=RATIOS)
    source = hash_source(config, quantised=rounding == "deployed")
    return load_rig(config, source, rounding, num_spec_tokens=2)


@pytest.fixture
def rig(loaded: Rig) -> Rig:
    return Rig(loaded.model, loaded.experts, dirty_kv(loaded.model))


@pytest.fixture(scope="module")
def one_shot(loaded: Rig) -> Tensor:
    return run_chunks(loaded, GOLDEN_IDS, [])


def test_one_shot_is_finite(one_shot: Tensor) -> None:
    assert one_shot.shape == (300, GOLDEN.vocab_size)
    assert one_shot.isfinite().all()
    assert 0.1 < one_shot.abs().mean() < 10


@pytest.mark.parametrize(
    "chunks",
    [
        [131, 1, 1, 1, 60, 1, 1, 104],
        [1, 2, 1, 4, 119, 1, 1, 126, 1, 1],
        [256],
        [17, 16, 15, 128, 80],
        [*[1] * 20, 105, *[1] * 6, 120, *[1] * 8],
    ],
    ids=["spec", "borders", "page", "tiles", "single tokens"],
)
def test_chunks_do_not_show(rig: Rig, one_shot: Tensor, chunks: list[int]) -> None:
    assert torch.equal(run_chunks(rig, GOLDEN_IDS, chunks), one_shot)


def test_placement_does_not_show(rig: Rig, one_shot: Tensor) -> None:
    got = run_chunks(rig, GOLDEN_IDS, [100], seq_slot=4, pages=(7, 2, 5))
    assert torch.equal(got, one_shot)


def test_batch_mates_do_not_show(rig: Rig, one_shot: Tensor) -> None:
    other = run_chunks(rig, OTHER_IDS, [], seq_slot=0, pages=(0, 1))
    rig = Rig(rig.model, rig.experts, dirty_kv(rig.model))
    # The sequence of interest decodes and prefills beside another that starts later and a third.
    mine: list[Tensor] = []
    theirs: list[Tensor] = []
    for start, end in ((0, 120), (120, 121), (121, 122), (122, 250), (250, 251), (251, 300)):
        at = start // 2, end // 2
        pieces = [
            Piece(OTHER_IDS[at[0] : at[1]], at[0], seq_slot=5, pages=(6, 7)),
            Piece(GOLDEN_IDS[start:end], start, seq_slot=2, pages=(3, 1)),
            Piece(GOLDEN_IDS[: end - start], 0, seq_slot=0, pages=(2, 4)),
        ]
        pieces = [piece for piece in pieces if piece.token_ids]
        logits = run_step(rig, pieces)
        mine.append(logits[-2])
        if len(pieces) == 3:
            theirs.append(logits[0])
        assert torch.equal(logits[-1], one_shot[: end - start])
    assert torch.equal(torch.cat(mine), one_shot)
    assert torch.equal(torch.cat(theirs), other[: sum(map(len, theirs))])


@pytest.mark.parametrize("first", [5, 122, 250])
def test_rejected_drafts_leave_no_trace(rig: Rig, one_shot: Tensor, first: int) -> None:
    run_chunks(rig, GOLDEN_IDS[:first], [])
    for position in range(first, first + 9):
        true = GOLDEN_IDS[position : position + 1]
        (logits,) = run_step(rig, [Piece([*true, 3, 4], position)])
        assert torch.equal(logits[0], one_shot[position])


def test_accepted_drafts_equal_single_steps(rig: Rig, one_shot: Tensor) -> None:
    got = run_chunks(rig, GOLDEN_IDS[:140], [119, *[3] * 7])
    assert torch.equal(got, one_shot[:140])


def test_resume_from_a_page_border_needs_only_what_the_spec_says(
    rig: Rig, one_shot: Tensor
) -> None:
    run_chunks(rig, GOLDEN_IDS[:256], [])
    for group in rig.model.kv_cache_spec().groups:
        if group.kind == "ring":  # to another slot, or lost
            kept = rig.kv[group.name][:, 0].clone()
            rig.kv[group.name].fill_(0x7F)
            if group.resume:
                rig.kv[group.name][:, 3] = kept
    got = [
        run_step(rig, [Piece(GOLDEN_IDS[start:end], start, seq_slot=3)])[0]
        for start, end in ((256, 257), (257, 300))
    ]
    assert torch.equal(torch.cat(got), one_shot[256:])


def test_only_asked_rows_get_logits(rig: Rig, one_shot: Tensor) -> None:
    rows = torch.tensor([0, 7, 8, 30])
    inputs = replace(forward_input([Piece(GOLDEN_IDS[:31], 0)]), logits_indices=rows)
    output = rig.model.forward(inputs, rig.kv, rig.experts)
    assert torch.equal(output.logits, one_shot[rows])
    assert output.hidden_states.shape == (31, 4, rig.model.config.hidden_size)


def test_drafts_are_free_of_chunks_and_mates(rig: Rig) -> None:
    def draft(pieces: Sequence[Piece], streams: Tensor) -> Tensor:
        inputs = forward_input(pieces)
        return rig.model.draft(inputs, streams, rig.kv, rig.experts).logits

    ids = GOLDEN_IDS[:41]
    streams = rig.model.forward(forward_input([Piece(ids, 0)]), rig.kv, rig.experts).hidden_states
    whole = draft([Piece(ids[1:], 0)], streams[:40])
    first = draft([Piece(ids[1:24], 0, seq_slot=1)], streams[:23])
    mixed = draft(
        [Piece(ids[1:31], 0, seq_slot=2), Piece(ids[24:41], 23, seq_slot=1)],
        torch.cat([streams[:30], streams[23:40]]),
    )
    assert torch.equal(torch.cat([first, mixed[30:]]), whole)
    assert torch.equal(mixed[:30], whole[:30])
