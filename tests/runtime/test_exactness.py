"""A request's tokens are a function of the request: of no mate, chunk, page, hit or preemption."""

import random
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moet.types import Request, TokenEvent
from tests.fakes import FakeModel, drain, expected_greedy, make_core, request, tokens_of

RESUMABLE = pytest.mark.parametrize("resumable", [True, False], ids=["rings", "no_rings"])


def _prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(64), k=length)


SHARED = _prompt(0, 17)
REQUESTS = [
    request("greedy", SHARED, max_tokens=21),
    request("longer", [*SHARED, *_prompt(1, 20)], max_tokens=30, logprobs=2),
    request("seeded", [*SHARED[:12], 9], max_tokens=25, temperature=1.0, seed=7, logprobs=0),
    request("short", [3], max_tokens=30, temperature=0.8, top_p=0.9, top_k=20, seed=8),
    request("border", _prompt(2, 16), max_tokens=16, temperature=1.0, min_p=0.1, seed=9),
    request(
        "counted",
        SHARED[:9],
        max_tokens=40,
        presence_penalty=1.5,
        frequency_penalty=0.7,
        repetition_penalty=1.3,
    ),
    request("stopped", _prompt(3, 30), max_tokens=50, temperature=1.0, seed=3, stop_token_ids=(5,)),
    request("ended", _prompt(4, 11), max_tokens=50, eos_token_ids=(1, 2, 3), min_tokens=4),
]


def _content(events: list[TokenEvent]) -> tuple[object, ...]:
    """What a client sees, without how it was cut into events."""
    logprobs = [entry for event in events if event.logprobs for entry in event.logprobs]
    return (
        tokens_of(events),
        [(tuple(e.token_ids), tuple(e.logprobs), e.rank) for e in logprobs],
        events[-1].finish_reason,
        events[-1].stop_token_id,
    )


@cache
def _alone(resumable: bool) -> dict[str, tuple[object, ...]]:
    """Each request by itself: one slot, one shot, no cache, plain loop."""
    return {
        one.request_id: _content(
            _run([one], resumable, prefix_cache="off", max_num_seqs=1)[0][one.request_id]
        )
        for one in REQUESTS
    }


def _run(
    requests: list[Request], resumable: bool, **options: object
) -> tuple[dict[str, list[TokenEvent]], object]:
    core = make_core(FakeModel(resumable=resumable), **options)  # type: ignore[arg-type]
    for one in requests:
        core.submit(one)
    events = drain(core)
    stats = core.stats()
    assert stats.num_used_pages == stats.num_used_host_blocks == 0
    core.shutdown()
    return events, stats


def _assert_as_alone(events: dict[str, list[TokenEvent]], resumable: bool = True) -> None:
    assert {name: _content(one) for name, one in events.items()} == _alone(resumable)


def test_alone_is_what_the_tokens_say() -> None:
    for name, prompt, count in (("greedy", SHARED, 21), ("longer", REQUESTS[1], 30)):
        tokens = prompt.prompt_token_ids if isinstance(prompt, Request) else prompt
        assert _alone(True)[name][0] == expected_greedy(tokens, count, FakeModel())
    assert any(len(content[0]) < 50 for content in _alone(True).values())  # type: ignore[arg-type]


@RESUMABLE
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("max_num_seqs", [1, 3, 8])
def test_batch_size_mates_and_loop(resumable: bool, overlap: bool, max_num_seqs: int) -> None:
    events, _ = _run(
        REQUESTS, resumable, overlap=overlap, max_num_seqs=max_num_seqs, prefix_cache="off"
    )
    _assert_as_alone(events, resumable)


@pytest.mark.parametrize("order", range(3))
def test_order_and_slots(order: int) -> None:
    shuffled = random.Random(order).sample(REQUESTS, len(REQUESTS))
    _assert_as_alone(_run(shuffled, True, max_num_seqs=3)[0])


