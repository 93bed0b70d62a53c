"""OpenAI's completion and chat requests: their fields, and what the engine is asked for.

Types are strict. Fields that are known and not served are refused by name (`REFUSED_*`); unknown
ones pass. Knows nothing of transport.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from moet.errors import RequestError
from moet.runtime.sampling_params import MAX_LOGPROBS
from moet.types import SamplingParams

REFUSED = {
    "best_of": "use n",
    "use_beam_search": "beam search does not exist here",
    "guided_json": "use structured_outputs.json",
    "guided_regex": "use structured_outputs.regex",
    "guided_choice": "use structured_outputs.choice",
    "guided_grammar": "use structured_outputs.grammar",
    "guided_decoding_backend": "the server chooses",
    "guided_whitespace_pattern": "the server chooses",
    "bad_words": "use logit_bias",
    "truncate_prompt_tokens": "shorten the prompt",
    "logprob_token_ids": "use logprobs",
    "repetition_detection": "use repetition_penalty",
    "prompt_embeds": "only tokens and text are taken",
}
REFUSED_CHAT = REFUSED | {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "audio": "the model has no audio",
    "prediction": "predicted outputs do not exist here",
    "web_search_options": "the server does not search the web",
    "store": "nothing is stored",
    "chat_template": "the model's own chat format is used",
    "documents": "put documents into messages",
}


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SharedFields(msgspec.Struct, kw_only=True):
    """What both endpoints take. None, as a missing field, means the model's default."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    seed: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    timings: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    spec_tokens: int | None = None
    precision: str | None = None
    user: str | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk carries usage."""
        options = self.stream_options
        return bool(options and options.include_usage and options.continuous_usage_stats)

    def check_shared(self) -> None:
        """Refuse combinations that make no sense."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream: true", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs needs stream: false", param="prompt_logprobs")

    def params(
        self,
        defaults: SamplingParams,
        *,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
    ) -> SamplingParams:
        """The sampling parameters, with the model's defaults where the request is silent."""
        given = {
            name: value for name in SAMPLING_FIELDS if (value := getattr(self, name)) is not None
        }
        return msgspec.structs.replace(
            defaults,
            **given,
            logit_bias=_token_biases(self.logit_bias or {}),
            allowed_token_ids=tuple(self.allowed_token_ids or ()),
            stop=_strings(self.stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )


SAMPLING_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "include_stop_str_in_output", "ignore_eos", "min_tokens", "seed",
    "spec_tokens", "precision",
)  # fmt: skip


class CompletionRequest(SharedFields, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[Any]
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = None

    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one: texts or token ids."""
        prompt = self.prompt
        if self.suffix and (not isinstance(prompt, str) or self.echo):
            message = "suffix needs a prompt that is one string, and no echo"
            raise RequestError(message, param="suffix")
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise RequestError("prompt is empty; give text or token ids", param="prompt")
        if len(prompt) > MAX_PROMPTS and not isinstance(prompt[0], int):
            message = f"prompt holds {len(prompt)} prompts; the limit is {MAX_PROMPTS} a request"
            raise RequestError(message, param="prompt")
        if all(isinstance(item, str) for item in prompt):
            return prompt
        if all(map(_is_id, prompt)):
            return [prompt]
        if all(isinstance(item, list) and all(map(_is_id, item)) for item in prompt):
            return prompt
        message = "prompt must be a string, a list of strings, token ids, or lists of token ids"
        raise RequestError(message, param="prompt")


MAX_PROMPTS = 128


class ChatRequest(SharedFields, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Any
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    thinking_token_budget: int | None = None
    reasoning_effort: str | None = None
    reasoning: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    include_reasoning: bool | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    modalities: list[str] | None = None

    def token_limit(self) -> int | None:
        """max_completion_tokens, or max_tokens, its older name."""
        for name in ("max_completion_tokens", "max_tokens"):
            limit: int | None = getattr(self, name)
            if limit is not None:
                if limit < 1:
                    raise RequestError(f"{name} is {limit}; it must be at least 1", param=name)
                return limit
        return None

    def num_logprobs(self) -> int | None:
        """Alternatives to report per token; None for no log-probabilities at all."""
        if not self.logprobs:
            if self.top_logprobs:
                raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
            return None
        return checked_top_logprobs(self.top_logprobs)

    def check_modalities(self) -> None:
        """Text, if anything is said."""
        for modality in self.modalities or ():
            if modality != "text":
                message = f"modalities holds {modality[:40]!r}; this model writes text only"
                raise RequestError(message, param="modalities")


REASONING_FIELDS = (
    "reasoning_effort", "reasoning", "thinking", "enable_thinking", "chat_template_kwargs",
    "thinking_token_budget", "include_reasoning",
)  # fmt: skip


def checked_top_logprobs(number: int | None) -> int:
    """Alternatives per token; RequestError beyond what a sampler reports."""
    if number is not None and not 0 <= number <= MAX_LOGPROBS:
        message = f"top_logprobs is {number}; it must be from 0 to {MAX_LOGPROBS}"
        raise RequestError(message, param="top_logprobs")
    return number or 0


def _is_id(item: object) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def _strings(stop: str | Iterable[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _token_biases(biases: dict[str, float]) -> dict[int, float]:
    parsed = {}
    for key, bias in biases.items():
        if not key.isascii() or not key.isdecimal() or len(key) > 10:
            message = "logit_bias has a key that is not a token id; keys are decimal token ids"
            raise RequestError(message, param="logit_bias")
        parsed[int(key)] = bias
    return parsed
