"""A row's bits on a GPU depend on its own sequence alone: not on company, on rows of a step, on
chunk borders, on graphs, on where pages and experts lie, or on how wide the page table is."""

from __future__ import annotations

import gc
from itertools import cycle
from typing import Any

import pytest
import torch

from moet.config import CacheConfig, SchedulerConfig
from moet.kernels.device_gemm import Device
from moet.kernels.moe import ExpertTable
from moet.runtime.core import EngineCore
from moet.runtime.device_runner import Placement
from moet.runtime.device_sampler import Kind
from moet.runtime.queues import CudaGraphs, CudaQueue, uncaptured
from moet.runtime.step_tensors import StepRow
from moet.types import Request, SamplingParams
from tests.fakes import drain, request, tokens_of
from tests.gpu.steps import NUM_DRAFTS, Steps, dummy, prompt

NUM_SEQS = 32
LENGTHS = (3, 130, 255, 256, 300, 64, 128, 517)  # tokens before the step that is compared


@pytest.fixture(scope="module", params=["tiny", "small"])
def model(request: pytest.FixtureRequest, gpu: Device) -> tuple[Any, Any, Device]:
    return (*dummy(request.param, gpu), gpu)


@pytest.fixture(scope="module")
def steps(model: tuple[Any, Any, Device]) -> Steps:
    made = Steps(*model, num_seqs=NUM_SEQS, pages_each=3)
    made.admit()
    for slot in range(NUM_SEQS):
        made.prefill(slot, tokens_before(made, slot), [512])
    return made


def tokens_before(steps: Steps, slot: int) -> list[int]:
    return prompt(slot, LENGTHS[slot % len(LENGTHS)], steps.model.vocab_size)


def row(steps: Steps, slot: int, count: int = 1) -> StepRow:
    length = LENGTHS[slot % len(LENGTHS)]
    tokens = prompt(slot, length + count, steps.model.vocab_size)
    return StepRow(slot, length, tokens[length:])


def test_company_changes_no_bit(steps: Steps) -> None:
    before = steps.kept()
    together = steps.logits([row(steps, slot) for slot in range(NUM_SEQS)], (NUM_SEQS, 1))
    assert together.isfinite().all()
    after = steps.kept()
    steps.restore(before)
    for slot in range(NUM_SEQS):
        alone = steps.logits([row(steps, slot)], (1, 1))
        assert torch.equal(alone[0], together[slot]), f"sequence {slot}"
    again = steps.kept()
    assert all(torch.equal(after[name], again[name]) for name in after)
    steps.restore(before)


@pytest.mark.parametrize("company", [1, 5, NUM_SEQS])
def test_rows_of_one_step_are_those_of_several(steps: Steps, company: int) -> None:
    count = 1 + NUM_DRAFTS
    before = steps.kept()
    together = steps.logits([row(steps, s, count) for s in range(company)], (company, count))
    steps.restore(before)
    for depth in range(count):
        rows = [row(steps, slot, count) for slot in range(company)]
        assert all(r.token_ids is not None for r in rows)
        single = [StepRow(r.slot, r.start + depth, r.token_ids[depth : depth + 1]) for r in rows]  # type: ignore[index]
        apart = steps.logits(single, (company, 1))
        for slot in range(company):
            assert torch.equal(apart[slot, 0], together[slot, depth]), f"{slot} at {depth}"
    steps.restore(before)


def test_fill_rows_and_wide_tables_change_no_bit(steps: Steps) -> None:
    before = steps.kept()
    rows = [row(steps, slot, 1 + slot % 3) for slot in range(8)]
    plain = steps.logits(rows, (8, 3))
    steps.restore(before)
    filled = steps.logits(rows, (NUM_SEQS, 3))
    assert all(
        torch.equal(plain[i, : r.num_tokens], filled[i, : r.num_tokens]) for i, r in enumerate(rows)
    )
    steps.restore(before)
    short = row(steps, 0)
    narrow = steps.logits([short], (1, 1), num_pages=1)
    assert torch.equal(narrow, steps.logits([short], (1, 1)))
    steps.restore(before)
    wide = steps.table
    steps.table = torch.cat([wide, torch.full((NUM_SEQS, 600), -1, device=wide.device)], 1)
    assert torch.equal(narrow, steps.logits([short], (1, 1)))
    steps.table = wide
    steps.restore(before)


