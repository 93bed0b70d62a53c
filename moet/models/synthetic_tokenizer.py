"""Tokenizer files for synthetic checkpoints: byte-level BPE with DeepSeek-V4's special tokens.

Every token has the official text; ids are the official ones where the vocabulary reaches them, and
compact otherwise. The merges are made up: they spell no language, but every id decodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

OFFICIAL_VOCAB_SIZE = 129_280
_FIRST_ADDED_ID = 128_000
# Text -> id in the released tokenizer. Only the first three are flagged "special".
BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
NOISE = "<｜place▁holder▁no▁799｜>"  # fills the open slots of a DSpark draft block
OFFICIAL_IDS = {
    BOS: 0,
    EOS: 1,
    PAD: 2,
    NOISE: 128_799,
    "<｜fim▁hole｜>": 128_800,
    "<｜fim▁begin｜>": 128_801,
    "<｜fim▁end｜>": 128_802,
    "<｜User｜>": 128_803,
    "<｜Assistant｜>": 128_804,
    "<think>": 128_821,
    "</think>": 128_822,
    "｜DSML｜": 128_825,
    "<｜latest_reminder｜>": 128_828,
    "<｜action｜>": 128_829,
    "<｜query｜>": 128_830,
    "<｜authority｜>": 128_831,
    "<｜domain｜>": 128_832,
    "<｜title｜>": 128_836,
    "<｜extracted_url｜>": 128_844,
    "<｜read_url｜>": 128_845,
    "<｜image2｜>": 129_264,
}
_SPLITS = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[\p{P}\p{S}]\p{Latin}+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"


def special_token_ids(vocab_size: int) -> dict[str, int]:
    """Text -> id of the special tokens: official ids, or the last ones of a smaller vocabulary."""
    if vocab_size >= OFFICIAL_VOCAB_SIZE:
        return dict(OFFICIAL_IDS)
    first = vocab_size - (len(OFFICIAL_IDS) - 3)
    ids = {text: idx for idx, text in enumerate((BOS, EOS, PAD))}
    rest = [text for text in OFFICIAL_IDS if text not in ids]
    return ids | {text: first + place for place, text in enumerate(rest)}


def tokenizer_json(vocab_size: int) -> dict[str, Any]:
    """A tokenizer.json with exactly vocab_size ids. vocab_size is at least 277."""
    ids = special_token_ids(vocab_size)
    end = _FIRST_ADDED_ID if vocab_size >= OFFICIAL_VOCAB_SIZE else ids[NOISE]
    alphabet = byte_alphabet()
    vocab = {text: ids[text] for text in (BOS, EOS, PAD)}
    vocab |= {char: 3 + place for place, char in enumerate(alphabet)}
    merges = []
    for left, right in letter_merges(alphabet[ord(" ")]):
        if len(vocab) == end:
            break
        merges.append([left, right])
        vocab[left + right] = len(vocab)
    by_id = {token_id: text for text, token_id in ids.items()}
    for token_id in range(end, vocab_size):
        text = f"<｜place▁holder▁no▁{token_id - _FIRST_ADDED_ID}｜>"
        vocab[by_id.setdefault(token_id, text)] = token_id
    added = [added_token(i, by_id[i], special=i < 3) for i in sorted(by_id)]
    return bpe_file(vocab, merges, added, _SPLITS)


def bpe_file(
    vocab: dict[str, int],
    merges: list[list[str]],
    added_tokens: list[dict[str, Any]],
    splits: Sequence[str],
) -> dict[str, Any]:
    """A tokenizer.json: byte-level BPE behind pre-tokenisation by the regexes `splits`."""
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": merges,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _pre_tokenizers(splits)},
        "post_processor": None,
        "decoder": _byte_level(),
        "model": model,
    }


def tokenizer_config(max_length: int) -> dict[str, Any]:
    """A tokenizer_config.json: no token is added on its own, the chat encoding writes them all."""
    return {
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": BOS,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS,
        "model_max_length": max_length,
        "pad_token": PAD,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }


def added_token(token_id: int, text: str, *, special: bool) -> dict[str, Any]:
    """An entry of added_tokens; `special` ones never show in text."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": text, **flags, "special": special}


def _byte_level() -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }


def _pre_tokenizers(patterns: Sequence[str]) -> list[dict[str, Any]]:
    splits = [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
        for regex in patterns
    ]
    return [*splits, _byte_level()]


def byte_alphabet() -> list[str]:
    """The character that stands for each byte in byte-level BPE: itself if printable."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    shifted = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(shifted)) for byte in range(256)]


def letter_merges(space: str) -> Iterator[tuple[str, str]]:
    """Merges that build pieces of one to four letters, with and without a leading space."""
    for length in (1, 2, 3, 4):
        for letters in product(_LETTERS, repeat=length):
            stem, last = "".join(letters[:-1]), letters[-1]
            yield space + stem, last
            if stem:
                yield stem, last
