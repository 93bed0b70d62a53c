"""The ends of a captured step: token ids that only the device knows going in, the likeliest tokens
coming out. Knows slots; nothing of requests."""

from __future__ import annotations

import torch
from torch import Tensor

from moet.kernels.registry import GPU_ARCHS, op


@op(tolerance=0.0)
def newest_tokens(token_ids: Tensor, slots: Tensor, last_token: Tensor) -> Tensor:
    """token_ids where they are known, else the newest token of the row's slot.

    token_ids: [T] int64, -1 for unknown. slots: [T] int64. last_token: [num_slots + 1] int64.
    Returns [T] int64.
    """
    return torch.where(token_ids < 0, last_token[slots], token_ids)


@op(tolerance=0.0)
def take_greedy(
    logits: Tensor,
    token_ids: Tensor,
    counts: Tensor,
    slots: Tensor,
    last_token: Tensor,
    fault: Tensor | None,
    out: Tensor,
    *,
    num_token_ids: int,
) -> None:
    """The likeliest token of each row, the lowest id among equals, as long as drafts hold.

    logits: [num_seqs * R, vocab_size] fp32, of which the first num_token_ids count. token_ids:
    [num_seqs * R] int64, what went in: a row but the first of a sequence is a draft, which holds if
    it is the token of the row before. counts, slots: [num_seqs] int64, a sequence's rows and where
    last_token ([num_slots + 1] int64, the last one for nobody) gets its newest token. fault: [1]
    int32, taken and cleared. out: [1 + num_seqs, R + 2] int64: the fault first, then by sequence
    the tokens, how many of them hold, and whether the first row's logits were no numbers (as rows
    behind drafts may not be: those hold no more).
    """
    num_rows = out.shape[1] - 2
    no_slot = len(last_token) - 1
    if fault is not None:
        out[0, :1] = fault.to(torch.int64)
        fault.zero_()
    best, tokens = logits[:, :num_token_ids].max(-1)  # documented to take the first of equals
    is_bad = ~(best < torch.inf).view(-1, num_rows)
    tokens, drafts = tokens.view(-1, num_rows), token_ids.view(-1, num_rows)
    holds = counts > 0
    num_held = torch.zeros_like(counts)
    for depth in range(num_rows):
        if depth:
            holds = holds & (counts > depth) & (drafts[:, depth] == tokens[:, depth - 1])
            holds = holds & ~is_bad[:, depth]
        last_token.index_copy_(0, torch.where(holds, slots, no_slot), tokens[:, depth])
        num_held = num_held + holds
    out[1:, :num_rows] = tokens
    out[1:, num_rows] = num_held
    out[1:, num_rows + 1] = is_bad[:, 0]


def _on_gpu(*, arch: str) -> bool:
    return arch in GPU_ARCHS


newest_tokens.impl_in("moet.kernels.triton_greedy", "triton", supports=_on_gpu)


take_greedy.impl_in("moet.kernels.triton_greedy", "triton", supports=_on_gpu)
