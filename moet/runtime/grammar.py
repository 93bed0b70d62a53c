"""What a sequence's tokens must spell, token by token: masks of the ones that may come next.

A Constraint belongs to one sequence and lives on the host with it, wherever its pages are. It knows
when it begins; what it allows is a Matcher's business (grammar_compiler.py makes them). Knows
nothing of logits, text formats or schemas.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

WORD_BITS = 32


def num_words(vocab_size: int) -> int:
    """Words of a mask: bit i % 32 of word i // 32 says whether token i may come."""
    return -(-vocab_size // WORD_BITS)


class Matcher(Protocol):
    """A compiled grammar part of the way through."""

    def accept(self, token_id: int) -> bool:
        """Move on; False, changing nothing, if the token may not come here."""
        ...

    def fill(self, mask: Tensor) -> None:
        """Set the bits of the tokens that may come next. mask: [words] int32, contiguous, CPU.

        End tokens are among them exactly where the grammar may end.
        """
        ...

    def rollback(self, num_tokens: int) -> None:
        """Take the last num_tokens accepted ones back."""
        ...


class Constraint:
    """One sequence's matcher, off until the token that turns it on.

    end_token_ids: the sequence cannot end while the constraint is off.
    """

    def __init__(
        self,
        matcher: Matcher,
        *,
        vocab_size: int,
        after_token_id: int | None,
        forbidden_token_ids: Iterable[int],
        end_token_ids: Iterable[int],
    ) -> None:
        self._matcher = matcher
        self._after = after_token_id
        self._num_words = num_words(vocab_size)
        self._ends = frozenset(end_token_ids)
        self._off_mask = _all_but(self._num_words, {*forbidden_token_ids, *self._ends})
        self._num_tokens = 0
        self._on_at: int | None = 0 if after_token_id is None else None  # tokens before it is on

    @property
    def is_on(self) -> bool:
        return self._on_at is not None

    def has_next(self) -> bool:
        """Whether any token, or the end, may come here; a grammar may lead to where none does."""
        return bool(self.masks().any())

    def accept(self, token_id: int) -> bool:
        """Take the sequence's next token; False, changing nothing, if it may not come here.

        Not for end tokens: nothing comes behind them.
        """
        assert token_id not in self._ends
        if self._on_at is not None:
            if not self._matcher.accept(token_id):
                return False
            self._num_tokens += 1
            return True
        self._num_tokens += 1
        if token_id == self._after:
            self._on_at = self._num_tokens
        return True

    def rollback(self, num_tokens: int) -> None:
        """Take the last num_tokens accepted ones back."""
        assert 0 <= num_tokens <= self._num_tokens
        before = self._num_tokens
        self._num_tokens -= num_tokens
        if self._on_at is None:
            return
        matched = min(num_tokens, before - self._on_at)
        if matched:
            self._matcher.rollback(matched)
        if self._num_tokens < self._on_at:
            self._on_at = None

    def masks(self, draft_token_ids: Sequence[int] = ()) -> Tensor:
        """Masks for the next token and behind each draft; the constraint itself stays where it is.

        Returns [1 + num_drafts, words] int32. Rows behind a draft that may not come, or that ends
        the sequence, allow everything: no token will be taken from them.
        """
        masks = torch.full((1 + len(draft_token_ids), self._num_words), -1, dtype=torch.int32)
        num_accepted = 0
        for i in range(len(masks)):
            if self.is_on:
                self._matcher.fill(masks[i])
            else:
                masks[i] = self._off_mask
            if i == len(draft_token_ids) or draft_token_ids[i] in self._ends:
                break
            if not allows(masks[i], draft_token_ids[i]):
                break
            accepted = self.accept(draft_token_ids[i])
            assert accepted, "the mask and the matcher disagree"
            num_accepted += 1
        self.rollback(num_accepted)
        return masks


def allows(mask: Tensor, token_id: int) -> bool:
    """Whether one token may come."""
    return bool(int(mask[token_id // WORD_BITS]) >> (token_id % WORD_BITS) & 1)


def allowed(mask: Tensor, vocab_size: int) -> Tensor:
    """[vocab_size] bool of a mask, on the mask's device."""
    bits = torch.arange(WORD_BITS, dtype=torch.int32, device=mask.device)
    return ((mask[:, None] >> bits) & 1).bool().reshape(-1)[:vocab_size]


def _all_but(words: int, token_ids: Iterable[int]) -> Tensor:
    bits = torch.ones(words * WORD_BITS, dtype=torch.int64)
    bits[list(token_ids)] = 0
    values = (bits.view(words, WORD_BITS) << torch.arange(WORD_BITS)).sum(-1)
    return torch.where(values >= 2**31, values - 2**32, values).to(torch.int32)
