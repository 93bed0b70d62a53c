"""The training mixture: how often each generator is asked, system messages, several turns."""

from __future__ import annotations

import random
from dataclasses import replace

from bench.train_demo.data import facts, plain, records, retrieval, stories, sums, tools
from bench.train_demo.data.sample import Generator, Sample, answer, draw, with_system

SHARES: dict[Generator, float] = {
    stories.story: 14,
    stories.explanation: 5,
    facts.question: 7,
    facts.talk: 4,
    sums.bare: 20,
    sums.problem: 13,
    sums.compare: 2,
    tools.call: 14,
    tools.drill: 15,
    tools.pair: 1.5,
    tools.result: 6,
    tools.follow_up: 4,
    tools.unneeded: 3,
    retrieval.short_needle: 7,
    retrieval.short_quiz: 20,
    retrieval.copy: 4,
    retrieval.passage: 4,
    retrieval.transform: 2,
    records.record: 10,
    plain.text: 3,
}
# What an architecture finds hard is asked more often: compressed entries make names of tools hard
# to read, and many codes in one text mix up where nothing is compressed.
HARD: dict[str, dict[Generator, float]] = {
    "deepseek-v4": {tools.drill: 22, retrieval.short_quiz: 8},
    "glm": {tools.drill: 9, retrieval.short_quiz: 24},
}
LONG_SHARES: dict[Generator, float] = {retrieval.long_needle: 1, retrieval.long_quiz: 2}
_SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are a friendly assistant. Answer briefly.",
    "You are moet, a small demo model.",
    "Be brief.",
    "Answer in simple words.",
    "You are a careful assistant that uses tools when they help.",
)
# Turns that may precede another question.
_TURNS: tuple[Generator, ...] = (
    facts.talk,
    facts.talk,
    facts.question,
    facts.question,
    sums.compare,
    sums.bare,
    retrieval.passage,
    stories.story,
)


def one(
    rng: random.Random, family: str = "", *, held_out: bool = False, long: bool = False
) -> Sample:
    """The next conversation of a model's mixture; `long` ones search in long text."""
    shares = LONG_SHARES if long else {**SHARES, **HARD.get(family, {})}
    generate = rng.choices(list(shares), list(shares.values()))[0]
    sample = draw(generate, rng, held_out=held_out)
    if (
        not long
        and not sample.tools
        and sample.schema is None
        and not sample.every_answer
        and sample.messages
        and rng.random() < 0.2
    ):
        sample = _after(sample, rng)
    if sample.messages and rng.random() < 0.25:
        sample = with_system(sample, rng.choice(_SYSTEMS))
    return sample


def _after(sample: Sample, rng: random.Random) -> Sample:
    """The same question after one or two finished turns."""
    before = []
    for _ in range(rng.randint(1, 2)):
        earlier = draw(rng.choice(_TURNS), rng, held_out=False)
        ask, said = earlier.messages[-2], earlier.messages[-1]
        before += [ask, answer(said.content, said.reasoning)]
    return replace(sample, messages=(*before, *sample.messages))
