"""The core around both models on the reference ops: tokens and log-probabilities of a request are
the same bits alone and in company, cut, moved, resumed and recomputed."""

from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest
from torch import Tensor

from moet.config import CacheConfig, SchedulerConfig
from moet.errors import CapacityError
from moet.kernels.moe import ExpertTable
from moet.models.base import ExpertProvider
from moet.models.glm_moe_dsa_config import GlmMoeDsaConfig
from moet.runtime.core import EngineCore
from moet.types import Request, SamplingParams, TokenEvent
from tests.fakes import drain, request, tokens_of
from tests.models.glm_configs import tiny
from tests.models.glm_rig import load_model, random_source, resident
from tests.models.hash_weights import (
    DEPLOYED,
    GOLDEN,
    GOLDEN_IDS,
    Rig,
    dirty_kv,
    hash_source,
    load_rig,
)

# Model and arithmetic: without rounding, or as deployed over the narrowest rows there are.
Case = Literal["v4 exact", "v4 deployed", "glm deployed"]
CASES = pytest.mark.parametrize(
    "case", [pytest.param("v4 exact", marks=pytest.mark.deep), "v4 deployed", "glm deployed"]
)
GLM = GlmMoeDsaConfig.from_dict(tiny(vocab_size=257, num_hidden_layers=5))
PREFIX = GOLDEN_IDS[:256]  # full pages of either model
REQUESTS = [
    request("long", [*PREFIX, *GOLDEN_IDS[40:76]], max_tokens=10, logprobs=0),
    request("branch", [*PREFIX, 3, 5], max_tokens=8, temperature=1.0, seed=5, logprobs=0),
    request("crosses", GOLDEN_IDS[9:259], max_tokens=12, logprobs=0),
    request("short", [42], max_tokens=12, temperature=0.7, seed=6, logprobs=0),
]


@cache
def _rig(case: Case) -> Rig:
    if case == "v4 exact":
        return load_rig(GOLDEN, hash_source(GOLDEN))
    if case == "v4 deployed":
        return load_rig(DEPLOYED, hash_source(DEPLOYED, quantised=True), "deployed")
    source = random_source(GLM, "fp8")
    model = load_model(GLM, source, "deployed", "nvfp4")
    return Rig(model, resident(GLM, source), dirty_kv(model))


def _core(case: Case, num_pages: int = 80, **options: object) -> EngineCore:
    rig = _rig(case)
    page_bytes = rig.model.kv_cache_spec().bytes_per_page
    host_blocks = options.pop("num_host_blocks", 1_000)
    mode = options.pop("prefix_cache", "off")
    experts = options.pop("experts", rig.experts)
    tiers: dict[str, Any] = options.pop("tiers", {})  # type: ignore[assignment]
    vocab_size: int = options.pop("vocab_size", rig.model.vocab_size)  # type: ignore[assignment]
    return EngineCore(
        rig.model,
        experts,  # type: ignore[arg-type]
        cache=CacheConfig(
            budget_bytes=num_pages * page_bytes,
            host_budget_bytes=host_blocks * page_bytes,  # type: ignore[operator]
            prefix_cache=mode,  # type: ignore[arg-type]
            **tiers,
        ),
        scheduler=SchedulerConfig(**{"overlap": False, **options}),  # type: ignore[arg-type]
        precision="fp4",
        vocab_size=vocab_size,
        seed=0,
        kv_identity=case,
    )


def _run(core: EngineCore, requests: list[Request]) -> dict[str, tuple[object, ...]]:
    for one in requests:
        core.submit(one)
    return {name: _content(events) for name, events in drain(core).items()}


def _content(events: list[TokenEvent]) -> tuple[object, ...]:
    logprobs = [entry.logprobs[0] for event in events for entry in event.logprobs or []]
    return tokens_of(events), logprobs


@cache
def _alone(case: Case) -> dict[str, tuple[object, ...]]:
    """Each by itself, the prompt in one step, nothing cached."""
    return {one.request_id: _run(_core(case), [one])[one.request_id] for one in REQUESTS}


@pytest.mark.parametrize(
    ("case", "overlap"),
    [
        ("v4 exact", False),
        ("v4 exact", True),
        ("v4 deployed", True),
        ("glm deployed", True),
    ],
)
def test_mates_chunks_and_loop(case: Case, overlap: bool) -> None:
    core = _core(case, overlap=overlap, max_num_batched_tokens=100)
    assert _run(core, REQUESTS) == _alone(case)
    core.shutdown()


