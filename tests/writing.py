"""A model that wants to write given texts, and cores around it that can hold it to a grammar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise

import numpy as np
import torch

from moet.config import CacheConfig, SchedulerConfig
from moet.models.base import ForwardInput, KVCacheSpec, KVGroup, KVTensors, ModelOutput
from moet.runtime.core import EngineCore
from moet.runtime.grammar_backends import Backend, Guidance, XGrammar
from moet.runtime.grammar_compiler import GrammarCompiler
from tests.fakes import NoExperts, logits_of, mix
from tests.texts import EOS, byte_tokenizer

Wish = Callable[[list[int]], Sequence[int]]
"""All of a sequence's tokens so far -> what the model would like to go on with, best first."""
VOCAB_SIZE = 300  # a few ids more than the tokenizer has, as real models do
CLOSING = byte_tokenizer().encode('<"}]')  # or texts would never end
END_TAG = byte_tokenizer().encode("</｜DSML｜", allow_special=True)


@cache
def _backends() -> tuple[Backend, Backend]:
    return XGrammar(byte_tokenizer(), VOCAB_SIZE), Guidance(byte_tokenizer(), VOCAB_SIZE)


def new_compiler(**options: int) -> GrammarCompiler:
    """A compiler whose libraries are loaded already, once for all tests."""
    compiler = GrammarCompiler(byte_tokenizer, VOCAB_SIZE, **options)
    compiler._backends = _backends()
    return compiler


class WritingModel:
    """Keeps the tokens themselves as its state; what it wishes gets the largest logits.

    All other logits are small and a hash of the history, so that any token may follow where the
    wishes may not, and a lost or moved entry of the state changes the answer.
    """

    vocab_size = VOCAB_SIZE
    max_position_embeddings = 4096

    def __init__(self, wish: Wish = lambda token_ids: (), *, page_size: int = 8) -> None:
        self.wish = wish
        self.page_size = page_size
        self.batches: list[int] = []  # sequences of each step

    def kv_cache_spec(self) -> KVCacheSpec:
        page = self.page_size
        return KVCacheSpec(page, (KVGroup("tokens", "paged", (0,), page, page * 8),))

    def forward(self, inputs: ForwardInput, kv: KVTensors, experts: object) -> ModelOutput:
        tokens = kv["tokens"].numpy().view(np.int64)[0]
        self.batches.append(len(inputs.seq_lens))
        wanted = set(inputs.logits_indices.tolist())
        logits: list[np.ndarray] = []
        for i in range(len(inputs.seq_lens)):
            pages = inputs.page_table[i].numpy()
            for row in range(inputs.cu_seqlens_q[i], inputs.cu_seqlens_q[i + 1]):
                position = int(inputs.positions[row])
                page, place = divmod(position, self.page_size)
                tokens[pages[page]].reshape(-1)[place] = int(inputs.token_ids[row])
                if row in wanted:
                    history = tokens[pages[: page + 1]].reshape(-1)[: position + 1].tolist()
                    logits.append(self._logits(history))
        stacked = np.array(logits, dtype=np.float32).reshape(-1, self.vocab_size)
        return ModelOutput(torch.from_numpy(stacked), inputs.token_ids[:, None].float())

    def _logits(self, history: list[int]) -> np.ndarray:
        logits = logits_of(mix(*history), self.vocab_size)
        logits[CLOSING] += 3.0
        for before, then in pairwise(END_TAG):
            logits[then] += 6.0 * (history[-1] == before)
        for rank, token_id in enumerate(self.wish(history)):
            logits[token_id] = 100.0 - rank
        return logits


def wanting(text: str, *, after: str = "<｜Assistant｜>") -> Wish:
    """Write a text behind the last `after` (which may carry a think tag), then end."""
    encode = byte_tokenizer().encode
    opening, script = encode(after, allow_special=True), encode(text, allow_special=True)
    tags = encode("<think></think>", allow_special=True)

    def wish(token_ids: list[int]) -> list[int]:
        begin = max(
            i for i in range(len(token_ids)) if token_ids[i : i + len(opening)] == opening
        ) + len(opening)
        begin += token_ids[begin : begin + 1] != [] and token_ids[begin] in tags
        written = len(token_ids) - begin
        return [script[written], EOS] if written < len(script) else [EOS]

    return wish


def writing_core(
    model: WritingModel | None = None,
    *,
    num_pages: int = 512,
    num_host_blocks: int = 512,
    compiler: GrammarCompiler | None = None,
    **scheduler: object,
) -> EngineCore:
    """A core around a WritingModel, with grammars; memory is given in pages and blocks."""
    model = model or WritingModel()
    page_bytes = model.kv_cache_spec().bytes_per_page
    scheduler.setdefault("overlap", False)
    return EngineCore(
        model,
        NoExperts(),
        cache=CacheConfig(
            budget_bytes=num_pages * page_bytes, host_budget_bytes=num_host_blocks * page_bytes
        ),
        scheduler=SchedulerConfig(**scheduler),  # type: ignore[arg-type]
        precision="w2",
        vocab_size=model.vocab_size,
        seed=0,
        grammars=compiler or new_compiler(),
    )
