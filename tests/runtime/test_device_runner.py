"""A core on a stand-in device gives the tokens of one without, plainly and a step ahead."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import cycle
from typing import Any

import pytest
import torch

from moet.config import CacheConfig, SchedulerConfig
from moet.errors import RequestError
from moet.models.base import ForwardInput, KVTensors, ModelOutput
from moet.models.glm_moe_dsa_config import GlmMoeDsaConfig
from moet.runtime.batch import Batch
from moet.runtime.core import EngineCore
from moet.runtime.device_runner import Placement
from moet.runtime.draft_length import StepCosts
from moet.runtime.experts.precision import PrecisionSet
from moet.runtime.queues import Capture, CpuQueue, Work, uncaptured
from moet.types import Request, TokenEvent, TokenLogprobs
from tests.fakes import FakeModel, NoExperts, drain, expected_greedy, make_core, request, tokens_of
from tests.models.glm_configs import tiny
from tests.models.glm_rig import load_model, random_source, resident
from tests.models.hash_weights import DEPLOYED, GOLDEN_IDS, Rig, hash_source, load_rig
from tests.runtime.device_fakes import LoggedQueue, StepFakeModel, Tape, placed_core

REQUESTS = [
    request("greedy", [1, 2, 3, 4, 5], max_tokens=12),
    request("short", [9], max_tokens=3),
    request("plain", [7, 7, 7], temperature=0.8, seed=3, max_tokens=9),
    request("ranked", list(range(1, 30)), temperature=1.2, top_k=12, top_p=0.9, seed=4),
    request("penalised", [4, 5, 6], presence_penalty=1.0, repetition_penalty=1.2, max_tokens=15),
    request("told", [3, 1, 4, 1, 5], logprobs=3, max_tokens=6),
    request("prompt", [3, 1, 4, 1, 5, 9], prompt_logprobs=2, max_tokens=4),
    request("biased", [8, 8], logit_bias={5: 3.0}, min_tokens=5, stop_token_ids=(5,)),
]


def facts(core: EngineCore, requests: list[Request]) -> dict[str, Any]:
    for one in requests:
        core.submit(one)
    return {key: _facts(events) for key, events in drain(core).items()}


def _facts(events: list[TokenEvent]) -> tuple[Any, ...]:
    logprobs = [each for event in events for each in event.logprobs or []]
    prompt = [event.prompt_logprobs for event in events if event.prompt_logprobs]
    return tokens_of(events), events[-1].finish_reason, logprobs, prompt


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("capture", [uncaptured, Tape()])
@pytest.mark.parametrize("max_num_seqs", [3, 8])
def test_tokens_are_those_of_the_plain_runner(
    capture: Capture, overlap: bool, max_num_seqs: int
) -> None:
    limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": 16}
    expected = facts(make_core(FakeModel(), **limits), REQUESTS)
    core = placed_core(StepFakeModel(), Placement(CpuQueue(), capture), overlap=overlap, **limits)
    assert facts(core, REQUESTS) == expected
    core.check()
    core.shutdown()


@pytest.mark.parametrize(
    ("num_spec_tokens", "draft_rate", "overlap"),
    [(1, 0.6, True), (2, 1.0, True), (3, 0.0, True), (4, 0.6, False)],
)
def test_drafts_are_those_of_the_plain_runner(
    num_spec_tokens: int, draft_rate: float, overlap: bool
) -> None:
    facts_of_model: dict[str, Any] = {
        "num_spec_tokens": num_spec_tokens,
        "draft_rate": draft_rate,
        "page_size": 6,
    }
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "adaptive_spec": False}
    requests = [
        *REQUESTS,
        request("none", [6, 7, 8], max_tokens=12, spec_tokens=0),
        request("later", [5, 4, 3, 2, 1], max_tokens=30),
    ]
    plain = make_core(FakeModel(**facts_of_model), **limits)
    expected = facts(plain, requests)
    model = StepFakeModel(**facts_of_model)
    limits["adaptive_spec"] = overlap
    core = placed_core(model, Placement(CpuQueue(), Tape()), overlap=overlap, **limits)
    assert facts(core, requests) == expected
    assert model.num_torn == 0
    got, wanted = core.stats(), plain.stats()
    assert got.num_draft_tokens > 0
    if not overlap:
        assert got.num_draft_tokens == wanted.num_draft_tokens
        assert got.num_accepted_tokens == wanted.num_accepted_tokens
    core.check()


def test_drafts_of_a_chunk_are_judged_by_who_reads_logits() -> None:
    """Prompts go through chunks; the gate's rows do not, and need what drafts were drawn from."""
    requests = [one for one in REQUESTS if one.params.temperature > 0]
    options: dict[str, Any] = {"num_spec_tokens": 2, "draft_rate": 0.6, "page_size": 6}

    def gated(placement: Placement | None) -> EngineCore:
        providers = {"w2": NoExperts(), "fp4": NoExperts()}
        precisions = PrecisionSet("gate", providers, tau=0.055)
        model = StepFakeModel(**options)
        return placed_core(model, placement, precisions=precisions, max_num_seqs=2)

    core = gated(Placement(CpuQueue(), uncaptured))
    assert facts(core, requests) == facts(gated(None), requests)
    assert core.stats().num_accepted_tokens > 0


