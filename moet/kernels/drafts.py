"""Rows of a draft block inside a captured step, by which rows of the step hold, and its likeliest
tokens. Knows slots and positions; nothing of requests and of models."""

from __future__ import annotations

import torch
from torch import Tensor

from moet.kernels.registry import GPU_ARCHS, op

Parts = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""token_ids, positions, starts, ends and seq_slots, [T] int64 each as in kernels/rows.py; rows that
are not there are fill rows."""


@op(tolerance=0.0)
def settled_rows(
    sent: Tensor,
    out: Tensor,
    sampler_slots: Tensor,
    wanted: Tensor,
    given: Tensor,
    proposed: Tensor,
    *,
    page_size: int,
) -> tuple[Parts, Tensor]:
    """The rows of a step that hold, each with the token behind it; and what drafting begins with.

    sent: [5, num_seqs * R] int64, token_ids, positions, starts, ends, seq_slots of the step. out:
    [1 + num_seqs, R + 2] int64, what came of it: by sequence R tokens, then how many hold.
    sampler_slots, wanted: [num_seqs] int64; wanted: drafts asked for, -1 for a sequence without
    any. The row before a page border joins its own token, and nothing is proposed from there.

    Returns the rows and [num_seqs] int64, the place of each sequence's last one. Writes given
    ([4, num_seqs] int64: the position behind the rows, seq_slots, sampler_slots, tokens to propose)
    and proposed[:, 0] = 0.
    """
    num_rows = out.shape[1] - 2
    token_ids, positions, starts, _, slots = sent.view(5, -1, num_rows).unbind(0)
    num_held, tokens = out[1:, num_rows], out[1:, :num_rows]
    ends = starts[:, 0] + num_held
    drafts = (wanted >= 0) & (num_held > 0)
    there = (torch.arange(num_rows, device=out.device) < num_held[:, None]) & drafts[:, None]
    before_border = (positions + 1) % page_size == 0
    given[0], given[1], given[2] = ends, slots[:, 0], sampler_slots
    given[3] = torch.where(drafts & (ends % page_size != 0), wanted, 0)
    proposed[:, 0] = 0
    firsts = torch.arange(len(num_held), device=out.device) * num_rows
    rows = (
        torch.where(there, torch.where(before_border, token_ids, tokens), 0),
        torch.where(there, positions, -1),
        torch.where(there, starts, 0),
        torch.where(there, ends[:, None], 0),
        torch.where(there, slots, 0),
    )
    a, b, c, d, e = (part.reshape(-1) for part in rows)
    return (a, b, c, d, e), firsts + (num_held - 1).clamp(min=0)


@op(tolerance=0.0)
def chained_rows(given: Tensor, proposed: Tensor, *, number: int) -> Parts:
    """A row for each sequence whose draft `number` is there and which wants another behind it.

    given: [4, num_seqs] int64 as settled_rows writes it. proposed: [num_seqs, 1 + drafts] int64,
    how many there are, then the tokens.
    """
    ends, slots, _, limits = given.unbind(0)
    goes_on = (proposed[:, 0] == number + 1) & (limits > number + 1)
    places = ends + number
    return (
        proposed[:, 1 + number].contiguous(),
        torch.where(goes_on, places, -1),
        torch.where(goes_on, places, 0),
        torch.where(goes_on, places + 1, 0),
        torch.where(goes_on, slots, 0),
    )


@op(tolerance=0.0)
def take_likeliest(
    logits: Tensor, limits: Tensor, proposed: Tensor, *, number: int, num_token_ids: int
) -> None:
    """Propose token `number`, the likeliest, for each sequence that has come so far and wants it.

    logits: [num_seqs, vocab_size] fp32, of which the first num_token_ids count; what is no number
    ends a sequence's drafts. limits: [num_seqs] int64. proposed: [num_seqs, 1 + drafts] int64,
    changed.
    """
    best, token_ids = logits[:, :num_token_ids].max(-1)  # documented to take the first of equals
    count = proposed[:, 0]
    count += (limits > number) & (count == number) & (best < torch.inf)
    proposed[:, 1 + number] = token_ids


def _on_gpu(*, arch: str) -> bool:
    return arch in GPU_ARCHS


settled_rows.impl_in("moet.kernels.triton_drafts", "triton", supports=_on_gpu)


chained_rows.impl_in("moet.kernels.triton_drafts", "triton", supports=_on_gpu)


take_likeliest.impl_in("moet.kernels.triton_drafts", "triton", supports=_on_gpu)
