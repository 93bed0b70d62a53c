"""POST /v1/completions: prompts in, plain text out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moet.errors import RequestError
from moet.runtime.engine import Engine
from moet.runtime.output import Output
from moet.runtime.tokenizer import Tokenizer
from moet.server.answers import (
    Answer,
    CompletionLogprobs,
    Header,
    Pending,
    plain_reason,
    prompt_logprobs,
)
from moet.server.openai import CompletionRequest
from moet.server.structured import content_grammar
from moet.types import Request, TokenLogprobs

MAX_CHOICES = 1024
DEFAULT_MAX_TOKENS = 16  # OpenAI's


FillIn = Callable[[str, str], list[int]]


def completion_answer(
    engine: Engine, body: CompletionRequest, model: str, fill_in: FillIn
) -> Answer:
    """Check a request and prepare its answer. RequestError names what is wrong.

    fill_in: makes the prompt whose completion stands between two texts.
    """
    body.check_shared()
    requests = _requests(engine, body, fill_in)
    tokenizer = engine.text.tokenizer
    choices = [_Choice(body, index, each, tokenizer) for index, each in enumerate(requests)]
    header = Header("cmpl", "text_completion", model, body.request_id)
    return Answer(engine, body, requests, choices, header, prompt_field="prompt")


def _requests(engine: Engine, body: CompletionRequest, fill_in: FillIn) -> list[Request]:
    prompts = body.prompts()
    if body.suffix:
        prompts = [fill_in(str(prompts[0]), body.suffix)]
    samples = 1 if body.n is None else body.n
    if samples * len(prompts) > MAX_CHOICES:
        message = f"n times the number of prompts is {samples * len(prompts)}"
        raise RequestError(f"{message}; the limit is {MAX_CHOICES}", param="n")
    params = body.params(
        engine.text.defaults,
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else body.prompt_logprobs,
    )
    grammar = content_grammar(body.response_format, body.structured_outputs)
    return [
        request
        for prompt in prompts
        for request in engine.requests(
            engine.encode(prompt),
            params,
            n=samples,
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            grammar=grammar,
        )
    ]


class _Choice:
    """One sample of one prompt as it grows."""

    def __init__(
        self, body: CompletionRequest, index: int, request: Request, tokenizer: Tokenizer
    ) -> None:
        self._body = body
        self._index = index
        self._prompt = request.prompt_token_ids
        self._tokenizer = tokenizer
        self._logprobs = CompletionLogprobs(tokenizer)
        self._prompt_logprobs: list[TokenLogprobs | None] = []
        self._pending = Pending()
        self._is_first = True
        self._parts: list[dict[str, Any]] = []
        self.reasoning_tokens = 0  # nothing is told apart here
        self.num_malformed: int | None = None

    def add(self, output: Output) -> list[dict[str, Any]]:
        """The choice objects of chunks that an increment makes; none if all of it is held back."""
        text = output.text
        self._prompt_logprobs += output.prompt_logprobs or []
        if self._is_first and self._body.echo:
            text = self._tokenizer.decode(self._prompt, skip_special=False) + text
            self._pending.token_ids += self._prompt
            self._pending.logprobs += self._prompt_logprobs
        self._is_first = False
        self._pending.add(output)
        if not text and output.finish_reason is None:
            return []
        self._parts.append(self._part(text, output))
        return self._parts[-1:]

    def _part(self, text: str, output: Output) -> dict[str, Any]:
        token_ids, entries = self._pending.take()
        part: dict[str, Any] = {
            "index": self._index,
            "text": text,
            "logprobs": None,
            "finish_reason": plain_reason(output.finish_reason),
            "stop_reason": output.stop_reason,
        }
        if self._body.logprobs is not None:
            part["logprobs"] = self._logprobs.body(token_ids, entries)
        if self._body.return_token_ids:
            part["token_ids"] = token_ids
        return part

    def whole(self) -> dict[str, Any]:
        """Everything added so far as the choice object of one body."""
        parts = self._parts
        whole = dict(parts[-1])
        whole["text"] = "".join(part["text"] for part in parts)
        if whole["logprobs"] is not None:
            whole["logprobs"] = {
                key: [item for part in parts for item in part["logprobs"][key]]
                for key in whole["logprobs"]
            }
        if self._body.return_token_ids:
            whole["token_ids"] = [token for part in parts for token in part["token_ids"]]
            whole["prompt_token_ids"] = self._prompt
        if self._body.prompt_logprobs is not None:
            whole["prompt_logprobs"] = prompt_logprobs(self._tokenizer, self._prompt_logprobs)
        return whole
