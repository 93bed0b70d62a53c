"""What a caller gets: token events turned into text, one assembler per request.

Knows detokenising and stop strings; knows nothing of cores, HTTP or chat formats.
"""

from __future__ import annotations

import msgspec

from moet.errors import MoetError, OverloadedError
from moet.runtime.detokenizer import Detokenizer, Piece, StopChecker, plain_text
from moet.runtime.tokenizer import Tokenizer
from moet.types import FinishReason, Request, TokenEvent, TokenLogprobs


class Output(msgspec.Struct, frozen=True, kw_only=True):
    """One increment of one request; the one with a finish_reason is the last.

    index: which of the caller's requests. pieces: the text that became certain, control tokens as
    pieces of their own; it may lag behind token_ids, which are the ids of this increment.
    stop_reason: the stop string or stop_token_ids entry that ended it; None at the model's own end.
    num_draft_tokens were tried for the request so far, and num_accepted_tokens of them held.
    """

    index: int
    pieces: list[Piece]
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    overloaded: bool = False
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def text(self) -> str:
        """The increment as a user sees it."""
        return plain_text(self.pieces)

    def raise_if_failed(self) -> None:
        """Raise MoetError if a fault ended the request, OverloadedError if it waited too long."""
        if self.overloaded:
            raise OverloadedError(self.error or "the server is full")
        if self.finish_reason == FinishReason.ERROR:
            raise MoetError(f"request {self.index} failed: {self.error}")


class Choice(msgspec.Struct, kw_only=True):
    """One whole answer."""

    index: int
    text: str = ""
    token_ids: list[int] = msgspec.field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None


class Completion(msgspec.Struct, kw_only=True):
    """A prompt's n answers."""

    prompt_token_ids: list[int]
    choices: list[Choice]
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text

    def add(self, output: Output, choice: Choice) -> None:
        """Append an increment to one of the choices."""
        choice.text += output.text
        choice.token_ids += output.token_ids
        if output.logprobs is not None:
            choice.logprobs = (choice.logprobs or []) + output.logprobs
        choice.finish_reason = output.finish_reason
        choice.stop_reason = output.stop_reason
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)


class TextAssembler:
    """Turns one request's events into increments of text, ending it at a stop string."""

    def __init__(self, index: int, request: Request, tokenizer: Tokenizer) -> None:
        self._index = index
        self._params = request.params
        self._detokenizer = Detokenizer(tokenizer)
        self._stop = StopChecker(
            self._params.stop, include_stop=self._params.include_stop_str_in_output
        )

    def push(self, event: TokenEvent) -> Output:
        """The increment that an event makes. Tokens after a completed stop string are dropped."""
        pieces: list[Piece] = []
        num_tokens = 0
        for token_id in event.token_ids:
            num_tokens += 1
            if token_id == event.stop_token_id and num_tokens == len(event.token_ids):
                continue  # the end is not part of the text
            pieces += self._stop.push(self._detokenizer.push([token_id]))
            if self._stop.matched is not None:
                break
        reason, stop_reason = event.finish_reason, self._stop.matched
        if stop_reason is None and reason is not None:
            pieces += self._stop.push(self._detokenizer.finish())
            if self._stop.matched is None:
                pieces += self._stop.finish()
            stop_reason = self._stop.matched
        if stop_reason is not None:
            reason = FinishReason.STOP
        return Output(
            index=self._index,
            pieces=pieces,
            token_ids=event.token_ids[:num_tokens],
            finish_reason=reason,
            stop_reason=stop_reason if stop_reason is not None else self._stop_id(event),
            logprobs=event.logprobs[:num_tokens] if event.logprobs is not None else None,
            prompt_logprobs=event.prompt_logprobs,
            num_cached_tokens=event.num_cached_tokens,
            error=event.error,
            overloaded=event.overloaded,
            num_draft_tokens=event.num_draft_tokens,
            num_accepted_tokens=event.num_accepted_tokens,
        )

    def _stop_id(self, event: TokenEvent) -> int | None:
        named = event.stop_token_id in self._params.stop_token_ids
        return event.stop_token_id if named else None
