"""Both ends of a captured step in Triton give what their references give."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moet.kernels.greedy import newest_tokens, take_greedy


@pytest.mark.parametrize("count", [1, 3, 200])
def test_newest_tokens(device: torch.device, count: int) -> None:
    bind = newest_tokens.bind(arch="sm90a")
    ids = torch.randint(-1, 5, (count,)).clamp(max=3)
    slots, last = torch.randint(0, 9, (count,)), torch.randint(0, 1000, (10,))
    got = bind(ids.to(device), slots.to(device), last.to(device))
    assert torch.equal(got.cpu(), newest_tokens(ids, slots, last))


def step(
    num_seqs: int, num_rows: int, vocab_size: int, device: torch.device
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Logits with ties, drafts that often hold, and the tensors that are written."""
    num_tokens = num_seqs * num_rows
    logits = torch.randint(-3, 4, (num_tokens, vocab_size)).float()
    best = logits[:, : vocab_size - 5].argmax(-1)
    ids = torch.roll(best, 1)
    ids[torch.rand(num_tokens) < 0.3] = 1
    counts = torch.randint(0, num_rows + 1, (num_seqs,))
    slots = torch.where(counts > 0, torch.randperm(num_seqs), num_seqs)
    last = torch.arange(num_seqs + 1) + 5000
    out = torch.zeros(1 + num_seqs, num_rows + 2, dtype=torch.int64)
    fault = torch.tensor([3], dtype=torch.int32)
    tensors = [t.to(device) for t in (logits, ids, counts, slots)]
    return tensors, last.to(device), fault.to(device), out.to(device)


@pytest.mark.parametrize(("num_seqs", "num_rows"), [(1, 1), (1, 3), (5, 2), (33, 1)])
@pytest.mark.parametrize("vocab_size", [50, 4096, 9000])
@pytest.mark.parametrize("spoilt", [False, True])
def test_take_greedy(
    device: torch.device, num_seqs: int, num_rows: int, vocab_size: int, spoilt: bool
) -> None:
    tensors, last, fault, out = step(num_seqs, num_rows, vocab_size, device)
    if spoilt:
        tensors[0][::2, 7] = torch.nan
        tensors[0][1::4, 9] = torch.inf
    wanted = [value.cpu().clone() for value in (*tensors, last, fault, out)]
    limit = {"num_token_ids": vocab_size - 5}
    take_greedy(*wanted[:4], *wanted[4:7], **limit)  # type: ignore[arg-type]
    take_greedy.bind(arch="sm90a")(*tensors, last, fault, out, **limit)  # type: ignore[arg-type]
    got_last, want_last = last.cpu()[:num_seqs], wanted[4][:num_seqs]
    assert torch.equal(got_last, want_last)
    assert fault.item() == 0
    got, want = out.cpu(), wanted[6]
    assert torch.equal(got[:, num_rows:], want[:, num_rows:])
    if not spoilt:
        assert torch.equal(got, want)
    held = want[1:, num_rows]
    for seq in range(num_seqs):
        if not want[1 + seq, num_rows + 1]:
            assert torch.equal(got[1 + seq, : held[seq]], want[1 + seq, : held[seq]])
