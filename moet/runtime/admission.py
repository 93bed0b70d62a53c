"""Which requests a core takes: refuses what can never be served, and what has no room to wait.

Knows limits and books; knows no sequence, and changes nothing.
"""

from __future__ import annotations

from moet.config import SchedulerConfig
from moet.errors import ContextLengthError, OverloadedError, RequestError
from moet.runtime.grammar_check import check_grammar
from moet.runtime.metrics import CoreInfo
from moet.runtime.sampling_params import check_precision, validate_params
from moet.types import GrammarSpec, Request, SamplingParams


def require_servable(
    request: Request,
    info: CoreInfo,
    has_grammars: bool,
) -> int:
    """The most tokens that the sequence of a request may reach; pages for a whole window exist.

    Raises RequestError (ContextLengthError) for what this core can never serve.
    """
    prompt, params, window = request.prompt_token_ids, request.params, info.max_model_len
    if not prompt:
        raise RequestError("the prompt has no tokens; it needs at least one", param="prompt")
    least = 0 if params.max_tokens == 0 else 1
    if len(prompt) + least > window:
        raise ContextLengthError(
            f"prompt has {len(prompt)} tokens; this server allows {window - least} with room "
            f"for an answer (--max-model-len {window})"
        )
    validate_params(params, info.vocab_size, window)
    check_precision(params.precision, info.precision, info.precisions)
    low, high = min(prompt), max(prompt)
    if low < 0 or high >= info.vocab_size:
        raise RequestError(
            f"prompt has token id {low if low < 0 else high}; ids must be from 0 to "
            f"{info.vocab_size - 1}",
            param="prompt",
        )
    if request.grammar is not None:
        _require_enforceable(request, request.grammar, info.vocab_size, has_grammars)
    if params.max_tokens is None:
        return window
    total = len(prompt) + params.max_tokens
    if total > window:
        raise ContextLengthError(
            f"prompt has {len(prompt)} tokens and max_tokens is {params.max_tokens}, together "
            f"{total}; this server allows {window} (--max-model-len); shorten the prompt or "
            f"ask for at most {window - len(prompt)}"
        )
    return total


def _require_enforceable(
    request: Request, spec: GrammarSpec, vocab_size: int, has_grammars: bool
) -> None:
    if not has_grammars:
        message = "this engine has no tokenizer, so it cannot hold an answer to a grammar"
        raise RequestError(message, param=spec.param)
    if request.params.ignore_eos or not request.eos_token_ids:
        message = "ignore_eos and a grammar exclude each other: the grammar ends the answer"
        raise RequestError(message, param="ignore_eos")
    ids = [*spec.forbidden_token_ids, *request.eos_token_ids]
    ids += [] if spec.after_token_id is None else [spec.after_token_id]
    if not all(0 <= token_id < vocab_size for token_id in ids):
        message = f"the grammar names a token that is not among {vocab_size}"
        raise RequestError(message, param=spec.param)
    check_grammar(spec)


def require_room(
    config: SchedulerConfig, *, num_waiting: int, waiting_tokens: int, num_tokens: int
) -> None:
    """Raise OverloadedError if a prompt of num_tokens may not wait beside those that do."""
    if num_waiting >= config.max_queued_requests:
        raise OverloadedError(
            f"{num_waiting} requests wait; this server queues {config.max_queued_requests} "
            "(--max-num-queued-reqs); try again later"
        )
    if waiting_tokens and waiting_tokens + num_tokens > config.max_queued_tokens:
        raise OverloadedError(
            f"{waiting_tokens} prompt tokens wait and this request brings {num_tokens}; this "
            f"server queues {config.max_queued_tokens} (--max-num-queued-tokens); try again later"
        )


def num_drafts(params: SamplingParams, limit: int) -> int:
    """Tokens that a request has drafted a step, where `limit` are."""
    return limit if params.spec_tokens is None else min(params.spec_tokens, limit)
