"""Six hundred rounds of requests, aborts and failing disks over a core whose experts are in tiers:
what ends in error names its row, what does not has the right tokens, and nothing is left behind."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moet.config import CacheConfig, SchedulerConfig
from moet.models.base import ExpertProvider, ForwardInput, KVTensors, ModelOutput
from moet.runtime.core import EngineCore
from moet.runtime.experts.precision import PrecisionSet
from moet.runtime.experts.tiered import TieredExpertStore
from moet.types import FinishReason, TokenEvent
from tests.fakes import FakeModel, expected_greedy, request, tokens_of
from tests.runtime.experts.rig import EXPERTS, LAYERS, NUM_EXPERTS, Rig


class ReadingModel(FakeModel):
    """A FakeModel that asks for experts by token, two a row and layer, and reads their bytes."""

    def __init__(self, rig: Rig, **options: object) -> None:
        super().__init__(vocab_size=40, **options)  # type: ignore[arg-type]
        self.rig = rig

    def forward(self, inputs: ForwardInput, kv: KVTensors, experts: object) -> ModelOutput:
        output = super().forward(inputs, kv, experts)
        assert hasattr(experts, "resolve")
        provider: ExpertProvider = experts  # type: ignore[assignment]
        for n, layer_idx in enumerate(LAYERS):
            ids = experts_of(inputs.token_ids, n)
            table = provider.resolve(layer_idx, ids)
            for expert_id in dict.fromkeys(ids.flatten().tolist()):
                row = EXPERTS.row(layer_idx, expert_id)
                assert torch.equal(table.matrices(expert_id)[0], self.rig.rows[row])
        return output


def experts_of(token_ids: Tensor, n: int) -> Tensor:
    """[num_tokens, 2] distinct experts of each token in the n-th layer."""
    first = (token_ids * 7 + n * 3) % NUM_EXPERTS
    return torch.stack([first, (first + 1 + token_ids % 5) % NUM_EXPERTS], 1)


def needs(token_ids: list[int], row: int) -> bool:
    """Whether any of the tokens reads a row when it is computed."""
    place, expert_id = divmod(row, NUM_EXPERTS)
    return bool((experts_of(torch.tensor(token_ids), place) == expert_id).any())


def make_core(model: ReadingModel, store: TieredExpertStore, *, overlap: bool) -> EngineCore:
    spec = model.kv_cache_spec()
    return EngineCore(
        model,
        store,
        cache=CacheConfig(
            budget_bytes=60 * spec.bytes_per_page,
            host_budget_bytes=40 * spec.bytes_per_page,
            snapshot_budget_bytes=1 << 16,
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=6, max_num_batched_tokens=24, overlap=overlap, prefill_share=1.0
        ),
        precision="w2",
        vocab_size=model.vocab_size,
        seed=0,
        precisions=PrecisionSet.single(store),
    )


@pytest.mark.parametrize("overlap", [False, True])
def test_storm(tmp_path: Path, overlap: bool) -> None:
    rig, draw = Rig(tmp_path), random.Random(5)
    model = ReadingModel(rig)
    store = rig.store(7, 10, scan_from_rows=12, num_staging=3)
    core = make_core(model, store, overlap=overlap)
    prompts: dict[str, list[int]] = {}
    events: dict[str, list[TokenEvent]] = {}
    ever_bad: set[int] = set()
    number = 0
    for round_number in range(600 // 2):  # of either loop
        if round_number % 30 == 0:
            rig.disk.bad = set(draw.sample(range(EXPERTS.num_rows), draw.choice([0, 0, 1])))
            ever_bad |= rig.disk.bad
            store.host._failures.clear()
        if round_number % 60 == 59 and not overlap:
            store.resize(draw.randint(5, 12))
        if draw.random() < 0.4 and len(prompts) - len(finished(events)) < 10:
            name = f"r{number}"
            number += 1
            prompts[name] = [draw.randrange(40) for _ in range(draw.choice([1, 3, 9, 30]))]
            events[name] = []
            core.submit(request(name, prompts[name], max_tokens=draw.choice([1, 4, 9])))
        if draw.random() < 0.05:
            open_ones = [name for name in prompts if name not in finished(events)]
            if open_ones:
                core.abort(draw.choice(open_ones))
        if core.has_work:
            for event in core.step():
                events[event.request_id].append(event)
    rig.disk.bad = set()
    while core.has_work:
        for event in core.step():
            events[event.request_id].append(event)
    core.check()
    assert core.stats().num_used_pages == core.stats().num_used_host_blocks == 0
    assert core.stats().num_failed_steps == 0
    reasons = {name: each[-1].finish_reason for name, each in events.items()}
    for name, each in events.items():
        tokens = tokens_of(each)
        assert tokens == expected_greedy(prompts[name], len(tokens), model)
        if reasons[name] is FinishReason.ERROR:
            error = each[-1].error
            assert error is not None
            row = int(error.split("row ")[1].split()[0])
            assert row in ever_bad
            assert "Input/output error" in error
            assert needs([*prompts[name], *tokens], row), "it ended for a row that it never reads"
    assert set(reasons.values()) >= {FinishReason.LENGTH, FinishReason.ERROR, FinishReason.ABORT}
    core.shutdown()
    rig.verify_slots(store)
    store.check()
    store.close()


def finished(events: dict[str, list[TokenEvent]]) -> set[str]:
    """Requests whose last event is there."""
    return {name for name, each in events.items() if each and each[-1].finish_reason}
