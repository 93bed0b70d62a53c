"""What both OpenAI completion endpoints answer with: ids, log-probabilities, the final reason."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from moet import __version__
from moet.errors import RequestError
from moet.runtime.engine import Engine
from moet.runtime.output import Output
from moet.runtime.router import Generation
from moet.runtime.tokenizer import Tokenizer
from moet.server.exchange import Exchange, Usage
from moet.server.openai import SharedFields
from moet.types import FinishReason, Request, TokenLogprobs

LOWEST_LOGPROB = -9999.0  # JSON has no infinity
MAX_REQUEST_ID = 128


class Header:
    """The fields that every body and chunk of one answer shares."""

    def __init__(self, prefix: str, kind: str, model: str, request_id: str | None) -> None:
        if request_id is not None and not (
            0 < len(request_id) <= MAX_REQUEST_ID and request_id.isprintable()
        ):
            message = f"request_id must be 1 to {MAX_REQUEST_ID} printable characters"
            raise RequestError(message, param="request_id")
        self.fields: dict[str, Any] = {
            "id": f"{prefix}-{request_id or uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"moet-{__version__}",
        }

    def chunk(self, choices: list[dict[str, Any]], usage: Usage | None) -> dict[str, Any]:
        """One body or chunk, with usage if given."""
        body = {**self.fields, "choices": choices}
        if usage is not None:
            body["usage"] = usage.body()
        return body


class Pending:
    """Tokens of one choice whose text is held back, so that their log-probabilities wait too."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs | None] = []

    def add(self, output: Output) -> None:
        """Remember an increment's tokens."""
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or []

    def take(self) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Everything since the last call."""
        taken = self.token_ids, self.logprobs
        self.token_ids, self.logprobs = [], []
        return taken


def spell(tokenizer: Tokenizer, token_id: int) -> str:
    """A token as text; one that is not a whole number of characters as its bytes."""
    spelling = tokenizer.token_bytes(token_id)
    try:
        return spelling.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelling)


def chat_logprobs(tokenizer: Tokenizer, entries: list[TokenLogprobs | None]) -> dict[str, Any]:
    """The chat endpoint's logprobs object."""
    known = [entry for entry in entries if entry is not None]
    return {"content": token_logprobs(tokenizer, known), "refusal": None}


def token_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    """Each token with its log-probability, and those of the most likely ones in its place."""

    def one(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": spell(tokenizer, token_id),
            "logprob": max(logprob, LOWEST_LOGPROB),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    told = []
    for entry in entries:
        pairs = list(zip(entry.token_ids, entry.logprobs, strict=True))
        top = [one(*pair) for pair in pairs[1:]]
        told.append({**one(*pairs[0]), "top_logprobs": top})
    return told


class CompletionLogprobs:
    """The completion endpoint's logprobs objects of one choice; keeps the place in the text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def body(self, token_ids: list[int], entries: list[TokenLogprobs | None]) -> dict[str, Any]:
        """One object for consecutive tokens; an entry is None where there is nothing before."""
        tokens = [spell(self._tokenizer, token_id) for token_id in token_ids]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [
                None if entry is None else max(entry.logprobs[0], LOWEST_LOGPROB)
                for entry in entries
            ],
            "top_logprobs": [None if entry is None else self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        top: dict[str, float] = {}
        for token_id, logprob in zip(entry.token_ids, entry.logprobs, strict=True):
            top.setdefault(spell(self._tokenizer, token_id), max(logprob, LOWEST_LOGPROB))
        return top


def prompt_logprobs(
    tokenizer: Tokenizer, entries: list[TokenLogprobs | None]
) -> list[dict[str, Any] | None]:
    """Log-probabilities of the prompt's tokens by id, in any order."""

    def one(entry: TokenLogprobs) -> dict[str, Any]:
        pairs = zip(entry.token_ids, entry.logprobs, strict=True)
        return {
            str(token_id): {
                "logprob": max(logprob, LOWEST_LOGPROB),
                "decoded_token": spell(tokenizer, token_id),
            }
            for token_id, logprob in pairs
        }

    return [None if entry is None else one(entry) for entry in entries]


def plain_reason(reason: FinishReason | None) -> str | None:
    """OpenAI's finish_reason of an answer without tools."""
    return None if reason is None else reason.value


class Choice(Protocol):
    """One sample of one prompt as it grows."""

    reasoning_tokens: int

    @property
    def num_malformed(self) -> int | None:
        """Tags and calls that had to be dropped or mended; None where there is no parser."""
        ...

    def add(self, output: Output) -> list[dict[str, Any]]:
        """The choice objects of chunks that an increment makes; none if all of it is held back."""
        ...

    def whole(self) -> dict[str, Any]:
        """Everything added so far as the choice object of one body."""
        ...


class Answer(Exchange):
    """An exchange of OpenAI's completion and chat endpoints."""

    def __init__(
        self,
        engine: Engine,
        body: SharedFields,
        requests: Sequence[Request],
        choices: Sequence[Choice],
        header: Header,
        *,
        prompt_field: str,
    ) -> None:
        """requests, choices: sample by sample, prompt by prompt."""
        name = header.fields["id"]
        super().__init__(engine, requests, name, samples=body.n or 1, field=prompt_field)
        self.header = header
        self._body = body
        self._choices = choices

    async def chunks(self, generation: Generation) -> AsyncGenerator[dict[str, Any], None]:
        """The answer bit by bit."""
        async for output in self._outputs(generation):
            for choice in self._add(output):
                usage = self.usage if self._body.continuous_usage else None
                yield self.header.chunk([choice], usage)
        if self._body.include_usage or self._body.timings:
            usage = self.usage if self._body.include_usage else None
            yield self._timed(self.header.chunk([], usage))

    async def collect(self, generation: Generation) -> dict[str, Any]:
        """The answer as one body."""
        async for output in self._outputs(generation):
            self._add(output)
        choices = [choice.whole() for choice in self._choices]
        return self._timed(self.header.chunk(choices, self.usage))

    @property
    def num_malformed(self) -> int | None:
        """Tags and calls that had to be dropped or mended."""
        counts = [choice.num_malformed for choice in self._choices]
        known = [count for count in counts if count is not None]
        return sum(known) if known else None

    def _timed(self, body: dict[str, Any]) -> dict[str, Any]:
        """The body with its timings, if they were asked for."""
        return {**body, "timings": self.clock.timings()} if self._body.timings else body

    def _add(self, output: Output) -> list[dict[str, Any]]:
        chunks = self._choices[output.index].add(output)
        self.usage.reasoning_tokens = sum(choice.reasoning_tokens for choice in self._choices)
        return chunks
