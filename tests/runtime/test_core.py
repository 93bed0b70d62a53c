"""EngineCore: what is asked, refused, reported, and how faults are held apart."""

import math

import pytest
import torch

from moet.errors import ConfigError, ContextLengthError, OverloadedError, RequestError
from moet.models.base import ForwardInput
from moet.types import FinishReason
from tests.fakes import (
    FakeModel,
    drain,
    expected_greedy,
    expected_logits,
    make_core,
    request,
    run,
    tokens_of,
)

BOTH = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
PROMPT = [5, 9, 2, 60, 33, 1, 7, 7, 12, 40, 3]


@BOTH
def test_tokens_are_those_of_the_whole_history(overlap: bool) -> None:
    model = FakeModel()
    core = make_core(model, overlap=overlap)
    requests = [request("a", PROMPT, max_tokens=12), request("b", PROMPT[:1], max_tokens=20)]
    tokens = run(core, requests)
    assert tokens["a"] == expected_greedy(PROMPT, 12, model)
    assert tokens["b"] == expected_greedy(PROMPT[:1], 20, model)
    core.shutdown()


@BOTH
def test_events_carry_reasons_and_cached_tokens(overlap: bool) -> None:
    model = FakeModel()
    answer = expected_greedy(PROMPT, 8, model)
    stop = next(token for i, token in enumerate(answer) if i >= 3 and token not in answer[:i])
    upto = answer.index(stop) + 1
    core = make_core(model, overlap=overlap)
    core.submit(request("length", PROMPT, max_tokens=8))
    core.submit(request("stop", PROMPT, stop_token_ids=(stop,)))
    core.submit(request("eos", PROMPT, eos_token_ids=(stop,)))
    core.submit(request("ignored", PROMPT, eos_token_ids=(stop,), ignore_eos=True))
    events = drain(core)
    for name, reason, count in (
        ("length", FinishReason.LENGTH, 8),
        ("stop", FinishReason.STOP, upto),
        ("eos", FinishReason.STOP, upto),
        ("ignored", FinishReason.LENGTH, 8),
    ):
        assert tokens_of(events[name]) == answer[:count], name
        assert [e.finish_reason for e in events[name]] == [None] * (count - 1) + [reason]
        assert events[name][-1].stop_token_id == (stop if reason is FinishReason.STOP else None)
    core.submit(request("again", PROMPT))
    again = drain(core)["again"]
    assert [event.num_cached_tokens for event in again] == [8] + [0] * 7
    assert core.stats().finished == {"stop": 2, "length": 3, "abort": 0, "error": 0}
    core.shutdown()


@BOTH
def test_min_tokens_holds_back_the_end(overlap: bool) -> None:
    model = FakeModel()
    answer = expected_greedy(PROMPT, 8, model)
    core = make_core(model, overlap=overlap)
    tokens = run(core, [request("a", PROMPT, stop_token_ids=(answer[0],), min_tokens=3)])
    assert len(tokens["a"]) >= 3
    assert answer[0] not in tokens["a"][:2]
    core.shutdown()


@BOTH
def test_abort_ends_waiting_and_running_requests(overlap: bool) -> None:
    core = make_core(overlap=overlap, max_num_seqs=1)
    core.submit(request("runs", PROMPT, max_tokens=50))
    core.submit(request("waits", PROMPT, max_tokens=50))
    for _ in range(5):
        core.step()
        core.check()
    core.abort("waits")
    core.abort("runs", reason=FinishReason.STOP)
    core.abort("never there")
    events = drain(core)
    assert [e.finish_reason for e in events["waits"]] == [FinishReason.ABORT]
    assert [e.finish_reason for e in events["runs"]] == [FinishReason.STOP]
    assert core.stats().num_used_pages == 0
    core.shutdown()


@pytest.mark.bug("S01")
@BOTH
def test_s01_no_tokens_wanted_gives_the_prompt_with_its_logprobs(overlap: bool) -> None:
    model = FakeModel()
    core = make_core(model, overlap=overlap)
    core.submit(request("a", PROMPT, max_tokens=0, prompt_logprobs=1))
    core.submit(request("b", PROMPT, max_tokens=0))
    core.submit(request("c", [7], max_tokens=0, prompt_logprobs=0))
    events = drain(core)
    for name in "abc":
        assert [e.finish_reason for e in events[name]] == [FinishReason.LENGTH]
        assert tokens_of(events[name]) == []
    assert events["b"][0].prompt_logprobs is None
    assert events["c"][0].prompt_logprobs == [None]
    _assert_prompt_logprobs(events["a"][0].prompt_logprobs, model, top_n=1)
    assert core.stats().generation_tokens == 0
    core.shutdown()