@CASES
def test_prefix_hits_and_finished_turns(case: Case) -> None:
    core = _core(case, prefix_cache="on")
    assert _run(core, REQUESTS) == _alone(case)
    before = core.stats().cached_tokens
    assert _run(core, REQUESTS[:2]) == {n: _alone(case)[n] for n in ("long", "branch")}
    assert core.stats().cached_tokens - before == 512
    turn = [*REQUESTS[2].prompt_token_ids, *_alone(case)["crosses"][0]]  # type: ignore[misc]
    follow_up = request("next", [*turn, 17], max_tokens=4, logprobs=0)
    before = core.stats().cached_tokens
    resumed = _run(core, [follow_up])
    assert core.stats().cached_tokens - before == 256  # past its prompt: kept by the turn
    assert resumed == _run(_core(case), [follow_up])


@CASES
@pytest.mark.parametrize("num_host_blocks", [0, 1_000], ids=["recompute", "to host"])
def test_preemption(case: Case, num_host_blocks: int) -> None:
    core = _core(
        case,
        num_pages=4 if case.startswith("v4") else 13,  # enough for the prompts alone
        num_host_blocks=num_host_blocks,
        overlap=True,
        max_num_seqs=4,
    )
    assert _run(core, REQUESTS[2:] + _copies(2)) == {
        "crosses": _alone(case)["crosses"],
        "short": _alone(case)["short"],
        **{f"crosses{i}": _alone(case)["crosses"] for i in range(2)},
    }
    stats = core.stats()
    assert stats.num_preemptions > 0
    assert stats.num_recomputed == (0 if num_host_blocks else stats.num_preemptions)
    assert stats.num_used_pages == stats.num_used_host_blocks == 0
    core.shutdown()


@CASES
def test_pages_on_the_host_and_on_disk(case: Case, tmp_path: Path) -> None:
    tiers = {
        "host_cache_bytes": 64 << 20,
        "disk_cache_folder": str(tmp_path),
        "disk_cache_bytes": 256 << 20,
    }
    num_pages = 6 if case == "glm deployed" else 2  # "long" or "crosses", not both
    core = _core(case, num_pages, prefix_cache="on", tiers=tiers, overlap=True)
    for name in ("long", "crosses", "long"):
        assert _run(core, [r for r in REQUESTS if r.request_id == name])[name] == _alone(case)[name]
    assert core.stats().num_host_hits > 0
    assert core.stats().cached_tokens == 256
    core.shutdown()
    core = _core(case, prefix_cache="on", tiers=tiers)
    assert _run(core, REQUESTS[:2]) == {name: _alone(case)[name] for name in ("long", "branch")}
    stats = core.stats()
    assert stats.cached_tokens == 512
    assert stats.num_disk_hits > 0
    assert stats.num_disk_rejected == stats.num_disk_errors == 0
    core.shutdown()


class _FewSlots:
    """Holds so many experts of a layer at once, and says so only when too many are asked for."""

    def __init__(self, experts: ExpertProvider, num_slots: int) -> None:
        self.experts = experts
        self.num_slots = num_slots

    def resolve(self, layer_idx: int, expert_ids: Tensor) -> ExpertTable:
        num_wanted = len(expert_ids.unique())
        if num_wanted > self.num_slots:
            raise CapacityError(f"{num_wanted} experts wanted, {self.num_slots} slots")
        return self.experts.resolve(layer_idx, expert_ids)


@CASES
def test_few_expert_slots(case: Case) -> None:
    requests = [
        request("a", GOLDEN_IDS[5:45], max_tokens=3, logprobs=0),
        request("b", [42, 7], max_tokens=6, temperature=0.7, seed=6, logprobs=0),
    ]
    few = _FewSlots(_rig(case).experts, 8 if case == "glm deployed" else 5)
    core = _core(case, experts=few, overlap=True)
    assert _run(core, requests) == _run(_core(case), requests)
    assert core.stats().num_split_steps > 0
    core.shutdown()


def _copies(count: int) -> list[Request]:
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=0)
    prompt = REQUESTS[2].prompt_token_ids
    return [
        Request(request_id=f"crosses{i}", prompt_token_ids=prompt, params=params)
        for i in range(count)
    ]


@CASES
def test_an_id_that_the_tokenizer_lacks_never_comes_however_likely(case: Case) -> None:
    asked = request("a", [1, 2], max_tokens=12, logprobs=0)
    likely = max(_run(_core(case), [asked])["a"][0])  # type: ignore[call-overload]
    core = _core(case, vocab_size=likely)
    tokens, logprobs = _run(core, [asked])["a"]
    assert max(tokens) < likely  # type: ignore[call-overload]
    assert len(logprobs) == 12  # type: ignore[arg-type]
    assert all(-20 < value < 0 for value in logprobs)  # type: ignore[attr-defined]
