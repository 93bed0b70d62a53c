"""Builds the two demo tokenizers: a byte-level BPE of the corpus and the official control tokens.

Digits stand alone, so that sums can be done digit by digit."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from bench.train_demo.data.mixture import one
from bench.train_demo.data.plain import paragraphs
from moet.models.synthetic_tokenizer import OFFICIAL_IDS

Family = Literal["deepseek-v4", "glm"]
VOCAB_SIZE = 4096
GLM_CONTROLS = (
    *("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    *("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"),
    *("<|begin_of_audio|>", "<|end_of_audio|>"),
    *("<|begin_of_transcription|>", "<|end_of_transcription|>"),
    *("<|code_prefix|>", "<|code_middle|>", "<|code_suffix|>"),
    *("<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<tool_response>", "</tool_response>", "<arg_key>", "</arg_key>"),
    *("<arg_value>", "</arg_value>", "/nothink"),
    *("<|begin_of_box|>", "<|end_of_box|>", "<|image|>", "<|video|>"),
)
# Control tokens that belong to the text of an answer are not "special".
GLM_SHOWN = frozenset(t for t in GLM_CONTROLS if t.startswith(("<think", "</", "<tool", "<arg")))
_SPLITS = (
    r"\p{N}",
    r"[^\r\n\p{L}\p{N}]?\p{L}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


def controls(family: Family) -> list[str]:
    """The control tokens in the order of their official ids."""
    if family == "glm":
        return list(GLM_CONTROLS)
    return sorted(OFFICIAL_IDS, key=lambda text: OFFICIAL_IDS[text])


def texts(num_samples: int, seed: int = 0) -> Iterator[str]:
    """The text of conversations, piece by piece, and what chat formats write around it."""
    rng = random.Random(seed)
    for _ in range(num_samples):
        sample = one(rng)
        if not sample.messages:
            yield sample.expect
        for message in sample.messages:
            yield from (message.content, message.reasoning)
            for call in message.tool_calls:
                yield from (call.name, call.arguments)
        for tool in sample.tools:
            yield json.dumps(
                {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
            )
        if sample.schema:
            yield json.dumps(sample.schema)


def frames() -> Iterator[str]:
    """The fixed wording of both chat formats, without control tokens."""
    from moet.server.chat import deepseek_v4, glm

    parts = (
        *(deepseek_v4.TOOLS_HEAD, deepseek_v4.TOOLS_TAIL, deepseek_v4.RESPONSE_HEAD),
        *(deepseek_v4.EFFORT_HIGH, glm.TOOLS_HEAD, glm.TOOLS_TAIL, glm.RESPONSE_HEAD),
        '<tool_calls>\n<invoke name="x">\n<parameter name="y" string="true">',
        "</parameter>\n</invoke>\n</tool_calls>\n\n<tool_result></tool_result>",
        "Reasoning Effort: High Reasoning Effort: Max",
    )
    either = "|".join(re.escape(text) for text in (*controls("glm"), *controls("deepseek-v4")))
    for part in parts:
        yield from re.split(either, part)


def train_merges(num_samples: int = 8_000) -> list[tuple[str, str]]:
    """BPE merges over the corpus, most useful first; deterministic."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = _pre_tokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, initial_alphabet=_alphabet(), show_progress=False
    )
    pieces = [*texts(num_samples), *list(frames()) * 2000, *paragraphs()]
    bpe.train_from_iterator(pieces, trainer)
    merges = json.loads(bpe.to_str())["model"]["merges"]
    return [(left, right) for left, right in merges]


def build(family: Family, merges: Sequence[tuple[str, str]]) -> Tokenizer:
    """A tokenizer of exactly VOCAB_SIZE ids (fewer if there are too few merges)."""
    special = controls(family)
    first = special[:3] if family == "deepseek-v4" else []
    tokens = [*first, *_alphabet()]
    room = VOCAB_SIZE - len(tokens) - (len(special) - len(first))
    kept = list(merges[:room])
    tokens += [left + right for left, right in kept]
    assert len(set(tokens)) == len(tokens), "two merges make the same token"
    tokens += [text for text in special if text not in first]
    bpe = Tokenizer(models.BPE({token: idx for idx, token in enumerate(tokens)}, kept))
    bpe.pre_tokenizer = _pre_tokenizer()
    bpe.decoder = decoders.ByteLevel()
    for text in special:
        hidden = text in first if family == "deepseek-v4" else text not in GLM_SHOWN
        bpe.add_tokens([AddedToken(text, special=hidden, normalized=False)])
    return bpe


def write(folder: Path, family: Family, merges: Sequence[tuple[str, str]], max_length: int) -> None:
    """tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    build(family, merges).save(str(folder / "tokenizer.json"))
    ends = {"deepseek-v4": "<｜end▁of▁sentence｜>", "glm": "<|endoftext|>"}
    pads = {"deepseek-v4": "<｜▁pad▁｜>", "glm": "<|endoftext|>"}
    config = {
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "eos_token": ends[family],
        "model_max_length": max_length,
        "pad_token": pads[family],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def _alphabet() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS]
    return pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
