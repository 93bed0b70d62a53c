"""Chat formats by model type: how a conversation becomes a prompt, and an answer a message."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moet.errors import ConfigError
from moet.runtime.tokenizer import Tokenizer
from moet.server.chat import deepseek_v4_grammar
from moet.server.chat.deepseek_v4 import DeepseekV4Encoding, Ladder
from moet.server.chat.encoding import ChatEncoding
from moet.server.chat.grammar import Lexicon


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """One model's chat format, bound to its tokenizer; requests share it."""

    encoding: ChatEncoding
    lexicon: Lexicon


def chat_format(
    config: Mapping[str, Any], tokenizer: Tokenizer, template: str | None = None
) -> ChatFormat:
    """The format of the model whose config.json is `config`.

    template: the text of chat_template.jinja, if the model folder has one. Raises ConfigError if no
    format is known for the model type, or if the tokenizer lacks a control token of the format.
    """
    model_type = config.get("model_type")
    build = _FORMATS.get(model_type) if isinstance(model_type, str) else None
    if build is None:
        message = f"no chat format is known for model_type {model_type!r}; known are "
        raise ConfigError(message + ", ".join(_FORMATS))
    return build(config, tokenizer, template)


def _deepseek_v4(
    config: Mapping[str, Any], tokenizer: Tokenizer, template: str | None
) -> ChatFormat:
    """Effort prompts differ by revision: those with DSpark stages read 0731's."""
    ladder: Ladder = "preview" if config.get("dspark_block_size") is None else "0731"
    encoding = DeepseekV4Encoding(tokenizer, ladder)
    return ChatFormat(encoding, Lexicon(deepseek_v4_grammar.GRAMMAR, tokenizer))


_FORMATS: Mapping[str, Callable[[Mapping[str, Any], Tokenizer, str | None], ChatFormat]] = {
    "deepseek_v4": _deepseek_v4
}
