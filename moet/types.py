"""Nouns shared by packages: what a request asks for and what a step reports. No behaviour."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class ThinkingBudget(msgspec.Struct, frozen=True, kw_only=True):
    """At most max_tokens tokens of reasoning: then end_token_id is forced.

    start_token_id opens reasoning, which the prompt has done already if `starts_open`; end_token_id
    ends it, and so does any of other_end_token_ids. None of these counts as reasoning.
    """

    max_tokens: int
    start_token_id: int
    end_token_id: int
    other_end_token_ids: tuple[int, ...] = ()
    starts_open: bool = True


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to turn logits into tokens, and when to stop.

    Every field acts on token level except `stop`, which the text side applies. `top_k` 0 means
    off. `seed` None lets the engine draw one. `logprobs` is the number of alternatives to report
    per generated token (0: only the chosen one; None: nothing); `prompt_logprobs` likewise for the
    prompt. `max_tokens` None means the rest of the window. `spec_tokens` is the number of drafts
    per step at most, 0 for none; None means what the server does, and so it does for `precision`,
    the policy by which routed experts are computed.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = None
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    spec_tokens: int | None = None
    precision: str | None = None
    thinking: ThinkingBudget | None = None


class GrammarSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a sequence's tokens must spell.

    text is a JSON schema, a regular expression, a JSON list of strings, an EBNF grammar or a
    structural tag in JSON. With after_token_id the constraint begins behind the first token of that
    id; until then everything goes but the end of the sequence and forbidden_token_ids. `param` is
    the request field that a refusal names.
    """

    kind: Literal["json_schema", "regex", "choice", "ebnf", "structural_tag"]
    text: str
    after_token_id: int | None = None
    forbidden_token_ids: tuple[int, ...] = ()
    param: str = "structured_outputs"


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate, as it travels to the engine core.

    `eos_token_ids` end the sequence unless `params.ignore_eos`. Lower `priority` runs first.
    `cache_salt` separates prefix-cache entries; equal salts may share pages. `grammar` constrains
    the answer, which then ends where the grammar allows it and not before.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    priority: int = 0
    cache_salt: str = ""
    grammar: GrammarSpec | None = None


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities at one position: the chosen token first, then the alternatives by rank."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int  # of the chosen token among all of the vocabulary, 1 = most likely


class TokenEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What one step did for one request.

    `token_ids` are the new tokens, in order; `logprobs` has one entry per token if asked for.
    The event with a `finish_reason` is the last one; `stop_token_id` is the id that ended the
    sequence, and it is the last of `token_ids`. `prompt_logprobs` (entry 0 is None) and
    `num_cached_tokens` come with the first event. `error` explains FinishReason.ERROR, which is no
    fault but a full house if `overloaded`. num_draft_tokens were tried so far for the request, and
    num_accepted_tokens of them held; a step tries one run of drafts, so what is added since the
    event before is one run, of which the first ones held.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    overloaded: bool = False
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
