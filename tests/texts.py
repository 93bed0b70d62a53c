"""A tokenizer of single bytes with V4's control tokens, for tests that care about text."""

from __future__ import annotations

import json
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from moet.runtime.text_side import TextSide
from moet.runtime.tokenizer import Tokenizer as MoetTokenizer

SPECIAL = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
CONTROL = (
    "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜", "<｜latest_reminder｜>",
    "<｜action｜>", "<｜query｜>", "<｜authority｜>", "<｜domain｜>", "<｜title｜>",
    "<｜read_url｜>", "<｜extracted_url｜>", "<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>",
)  # fmt: skip
EOS = 257


@cache
def byte_tokenizer() -> MoetTokenizer:
    """Ids 0-255 are bytes, in the order of the byte-level alphabet; then the controls."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in CONTROL])
    return MoetTokenizer(tokenizer.to_str(), (EOS,))


def ids(text: str) -> list[int]:
    """The ids of a text in which control tokens count as such."""
    return byte_tokenizer().encode(text, allow_special=True)


def text_side() -> TextSide:
    """A V4 model's text side over the byte tokenizer."""
    return TextSide(tokenizer=byte_tokenizer(), config={"model_type": "deepseek_v4"})


def tokenizer_json() -> str:
    """The tokenizer as a file's content."""
    return json.dumps(json.loads(byte_tokenizer()._full.to_str()))
