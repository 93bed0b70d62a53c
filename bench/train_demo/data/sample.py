"""What a generator makes: one conversation whose last message is what the model should say."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from moet.server.chat.messages import Message, Tool, ToolCall

HELD_OUT_SHARE = 16  # one key in so many is for evaluation only


@dataclass(frozen=True, slots=True)
class Sample:
    """A conversation ending in the wanted answer, whose `reasoning` is used if it is to think.

    key: what makes the question the same question. expect: a text that a right answer contains.
    """

    task: str
    key: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    schema: dict[str, Any] | None = None
    expect: str = ""
    think: bool | None = None  # None: either way
    every_answer: bool = False  # whether what was said earlier is wanted, too

    @property
    def held_out(self) -> bool:
        return zlib.crc32(f"{self.task}:{self.key}".encode()) % HELD_OUT_SHARE == 0


Generator = Callable[[random.Random], Sample]


def draw(generate: Generator, rng: random.Random, *, held_out: bool) -> Sample:
    """The next sample of the wanted side of the split."""
    while True:
        sample = generate(rng)
        if sample.held_out == held_out:
            return sample


def user(text: str) -> Message:
    return Message("user", text)


def answer(text: str, reasoning: str = "") -> Message:
    return Message("assistant", text, reasoning=reasoning)


def calls(reasoning: str, *made: ToolCall, text: str = "") -> Message:
    return Message("assistant", text, reasoning=reasoning, tool_calls=made)


def system(text: str) -> Message:
    return Message("system", text)


def with_system(sample: Sample, text: str) -> Sample:
    """The same behind a system message."""
    return replace(sample, messages=(system(text), *sample.messages))


def capital(text: str) -> str:
    """With a capital first letter, the rest as it is."""
    return text[:1].upper() + text[1:]


def an(word: str) -> str:
    """The word behind its indefinite article."""
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"
