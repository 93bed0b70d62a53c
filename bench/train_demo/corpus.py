"""Conversations to rows of token ids through moet's own chat formats, so that training sees exactly
what serving writes. Rows are packed from whole conversations."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bench.train_demo.data.mixture import one
from bench.train_demo.data.sample import Sample
from bench.train_demo.tokenizer import Family
from moet.runtime.tokenizer import Span, Tokenizer
from moet.server.chat.deepseek_v4 import ASSISTANT, BOS, EOS, DeepseekV4Encoding
from moet.server.chat.encoding import ChatEncoding, ChatOptions
from moet.server.chat.glm import GlmEncoding
from moet.server.chat.messages import Message

WANTED = 0x8000  # set on tokens of the answer, which count in full
READ = 0x4000  # set beside it on what had to be read elsewhere to be said: names in calls
TOKEN_MASK = READ - 1  # the id of a marked token
CONTEXT_WEIGHT = 0.15  # of predicting any token outside the answer
READ_WEIGHT = 4.0  # few tokens say whether a call is right
OPEN_ROWS = 24


@dataclass(frozen=True, slots=True)
class Rendered:
    """prompt: ids up to where the answer begins. completion: the answer with its end token."""

    prompt: list[int]
    completion: list[int]


def _shown(sample: Sample, thinking: bool) -> tuple[Message, ...]:
    """The messages, without reasoning where nothing is thought."""
    if thinking:
        return sample.messages
    return tuple(replace(message, reasoning="") for message in sample.messages)


class Renderer:
    """One model's chat format over one tokenizer folder."""

    def __init__(self, family: Family, folder: Path) -> None:
        self.family = family
        self.tokenizer = Tokenizer.from_folder(folder)
        self.encoding: ChatEncoding
        if family == "glm":
            self.encoding = GlmEncoding(self.tokenizer)
            self.pad = self.tokenizer.control_id("<|endoftext|>")
            self.user = self.tokenizer.control_id("<|user|>")
            self.observation = self.tokenizer.control_id("<|observation|>")
        else:
            self.encoding = DeepseekV4Encoding(self.tokenizer, "preview")
            self.pad = self.tokenizer.control_id("<｜▁pad▁｜>")

    def options(self, sample: Sample, thinking: bool, effort: str | None) -> ChatOptions:
        return ChatOptions(
            thinking=thinking, reasoning_effort=effort, response_schema=sample.schema
        )

    def render(self, sample: Sample, thinking: bool, effort: str | None = None) -> Rendered:
        """The prompt as a server would write it, and the answer as the model should."""
        messages = _shown(sample, thinking)
        options = self.options(sample, thinking, effort)
        prompt = self.encoding.encode(messages[:-1], sample.tools, options).token_ids
        whole = self.whole(sample, thinking, effort)
        if whole[: len(prompt)] != prompt:
            raise ValueError(f"the answer changes its prompt: {sample}")
        return Rendered(prompt, whole[len(prompt) :])

    def whole(self, sample: Sample, thinking: bool, effort: str | None = None) -> list[int]:
        """The conversation with its last answer and that one's end token."""
        options = replace(self.options(sample, thinking, effort), add_generation_prompt=False)
        messages = _shown(sample, thinking)
        whole = self.encoding.encode(messages, sample.tools, options).token_ids
        if self.family == "glm":
            whole.append(self.observation if messages[-1].tool_calls else self.user)
        return whole

    def _plain(self, text: str) -> np.ndarray:
        first = "[gMASK]<sop>" if self.family == "glm" else BOS
        last = "<|endoftext|>" if self.family == "glm" else EOS
        spans = [Span(first, trusted=True), Span(text), Span(last, trusted=True)]
        return np.array(self.tokenizer.encode_spans(spans), dtype=np.uint16)

    def sample_tokens(self, sample: Sample, rng: random.Random) -> np.ndarray:
        """A conversation with a random mode as uint16, answer tokens marked with WANTED and the
        names in calls with READ."""
        if not sample.messages:
            return self._plain(sample.expect)
        thinking = rng.random() < 0.5 if sample.think is None else sample.think
        effort = None
        if thinking:
            effort = rng.choices((None, "low", "high", "max"), (6, 1, 2, 0.4))[0]
        if sample.every_answer:  # finding them needs no prompt, whose ids take time
            tokens = np.array(self.whole(sample, thinking, effort), dtype=np.uint16)
            self._mark_answers(tokens)
        else:
            done = self.render(sample, thinking, effort)
            tokens = np.array(done.prompt + done.completion, dtype=np.uint16)
            tokens[len(done.prompt) :] |= WANTED
        self._mark_names(sample, tokens)
        return tokens

    def _mark_names(self, sample: Sample, tokens: np.ndarray) -> None:
        """Mark the names of called tools and of their parameters where answers say them."""
        called = [call for message in sample.messages for call in message.tool_calls]
        names = {call.name for call in called}
        names.update(key for call in called for key in json.loads(call.arguments))
        at = np.flatnonzero(tokens >= WANTED)
        plain = tokens & TOKEN_MASK
        for name in sorted(names):
            for text in (name, f" {name}"):
                ids = self.tokenizer.encode_spans([Span(text)])
                begins = at[plain[at] == ids[0]]
                for begin in begins[begins + len(ids) <= len(tokens)]:
                    span = slice(begin, begin + len(ids))
                    if (plain[span] == ids).all() and (tokens[span] >= WANTED).all():
                        tokens[span] |= READ

    def _mark_answers(self, tokens: np.ndarray) -> None:
        """Mark what follows each assistant header, with the token that ends it."""
        glm = self.family == "glm"
        header = self.tokenizer.control_id("<|assistant|>" if glm else ASSISTANT)
        closing = ("<|user|>", "<|observation|>") if glm else (EOS,)
        plain = tokens & TOKEN_MASK
        ends = np.flatnonzero(np.isin(plain, [self.tokenizer.control_id(end) for end in closing]))
        for begin in np.flatnonzero(plain == header) + 1:
            stop = ends[ends >= begin]
            tokens[begin : stop[0] + 1 if len(stop) else None] |= WANTED