class Moving:
    """Experts of a server whose rows move when they are tuned."""

    def __init__(self) -> None:
        self.precisions, self.moved = PrecisionSet.single(NoExperts()), False

    def tune(self, *, tau: float | None = None, pool_bytes: int | None = None) -> None:
        self.moved = True
        if pool_bytes == 0:
            raise RequestError("no room")

    def take_moved(self) -> bool:
        moved, self.moved = self.moved, False
        return moved

    def close(self) -> None: ...


@pytest.mark.parametrize("pool_bytes", [0, 1])
def test_steps_are_captured_anew_where_experts_have_moved(pool_bytes: int) -> None:
    """In the middle of answers, a step ahead, with drafts; and where moving them went wrong."""
    options: dict[str, Any] = {"num_spec_tokens": 2, "draft_rate": 0.6, "page_size": 6}
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "adaptive_spec": False}
    expected = facts(make_core(FakeModel(**options), **limits), REQUESTS)
    captured: list[Work] = []

    def capture(work: Work) -> Work:
        captured.append(work)
        return Tape()(work)

    core = placed_core(StepFakeModel(**options), Placement(CpuQueue(), capture), **limits)
    core._served = Moving()  # type: ignore[assignment]
    for one in REQUESTS:
        core.submit(one)
    events = [event for _ in range(5) for event in core.step()]
    num_captured = len(captured)
    with pytest.raises(RequestError) if pool_bytes == 0 else nullcontext():
        core.tune_experts(tau=None, pool_bytes=pool_bytes)
    assert len(captured) == 2 * num_captured
    found: dict[str, list[TokenEvent]] = {}
    for event in events:
        found.setdefault(event.request_id, []).append(event)
    for key, rest in drain(core).items():
        found.setdefault(key, []).extend(rest)
    assert {key: _facts(events) for key, events in found.items()} == expected
    core.check()
    num_pages, page_bytes = core.info().num_pages, core._kv.block_bytes
    with pytest.raises(RequestError, match="1 pages; a sequence of"):
        core.tune_experts(tau=None, pool_bytes=None, kv_bytes=page_bytes)
    for size in (2 * num_pages, num_pages - 1):
        core.tune_experts(tau=None, pool_bytes=None, kv_bytes=size * page_bytes + 1)
        assert core.info().num_pages == size
        assert facts(core, REQUESTS) == expected
        core.check()
    core.submit(REQUESTS[0])
    with pytest.raises(RequestError, match="under way"):
        core.tune_experts(tau=None, pool_bytes=None, kv_bytes=num_pages * page_bytes)
    core.shutdown()


@pytest.mark.bug("P25")
@pytest.mark.parametrize("on_device", [False, True])
def test_drafts_have_log_probabilities_as_other_tokens(on_device: bool) -> None:
    def told(num_spec_tokens: int) -> list[TokenLogprobs]:
        options: dict[str, Any] = {"num_spec_tokens": num_spec_tokens, "draft_rate": 0.7}
        if on_device:
            core = placed_core(StepFakeModel(**options), Placement(CpuQueue(), Tape()))
        else:
            core = make_core(FakeModel(**options), num_spec_tokens=num_spec_tokens)
        core.submit(request("a", [3, 1, 4], logprobs=3, max_tokens=30))
        events = drain(core)["a"]
        assert core.stats().num_accepted_tokens > 0 or num_spec_tokens == 0
        return [each for event in events for each in event.logprobs or []]

    plain, drafted = told(0), told(2)
    assert drafted == plain
    assert len(drafted) == 30
    assert all(value < 0.0 for each in drafted for value in each.logprobs)


