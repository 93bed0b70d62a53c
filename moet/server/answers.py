"""What both OpenAI endpoints answer with: ids, usage, log-probabilities, the final reason."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from moet.errors import RequestError
from moet.runtime.engine import Engine, Generation
from moet.runtime.output import Output
from moet.runtime.tokenizer import Tokenizer
from moet.server.openai import SharedFields
from moet.types import FinishReason, Request, TokenLogprobs

logger = logging.getLogger(__name__)

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
        }

    def chunk(self, choices: list[dict[str, Any]], usage: Usage | None) -> dict[str, Any]:
        """One body or chunk, with usage if given."""
        body = {**self.fields, "choices": choices}
        if usage is not None:
            body["usage"] = usage.body()
        return body


class Usage:
    """Tokens of one answer. A prompt counts once, however many samples it has."""

    def __init__(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self._cached: dict[int, int] = {}

    def add(self, output: Output, *, samples: int) -> None:
        """Count an increment; `samples` is n, since samples of a prompt share its cached tokens."""
        self.completion_tokens += len(output.token_ids)
        if output.num_cached_tokens and output.index % samples == 0:
            self._cached[output.index] = output.num_cached_tokens

    def body(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


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

    def one(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": spell(tokenizer, token_id),
            "logprob": max(logprob, LOWEST_LOGPROB),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    content = []
    for entry in entries:
        if entry is None:
            continue
        pairs = list(zip(entry.token_ids, entry.logprobs, strict=True))
        top = [one(*pair) for pair in pairs[1:]]
        content.append({**one(*pairs[0]), "top_logprobs": top})
    return {"content": content, "refusal": None}


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

    def add(self, output: Output) -> list[dict[str, Any]]:
        """The choice objects of chunks that an increment makes; none if all of it is held back."""
        ...

    def whole(self) -> dict[str, Any]:
        """Everything added so far as the choice object of one body."""
        ...


class Answer:
    """One request to an endpoint: opened first, then either streamed or collected."""

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
        """requests, choices: sample by sample, prompt by prompt. prompt_field: for errors."""
        self.engine = engine
        self.header = header
        self._body = body
        self._requests = requests
        self._choices = choices
        self._prompt_field = prompt_field
        self._samples = body.n or 1
        self.usage = Usage(sum(len(r.prompt_token_ids) for r in requests[:: self._samples]))

    async def open(self) -> Generation:
        """Queue all requests; a refusal is raised here, before any byte is sent."""
        try:
            return await self.engine.open(self._requests)
        except RequestError as error:
            if error.param in ("prompt", "messages"):
                error.param = self._prompt_field
            raise

    async def chunks(self, generation: Generation) -> AsyncGenerator[dict[str, Any], None]:
        """The answer bit by bit."""
        async for output in self._outputs(generation):
            for choice in self._add(output):
                usage = self.usage if self._body.continuous_usage else None
                yield self.header.chunk([choice], usage)
        if self._body.include_usage:
            yield self.header.chunk([], self.usage)

    async def collect(self, generation: Generation) -> dict[str, Any]:
        """The answer as one body."""
        async for output in self._outputs(generation):
            self._add(output)
        return self.header.chunk([choice.whole() for choice in self._choices], self.usage)

    def _add(self, output: Output) -> list[dict[str, Any]]:
        chunks = self._choices[output.index].add(output)
        self.usage.reasoning_tokens = sum(choice.reasoning_tokens for choice in self._choices)
        return chunks

    async def _outputs(self, generation: Generation) -> AsyncGenerator[Output, None]:
        async with generation:
            async for output in generation:
                output.raise_if_failed()
                self.usage.add(output, samples=self._samples)
                yield output
        logger.info("finished %s: %s", self.header.fields["id"], self.usage.body())