@BOTH
@pytest.mark.parametrize("budget", [3, 16])
def test_prompt_logprobs_come_with_the_first_event(overlap: bool, budget: int) -> None:
    model = FakeModel()
    core = make_core(model, overlap=overlap, max_num_seqs=3, max_num_batched_tokens=budget)
    run(core, [request("before", PROMPT)])  # a prefix hit must not hide rows
    core.submit(request("a", PROMPT, max_tokens=3, prompt_logprobs=2, logprobs=0))
    core.submit(request("mate", PROMPT, max_tokens=3))
    events = drain(core)["a"]
    _assert_prompt_logprobs(events[0].prompt_logprobs, model, top_n=2)
    assert [e.prompt_logprobs for e in events[1:]] == [None, None]
    logits = torch.from_numpy(expected_logits(PROMPT, model)[-1])
    assert events[0].logprobs is not None
    assert events[0].logprobs[0].logprobs[0] == pytest.approx(
        float(logits.log_softmax(-1).max()), abs=1e-6
    )
    core.shutdown()


def _assert_prompt_logprobs(reported: object, model: FakeModel, *, top_n: int) -> None:
    assert isinstance(reported, list)
    assert len(reported) == len(PROMPT)
    assert reported[0] is None
    logprobs = torch.from_numpy(expected_logits(PROMPT, model)).log_softmax(-1)
    for position, entry in enumerate(reported[1:], start=1):
        assert entry.token_ids[0] == PROMPT[position]
        assert len(entry.token_ids) == 1 + top_n
        expected = float(logprobs[position - 1, PROMPT[position]])
        assert entry.logprobs[0] == pytest.approx(expected, abs=1e-6)
        assert entry.token_ids[1] == int(logprobs[position - 1].argmax())


@BOTH
def test_logits_that_are_not_numbers_end_that_request_only(overlap: bool) -> None:
    model = FakeModel(nan_token=61)
    core = make_core(model, overlap=overlap)
    core.submit(request("bad", [*PROMPT, 61]))
    core.submit(request("bad prompt", [61, *PROMPT], prompt_logprobs=0))
    core.submit(request("good", PROMPT, max_tokens=6))
    events = drain(core)
    for name in ("bad", "bad prompt"):
        assert [e.finish_reason for e in events[name]] == [FinishReason.ERROR]
        assert "not numbers" in (events[name][0].error or "")
        assert tokens_of(events[name]) == []
    good = expected_greedy(PROMPT, 6, model)
    assert 61 not in good[:-1]
    assert tokens_of(events["good"]) == good
    assert core.stats().num_corrupted == 2
    core.shutdown()


@BOTH
def test_pages_of_a_corrupted_request_are_not_shared(overlap: bool) -> None:
    core = make_core(FakeModel(nan_token=61), overlap=overlap, max_num_batched_tokens=32)
    core.submit(request("bad", [*PROMPT * 3, 61]))
    core.step()
    core.step() if overlap else None
    assert core._scheduler.memory.cache.num_cached == 8  # its first chunk was sound
    drain(core)
    assert core.stats().num_corrupted == 1
    assert core.stats().num_cached_pages == 0
    core.shutdown()


@BOTH
def test_a_failed_step_ends_its_requests_and_no_others(overlap: bool) -> None:
    def fault(inputs: ForwardInput) -> None:
        if 61 in inputs.token_ids.tolist():
            raise RuntimeError("the device has gone")

    model = FakeModel(fault=fault)
    core = make_core(model, overlap=overlap)
    core.submit(request("bad", [61, 1, 2]))
    core.submit(request("mate", [1, 2, 3]))
    events = drain(core)
    for name in ("bad", "mate"):
        assert [e.finish_reason for e in events[name]] == [FinishReason.ERROR]
        assert "the device has gone" in (events[name][0].error or "")
    assert core.stats().num_failed_steps == 1
    assert run(core, [request("next", PROMPT)])["next"] == expected_greedy(PROMPT, 8, model)
    assert core.stats().num_used_pages == 0
    core.shutdown()