@pytest.mark.parametrize("num_spec_tokens", [0, 2])
def test_pages_may_run_out(num_spec_tokens: int) -> None:
    """Whoever is sent away takes drafts along, and what they were drawn from."""
    seeded = [
        request(f"drawn {n}", [n] * 9, max_tokens=20, temperature=0.9, seed=n) for n in range(3)
    ]
    requests = [*(request(str(n), [n] * 9, max_tokens=20) for n in range(3)), *seeded]
    options: dict[str, Any] = {"num_spec_tokens": num_spec_tokens, "draft_rate": 0.7}
    limits = {"max_num_seqs": 6, "adaptive_spec": False}
    expected = facts(make_core(FakeModel(**options), **limits), requests)
    placement = Placement(CpuQueue(), Tape())
    core = placed_core(StepFakeModel(**options), placement, num_pages=24, overlap=True, **limits)
    assert facts(core, requests) == expected
    assert core.stats().num_preemptions > 0


def test_the_next_step_is_launched_before_the_last_one_is_read() -> None:
    log: list[str] = []
    placement = Placement(LoggedQueue(log.append), Tape(log.append))
    core = placed_core(StepFakeModel(), placement, overlap=True, max_num_seqs=2)
    core.submit(request("a", [1, 2, 3], max_tokens=6))
    log.clear()
    drain(core)
    # The prompt and the first decode are in flight before anything is waited for; the last step is
    # launched for a sequence that has ended meanwhile.
    assert log[:6] == ["play", "wait", "play", "wait", "play", "wait"]
    plain: list[str] = []
    placement = Placement(LoggedQueue(plain.append), Tape(plain.append))
    core = placed_core(StepFakeModel(), placement, overlap=False, max_num_seqs=2)
    core.submit(request("a", [1, 2, 3], max_tokens=6))
    plain.clear()
    drain(core)
    assert plain[:5] == ["wait", "play", "wait", "play", "wait"]


def test_who_drafts_is_launched_again_before_events_are_told() -> None:
    log: list[str] = []
    placement = Placement(LoggedQueue(log.append), Tape(log.append))
    model = StepFakeModel(num_spec_tokens=2, resumable=False)  # so no step is a snapshot's
    core = placed_core(model, placement, overlap=True, max_num_seqs=2, adaptive_spec=False)
    core.submit(request("a", [1, 2, 3], max_tokens=40))
    tokens: list[int] = []
    while len(tokens) < 20:
        log.clear()
        for event in core.step():
            tokens += event.token_ids
            # The step, the draft block over it, and a draft, a pass and a draft behind that.
            assert log == ["wait", *["play"] * 5] or len(tokens) == 1
    core.abort("a")
    drain(core)
    assert tokens == expected_greedy([1, 2, 3], len(tokens), model)


def test_who_has_given_up_drafts_is_launched_before_the_last_step_is_read() -> None:
    log: list[str] = []
    placement = Placement(LoggedQueue(log.append), Tape(log.append))
    model = StepFakeModel(num_spec_tokens=2, draft_rate=0.0)
    core = placed_core(model, placement, overlap=True, max_num_seqs=2)
    core._scheduler.meter, core._scheduler.costs = None, StepCosts(per_row=1.0)
    for n, name in enumerate("ab"):
        core.submit(request(name, [1, 2, n], max_tokens=60))
    tokens: dict[str, list[int]] = {"a": [], "b": []}
    num_ahead = num_steps = 0
    while core.has_work:
        log.clear()
        for event in core.step():
            tokens[event.request_id] += event.token_ids
        num_steps += "wait" in log
        num_ahead += log[:1] == ["play"]
        core.check()
    assert num_ahead > num_steps // 2
    for n, name in enumerate("ab"):
        assert tokens[name] == expected_greedy([1, 2, n], 60, model)


