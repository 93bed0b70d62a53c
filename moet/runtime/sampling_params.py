"""Refuses sampling parameters that cannot be served, before any work starts. Knows no request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeGuard

from moet.config import MAX_SPEC_TOKENS
from moet.errors import RequestError
from moet.types import SamplingParams, ThinkingBudget

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 100.0
MAX_TEMPERATURE = 100.0
MIN_TEMPERATURE = 1e-4  # anything lower, but for 0, would only be greedy with rounding noise
MAX_STOP_STRINGS = 64
MAX_STOP_BYTES = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_THINK_ENDS = 3  # tokens that end thinking beside the forced one


def validate_params(params: SamplingParams, vocab_size: int, max_model_len: int) -> None:
    """Raise RequestError naming the field, its value, the limit and the remedy.

    vocab_size: ids must be below it. max_model_len: tokens of prompt and output together; how much
    of it the prompt leaves is checked where the prompt is known.
    """
    _check_randomness(params)
    _check_penalties(params)
    _check_ids(params, vocab_size)
    _check_lengths(params, max_model_len)
    _check_stop(params)
    if params.thinking is not None:
        _check_thinking(params.thinking, vocab_size)
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None:
            _integer(params, name, 0, MAX_LOGPROBS)


def check_precision(precision: str | None, default: str, others: Iterable[str]) -> None:
    """Raise RequestError if experts cannot be computed so: with neither default nor others."""
    served = dict.fromkeys((default, *others))
    if precision is not None and precision not in served:
        message = f"precision is {_show(precision)}; this server has {', '.join(served)}"
        raise RequestError(message, param="precision")


def _check_randomness(params: SamplingParams) -> None:
    temperature = _number(params, "temperature", 0.0, MAX_TEMPERATURE)
    if 0.0 < temperature < MIN_TEMPERATURE:
        message = f"temperature is {temperature}; use 0 for greedy or at least {MIN_TEMPERATURE}"
        raise RequestError(message, param="temperature")
    if _number(params, "top_p", 0.0, 1.0) == 0.0:
        raise RequestError("top_p is 0; it must be above 0, and 1 turns it off", param="top_p")
    _number(params, "min_p", 0.0, 1.0)
    _integer(params, "top_k", 0, 2**63 - 1, remedy="; 0 turns it off")
    if params.seed is not None:
        _integer(params, "seed", -(2**63), 2**63 - 1)


def _check_penalties(params: SamplingParams) -> None:
    _number(params, "presence_penalty", -2.0, 2.0)
    _number(params, "frequency_penalty", -2.0, 2.0)
    if _number(params, "repetition_penalty", 0.0, 10.0) < 0.01:
        message = f"repetition_penalty is {params.repetition_penalty}; it must be from 0.01 to 10"
        raise RequestError(message + ", and 1 turns it off", param="repetition_penalty")


def _check_ids(params: SamplingParams, vocab_size: int) -> None:
    _token_ids("logit_bias", params.logit_bias, vocab_size)
    for token_id, bias in params.logit_bias.items():
        in_range = _is_number(bias) and -MAX_LOGIT_BIAS <= bias <= MAX_LOGIT_BIAS
        if not in_range:
            message = f"logit_bias of token {token_id} is {_show(bias)}; it must be from "
            message += f"-{MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}"
            raise RequestError(message, param="logit_bias")
    _token_ids("allowed_token_ids", params.allowed_token_ids, vocab_size)
    _token_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        message = f"stop_token_ids has {len(params.stop_token_ids)} entries; the limit is "
        raise RequestError(message + str(MAX_STOP_TOKEN_IDS), param="stop_token_ids")


def _check_lengths(params: SamplingParams, max_model_len: int) -> None:
    if params.max_tokens is not None:
        _integer(params, "max_tokens", 0, 2**63 - 1)
    limit, field = max_model_len, f"the window of {max_model_len} tokens"
    if params.max_tokens is not None and params.max_tokens < limit:
        limit, field = params.max_tokens, f"max_tokens {params.max_tokens}"
    if params.spec_tokens is not None:
        _integer(params, "spec_tokens", 0, MAX_SPEC_TOKENS)
    if _integer(params, "min_tokens", 0, 2**63 - 1) > limit:
        message = f"min_tokens is {params.min_tokens}, more than {field}; lower it"
        raise RequestError(message, param="min_tokens")


def _check_stop(params: SamplingParams) -> None:
    if len(params.stop) > MAX_STOP_STRINGS:
        message = f"stop has {len(params.stop)} strings; the limit is {MAX_STOP_STRINGS}"
        raise RequestError(message, param="stop")
    for text in params.stop:
        if not isinstance(text, str) or not text:
            message = f"stop holds {_show(text)}; every stop must be a string of at least one "
            raise RequestError(message + "character", param="stop")
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError as error:
            message = "stop holds a lone surrogate, which is no character; send valid Unicode"
            raise RequestError(message, param="stop") from error
        if num_bytes > MAX_STOP_BYTES:
            message = f"stop holds a string of {num_bytes} bytes; the limit is {MAX_STOP_BYTES}"
            raise RequestError(message, param="stop")


def _check_thinking(budget: ThinkingBudget, vocab_size: int) -> None:
    if budget.max_tokens < 0:
        message = f"thinking_token_budget is {budget.max_tokens}; it must be at least 0"
        raise RequestError(message, param="thinking_token_budget")
    ends = (budget.end_token_id, *budget.other_end_token_ids)
    _token_ids("thinking", (budget.start_token_id, *ends), vocab_size)
    if len(ends) > 1 + MAX_THINK_ENDS:
        message = f"thinking has {len(ends)} end tokens; the limit is {1 + MAX_THINK_ENDS}"
        raise RequestError(message, param="thinking")


def _number(params: SamplingParams, name: str, low: float, high: float) -> float:
    """The value of a field that must be a number within the limits (a NaN is not)."""
    value: object = getattr(params, name)
    if not _is_number(value) or not low <= value <= high:
        message = f"{name} is {_show(value)}; it must be from {low:g} to {high:g}"
        raise RequestError(message, param=name)
    return float(value)


def _integer(params: SamplingParams, name: str, low: int, high: int, remedy: str = "") -> int:
    """The value of a field that must be an integer within the limits."""
    value: object = getattr(params, name)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        limits = f"from {low} to {high}" if high < 2**63 - 1 or low < 0 else f"at least {low}"
        message = f"{name} is {_show(value)}; it must be an integer {limits}{remedy}"
        raise RequestError(message, param=name)
    return value


def _token_ids(name: str, token_ids: Iterable[object], vocab_size: int) -> None:
    for token_id in token_ids:
        is_integer = isinstance(token_id, int) and not isinstance(token_id, bool)
        if not is_integer or not 0 <= token_id < vocab_size:  # type: ignore[operator]
            message = f"{name} names token {_show(token_id)}; ids must be integers from 0 to "
            raise RequestError(message + str(vocab_size - 1), param=name)


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _show(value: object) -> str:
    """The value as it was sent, cut to a length that an error body can carry."""
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."