@RESUMABLE
@pytest.mark.parametrize("budget", [8, 9, 13, 24, 64])
def test_chunk_size(resumable: bool, budget: int) -> None:
    events, _ = _run(REQUESTS, resumable, max_num_seqs=8, max_num_batched_tokens=budget)
    _assert_as_alone(events, resumable)


@RESUMABLE
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("mode", ["on", "exact"])
def test_prefix_hits(resumable: bool, overlap: bool, mode: str) -> None:
    core = make_core(
        FakeModel(resumable=resumable), prefix_cache=mode, overlap=overlap, snapshot_interval=8
    )
    for round_ in range(3):
        before = core.stats().cached_tokens
        for one in REQUESTS:
            core.submit(one)
        _assert_as_alone(drain(core), resumable)
        if round_ > 0:
            assert core.stats().cached_tokens - before > 60
    core.shutdown()


@RESUMABLE
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("num_host_blocks", [0, 25, 400])
def test_preemption(resumable: bool, overlap: bool, num_host_blocks: int) -> None:
    events, stats = _run(
        REQUESTS,
        resumable,
        overlap=overlap,
        num_pages=20,
        max_model_len=80,
        num_host_blocks=num_host_blocks,
        prefix_cache="off",
    )
    _assert_as_alone(events, resumable)
    assert stats.num_preemptions > 0  # type: ignore[attr-defined]
    recomputed = stats.num_recomputed / stats.num_preemptions  # type: ignore[attr-defined]
    assert recomputed == {0: 1.0, 400: 0.0}.get(num_host_blocks, recomputed)


def test_follow_ups_resume_at_the_end_of_a_turn() -> None:
    model = FakeModel()
    core = make_core(model)
    turn = [*SHARED, *expected_greedy(SHARED, 21, model)]  # 38 tokens, 37 of them computed
    core.submit(REQUESTS[0])
    drain(core)
    core.submit(request("next", [*turn, 1, 2, 3]))
    events = drain(core)["next"]
    assert events[0].num_cached_tokens == 36
    assert tokens_of(events) == expected_greedy([*turn, 1, 2, 3], 8, model)


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    num_pages=st.sampled_from([20, 23, 40, 300]),
    num_host_blocks=st.sampled_from([0, 12, 30, 300]),
    num_snapshots=st.sampled_from([0, 1, 4, 50]),
    budget=st.sampled_from([4, 7, 16, 200]),
    max_num_seqs=st.sampled_from([1, 2, 4]),
    interval=st.sampled_from([1, 8, 4096]),
    mode=st.sampled_from(["on", "exact", "off"]),
    overlap=st.booleans(),
    resumable=st.booleans(),
)
def test_any_settings_and_arrivals(
    seed: int,
    num_pages: int,
    num_host_blocks: int,
    num_snapshots: int,
    budget: int,
    max_num_seqs: int,
    interval: int,
    mode: str,
    overlap: bool,
    resumable: bool,
) -> None:
    rng = random.Random(seed)
    core = make_core(
        FakeModel(resumable=resumable),
        num_pages=num_pages,
        num_host_blocks=num_host_blocks,
        num_snapshots=num_snapshots,
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        snapshot_interval=interval,
        max_model_len=80,
        prefix_cache=mode,
        overlap=overlap,
    )
    waiting = rng.sample(REQUESTS, len(REQUESTS)) + rng.sample(REQUESTS, 3)
    open_ids: set[str] = set()
    events: dict[str, list[TokenEvent]] = {}
    while waiting or core.has_work:
        if waiting and rng.random() < 0.2 and waiting[-1].request_id not in open_ids:
            one = waiting.pop()
            open_ids.add(one.request_id)
            events[one.request_id] = []
            core.submit(one)
        for event in core.step():
            events[event.request_id].append(event)
            if event.finish_reason is not None:
                open_ids.remove(event.request_id)
                expected = _alone(resumable)[event.request_id]
                assert _content(events[event.request_id]) == expected
        core.check()
    assert core.stats().num_used_pages == 0
    core.shutdown()