def test_a_row_that_is_no_number_ends_its_sequence_alone() -> None:
    model = StepFakeModel(nan_token=17)
    core = placed_core(model, Placement(CpuQueue(), uncaptured), overlap=True, max_num_seqs=4)
    core.submit(request("bad", [1, 17], max_tokens=4))
    core.submit(request("good", [1, 16], max_tokens=4))
    events = drain(core)
    assert "not numbers" in (events["bad"][-1].error or "")
    assert tokens_of(events["good"]) == expected_greedy([1, 16], 4, model)
    assert core.stats().num_corrupted == 1


def test_a_fault_of_the_kernels_ends_the_step_and_not_the_engine() -> None:
    fault = torch.zeros(1, dtype=torch.int32)
    core = placed_core(
        StepFakeModel(), Placement(CpuQueue(), uncaptured, fault), overlap=False, max_num_seqs=4
    )
    core.submit(request("a", [1, 2, 3], max_tokens=8))
    for _ in range(3):
        core.step()
    fault.fill_(1)
    events = drain(core)
    assert "fault 0x1" in (events["a"][-1].error or "")
    core.submit(request("b", [1, 2, 3], max_tokens=3))
    assert tokens_of(drain(core)["b"]) == expected_greedy([1, 2, 3], 3, FakeModel())
    assert core.stats().num_failed_steps == 1


def test_a_failing_chunk_ends_its_sequences_and_no_others() -> None:
    def refuse(inputs: Any) -> None:
        if 63 in inputs.token_ids.tolist():
            raise RuntimeError("no")
        if 62 in inputs.token_ids.tolist():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 MiB. GPU 0 has")

    core = placed_core(
        StepFakeModel(fault=refuse), Placement(CpuQueue(), uncaptured), max_num_seqs=4
    )
    core.submit(request("a", [1, 2, 3], max_tokens=8))
    first = core.step()
    core.submit(request("b", [63] * 3, max_tokens=3))
    events = drain(core)
    assert "RuntimeError: no" in (events["b"][-1].error or "")
    assert tokens_of([*first, *events["a"]]) == expected_greedy([1, 2, 3], 8, FakeModel())
    core.submit(request("c", [62] * 3, max_tokens=3))
    told = drain(core)["c"][-1].error or ""
    assert "Tried to allocate 9 MiB). Lower --max-num-batched-tokens" in told
    core.submit(request("d", [1, 2, 3], max_tokens=3))
    assert tokens_of(drain(core)["d"]) == expected_greedy([1, 2, 3], 3, FakeModel())


@pytest.mark.parametrize(
    ("overlap", "num_spec_tokens"),
    [(False, 0), (True, 2), pytest.param(True, 0, marks=pytest.mark.deep)],
)
def test_prompts_pass_in_parts_beside_who_decodes(overlap: bool, num_spec_tokens: int) -> None:
    """Some of them leave midway, are sent away, or fail; everybody has the tokens of one alone."""
    model = StepFakeModel(num_spec_tokens=num_spec_tokens, draft_rate=0.7)
    fault = torch.zeros(1, dtype=torch.int32)
    core = placed_core(
        model,
        Placement(CpuQueue(), Tape(), fault),
        num_pages=32,
        overlap=overlap,
        prefill_share=0.5,
        max_num_seqs=6,
        max_num_batched_tokens=32,
    )
    seen, launch = list[Batch](), core._runner.launch  # type: ignore[union-attr]

    def recorded(batch: Batch) -> Any:
        seen.append(batch)
        return launch(batch)

    core._runner.launch = recorded  # type: ignore[method-assign, union-attr]
    carried = cycle([1, 0, 1, 1])
    core._scheduler.pace.parts = lambda users, rows: next(carried)  # type: ignore[method-assign, assignment]
    tokens: dict[str, list[int]] = {}
    asked: dict[str, list[int]] = {}
    for n in range(60):
        if n % 3 == 0:
            prompt = [n % 60] * (3 if n < 6 else 20 + n % 17)
            name = f"{n}"
            asked[name], tokens[name] = prompt, []
            priority = n % 4 if n else -1
            core.submit(request(name, prompt, max_tokens=60 if n < 6 else 9, priority=priority))
        passing = core._scheduler._pass
        if n % 5 == 4 and passing is not None:
            for row in passing.rows[: 1 + n % 2]:
                core.abort(row.seq.request.request_id)
        for event in core.step():
            tokens[event.request_id] += event.token_ids
        core.check()
    while core.has_work:
        for event in core.step():
            tokens[event.request_id] += event.token_ids
        core.check()
    for name, made in tokens.items():
        assert made == expected_greedy(asked[name], len(made), model)
    assert sum(batch.num_parts > 0 and not batch.ends_pass for batch in seen) > 5
    assert any(batch.ends_pass and batch.num_parts == 0 for batch in seen)
    assert core.stats().num_preemptions > 0
    assert model.num_torn == 0


