"""Feeding answers to an output parser, cut in any way, and what they came to."""

import json
import random
from dataclasses import dataclass, field

from moet.runtime.detokenizer import Detokenizer, Piece
from moet.server.chat.calls import CallArguments, CallStart
from moet.server.chat.messages import Tool
from moet.server.chat.parser import ContentDelta, OutputParser, ReasoningDelta
from moet.types import FinishReason


@dataclass
class Answer:
    """All deltas joined."""

    reasoning: str = ""
    content: str = ""
    calls: list = field(default_factory=list)  # (name, arguments as JSON text)
    finish_reason: str = ""
    reasoning_is_answer: bool = False
    num_malformed: int = 0

    @property
    def arguments(self):
        """Of each call: its name and the parsed arguments."""
        return [(name, json.loads(text)) for name, text in self.calls]


def feed(
    lexicon, chunks, *, reason=FinishReason.STOP, stop_reason=None, start="content", **options
):
    """The answer that the chunks (lists of pieces) make, and the deltas of each step."""
    parser = OutputParser(lexicon, start=start, **options)
    steps = [parser.feed(chunk) for chunk in chunks]
    finish = parser.finish(reason, stop_reason=stop_reason)
    steps.append(finish.deltas)
    answer = Answer(
        finish_reason=finish.finish_reason,
        reasoning_is_answer=finish.reasoning_is_answer,
        num_malformed=parser.num_malformed,
    )
    ids = set()
    for delta in (delta for step in steps for delta in step):
        match delta:
            case ReasoningDelta(text):
                assert text
                answer.reasoning += text
            case ContentDelta(text):
                assert text
                answer.content += text
            case CallStart(index, call_id, name):
                assert index == len(answer.calls)
                assert call_id not in ids
                ids.add(call_id)
                answer.calls.append([name, ""])
            case CallArguments(index, text):
                assert text
                assert index == len(answer.calls) - 1
                answer.calls[index][1] += text
    if answer.finish_reason == "tool_calls":
        assert answer.calls
        assert all(isinstance(arguments, dict) for _, arguments in answer.arguments)
    return answer, steps


def of_text(texts):
    """Chunks of one text piece each, as when no token ids are known."""
    return [[Piece(text)] for text in texts]


def of_tokens(tokenizer, text, size=None, seed=None):
    """The text's tokens, control tokens by id, in runs of `size`, or at random by seed."""
    return of_ids(tokenizer, tokenizer.encode(text, allow_special=True), size, seed)


def of_ids(tokenizer, ids, size=None, seed=None):
    """The tokens in runs of `size`, or at random by seed."""
    detokenizer = Detokenizer(tokenizer)
    rng = random.Random(seed)
    chunks = []
    while ids:
        step = size or rng.choice([0, 1, 1, 2, 3, 5, 17])
        chunks.append(detokenizer.push(ids[:step]))
        ids = ids[step:]
    return [*chunks, detokenizer.finish()]


def function(name, required=(), **properties):
    """A tool whose parameters have the given JSON types."""
    schema = {"type": "object", "properties": {k: {"type": v} for k, v in properties.items()}}
    return Tool(name, None, {**schema, "required": list(required)})
