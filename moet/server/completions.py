"""POST /v1/completions: prompts in, plain text out."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from moet.errors import RequestError
from moet.runtime.engine import Engine, Generation
from moet.runtime.output import Output
from moet.server.answers import (
    CompletionLogprobs,
    Header,
    Pending,
    Usage,
    opened,
    plain_reason,
    prompt_logprobs,
)
from moet.server.openai import CompletionRequest
from moet.server.stream import frame
from moet.types import Request, TokenLogprobs

MAX_CHOICES = 1024
DEFAULT_MAX_TOKENS = 16  # OpenAI's


class _Choice:
    """One sample of one prompt as it grows."""

    def __init__(self, answer: CompletionAnswer, index: int, request: Request) -> None:
        self.index = index
        self.text = ""
        self._answer = answer
        self._request = request
        self._pending = Pending()
        self._logprobs = CompletionLogprobs(answer.engine.text.tokenizer)
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._is_first = True

    def add(self, output: Output) -> dict[str, Any] | None:
        """The choice object of this increment; None if there is nothing to tell yet."""
        text = output.text
        if self._is_first and self._answer.body.echo:
            text = self._echo(output) + text
        self._is_first = False
        self._pending.add(output)
        self._prompt_logprobs = output.prompt_logprobs or self._prompt_logprobs
        if not text and output.finish_reason is None:
            return None
        token_ids, entries = self._pending.take()
        choice: dict[str, Any] = {
            "index": self.index,
            "text": text,
            "logprobs": None,
            "finish_reason": plain_reason(output.finish_reason),
            "stop_reason": output.stop_reason,
        }
        if self._answer.body.logprobs is not None:
            choice["logprobs"] = self._logprobs.body(token_ids, entries)
        if self._prompt_logprobs is not None and self._answer.wants_prompt_logprobs:
            choice["prompt_logprobs"] = prompt_logprobs(
                self._answer.engine.text.tokenizer, self._prompt_logprobs
            )
        if self._answer.body.return_token_ids:
            choice["token_ids"] = token_ids
            choice["prompt_token_ids"] = self._request.prompt_token_ids
        return choice

    def _echo(self, output: Output) -> str:
        prompt = self._request.prompt_token_ids
        self._pending.token_ids += prompt
        self._pending.logprobs += output.prompt_logprobs or []
        return self._answer.engine.text.tokenizer.decode(prompt, skip_special=False)


class CompletionAnswer:
    """One request to the endpoint: opened first, then either streamed or collected."""

    def __init__(self, engine: Engine, body: CompletionRequest, model: str) -> None:
        self.engine = engine
        self.body = body
        self.wants_prompt_logprobs = body.prompt_logprobs is not None
        self.samples = 1 if body.n is None else body.n
        self.header = Header("cmpl", "text_completion", model, body.request_id)
        self.requests = self._requests()
        prompts = self.requests[:: self.samples]
        self.usage = Usage(sum(len(request.prompt_token_ids) for request in prompts))
        self.choices = [_Choice(self, i, request) for i, request in enumerate(self.requests)]

    def _requests(self) -> list[Request]:
        body = self.body
        body.check_shared()
        max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        if body.echo and body.logprobs is not None:
            body.prompt_logprobs = body.logprobs
        params = body.params(
            self.engine.text.defaults, max_tokens=max_tokens, logprobs=body.logprobs
        )
        prompts = body.prompts()
        if self.samples * len(prompts) > MAX_CHOICES:
            message = f"n times the number of prompts is {self.samples * len(prompts)}"
            raise RequestError(f"{message}; the limit is {MAX_CHOICES}", param="n")
        return [
            request
            for prompt in prompts
            for request in self.engine.requests(
                self.engine.encode(prompt),
                params,
                n=self.samples,
                priority=body.priority or 0,
                cache_salt=body.cache_salt or "",
            )
        ]

    async def open(self) -> Generation:
        """Queue all requests; a refusal is raised here, before any byte is sent."""
        return await opened(self.engine, self.requests, "prompt")

    async def frames(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """The answer as events."""
        body = self.body
        async with generation:
            async for output in generation:
                output.raise_if_failed()
                self.usage.add(output, samples=self.samples)
                choice = self.choices[output.index].add(output)
                if choice is not None:
                    usage = self.usage if body.continuous_usage else None
                    yield frame(self.header.chunk([choice], usage))
        if body.include_usage:
            yield frame(self.header.chunk([], self.usage))

    async def collect(self, generation: Generation) -> dict[str, Any]:
        """The answer as one body."""
        parts: list[list[dict[str, Any]]] = [[] for _ in self.choices]
        async with generation:
            async for output in generation:
                output.raise_if_failed()
                self.usage.add(output, samples=self.samples)
                choice = self.choices[output.index].add(output)
                if choice is not None:
                    parts[output.index].append(choice)
        return self.header.chunk([_joined(each) for each in parts], self.usage)


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Consecutive choice objects as one."""
    whole = dict(parts[-1])
    whole["text"] = "".join(part["text"] for part in parts)
    if whole["logprobs"] is not None:
        whole["logprobs"] = {
            key: [item for part in parts for item in part["logprobs"][key]]
            for key in whole["logprobs"]
        }
    if "token_ids" in whole:
        whole["token_ids"] = [token for part in parts for token in part["token_ids"]]
    return whole