@pytest.mark.parametrize("prefill", [None, "fp4"])
def test_who_leaves_amid_a_pass_goes_on_as_if_it_had_not(prefill: str | None) -> None:
    """Its drafts are drawn when it is on its way out; what it has made comes back through chunks,
    unless they have other experts."""
    of_rows: dict[bool, set[object]] = {False: set(), True: set()}

    class Watched(StepFakeModel):
        def forward(self, inputs: ForwardInput, kv: KVTensors, experts: object) -> ModelOutput:
            for position in inputs.positions.tolist():
                of_rows[position >= 20].add(experts)
            return super().forward(inputs, kv, experts)

    options: dict[str, Any] = {"num_spec_tokens": 2, "draft_rate": 0.7, "page_size": 6}
    model = Watched(**options)
    w2, fp4 = NoExperts(), NoExperts()
    precisions = PrecisionSet("w2", {"w2": w2, "fp4": fp4}, prefill=prefill)
    drawn = request("drawn", [5] * 20, max_tokens=15, temperature=0.9, seed=3, priority=1)
    later = request("later", [7] * 20, max_tokens=15, spec_tokens=0, priority=1)
    limits: dict[str, Any] = {"max_num_seqs": 2, "prefill_share": 0.5, "adaptive_spec": False}
    core = placed_core(model, Placement(CpuQueue(), uncaptured), precisions=precisions, **limits)
    pace = core._scheduler.pace
    pace.parts = lambda users, rows: 1  # type: ignore[method-assign, assignment]
    pace._owe = lambda *times: None  # type: ignore[method-assign, assignment]
    events: dict[str, list[TokenEvent]] = {}

    def step(num_steps: int) -> None:
        for event in (event for _ in range(num_steps) for event in core.step()):
            events.setdefault(event.request_id, []).append(event)

    core.submit(request("user", [1] * 20, max_tokens=200, spec_tokens=0))
    step(3)
    for n, one in enumerate((drawn, later)):
        core.submit(one)
        while not (core._scheduler._pass and core._scheduler._pass.rows[0].sample):
            step(1)
        step(6 * n)  # the first one leaves within its pass, the second one when it decodes
        core.submit(request(f"first {n}", [n] * 20, max_tokens=5, temperature=0.9, seed=n))
        while len(core._scheduler.sequences) > 1:
            step(1)
    assert "user" in core._scheduler.sequences
    core.abort("user")
    step(1)
    assert core.stats().num_preemptions == 2
    assert of_rows == {False: {fp4 if prefill else w2}, True: {w2}}
    for one in (drawn, later):
        alone = facts(placed_core(StepFakeModel(**options), None, **limits), [one])
        assert _facts(events[one.request_id]) == alone[one.request_id]


def test_a_fault_of_a_part_is_that_of_its_pass_alone() -> None:
    fault = torch.zeros(1, dtype=torch.int32)
    model = StepFakeModel()
    placement = Placement(CpuQueue(), uncaptured, fault)
    core = placed_core(model, placement, prefill_share=0.5, max_num_seqs=2)
    core.submit(request("user", [1, 2, 3], max_tokens=200))
    tokens = [token for _ in range(4) for event in core.step() for token in event.token_ids]
    core.submit(request("long", [5] * 20, max_tokens=3))
    parts, error = model.compute_parts, None

    def broken(*args: Any) -> Any:
        fault.fill_(2)
        return (yield from parts(*args))

    model.compute_parts = broken  # type: ignore[method-assign, assignment]
    while error is None:
        for event in core.step():
            if event.request_id == "long":
                error = event.error
            else:
                tokens += event.token_ids
    assert "fault 0x2" in error
    core.abort("user")
    drain(core)
    assert tokens == expected_greedy([1, 2, 3], len(tokens), model)


