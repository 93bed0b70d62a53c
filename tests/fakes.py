"""A small model that forgets nothing and shows it, and short cuts to run a core around it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moet.config import CacheConfig, SchedulerConfig
from moet.errors import CapacityError
from moet.kernels.moe import ExpertTable
from moet.models.base import ForwardInput, KVCacheSpec, KVGroup, KVTensors, ModelOutput
from moet.runtime.core import EngineCore
from moet.types import Request, SamplingParams, TokenEvent

MASK = 2**64 - 1


def mix(*values: int) -> int:
    """One 64-bit number out of several, in which every bit and their order count."""
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = ((state ^ (value & MASK)) * 0xBF58476D1CE4E5B9) & MASK
        state ^= state >> 29
    return state


def logits_of(digest: int, vocab_size: int) -> np.ndarray:
    """[vocab_size] fp32 in 0..4, a function of the digest."""
    x = np.arange(1, vocab_size + 1, dtype=np.uint64) * np.uint64(0x94D049BB133111EB)
    x = (x ^ np.uint64(digest)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(31))) * np.uint64(0x94D049BB133111EB)
    return ((x >> np.uint64(40)).astype(np.float32)) * np.float32(4 * 2.0**-24)


class FakeModel:
    """Next-token logits are a hash of the whole history, read from every kind of state.

    Each position leaves a value in two paged layers; each full page a value made from a ring of the
    page's own length; each value depends on the last `window - 1` ones through a resumable ring.
    Every entry is stored with its position, so reading a wrong, stale or moved one changes the
    tokens. `nan_token` as the last token of a row makes its logits NaN; `fault` may raise. A pass
    over more rows than there is `room` for, or with the `unroomy_token`, raises CapacityError when
    most of its state is written.

    With num_spec_tokens it drafts: it reads the tokens so far from its own pages, so that a wrong
    or stale entry shows, and says what it would say itself with the chance draft_rate; otherwise a
    token further on.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 64,
        page_size: int = 4,
        window: int = 6,
        max_position_embeddings: int = 512,
        resumable: bool = True,
        nan_token: int | None = None,
        fault: Callable[[ForwardInput], None] = lambda inputs: None,
        room: Callable[[int], bool] = lambda num_rows: True,
        unroomy_token: int | None = None,
        num_spec_tokens: int = 0,
        draft_rate: float = 1.0,
    ) -> None:
        self.vocab_size = vocab_size
        self.page_size = page_size
        self.window = window
        self.max_position_embeddings = max_position_embeddings
        self.resumable = resumable
        self.nan_token = nan_token
        self.fault = fault
        self.room = room
        self.unroomy_token = unroomy_token
        self.num_spec_tokens = num_spec_tokens
        self.draft_rate = draft_rate
        self.num_refused = 0
        self.num_torn = 0  # draft rows that found others' or stale tokens in the pages
        self.batches: list[tuple[int, ...]] = []  # rows of each sequence, per step
        self.inputs: list[ForwardInput] = []

    def kv_cache_spec(self) -> KVCacheSpec:
        page = self.page_size
        groups = [
            KVGroup("values", "paged", (0, 1), page, page * 16),
            KVGroup("closed", "paged", (1,), 1, 8),
        ]
        if self.num_spec_tokens:
            groups.append(KVGroup("drafts", "paged", (2,), page, page * 24))
        if self.resumable:
            ring = self.ring_size
            groups.append(KVGroup("window", "ring", (0,), ring, ring * 16, True))
            opened = page + self.num_spec_tokens
            groups.append(KVGroup("open", "ring", (1,), opened, opened * 16))
        return KVCacheSpec(page, tuple(groups))

    @property
    def ring_size(self) -> int:
        return self.window + self.num_spec_tokens

    def draft(
        self, inputs: ForwardInput, hidden_states: Tensor, kv: KVTensors, experts: object
    ) -> ModelOutput:
        size, borders = self.page_size, inputs.cu_seqlens_q
        wanted, rows = inputs.logits_indices.tolist(), []
        state = kv["drafts"].numpy().view(np.uint64)[0]
        for i in range(len(inputs.seq_lens)):
            pages = inputs.page_table[i].tolist()
            for row in range(borders[i], borders[i + 1]):
                position = int(inputs.positions[row])
                own, following = int(hidden_states[row]), int(inputs.token_ids[row])
                assert pages[position // size] >= 0
                entries = state[pages[position // size]].reshape(size, 3)
                entries[position % size] = position, own, following
                if row in wanted:
                    rows.append(self._draft_row(state, pages, position))
        if not self.room(borders[-1]):
            raise CapacityError(f"no room for {borders[-1]} rows")
        logits = np.stack(rows) if rows else np.zeros((0, self.vocab_size), dtype=np.float32)
        return ModelOutput(torch.from_numpy(logits), inputs.token_ids[:, None].float())

    def _draft_row(self, state: np.ndarray, pages: list[int], position: int) -> np.ndarray:
        size = self.page_size
        entries = state[pages[: position // size + 1]].reshape(-1, 3)[: position + 1].tolist()
        for n, (place, own, _) in enumerate(entries):
            before = entries[n - 1][2] if n and n % size else own
            self.num_torn += place != n or before != own
        tokens = [own for _, own, _ in entries] + [entries[-1][2]]
        logits = expected_logits(tokens, self)[-1]
        right = mix(*tokens) % 1000 < self.draft_rate * 1000
        return logits if right else np.roll(logits, 1)

    def forward(self, inputs: ForwardInput, kv: KVTensors, experts: object) -> ModelOutput:
        self.inputs.append(inputs)
        borders = inputs.cu_seqlens_q
        self.batches.append(tuple(b - a for a, b in pairwise(borders)))
        self.fault(inputs)
        state = {name: tensor.numpy().view(np.uint64) for name, tensor in kv.items()}
        digests: list[int] = []
        for i in range(len(inputs.seq_lens)):
            first, last = borders[i], borders[i + 1]
            assert int(inputs.positions[last - 1]) + 1 == inputs.seq_lens[i]
            pages = inputs.page_table[i].numpy()
            slot = int(inputs.seq_slots[i])
            for row in range(first, last):
                token, position = int(inputs.token_ids[row]), int(inputs.positions[row])
                digests.append(self._row(state, slot, pages, token, position))
        if not self.room(len(digests)) or self.unroomy_token in inputs.token_ids.tolist():
            self.num_refused += 1
            raise CapacityError(f"no room for {len(digests)} rows")
        wanted = inputs.logits_indices.tolist()
        assert wanted == sorted(set(wanted))
        logits = np.zeros((len(wanted), self.vocab_size), dtype=np.float32)
        for n, row in enumerate(wanted):
            logits[n] = logits_of(digests[row], self.vocab_size)
            if int(inputs.token_ids[row]) == self.nan_token:
                logits[n, 3] = np.nan
        return ModelOutput(torch.from_numpy(logits), inputs.token_ids[:, None].float())

    def _row(
        self, state: dict[str, np.ndarray], slot: int, pages: np.ndarray, token: int, position: int
    ) -> int:
        page, size = int(pages[position // self.page_size]), self.page_size
        assert page >= 0, f"position {position} has no page"
        values = state["values"]
        back = range(max(0, position - self.window + 1), position)
        if self.resumable:
            ring = state["window"][0, slot].reshape(self.ring_size, 2)
            recent = [int(x) for p in back for x in ring[p % self.ring_size]]
        else:
            recent = []
            for p in back:
                entry = values[0, int(pages[p // size])].reshape(size, 2)[p % size]
                recent += [int(entry[0]), int(entry[1])]
        value = mix(token, position, *recent)
        if self.resumable:
            ring[position % self.ring_size] = position, value
            opened = state["open"][0, slot].reshape(-1, 2)
            opened[position % len(opened)] = position, value
        for layer in (0, 1):
            values[layer, page].reshape(size, 2)[position % size] = position, value ^ layer
        if (position + 1) % size == 0:
            source = values[0, page].reshape(size, 2)
            if self.resumable:
                source = opened[np.arange(position + 1 - size, position + 1) % len(opened)]
            state["closed"][0, page] = mix(*[int(x) for x in source.reshape(-1)])
        used = pages[: position // size + 1]
        entries = values[:, used].reshape(2, -1, 2)[:, : position + 1]
        place = np.arange(1, position + 2, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        history = int(((entries[..., 1] ^ (entries[..., 0] + place)) * place).sum(dtype=np.uint64))
        full = state["closed"][0, pages[: (position + 1) // size]].reshape(-1)
        return mix(history, int(full.sum(dtype=np.uint64)), value)


def expected_logits(token_ids: Sequence[int], model: FakeModel) -> np.ndarray:
    """What FakeModel says after token_ids, worked out from the tokens alone: [n, vocab_size]."""
    size, values, closed, rows = model.page_size, [], [], []
    history = 0
    for position, token in enumerate(token_ids):
        back = range(max(0, position - model.window + 1), position)
        value = mix(token, position, *[x for p in back for x in (p, values[p])])
        values.append(value)
        place = ((position + 1) * 0x9E3779B97F4A7C15) & MASK
        for layer in (0, 1):
            history += ((value ^ layer) ^ (position + place & MASK)) * place
        if (position + 1) % size == 0:
            start = position + 1 - size
            closed.append(mix(*[x for p in range(start, position + 1) for x in (p, values[p])]))
        rows.append(logits_of(mix(history & MASK, sum(closed) & MASK, value), model.vocab_size))
    return np.stack(rows)


def expected_greedy(
    prompt: Sequence[int], num_tokens: int, model: FakeModel, stop_ids: Iterable[int] = ()
) -> list[int]:
    """The greedy continuation, up to num_tokens or the first token of stop_ids."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(int(expected_logits(token_ids, model)[-1].argmax()))
        if token_ids[-1] in set(stop_ids):
            break
    return token_ids[len(prompt) :]


class NoExperts:
    """For models without a mixture."""

    def resolve(self, layer_idx: int, expert_ids: Tensor) -> ExpertTable:
        raise AssertionError("this model has no experts")


def make_core(
    model: FakeModel | None = None,
    *,
    num_pages: int = 256,
    num_host_blocks: int = 256,
    num_snapshots: int = 64,
    prefix_cache: str = "on",
    seed: int = 0,
    host_cache_blocks: int = 0,
    disk: tuple[Path, int] | None = None,
    kv_identity: str = "fake",
    vocab_size: int | None = None,
    **scheduler: object,
) -> EngineCore:
    """A core around a FakeModel; memory is given in pages, blocks and snapshots.

    disk: a folder and its budget in bytes. vocab_size: of the tokenizer, if not the model's.
    """
    model = model or FakeModel()
    spec = model.kv_cache_spec()
    cache = CacheConfig(
        budget_bytes=num_pages * spec.bytes_per_page,
        host_budget_bytes=num_host_blocks * spec.bytes_per_page,
        snapshot_budget_bytes=num_snapshots * (model.window + model.num_spec_tokens) * 16,
        prefix_cache=prefix_cache,  # type: ignore[arg-type]
        host_cache_bytes=host_cache_blocks * spec.bytes_per_page,
        disk_cache_folder=None if disk is None else str(disk[0]),
        disk_cache_bytes=0 if disk is None else disk[1],
    )
    scheduler.setdefault("overlap", False)
    scheduler.setdefault("num_spec_tokens", model.num_spec_tokens)
    scheduler.setdefault("prefill_share", 1.0)  # no chunk depends on measured time
    return EngineCore(
        model,
        NoExperts(),
        cache=cache,
        scheduler=SchedulerConfig(**scheduler),  # type: ignore[arg-type]
        precision="w2",
        vocab_size=vocab_size or model.vocab_size,
        seed=seed,
        kv_identity=kv_identity,
    )


def request(request_id: str, prompt: Sequence[int], **params: object) -> Request:
    """A request with greedy sampling and 8 tokens unless params say otherwise."""
    fields = ("eos_token_ids", "priority", "cache_salt")
    outer = {name: params.pop(name) for name in fields if name in params}
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **params})  # type: ignore[arg-type]
    return Request(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        params=sampling,
        **outer,  # type: ignore[arg-type]
    )


def drain(
    core: EngineCore, *, check: bool = True, max_steps: int = 10_000
) -> dict[str, list[TokenEvent]]:
    """Step until nothing is left; events by request."""
    events: dict[str, list[TokenEvent]] = {}
    for _ in range(max_steps):
        if not core.has_work:
            return events
        for event in core.step():
            events.setdefault(event.request_id, []).append(event)
        if check:
            core.check()
    raise AssertionError(f"still at work after {max_steps} steps: {core.stats()}")


def run(core: EngineCore, requests: Iterable[Request]) -> dict[str, list[int]]:
    """Submit all, drain, and return the tokens of each request."""
    for one in requests:
        core.submit(one)
    return {key: tokens_of(events) for key, events in drain(core).items()}


def tokens_of(events: Iterable[TokenEvent]) -> list[int]:
    """All tokens of a request's events."""
    return [token_id for event in events for token_id in event.token_ids]
