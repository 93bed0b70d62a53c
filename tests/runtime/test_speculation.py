"""Drafts change the speed and nothing else: the same tokens with any number of them, in company,
in chunks, moved, resumed, recomputed, overlapped and switched off for some."""

import random
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moet.errors import ConfigError, RequestError
from moet.runtime.core import EngineCore
from moet.types import FinishReason, Request, TokenEvent
from tests.fakes import FakeModel, drain, expected_greedy, make_core, request, run, tokens_of

PAGE = 8
LENGTHS = pytest.mark.parametrize("num_drafts", [1, 2, 3, 4])


def _prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(64), k=length)


SHARED = _prompt(0, 33)
GREEDY = [
    request("greedy", SHARED, max_tokens=21, logprobs=0),
    request("longer", [*SHARED, *_prompt(1, 20)], max_tokens=30, logprobs=2),
    request("short", [3], max_tokens=30),
    request("border", _prompt(2, 16), max_tokens=16),
    request("one", _prompt(5, 9), max_tokens=1),
    request("counted", SHARED[:9], max_tokens=40, presence_penalty=1.5, frequency_penalty=0.7,
            repetition_penalty=1.3, logprobs=1),
    request("bias", SHARED[:5], max_tokens=20, logit_bias={3: 2.0, 9: -100.0}),
    request("allowed", SHARED[:7], max_tokens=20, allowed_token_ids=(1, 5, 9, 30)),
    request("stopped", _prompt(3, 30), max_tokens=50, stop_token_ids=(5, 7, 11, 13)),
    request("ended", _prompt(4, 11), max_tokens=50, eos_token_ids=(1, 2, 3, 4, 5), min_tokens=4),
]  # fmt: skip
SEEDED = [
    request("plain", [*SHARED[:12], 9], max_tokens=25, temperature=1.0, seed=7, logprobs=0),
    request("cut", [3], max_tokens=30, temperature=0.8, top_p=0.9, top_k=20, seed=8),
    request("floor", _prompt(2, 16), max_tokens=16, temperature=1.0, min_p=0.1, seed=9),
    request("penalty", SHARED, max_tokens=25, temperature=1.0, presence_penalty=1.0, seed=1),
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


def _core(num_drafts: int, rate: float = 0.7, **options: object) -> tuple[EngineCore, FakeModel]:
    model_options = {name: options.pop(name) for name in ("resumable", "room") if name in options}
    model = FakeModel(
        page_size=PAGE,
        num_spec_tokens=num_drafts,
        draft_rate=rate,
        **model_options,  # type: ignore[arg-type]
    )
    options.setdefault("adaptive_spec", False)
    return make_core(model, **options), model  # type: ignore[arg-type]


def _drain(core: EngineCore, requests: list[Request]) -> dict[str, tuple[object, ...]]:
    for one in requests:
        core.submit(one)
    events = drain(core)
    stats = core.stats()
    assert stats.num_used_pages == stats.num_used_host_blocks == 0
    return {name: _content(one) for name, one in events.items()}


@cache
def _alone(num_drafts: int) -> dict[str, tuple[object, ...]]:
    """Each by itself, in one shot, nothing cached, the plain loop."""
    requests = GREEDY if num_drafts == 0 else SEEDED
    made = {}
    for one in requests:
        core, _ = _core(num_drafts, prefix_cache="off", max_num_seqs=1)
        made |= _drain(core, [one])
    return made


PRESSURE: dict[str, dict[str, object]] = {
    "company": {},
    "no rings": {"resumable": False},
    "chunks": {"max_num_batched_tokens": 40, "max_num_seqs": 8},
    "overlapped": {"overlap": True},
    "to host": {"num_pages": 16, "num_host_blocks": 500},
    "recomputed": {"num_pages": 16, "num_host_blocks": 0},
    "all": {"num_pages": 16, "num_host_blocks": 10, "max_num_batched_tokens": 30,
            "max_num_seqs": 6, "overlap": True},
    "exact": {"prefix_cache": "exact", "num_pages": 40},
}  # fmt: skip


@pytest.mark.parametrize(
    ("num_drafts", "pressure"),
    [(k, pressure) for k in (1, 2, 3, 4) for pressure in ("overlapped", "all")]
    + [(1 + n % 4, pressure) for n, pressure in enumerate(PRESSURE)],
)
def test_tokens_at_temperature_0_are_those_without_drafts(num_drafts: int, pressure: str) -> None:
    core, model = _core(num_drafts, **PRESSURE[pressure])
    assert _drain(core, GREEDY) == _alone(0)
    assert _drain(core, GREEDY) == _alone(0)  # with hits
    stats = core.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert model.num_torn == 0
    core.shutdown()


@pytest.mark.parametrize(
    ("num_drafts", "pressure"), [(1 + n % 3, pressure) for n, pressure in enumerate(PRESSURE)]
)
def test_a_seed_reproduces_for_the_same_number_of_drafts(num_drafts: int, pressure: str) -> None:
    core, model = _core(num_drafts, **{**PRESSURE[pressure], "adaptive_spec": True})
    assert _drain(core, SEEDED + GREEDY) == _alone(num_drafts) | _alone(0)
    assert _drain(core, SEEDED) == _alone(num_drafts)  # with hits
    assert model.num_torn == 0
    core.shutdown()


@LENGTHS
@pytest.mark.parametrize("resumable", [True, False])
def test_drafts_that_are_right_all_hold(num_drafts: int, resumable: bool) -> None:
    core, _ = _core(num_drafts, 1.0, resumable=resumable, num_pages=24, num_host_blocks=0)
    requests = [request(f"r{n}", [*SHARED[: 20 + n], n], max_tokens=30) for n in range(4)]
    _drain(core, requests)
    _drain(core, requests)
    stats = core.stats()
    assert stats.num_preemptions == stats.num_recomputed > 0
    assert stats.cached_tokens > 0
    assert stats.num_draft_tokens == stats.num_accepted_tokens
    assert stats.num_accepted_by_position[0] == stats.num_drafts
    assert stats.num_steps < stats.generation_tokens


def test_acceptance_is_as_stated_and_counted_by_position() -> None:
    core, _ = _core(3, 0.6)
    _drain(core, [request(f"r{n}", _prompt(n, 5), max_tokens=60) for n in range(12)])
    stats = core.stats()
    first, second, third = stats.num_accepted_by_position
    assert first / stats.num_drafts == pytest.approx(0.6, abs=0.12)
    assert second / first == pytest.approx(0.6, abs=0.15)
    assert third / second == pytest.approx(0.6, abs=0.2)
    assert stats.num_accepted_tokens == first + second + third


def test_events_carry_what_a_step_made() -> None:
    core, _ = _core(3, 1.0)
    core.submit(request("a", _prompt(1, 10), max_tokens=20, logprobs=0))
    events = drain(core)["a"]
    assert max(len(event.token_ids) for event in events) == 4
    assert all(len(event.logprobs or []) == len(event.token_ids) for event in events)
    last = events[-1]
    assert last.num_draft_tokens == last.num_accepted_tokens == core.stats().num_draft_tokens > 0


@LENGTHS
def test_ends_inside_of_accepted_rows(num_drafts: int) -> None:
    plain = expected_greedy(SHARED, 40, FakeModel(page_size=PAGE))
    for place in range(1, 20):
        stop = plain[place]
        wanted = plain[: plain.index(stop) + 1]
        core, _ = _core(num_drafts, 1.0)
        core.submit(request("stop", SHARED, max_tokens=40, stop_token_ids=(stop,)))
        core.submit(request("length", SHARED, max_tokens=place))
        events = drain(core)
        assert tokens_of(events["stop"]) == wanted
        assert events["stop"][-1].finish_reason is FinishReason.STOP
        assert events["stop"][-1].stop_token_id == stop
        assert tokens_of(events["length"]) == plain[:place]
        assert events["length"][-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("overlap", [False, True])
def test_drafting_plain_and_prefilling_ones_share_steps(overlap: bool) -> None:
    core, model = _core(3, overlap=overlap, max_num_batched_tokens=64, max_num_seqs=8)
    mixed = [
        request(one.request_id, one.prompt_token_ids, max_tokens=20, spec_tokens=n % 3)
        for n, one in enumerate(GREEDY)
    ]
    made = run(core, mixed)
    for one in mixed:
        plain = expected_greedy(one.prompt_token_ids, 20, FakeModel(page_size=PAGE))
        assert made[one.request_id] == plain
    assert {1, 2, 3} <= {rows for batch in model.batches for rows in batch}
    core.shutdown()


def test_others_start_behind_what_the_draft_block_has_read() -> None:
    """That is not the answer of a request without drafts, and it is a prompt without an answer."""
    core, model = _core(3, max_num_seqs=1)
    made = run(core, [request("a", SHARED, spec_tokens=0, max_tokens=30)])["a"]
    assert core.stats().num_draft_tokens == 0
    longer = [*SHARED, *made, *_prompt(6, 9)]  # its last page is full
    run(core, [request("b", longer, max_tokens=0)])
    for prompt in ([*SHARED, *made, 1], [*longer, 1]):
        after = request("next", prompt, temperature=1.0, seed=5, max_tokens=20)
        found = run(core, [after])
        assert found == run(_core(3, max_num_seqs=1)[0], [after])
        assert model.num_torn == 0
    assert core.stats().cached_tokens >= len(SHARED) + len(longer) - 2 * PAGE


def test_a_request_may_not_ask_for_fewer_drafts_than_none() -> None:
    core, _ = _core(3)
    with pytest.raises(RequestError, match="spec_tokens"):
        core.submit(request("b", SHARED, spec_tokens=-1))


def test_bad_drafts_are_given_up_and_good_ones_kept() -> None:
    shares = []
    for rate in (0.0, 1.0):
        core, _ = _core(4, rate, adaptive_spec=True)
        made = run(core, [request("a", _prompt(1, 10), max_tokens=200)])
        assert made["a"] == expected_greedy(_prompt(1, 10), 200, FakeModel(page_size=PAGE))
        stats = core.stats()
        shares.append(stats.num_draft_tokens / stats.num_steps)
    assert shares[0] < 0.2
    assert shares[1] > 2.5


def test_steps_that_must_be_split_change_nothing() -> None:
    core, model = _core(3, room=lambda num_rows: num_rows <= 2)
    assert _drain(core, GREEDY) == _alone(0)
    assert model.num_refused > 0
    assert core.stats().num_accepted_tokens > 0


def test_drafts_are_dropped_where_their_experts_never_fit() -> None:
    core, model = _core(2)
    draft = model.draft
    model.draft = lambda *args: draft(*args) if _never(args) else None  # type: ignore[assignment]
    assert run(core, [request("a", SHARED, max_tokens=12)])["a"] == expected_greedy(
        SHARED, 12, FakeModel(page_size=PAGE)
    )
    assert core.stats().num_draft_tokens == 0


def _never(_: object) -> bool:
    from moet.errors import CapacityError

    raise CapacityError("no room for any row")


def test_more_drafts_than_a_page_or_too_many_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match="page size"):
        make_core(FakeModel(page_size=4, num_spec_tokens=4))
    with pytest.raises(ConfigError, match="--spec-tokens"):
        _core(3, max_num_seqs=8, max_num_batched_tokens=31)
    with pytest.raises(ConfigError, match="from 0 to 8"):
        _core(9)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.integers(1, 24), st.integers(0, 4)), min_size=1, max_size=6
    ),
    st.integers(1, 4),
    st.integers(12, 40),
    st.sampled_from([0, 6, 200]),
    st.booleans(),
    st.sampled_from([0.0, 0.5, 0.9, 1.0]),
)
def test_any_mixture(
    shapes: list[tuple[int, int, int]],
    num_drafts: int,
    num_pages: int,
    num_host_blocks: int,
    overlap: bool,
    rate: float,
) -> None:
    core, _ = _core(
        num_drafts,
        rate,
        num_pages=num_pages,
        num_host_blocks=num_host_blocks,
        overlap=overlap,
        max_num_batched_tokens=32,
        max_num_seqs=4,
        adaptive_spec=True,
    )
    requests = [
        request(f"r{n}", SHARED[:length] if n % 2 else _prompt(n, length), max_tokens=size,
                spec_tokens=drafts)
        for n, (length, size, drafts) in enumerate(shapes)
    ]  # fmt: skip
    made = run(core, requests)
    for one in requests:
        assert one.params.max_tokens is not None
        plain = expected_greedy(
            one.prompt_token_ids, one.params.max_tokens, FakeModel(page_size=PAGE)
        )
        assert made[one.request_id] == plain
    core.shutdown()
