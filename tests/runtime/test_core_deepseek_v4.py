"""The core around DeepSeek-V4-Flash on the reference ops: tokens and log-probabilities of a request
are the same bits alone and in company, cut, moved, resumed and recomputed."""

from functools import cache

import pytest

from moet.config import CacheConfig, Rounding, SchedulerConfig
from moet.runtime.core import EngineCore
from moet.types import Request, SamplingParams, TokenEvent
from tests.fakes import drain, request, tokens_of
from tests.models.hash_weights import DEPLOYED, GOLDEN, GOLDEN_IDS, Rig, hash_source, load_rig

ROUNDINGS = pytest.mark.parametrize("rounding", ["none", "deployed"])
PREFIX = GOLDEN_IDS[:256]  # one page
REQUESTS = [
    request("long", [*PREFIX, *GOLDEN_IDS[40:76]], max_tokens=10, logprobs=0),
    request("branch", [*PREFIX, 3, 5], max_tokens=8, temperature=1.0, seed=5, logprobs=0),
    request("crosses", GOLDEN_IDS[9:259], max_tokens=12, logprobs=0),
    request("short", [42], max_tokens=12, temperature=0.7, seed=6, logprobs=0),
]


@cache
def _rig(rounding: Rounding) -> Rig:
    if rounding == "none":
        return load_rig(GOLDEN, hash_source(GOLDEN))
    return load_rig(DEPLOYED, hash_source(DEPLOYED, quantised=True), rounding)


def _core(rounding: Rounding, num_pages: int = 20, **options: object) -> EngineCore:
    rig = _rig(rounding)
    page_bytes = rig.model.kv_cache_spec().bytes_per_page
    host_blocks = options.pop("num_host_blocks", 10_000)
    mode = options.pop("prefix_cache", "off")
    return EngineCore(
        rig.model,
        rig.experts,
        cache=CacheConfig(
            budget_bytes=num_pages * page_bytes,
            host_budget_bytes=host_blocks * page_bytes,  # type: ignore[operator]
            prefix_cache=mode,  # type: ignore[arg-type]
        ),
        scheduler=SchedulerConfig(**{"overlap": False, **options}),  # type: ignore[arg-type]
        precision="fp4",
        vocab_size=rig.model.vocab_size,
        seed=0,
    )


def _run(core: EngineCore, requests: list[Request]) -> dict[str, tuple[object, ...]]:
    for one in requests:
        core.submit(one)
    return {name: _content(events) for name, events in drain(core).items()}


def _content(events: list[TokenEvent]) -> tuple[object, ...]:
    logprobs = [entry.logprobs[0] for event in events for entry in event.logprobs or []]
    return tokens_of(events), logprobs


@cache
def _alone(rounding: Rounding) -> dict[str, tuple[object, ...]]:
    """Each by itself, the prompt in one step, nothing cached."""
    return {one.request_id: _run(_core(rounding), [one])[one.request_id] for one in REQUESTS}


@pytest.mark.parametrize(
    ("rounding", "overlap"), [("none", False), ("none", True), ("deployed", True)]
)
def test_mates_chunks_and_loop(rounding: Rounding, overlap: bool) -> None:
    core = _core(rounding, overlap=overlap, max_num_batched_tokens=100)
    assert _run(core, REQUESTS) == _alone(rounding)
    core.shutdown()


@ROUNDINGS
def test_prefix_hits_and_finished_turns(rounding: Rounding) -> None:
    core = _core(rounding, prefix_cache="on")
    assert _run(core, REQUESTS) == _alone(rounding)
    before = core.stats().cached_tokens
    assert _run(core, REQUESTS[:2]) == {n: _alone(rounding)[n] for n in ("long", "branch")}
    assert core.stats().cached_tokens - before == 512
    turn = [*REQUESTS[2].prompt_token_ids, *_alone(rounding)["crosses"][0]]  # type: ignore[misc]
    follow_up = request("next", [*turn, 17], max_tokens=4, logprobs=0)
    before = core.stats().cached_tokens
    resumed = _run(core, [follow_up])
    assert core.stats().cached_tokens - before == 256  # past its prompt: kept by the turn
    assert resumed == _run(_core(rounding), [follow_up])


@ROUNDINGS
@pytest.mark.parametrize("num_host_blocks", [0, 10_000], ids=["recompute", "to host"])
def test_preemption(rounding: Rounding, num_host_blocks: int) -> None:
    core = _core(
        rounding,
        num_pages=4,
        num_host_blocks=num_host_blocks,
        overlap=True,
        max_num_seqs=4,
    )
    assert _run(core, REQUESTS[2:] + _copies(2)) == {
        "crosses": _alone(rounding)["crosses"],
        "short": _alone(rounding)["short"],
        **{f"crosses{i}": _alone(rounding)["crosses"] for i in range(2)},
    }
    stats = core.stats()
    assert stats.num_preemptions > 0
    assert stats.num_recomputed == (0 if num_host_blocks else stats.num_preemptions)
    assert stats.num_used_pages == stats.num_used_host_blocks == 0
    core.shutdown()


def _copies(count: int) -> list[Request]:
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=0)
    prompt = REQUESTS[2].prompt_token_ids
    return [
        Request(request_id=f"crosses{i}", prompt_token_ids=prompt, params=params)
        for i in range(count)
    ]