@BOTH
def test_a_fault_of_one_request_stays_with_it(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = FakeModel()
    core = make_core(model, overlap=overlap)
    admit = core._runner.sampler.admit

    def broken(slot: int, params: object, prompt: list[int], *rest: object) -> None:
        if prompt[0] == 61:
            raise ValueError("odd request")
        admit(slot, params, prompt, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(core._runner.sampler, "admit", broken)
    core.submit(request("bad", [61, 1, 2]))
    core.submit(request("mate", PROMPT))
    events = drain(core)
    assert [e.finish_reason for e in events["bad"]] == [FinishReason.ERROR]
    assert "odd request" in (events["bad"][0].error or "")
    assert tokens_of(events["mate"]) == expected_greedy(PROMPT, 8, model)
    core.shutdown()


def test_refusals_name_value_limit_and_remedy() -> None:
    core = make_core(num_pages=8, max_model_len=32, max_num_seqs=2)
    core.submit(request("taken", PROMPT))
    cases = [
        (
            request("a", [1] * 32, max_tokens=None),
            ContextLengthError,
            "32 tokens.*31.*max-model-len 32.$",
        ),
        (
            request("a", [1] * 30, max_tokens=3),
            ContextLengthError,
            "30.*max_tokens is 3.*33.*32.*most 2$",
        ),
        (request("a", [1] * 33, max_tokens=0), ContextLengthError, "33 tokens.*allows 32"),
        (request("a", []), RequestError, "at least one"),
        (request("a", [1, 64]), RequestError, "64.*0 to 63"),
        (request("a", [-1, 2]), RequestError, "-1.*0 to 63"),
        (request("taken", [1]), RequestError, "'taken' is in use"),
        (request("a", [1], logit_bias={64: 1.0}), RequestError, "64"),
        (request("a", [1], temperature=math.nan), RequestError, "temperature"),
    ]
    for one, kind, message in cases:
        with pytest.raises(kind, match=message):
            core.submit(one)
    assert core.stats().num_waiting == 1
    drain(core)
    run(core, [request("fits", [1] * 32, max_tokens=0), request("too", [1] * 30, max_tokens=2)])


def test_a_full_queue_refuses_and_recovers() -> None:
    core = make_core(max_num_seqs=1, max_queued_requests=2, max_queued_tokens=20)
    core.submit(request("a", [1] * 15))
    with pytest.raises(
        OverloadedError, match=r"15 prompt tokens wait.*6.*20.*max-num-queued-tokens"
    ):
        core.submit(request("b", [1] * 6))
    core.submit(request("b", [1] * 5))
    with pytest.raises(OverloadedError, match=r"2 requests wait.*max-num-queued-reqs"):
        core.submit(request("c", [1]))
    assert core.stats().num_rejected == 2
    core.step()  # "a" starts
    core.submit(request("c", [1]))
    assert set(drain(core)) == {"a", "b", "c"}
    core.submit(request("long", [1] * 100))  # alone, any prompt that fits is served
    assert set(drain(core)) == {"long"}


def test_pages_too_few_for_the_window_stop_the_start() -> None:
    with pytest.raises(ConfigError, match=r"64 tokens needs \d+ bytes.*enough for 32 tokens.*Rai"):
        make_core(num_pages=8, max_model_len=64)
    with pytest.raises(ConfigError, match=r"1000.*positions end at 512"):
        make_core(num_pages=1000, max_model_len=1000)
    assert make_core(num_pages=8).info().max_model_len == 32
    assert make_core(num_pages=1000).info().max_model_len == 512


def test_seeds_come_from_the_engine_or_the_request() -> None:
    def draw(engine_seed: int, **params: object) -> list[int]:
        core = make_core(seed=engine_seed)
        return run(core, [request("a", PROMPT, temperature=1.0, max_tokens=16, **params)])["a"]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert draw(1, seed=3) == draw(2, seed=3)


def test_stats_count_what_happened() -> None:
    core = make_core()
    run(core, [request("a", PROMPT, max_tokens=4)])
    run(core, [request("b", PROMPT, max_tokens=4)])
    stats = core.stats()
    assert (stats.prompt_tokens, stats.generation_tokens, stats.cached_tokens) == (22, 8, 8)
    assert (stats.prefix_queries, stats.prefix_hits) == (22, 8)
    assert stats.request_latency_s.count == stats.time_to_first_token_s.count == 2
    assert stats.inter_token_latency_s.count == 6
    assert stats.num_steps == stats.step_time_s.count == stats.step_tokens.count
    assert stats.step_tokens.sum == 11 + 3 + 3 + 3
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)


def test_shutdown_frees_everything_mid_flight() -> None:
    core = make_core(overlap=True)
    for name in "abc":
        core.submit(request(name, PROMPT, max_tokens=100))
    for _ in range(4):
        core.step()
    core.shutdown()
    core.check()
    assert core.stats().num_used_pages == 0
    assert not core.has_work
