"""The two libraries that compile grammars and match them. Knows no request and no thread.

Control tokens never match text: only a grammar that names a token by its id lets one come.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from moet.runtime.grammar import Matcher
from moet.runtime.tokenizer import Tokenizer
from moet.types import GrammarSpec

MAX_WHITESPACE = 20  # in one place of a JSON text; a model may not fill its answer with blanks


class Backend(Protocol):
    """Compiles grammars for a vocabulary."""

    def compile(self, spec: GrammarSpec) -> tuple[Callable[[Sequence[int]], Matcher], int]:
        """A maker of matchers by end tokens, and the bytes that it holds.

        Raises ValueError with the reason if the grammar is refused.
        """
        ...


class XGrammar:
    """xgrammar: everything compiled up front, masks in microseconds."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        import xgrammar  # seconds: it brings the transformers library along

        self._library = xgrammar
        # No text has a byte 0xFF, so that no text grammar lets a control token come. Tokens of no
        # bytes, such as the padding of the vocabulary, are never allowed at all.
        spellings = [
            b"\xff" + spelling if tokenizer.is_control(i) else spelling
            for i, spelling in enumerate(map(tokenizer.token_bytes, range(vocab_size)))
        ]
        info = xgrammar.TokenizerInfo(
            spellings, vocab_size=vocab_size, stop_token_ids=list(tokenizer.eos_token_ids)
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, spec: GrammarSpec) -> tuple[Callable[[Sequence[int]], Matcher], int]:
        """See Backend."""
        try:
            compiled = self._compiled(spec)
        except RuntimeError as error:
            raise ValueError(_reason(error)) from error
        library = self._library

        def make(end_token_ids: Sequence[int]) -> Matcher:
            return _XMatcher(
                library.GrammarMatcher(compiled, override_stop_tokens=list(end_token_ids))
            )

        return make, compiled.memory_size_bytes

    def _compiled(self, spec: GrammarSpec) -> Any:
        match spec.kind:
            case "json_schema":
                return self._compiler.compile_json_schema(
                    spec.text, max_whitespace_cnt=MAX_WHITESPACE
                )
            case "regex":
                return self._compiler.compile_regex(spec.text)
            case "choice":
                return self._compiler.compile_grammar(_alternatives(json.loads(spec.text)))
            case "ebnf":
                return self._compiler.compile_grammar(spec.text)
            case "structural_tag":
                return self._compiler.compile_structural_tag(spec.text)


class _XMatcher:
    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def accept(self, token_id: int) -> bool:
        return bool(self._matcher.accept_token(token_id))

    def fill(self, mask: Tensor) -> None:
        self._matcher.fill_next_token_bitmask(mask[None])

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)


class Guidance:
    """llguidance: everything worked out on the way, more of JSON schema, Lark grammars."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        import llguidance

        self._library = llguidance
        self._vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._vocabularies: dict[tuple[int, ...], Any] = {}

    def compile(self, spec: GrammarSpec) -> tuple[Callable[[Sequence[int]], Matcher], int]:
        """See Backend."""
        text = self._grammar(spec)
        matcher = self._library.LLMatcher(
            self._vocabulary(self._tokenizer.eos_token_ids), text, log_level=0
        )
        if matcher.is_error():
            raise ValueError(matcher.get_error().strip().splitlines()[0])

        def make(end_token_ids: Sequence[int]) -> Matcher:
            vocabulary = self._vocabulary(tuple(end_token_ids))
            matcher = self._library.LLMatcher(vocabulary, text, log_level=0)
            return _GuidanceMatcher(matcher)

        return make, len(text)

    def _vocabulary(self, end_token_ids: tuple[int, ...]) -> Any:
        if end_token_ids not in self._vocabularies:
            wrapper = self._library.TokenizerWrapper(
                _Vocabulary(self._tokenizer, self._vocab_size, end_token_ids)
            )
            self._vocabularies[end_token_ids] = self._library.LLTokenizer(
                wrapper, n_vocab=self._vocab_size, eos_token=list(end_token_ids)
            )
        return self._vocabularies[end_token_ids]

    def _grammar(self, spec: GrammarSpec) -> str:
        make = self._library.LLMatcher
        match spec.kind:
            case "json_schema":
                blanks: Any = {"whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{0,{MAX_WHITESPACE}}}"}
                return str(make.grammar_from_json_schema(spec.text, defaults=blanks))
            case "regex":
                return str(make.grammar_from_regex(spec.text))
            case "ebnf":
                return str(make.grammar_from_lark(spec.text))
            case kind:
                raise ValueError(f"a {kind} has no other form")


class _Vocabulary:
    """A tokenizer as llguidance asks for it."""

    bos_token_id = None

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, end_token_ids: tuple[int, ...]
    ) -> None:
        self.eos_token_id = end_token_ids[0]
        self.tokens = [tokenizer.token_bytes(i) for i in range(vocab_size)]
        self.special_token_ids = [i for i in range(vocab_size) if tokenizer.is_control(i)]
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)


class _GuidanceMatcher:
    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def accept(self, token_id: int) -> bool:
        if self._matcher.validate_tokens([token_id]) != 1:
            return False  # asked first, since a matcher that has refused a token stays broken
        return bool(self._matcher.consume_token(token_id))

    def fill(self, mask: Tensor) -> None:
        words = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.int32)
        mask.copy_(words[: len(mask)])

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)


def _alternatives(texts: Sequence[str]) -> str:
    return "root ::= " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


_WHERE = re.compile(r"^\[[\d:]+\] \S+:\d+: ")


def _reason(error: RuntimeError) -> str:
    """The library's message without the place in its source."""
    return _WHERE.sub("", str(error).strip()).splitlines()[0]
