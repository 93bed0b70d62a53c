"""A draft block's rows and its likeliest tokens in Triton are what their references give."""

from __future__ import annotations

import pytest
import torch

from moet.kernels.drafts import chained_rows, settled_rows, take_likeliest


@pytest.mark.parametrize(("num_seqs", "num_rows"), [(1, 3), (40, 2)])
def test_rows_of_a_draft_block(device: torch.device, num_seqs: int, num_rows: int) -> None:
    num_drafts, page_size = 3, 4
    starts = torch.randint(0, 30, (num_seqs, 1)).expand(-1, num_rows)
    positions = starts + torch.arange(num_rows)
    slots = torch.randperm(num_seqs)[:, None].expand(-1, num_rows)
    tokens = torch.randint(1, 90, (num_seqs, num_rows))
    sent = torch.stack([tokens, positions, starts, starts + num_rows, slots]).view(5, -1)
    out = torch.randint(100, 190, (1 + num_seqs, num_rows + 2))
    out[1:, num_rows] = torch.randint(0, num_rows + 1, (num_seqs,))
    wanted = torch.randint(-1, num_drafts + 1, (num_seqs,))
    given = torch.full((4, num_seqs), 7)
    proposed = torch.full((num_seqs, 1 + num_drafts), 9)
    tensors = (sent, out, slots[:, 0].contiguous(), wanted, given, proposed)
    found = [tensor.clone().to(device) for tensor in tensors]
    parts, last = settled_rows(*tensors, page_size=page_size)
    got, got_last = settled_rows.bind(arch="sm90a")(*found, page_size=page_size)  # type: ignore[arg-type]
    assert torch.equal(got_last.cpu(), last)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(got, parts, strict=True))
    assert torch.equal(found[4].cpu(), given)
    for number in range(num_drafts):
        logits = torch.randint(-3, 4, (num_seqs, 5000)).float()
        logits[::3, 8] = torch.nan
        limits = {"number": number, "num_token_ids": 4990}
        take_likeliest(logits, given[3], proposed, **limits)
        bound = take_likeliest.bind(arch="sm90a")
        bound(logits.to(device), found[4][3], found[5], **limits)
        good = ~logits.isnan().any(1)
        assert torch.equal(found[5].cpu()[:, 0], proposed[:, 0])
        assert torch.equal(found[5].cpu()[good], proposed[good])
        found[5].copy_(proposed)  # what a bad row says does not matter
        chained = chained_rows(given, proposed, number=number)
        got = chained_rows.bind(arch="sm90a")(found[4], found[5], number=number)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(got, chained, strict=True))
