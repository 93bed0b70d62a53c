"""Chat templates that a checkpoint ships: jinja2 in a sandbox, with text that cannot steer.

A template returns one string, in which a user's `<|user|>` and the template's own look the same.
So control tokens spelled in conversation text are replaced by sentinels before rendering and put
back afterwards, as text that may not become a token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from moet.errors import ConfigError, RequestError
from moet.runtime.tokenizer import Span, Tokenizer

# Noncharacters: they have no meaning in text, and no tokenizer spells a control token with them.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_SENTINEL = re.compile(f"{_OPEN}(\\d+){_CLOSE}")


class Shield:
    """Keeps control tokens spelled in conversation text from becoming tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: list[str] = []

    def cover(self, value: Any, *, allowed: frozenset[str] = frozenset()) -> Any:
        """The value with every control token in its strings replaced, but for those allowed."""
        if isinstance(value, str):
            return self._cover_text(value, allowed)
        if isinstance(value, Mapping):
            return {self.cover(k): self.cover(v, allowed=allowed) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.cover(item, allowed=allowed) for item in value]
        return value

    def _cover_text(self, text: str, allowed: frozenset[str]) -> str:
        parts, start = [], 0
        for piece in _SENTINEL.finditer(text):  # the client's own noncharacters, spelled likewise
            parts.append(self._cover_tokens(text[start : piece.start()], allowed))
            parts.append(self._sentinel(piece.group()))
            start = piece.end()
        parts.append(self._cover_tokens(text[start:], allowed))
        return "".join(parts)

    def _cover_tokens(self, text: str, allowed: frozenset[str]) -> str:
        parts, start = [], 0
        for begin, end, _ in self._tokenizer.controls_in(text):
            if text[begin:end] not in allowed:
                parts += [text[start:begin], self._sentinel(text[begin:end])]
                start = end
        return "".join([*parts, text[start:]])

    def _sentinel(self, text: str) -> str:
        self._texts.append(text)
        return f"{_OPEN}{len(self._texts) - 1}{_CLOSE}"

    def uncover(self, rendered: str) -> list[Span]:
        """The rendered prompt as spans: only what the template wrote may spell control tokens."""
        spans, start = [], 0
        for piece in _SENTINEL.finditer(rendered):
            spans.append(Span(rendered[start : piece.start()], trusted=True))
            spans.append(Span(self._texts[int(piece.group(1))]))
            start = piece.end()
        return [*spans, Span(rendered[start:], trusted=True)]


class ChatTemplate:
    """One compiled template."""

    def __init__(self, source: str) -> None:
        """Raises ConfigError if the template does not compile."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            message = f"chat_template.jinja, line {error.lineno}: {error.message}"
            raise ConfigError(
                message + "; the file belongs to another model or is broken"
            ) from error

    def render(self, **variables: Any) -> str:
        """Raises RequestError if the template refuses the conversation."""
        try:
            return self._template.render(**variables)
        except jinja2.TemplateError as error:
            message = f"the model's chat template refuses this conversation: {error}"
            raise RequestError(message, param="messages") from error


def _to_json(value: Any, indent: int | None = None) -> str:
    """As chat templates expect it: characters as they are, no escapes for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
