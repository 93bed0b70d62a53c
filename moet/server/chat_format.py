"""Which chat format a model folder speaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moet.errors import ConfigError
from moet.runtime.text_side import TextSide
from moet.server.chat import deepseek_v4_grammar, glm_grammar
from moet.server.chat.call_writers import DsmlCalls, GlmCalls
from moet.server.chat.deepseek_v4 import DeepseekV4Encoding, Ladder
from moet.server.chat.encoding import ChatEncoding
from moet.server.chat.glm import GlmEncoding
from moet.server.chat.grammar import Lexicon
from moet.server.chat.tags import CallWriter


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How a model's prompts are written, its answers read and its calls held to their schemas.

    fill_in: the prompt whose completion belongs between two texts, of models that know one.
    """

    encoding: ChatEncoding
    lexicon: Lexicon
    calls: CallWriter
    fill_in: Callable[[str, str], list[int]] | None = None


def chat_format(text: TextSide) -> ChatFormat:
    """The format by the folder's model_type. ConfigError if it is unknown or a token is missing."""
    tokenizer, config = text.tokenizer, text.config
    model_type = config.get("model_type")
    if model_type == "deepseek_v4":
        ladder: Ladder = "0731" if "dspark_block_size" in config else "preview"
        lexicon = Lexicon(deepseek_v4_grammar.GRAMMAR, tokenizer)
        encoding = DeepseekV4Encoding(tokenizer, ladder)
        return ChatFormat(encoding, lexicon, DsmlCalls(tokenizer), encoding.encode_fim)
    if model_type == "glm_moe_dsa":
        lexicon = Lexicon(glm_grammar.GRAMMAR, tokenizer)
        return ChatFormat(GlmEncoding(tokenizer, text.chat_template), lexicon, GlmCalls(tokenizer))
    message = f"config.json names the model type {model_type!r}, whose chat format is unknown; "
    raise ConfigError(message + "use /v1/completions")
