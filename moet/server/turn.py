"""One turn of a conversation, whichever endpoint asks for it.

An endpoint reads its own fields into a `Turn`; here the turn becomes engine requests, and the
engine's increments become deltas. Knows nothing of any API's shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from moet.errors import RequestError
from moet.runtime.engine import Engine
from moet.runtime.output import Output
from moet.runtime.tokenizer import Tokenizer
from moet.server.chat.calls import CallStart
from moet.server.chat.encoding import ChatOptions, EncodedPrompt
from moet.server.chat.grammar import Lexicon, ReasoningCounter
from moet.server.chat.messages import Message, Tool
from moet.server.chat.parser import Delta, Finish, OutputParser, ReasoningDelta
from moet.server.chat_format import ChatFormat
from moet.server.structured import answer_grammar, behind_reasoning
from moet.types import GrammarSpec, Request, SamplingParams, ThinkingBudget, TokenLogprobs


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """What is asked for.

    content: the grammar of the answer's content. max_thinking_tokens: of each sample.
    hides_reasoning: the reasoning is made, counted and not shown.
    """

    messages: Sequence[Message]
    options: ChatOptions
    params: SamplingParams
    tools: Sequence[Tool] = ()
    content: GrammarSpec | None = None
    max_thinking_tokens: int | None = None
    parallel_tool_calls: bool = True
    hides_reasoning: bool = False
    n: int = 1
    priority: int = 0
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A turn that has been checked: its prompt, and one request per sample."""

    turn: Turn
    form: ChatFormat
    prompt: EncodedPrompt
    requests: list[Request]

    def reader(self, tokenizer: Tokenizer) -> TurnReader:
        """A reader for one sample."""
        return TurnReader(self.turn, self.form.lexicon, self.prompt, tokenizer)


def prepare(engine: Engine, form: ChatFormat, turn: Turn) -> Prepared:
    """Encode a turn and make its requests. RequestError names what is wrong."""
    prompt = form.encoding.encode(turn.messages, turn.tools, turn.options)
    params = turn.params
    if turn.max_thinking_tokens is not None:
        budget = _thinking_budget(form.lexicon, prompt, turn.max_thinking_tokens)
        params = msgspec.structs.replace(params, thinking=budget)
    requests = engine.requests(
        prompt.token_ids,
        params,
        n=turn.n,
        priority=turn.priority,
        cache_salt=turn.cache_salt,
        grammar=_grammar(form, turn, prompt),
    )
    return Prepared(turn, form, prompt, requests)


def _thinking_budget(lexicon: Lexicon, prompt: EncodedPrompt, max_tokens: int) -> ThinkingBudget:
    return ThinkingBudget(
        max_tokens=max_tokens,
        start_token_id=lexicon.think_id,
        end_token_id=lexicon.end_think_id,
        other_end_token_ids=lexicon.call_marker_ids,
        starts_open=prompt.start == "reasoning",
    )


def _grammar(form: ChatFormat, turn: Turn, prompt: EncodedPrompt) -> GrammarSpec | None:
    """What the answer is held to, if anything."""
    spec, from_the_start = answer_grammar(
        turn.content,
        turn.tools,
        turn.options.tool_choice,
        form.calls,
        only_one=not turn.parallel_tool_calls,
    )
    if spec is None:
        return None
    if turn.options.continue_final_message:
        message = "continue_final_message cannot go with a grammar, which is for whole answers"
        raise RequestError(message, param="continue_final_message")
    return spec if from_the_start else behind_reasoning(spec, prompt, form.lexicon)


class TurnReader:
    """One sample's increments as deltas. White space alone is no reasoning and is not shown.

    Without a tokenizer, reasoning tokens are not counted. `spoken` are the log-probabilities of the
    last increment's tokens that are neither reasoning nor control tokens, if any were asked for.
    """

    def __init__(
        self, turn: Turn, lexicon: Lexicon, prompt: EncodedPrompt, tokenizer: Tokenizer | None
    ) -> None:
        self.reasoning_tokens = 0
        self.spoken: list[TokenLogprobs] = []
        self.finish: Finish | None = None  # set by the last increment
        self.made_calls = False  # whether the client is to run tools now
        self._turn = turn
        self._parser = OutputParser(
            lexicon,
            start=prompt.start,
            tools=turn.tools,
            tool_choice=turn.options.tool_choice,
            parallel_tool_calls=turn.parallel_tool_calls,
        )
        self._tokenizer = tokenizer
        self._counter: ReasoningCounter | None = None
        if tokenizer is not None:
            self._counter = ReasoningCounter(
                lexicon.grammar, tokenizer, in_reasoning=prompt.start == "reasoning"
            )
        self._blank = ""  # reasoning that has shown nothing yet
        self._reasons = False  # whether the last delta shown was reasoning
        self._called = False

    @property
    def num_malformed(self) -> int:
        """Tags and calls that had to be dropped or mended."""
        return self._parser.num_malformed

    def read(self, output: Output) -> list[Delta]:
        """The deltas that an increment makes; none if all of it is held back."""
        self._count(output)
        deltas = self._parser.feed(output.pieces)
        if output.finish_reason is not None:
            self.finish = self._parser.finish(output.finish_reason, stop_reason=output.stop_reason)
            deltas = [*deltas, *self.finish.deltas]
        self._called = self._called or any(isinstance(delta, CallStart) for delta in deltas)
        if self.finish is not None:
            by_name = self._turn.options.tool_choice.kind == "named" and self._called
            ended = self.finish.finish_reason == "stop" and output.stop_reason is None
            self.made_calls = self.finish.finish_reason == "tool_calls" or (by_name and ended)
        return list(self._shown(deltas))

    def _count(self, output: Output) -> None:
        if self._counter is None or self._tokenizer is None:
            return
        self.spoken = []
        for i, token_id in enumerate(output.token_ids):
            is_reasoning = self._counter.push(token_id)
            if output.logprobs and not is_reasoning and not self._tokenizer.is_control(token_id):
                self.spoken.append(output.logprobs[i])
        self.reasoning_tokens = self._counter.count

    def _shown(self, deltas: Iterable[Delta]) -> Iterator[Delta]:
        for delta in deltas:
            if not isinstance(delta, ReasoningDelta):
                self._blank, self._reasons = "", False
                yield delta
            elif self._turn.hides_reasoning:
                continue
            elif self._reasons:
                yield delta
            else:
                self._blank += delta.text
                if self._blank.strip():
                    self._reasons = True
                    yield ReasoningDelta(self._blank)