@pytest.mark.parametrize("sizes", [[256], [256, 512], [512, 256]])
def test_chunk_borders_change_no_bit(steps: Steps, sizes: list[int]) -> None:
    tokens = prompt(77, 700, steps.model.vocab_size)
    before, found = steps.kept(), []
    for chosen in ([700], sizes):
        steps.restore(before)
        steps.prefill(3, tokens, chosen)
        follow = StepRow(3, 700, [5])
        found.append((steps.logits([follow], (1, 1)), steps.kept()))
    (whole, state), (cut, other) = found
    assert torch.equal(whole, cut)
    assert all(torch.equal(state[name], other[name]) for name in state)
    steps.restore(before)


class Moved:
    """Experts at other places of a larger pool."""

    def __init__(self, experts: Any, layers: range) -> None:
        draw = torch.Generator().manual_seed(9)
        self.tables = {}
        for layer_idx in layers:
            table = experts.resident(layer_idx)
            num = len(table.slot_of)
            slots = torch.randperm(2 * num, generator=draw)[:num].to(table.rows.device)
            rows = torch.full_like(table.rows[: 2 * num], 0xFF)
            rows[slots] = table.rows[table.slot_of]
            self.tables[layer_idx] = ExpertTable(table.format, rows, slots, table.bases)

    def resident(self, layer_idx: int, num_rows: int = 1) -> ExpertTable:
        return self.tables[layer_idx]

    def resolve(self, layer_idx: int, expert_ids: torch.Tensor) -> ExpertTable:
        return self.tables[layer_idx]


def runs(steps: Steps, capture: Any, kind: Kind, num_steps: int = 24) -> list[list[int]]:
    """Tokens of every sequence, in steps of changing company."""
    gc.collect()  # earlier graphs and their pinned memory, while nothing is captured
    graphs = steps.graphs(capture)
    lengths = [LENGTHS[slot % len(LENGTHS)] for slot in range(NUM_SEQS)]
    tokens: list[list[int]] = [[] for _ in range(NUM_SEQS)]
    for slot in range(NUM_SEQS):
        steps.sampler.last_token[slot] = 7 + slot
    steps.queue.settle()
    for step in range(num_steps):
        company = (1, 3, NUM_SEQS)[step % 3]
        rows = [StepRow(s, lengths[s] + len(tokens[s]), None, kind) for s in range(company)]
        output = graphs.launch(rows).result()
        assert output.fault == 0
        for slot, made in enumerate(output.tokens):
            tokens[slot] += made
    graphs.check()
    return tokens


@pytest.mark.parametrize("kind", [Kind.GREEDY, Kind.RANKED, Kind.FULL])
def test_graphs_give_the_tokens_of_single_launches(steps: Steps, kind: Kind) -> None:
    before = steps.kept()
    assert isinstance(steps.queue, CudaQueue)
    eager = runs(steps, uncaptured, kind)
    steps.restore(before)
    assert runs(steps, CudaGraphs(steps.queue), kind) == eager
    steps.restore(before)


def test_where_experts_lie_changes_no_token(steps: Steps) -> None:
    before = steps.kept()
    expected = runs(steps, uncaptured, Kind.GREEDY, 6)
    steps.restore(before)
    own = steps.experts
    steps.experts = Moved(own, range(steps.model.config.num_hidden_layers))
    found = runs(steps, uncaptured, Kind.GREEDY, 6)
    steps.experts = own
    assert found == expected
    steps.restore(before)