def model_core(rig: Rig, placement: Placement | None, **options: Any) -> EngineCore:
    page_bytes = rig.model.kv_cache_spec().bytes_per_page
    return EngineCore(
        rig.model,
        rig.experts,
        cache=CacheConfig(budget_bytes=20 * page_bytes, prefix_cache="off"),
        scheduler=SchedulerConfig(**options),
        precision="fp4",
        vocab_size=rig.model.vocab_size,
        seed=0,
        placement=placement,
    )


def v4_rig() -> Rig:
    return load_rig(DEPLOYED, hash_source(DEPLOYED, quantised=True), "deployed", num_spec_tokens=2)


def glm_rig() -> Rig:
    fields = tiny(vocab_size=257, num_hidden_layers=3, num_nextn_predict_layers=1)
    config = GlmMoeDsaConfig.from_dict(fields)
    source = random_source(config, "fp8")
    return Rig(load_model(config, source, "deployed", "fp8", 2), resident(config, source), {})


@pytest.mark.parametrize(("make", "prompt"), [(v4_rig, GOLDEN_IDS[9:258]), (glm_rig, [*range(70)])])
def test_a_real_model_drafts_the_same_either_way(
    make: Callable[[], Rig], prompt: list[int]
) -> None:
    rig = make()
    requests = [
        request("crosses", prompt, max_tokens=12),
        request("short", [42, 17], max_tokens=10, temperature=0.7, seed=1),
    ]
    options = {"max_num_seqs": 2, "max_num_batched_tokens": 300, "num_spec_tokens": 2}
    options["adaptive_spec"] = False
    plain = model_core(rig, None, overlap=False, **options)
    expected = facts(plain, requests)
    placed = model_core(rig, Placement(CpuQueue(), uncaptured), overlap=False, **options)
    assert facts(placed, requests) == expected
    got, wanted = placed.stats(), plain.stats()
    assert got.num_draft_tokens == wanted.num_draft_tokens > 0
    assert got.num_accepted_by_position == wanted.num_accepted_by_position


def test_a_real_model_gives_the_same_tokens_either_way() -> None:
    rig = load_rig(DEPLOYED, hash_source(DEPLOYED, quantised=True), "deployed")
    requests = [
        request("crosses", GOLDEN_IDS[9:262], max_tokens=6),
        request("short", [42, 17], max_tokens=6, temperature=0.9, seed=2),
    ]
    options = {"max_num_seqs": 3, "max_num_batched_tokens": 200}
    expected = facts(model_core(rig, None, overlap=False, **options), requests)
    core = model_core(rig, Placement(CpuQueue(), uncaptured), overlap=True, **options)
    core._runner._chunks.warm_up()  # type: ignore[union-attr]
    assert not any(tensor.any() for tensor in core._kv.tensors.values())
    core.submit(requests[1])
    made = core.step() + core.step()  # it decodes by now, and the other's layers pass beside it
    core._scheduler.pace.parts = lambda users, rows: 1  # type: ignore[method-assign, assignment]
    core.submit(requests[0])
    events = drain(core)
    events["short"] = [*made, *events["short"]]
    assert {name: _facts(events[name]) for name in events} == expected


def test_a_step_whose_rows_all_have_faults_says_nothing_of_costs() -> None:
    """It takes no time, and steps that take none made the next request's drafts cost nothing."""
    model = StepFakeModel(num_spec_tokens=2)
    core = placed_core(model, Placement(CpuQueue(), Tape()))
    core.submit(request("bad", [3, 5, 7], spec_tokens=0))
    core.step()
    core._scheduler.sequences["bad"].fault = "set-up failed"
    assert core.step()[0].error == "set-up failed"
    core.submit(request("next", [1, 2]))
    assert tokens_of(drain(core)["next"]) == expected_greedy([1, 2], 8, model)
