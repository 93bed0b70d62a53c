"""Tokenizer files for synthetic GLM-5.2 checkpoints: byte-level BPE with GLM's added tokens.

Every added token has its official text and order; ids are the official ones where the vocabulary
reaches them, and the last ones of a smaller vocabulary. The merges are made up."""

from __future__ import annotations

from typing import Any

from moet.models.synthetic_tokenizer import added_token, bpe_file, byte_alphabet, letter_merges

OFFICIAL_VOCAB_SIZE = 154_880  # a multiple of 128; the last ids have no token
FIRST_ADDED_ID = 154_820
_ROLES = (
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
    "<|begin_of_audio|>",
    "<|end_of_audio|>",
    "<|begin_of_transcription|>",
    "<|end_of_transcription|>",
)
# Part of the text: a decoder that skips special tokens keeps these.
_MARKS = (
    "<|code_prefix|>",
    "<|code_middle|>",
    "<|code_suffix|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "/nothink",
    "<|begin_of_box|>",
    "<|end_of_box|>",
    "<|image|>",
    "<|video|>",
)
END_TOKENS = ("<|endoftext|>", "<|user|>", "<|observation|>")
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def special_token_ids(vocab_size: int) -> dict[str, int]:
    """Text -> id of the added tokens, contiguous: official ids, or the last of a small vocabulary.

    vocab_size is at least 292: 256 bytes and the 36 added tokens.
    """
    texts = (*_ROLES, *_MARKS)
    first = FIRST_ADDED_ID if vocab_size >= OFFICIAL_VOCAB_SIZE else vocab_size - len(texts)
    return {text: first + place for place, text in enumerate(texts)}


def tokenizer_json(vocab_size: int) -> dict[str, Any]:
    """A tokenizer.json whose ids lie below vocab_size."""
    ids = special_token_ids(vocab_size)
    alphabet = byte_alphabet()
    vocab = {char: place for place, char in enumerate(alphabet)}
    merges = []
    for left, right in letter_merges(alphabet[ord(" ")]):
        if len(vocab) == ids[_ROLES[0]]:
            break
        merges.append([left, right])
        vocab[left + right] = len(vocab)
    added = [added_token(i, text, special=text in _ROLES) for text, i in ids.items()]
    return bpe_file(vocab | ids, merges, added, [_SPLIT])


def tokenizer_config(max_length: int) -> dict[str, Any]:
    """A tokenizer_config.json: no token is added on its own, the chat format writes them all."""
    return {
        "clean_up_tokenization_spaces": False,
        "eos_token": END_TOKENS[0],
        "model_max_length": max_length,
        "pad_token": END_TOKENS[0],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