REQUESTS: list[Request] = [
    request("greedy", [11, 12, 13], max_tokens=40),
    request("page", [(7 * i) % 400 + 2 for i in range(250)], max_tokens=30),
    request("long", [(11 * i) % 400 + 2 for i in range(700)], max_tokens=12),
    request("plain", [21, 22], temperature=0.9, seed=5, max_tokens=30),
    request("ranked", [31, 32], temperature=1.1, top_k=40, top_p=0.9, seed=6, max_tokens=30),
    request("penalised", [41, 42, 43], presence_penalty=0.8, max_tokens=30),
    request("told", [51, 52], logprobs=3, max_tokens=10),
    request("prompt", [61, 62, 63, 64], prompt_logprobs=1, max_tokens=5),
]


def engine(model: tuple[Any, Any, Device], *, graphs: bool, **scheduler: Any) -> EngineCore:
    built, experts, device = model
    queue = CudaQueue(device.torch_device)
    capture = CudaGraphs(queue) if graphs else uncaptured
    page_bytes = built.kv_cache_spec().bytes_per_page
    return EngineCore(
        built,
        experts,
        cache=CacheConfig(budget_bytes=40 * page_bytes, prefix_cache="off"),
        scheduler=SchedulerConfig(**{"prefill_share": 1.0, **scheduler}),
        precision="w2",
        vocab_size=built.vocab_size,
        seed=0,
        placement=Placement(queue, capture, device.error, device.arch),
    )


def tokens_from(core: EngineCore, requests: list[Request]) -> dict[str, list[int]]:
    for one in requests:
        core.submit(one)
    events = drain(core)
    assert not [e.error for each in events.values() for e in each if e.error]
    core.shutdown()
    return {name: tokens_of(each) for name, each in events.items()}


def test_engines_agree(model: tuple[Any, Any, Device]) -> None:
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 512}
    expected = tokens_from(engine(model, graphs=False, overlap=False, **limits), REQUESTS)
    assert all(expected.values())
    for graphs, overlap in ((True, True), (True, False), (False, True)):
        core = engine(model, graphs=graphs, overlap=overlap, **limits)
        assert tokens_from(core, REQUESTS) == expected, f"graphs={graphs} overlap={overlap}"
    alone = {}
    for one in REQUESTS:
        core = engine(model, graphs=True, overlap=True, max_num_seqs=1)
        alone |= tokens_from(core, [one])
    assert alone == expected


def test_layers_of_prompts_pass_between_the_steps_of_others(model: tuple[Any, Any, Device]) -> None:
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 512}
    expected = tokens_from(engine(model, graphs=True, overlap=True, **limits), REQUESTS)
    core = engine(model, graphs=True, overlap=True, prefill_share=0.5, **limits)
    carried, seen = cycle([1, 0, 2, 1]), []
    commit = core._scheduler.commit

    def watched(batch: Any, result: Any) -> Any:
        seen.append(batch.num_parts)
        return commit(batch, result)

    core._scheduler.commit = watched  # type: ignore[method-assign]
    core._scheduler.pace.parts = lambda users, rows: next(carried)  # type: ignore[method-assign, assignment]
    core.submit(REQUESTS[0])
    early = [event for _ in range(5) for event in core.step()]
    found = tokens_from(core, REQUESTS[1:])
    found[REQUESTS[0].request_id] = tokens_of(early) + found.get(REQUESTS[0].request_id, [])
    assert found == expected
    assert sum(0 < num_parts < core._runner.num_parts for num_parts in seen) > 3  # type: ignore[union-attr]


def test_a_seeded_request_repeats_itself_among_others(model: tuple[Any, Any, Device]) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.95, seed=3, max_tokens=20)
    wanted = replace_params(REQUESTS[3], params)
    alone = tokens_from(engine(model, graphs=True, max_num_seqs=1), [wanted])
    among = tokens_from(engine(model, graphs=True, max_num_seqs=8), [*REQUESTS[:3], wanted])
    assert among[wanted.request_id] == alone[wanted.request_id]


def replace_params(one: Request, params: SamplingParams) -> Request:
    return Request(request_id=one.request_id, prompt_token_ids=one.prompt_token_ids, params=params)
