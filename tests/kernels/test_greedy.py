"""The likeliest tokens and the drafts that hold."""

import torch

from moet.kernels.greedy import newest_tokens, take_greedy


def test_only_unknown_tokens_are_the_slots() -> None:
    last = torch.tensor([50, 51, 52, 0])
    got = newest_tokens(torch.tensor([-1, 7, -1, 0]), torch.tensor([2, 1, 0, 0]), last)
    assert got.tolist() == [52, 7, 50, 0]


def logits_for(tokens: list[int], vocab_size: int = 16) -> torch.Tensor:
    logits = torch.zeros(len(tokens), vocab_size)
    logits[torch.arange(len(tokens)), torch.tensor(tokens)] = 2.0
    return logits


def test_drafts_hold_up_to_the_first_wrong_one() -> None:
    # Of three sequences the first's drafts hold, the second's last one does not, and the third is
    # nobody.
    logits = logits_for([3, 4, 5, 6, 7, 8, 9, 9, 9])
    logits[0, 12] = logits[0, 3]  # an equal of a higher id
    logits[:, 14:] = 9.0  # padding
    ids = torch.tensor([1, 3, 4, 1, 6, 2, 0, 0, 0])
    last, fault = torch.tensor([10, 11, 12, 13, 0]), torch.tensor([6], dtype=torch.int32)
    out = torch.zeros(4, 5, dtype=torch.int64)
    counts, slots = torch.tensor([3, 3, 0]), torch.tensor([2, 0, 4])
    take_greedy(logits, ids, counts, slots, last, fault, out, num_token_ids=14)
    assert out.tolist() == [[6, 0, 0, 0, 0], [3, 4, 5, 3, 0], [6, 7, 8, 2, 0], [9, 9, 9, 0, 0]]
    assert last[:4].tolist() == [7, 11, 5, 13]
    assert fault.item() == 0


def test_what_is_no_number_is_told_of_first_rows_and_ends_drafts() -> None:
    logits = logits_for([3, 4, 6, 7])
    logits[1, 2], logits[2, 0] = torch.nan, torch.inf
    out = torch.zeros(3, 4, dtype=torch.int64)
    last = torch.zeros(3, dtype=torch.int64)
    ids, counts = torch.tensor([1, 3, 1, -1]), torch.tensor([2, 1])
    take_greedy(logits, ids, counts, torch.tensor([0, 1]), last, None, out, num_token_ids=16)
    assert out[1].tolist()[0::2] == [3, 1]
    assert out[1, 3] == 0
    assert out[2, 3] == 1
    assert last[0] == 3
