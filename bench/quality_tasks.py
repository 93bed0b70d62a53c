"""The questions of bench/quality.py, and what counts as a right answer. Knows no engine."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bench.train_demo.corpus import Rendered, Renderer
from bench.train_demo.data import facts, records, retrieval, stories, sums, tools
from bench.train_demo.data.sample import Generator, Sample, draw
from moet.runtime.tokenizer import Tokenizer

TASKS: dict[str, Generator] = {
    "sum": sums.bare,
    "problem": sums.problem,
    "question": facts.question,
    "tool_call": tools.call,
    "tool_result": tools.result,
    "json": records.record,
}
STRICT = "strict_call"  # the calls of "tool_call", their tools declared with "strict": true
STORY: Generator = stories.story
NEEDLE_WORDS = {500: 380, 1000: 780, 2000: 1560, 4000: 3150, 8000: 6300}  # tokens: words
_JSON_KINDS: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
}


@dataclass(frozen=True, slots=True)
class Question:
    """A held-out sample as a server would ask it."""

    sample: Sample
    rendered: Rendered
    thinking: bool


def held_out(generate: Generator, renderer: Renderer, count: int, seed: int) -> Iterator[Question]:
    """Distinct held-out questions; sums think, others every other time."""
    rng = random.Random(seed)
    seen: set[str] = set()
    while len(seen) < count:
        sample = draw(generate, rng, held_out=True)
        if sample.key in seen:
            continue
        thinking = sample.task in ("sum", "problem") or len(seen) % 2 == 0
        if sample.think is not None and sample.think != thinking:
            continue
        seen.add(sample.key)
        yield Question(sample, renderer.render(sample, thinking), thinking)


def needles(renderer: Renderer, num_words: int, count: int, seed: int) -> Iterator[Question]:
    """Needles at evenly spread depths, each of a text of num_words words of its own."""
    rng, found = random.Random(seed), 0
    while found < count:
        sample = retrieval.needle(rng, num_words, depth=(found + 0.5) / count)
        if sample.held_out:
            found += 1
            yield Question(sample, renderer.render(sample, thinking=False), False)


def needle_text(renderer: Renderer, num_words: int, count: int, seed: int) -> list[Question]:
    """Needles at evenly spread depths of one text of num_words words."""
    asked = retrieval.shared_needles(random.Random(seed), num_words, count)
    return [Question(sample, renderer.render(sample, thinking=False), False) for sample in asked]


def said(tokenizer: Tokenizer, token_ids: list[int], ends: tuple[int, ...]) -> str:
    """The visible answer with its markup: what comes after the reasoning, before the end token."""
    kept = [token_id for token_id in token_ids if token_id not in ends]
    return tokenizer.decode(kept, skip_special=False).rpartition("</think>")[2]


def is_right(question: Question, answer: str, wanted: str) -> bool:
    """Calls must be the wanted ones to the letter; what a tool said may be told in other words,
    with all that it said; other answers must contain what was asked."""
    sample = question.sample
    if sample.task == "tool_result":
        return _told(sample) <= _words(answer)
    if sample.task == "tool_call":
        return answer.strip() == wanted.strip()
    if sample.task == "json":
        return bool(_parsed(answer) == json.loads(sample.expect))
    return sample.expect in answer


def follows_schema(sample: Sample, answer: str) -> bool:
    """Whether an answer is an object with the keys and types of the sample's schema."""
    value = _parsed(answer)
    wanted = json.loads(sample.expect)
    properties = (sample.schema or {}).get("properties") or {}
    if not isinstance(value, dict) or set(value) != set(wanted):
        return False
    return all(isinstance(value[k], _JSON_KINDS[part["type"]]) for k, part in properties.items())


def _told(sample: Sample) -> set[str]:
    """The words of the wanted answer that come from the call or from its result."""
    *_, called, result, _ = sample.messages
    known = _words(result.content)
    for call in called.tool_calls:
        known |= _words(call.arguments)
    return _words(sample.expect) & known


def _words(text: str) -> set[str]:
    return set(re.findall(r"[\w./-]*\w", text.lower()))


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