def rows(
    renderer: Renderer, length: int, seed: int, *, held_out: bool = False, long_share: float = 0.0
) -> Iterator[np.ndarray]:
    """Endless rows [length] uint16 of whole conversations, padded at the end.

    Longer ones are dropped. long_share: how many of the conversations search in long text.
    """
    rng = random.Random(seed)
    open_rows: list[list[np.ndarray]] = [[] for _ in range(OPEN_ROWS)]
    used = [0] * OPEN_ROWS
    while True:
        long = rng.random() < long_share
        sample = one(rng, renderer.family, held_out=held_out, long=long)
        tokens = renderer.sample_tokens(sample, rng)
        size = len(tokens)
        if size > length:
            continue
        fits = [idx for idx in range(OPEN_ROWS) if used[idx] + size <= length]
        idx = (
            max(fits, key=used.__getitem__) if fits else max(range(OPEN_ROWS), key=used.__getitem__)
        )
        if not fits:
            yield _joined(open_rows[idx], length, renderer.pad)
            open_rows[idx], used[idx] = [], 0
        open_rows[idx].append(tokens)
        used[idx] += size


def _joined(parts: list[np.ndarray], length: int, pad: int) -> np.ndarray:
    row = np.full(length, pad, dtype=np.uint16)
    joined = np.concatenate(parts)
    row[: len(joined)] = joined
    return row


def token_counts(renderer: Renderer, num_rows: int = 200, length: int = 1024) -> np.ndarray:
    """How often each id occurs in some rows, [vocab_size] float32."""
    source = rows(renderer, length, seed=7)
    counts = np.zeros(renderer.tokenizer.vocab_size, dtype=np.float32)
    for _ in range(num_rows):
        np.add.at(counts, next(source) & TOKEN_MASK, 1)
    return counts
