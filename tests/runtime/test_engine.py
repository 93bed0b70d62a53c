"""Engine over a scripted core: text, stop strings, samples, cancellation, errors."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from moet.errors import ContextLengthError, MoetError, OverloadedError, RequestError
from moet.runtime.engine import Engine
from moet.runtime.host import ThreadHost
from moet.runtime.output import Output
from moet.types import FinishReason, Request, SamplingParams
from tests.scripted import FAULT, Script, ScriptedCore, echo, endless
from tests.texts import EOS, ids, text_side


@contextmanager
def engine_of(script: Script = echo, **options: object) -> Iterator[tuple[Engine, ScriptedCore]]:
    core = ScriptedCore(script, **options)  # type: ignore[arg-type]
    engine = Engine.over(ThreadHost(lambda progress: core), text_side)
    engine.wait_until_ready(60)
    with engine:
        yield engine, core
        assert engine.stats().num_running == 0


def saying(text: str) -> Script:
    return lambda request: [*ids(text), EOS]


def test_texts_come_back_in_order_without_the_end_token() -> None:
    with engine_of() as (engine, _):
        first, second = engine.generate(["one", "zwei"], SamplingParams(max_tokens=50))
        assert (first.text, second.text) == ("one", "zwei")
        choice = second.choices[0]
        assert choice.token_ids == [*ids("zwei"), EOS]
        assert choice.finish_reason == FinishReason.STOP
        assert choice.stop_reason is None
        assert second.num_cached_tokens == 2
        assert engine.generate("solo")[0].text == "solo"
        assert engine.generate(ids("ids"))[0].text == "ids"


def test_an_engine_that_nobody_has_any_more_ends_its_core() -> None:
    host = ThreadHost(lambda progress: ScriptedCore(echo))
    engine = Engine.over(host, text_side)
    engine.wait_until_ready(60)
    del engine
    gc.collect()
    assert host.state == "closed"


def test_more_prompts_than_may_be_open_are_fed_as_places_fall_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("moet.runtime.engine.MAX_IN_FLIGHT", 3)
    with engine_of(max_open=3) as (engine, _):
        completions = engine.generate([f"p{i}" for i in range(20)])
        assert [completion.text for completion in completions] == [f"p{i}" for i in range(20)]


@pytest.mark.bug("P14")
def test_p14_a_stop_string_is_cut_and_stops_the_core() -> None:
    with engine_of(lambda request: ids("a red kite" * 1000)) as (engine, core):
        outputs = list(engine.stream("x", SamplingParams(stop=("red kite",))))
        assert "".join(output.text for output in outputs) == "a "
        assert outputs[-1].finish_reason == FinishReason.STOP
        assert outputs[-1].stop_reason == "red kite"
        assert sum(len(output.token_ids) for output in outputs) == len("a red kite")
        finished = engine.stats().finished
        assert len(core.aborted) == 1
        assert (finished["stop"], finished["abort"]) == (1, 0)


def test_a_stop_token_is_reported_and_an_end_token_is_not() -> None:
    with engine_of(saying("ab!cd")) as (engine, _):
        stop_id = ids("!")[0]
        choice = engine.generate("x", SamplingParams(stop_token_ids=(stop_id,)))[0].choices[0]
        assert (choice.text, choice.stop_reason) == ("ab", stop_id)
        choice = engine.generate("x")[0].choices[0]
        assert (choice.text, choice.stop_reason) == ("ab!cd", None)


def test_a_cut_character_is_flushed_at_the_end() -> None:
    with engine_of(lambda request: ids("é")[:1]) as (engine, _):
        assert engine.generate("x")[0].text == "\N{REPLACEMENT CHARACTER}"


def test_leaving_a_stream_early_frees_its_request() -> None:
    with engine_of(endless) as (engine, core):
        stream = engine.stream("x")
        next(stream)
        stream.close()
        assert engine.stats().num_running == 0
        assert len(core.aborted) == 1


def seeded(request: Request) -> list[int]:
    return [*ids(f"seed {request.params.seed}"), EOS]


@pytest.mark.bug("P21")
def test_p21_samples_are_requests_of_their_own_with_reproducible_seeds() -> None:
    with engine_of(seeded) as (engine, _):
        params = SamplingParams(seed=7)
        first = engine.generate("x", params, n=3)[0]
        again = engine.generate("x", params, n=3)[0]
        texts = [choice.text for choice in first.choices]
        assert texts == [choice.text for choice in again.choices]
        assert texts[0] == "seed 7"
        assert len(set(texts)) == 3
        assert [choice.index for choice in first.choices] == [0, 1, 2]


@pytest.mark.bug("P21")
def test_p21_abort_frees_all_samples() -> None:
    async def leave_early(engine: Engine) -> None:
        requests = engine.requests(ids("x"), SamplingParams(), n=3)
        async with await engine.open(requests) as generation:
            await anext(generation)

    with engine_of(endless) as (engine, core):
        asyncio.run(leave_early(engine))
        assert engine.stats().num_running == 0
        assert len(core.aborted) == 3


def test_async_calls_say_the_same_as_sync_ones() -> None:
    async def collect(engine: Engine) -> tuple[list[Output], str]:
        outputs = [output async for output in engine.astream("grüße")]
        return outputs, (await engine.agenerate("grüße", n=2)).choices[1].text

    with engine_of() as (engine, _):
        outputs, text = asyncio.run(collect(engine))
        assert "".join(output.text for output in outputs) == text == "grüße"
        assert [output.text for output in engine.stream("grüße")] == [o.text for o in outputs]


def test_cancelling_an_async_call_frees_its_requests() -> None:
    async def cancel(engine: Engine) -> None:
        task = asyncio.create_task(engine.agenerate("x", n=2))
        while (await engine.astats()).num_running < 2:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with engine_of(endless) as (engine, core):
        asyncio.run(cancel(engine))
        assert engine.stats().num_running == 0
        assert len(core.aborted) == 2


@pytest.mark.parametrize(
    ("call", "param"),
    [
        (lambda engine: engine.generate(""), "prompt"),
        (lambda engine: engine.generate([[]]), "prompt"),
        (lambda engine: engine.generate([[5, 1000]]), "prompt"),
        (lambda engine: engine.generate([[-1]]), "prompt"),
        (lambda engine: engine.generate("x", n=0), "n"),
        (lambda engine: engine.generate("x", n=10**9), "n"),
        (lambda engine: engine.generate("x", SamplingParams(top_p=0.0)), "top_p"),
        (lambda engine: engine.generate("cut \ud83d"), None),
        (lambda engine: engine.generate([[[1, 2]]]), "prompt"),
        (lambda engine: engine.generate([[1, 2.5]]), "prompt"),
        (lambda engine: engine.generate("x", SamplingParams(stop=("",))), "stop"),
        (lambda engine: engine.generate("x", SamplingParams(stop=("a",) * 10_000)), "stop"),
    ],
)
def test_bad_input_is_refused_by_name_before_any_work(
    call: Callable[[Engine], object], param: str | None
) -> None:
    with engine_of() as (engine, core):
        with pytest.raises(RequestError) as caught:
            call(engine)
        assert caught.value.param == param
        assert not core.submitted


def test_a_prompt_that_fills_the_window_is_refused_with_both_numbers() -> None:
    with engine_of(max_model_len=10) as (engine, core):
        with pytest.raises(ContextLengthError, match=r"11 tokens; 10"):
            engine.generate("x" * 11)
        with pytest.raises(ContextLengthError, match=r"10 tokens; 10"):
            engine.generate("x" * 10)
        engine.generate("x" * 9, SamplingParams(max_tokens=500))
        assert [request.params.max_tokens for request in core.submitted] == [1]


def test_if_one_request_of_a_set_is_refused_the_others_are_stopped() -> None:
    async def too_many(engine: Engine) -> None:
        with pytest.raises(OverloadedError):
            await engine.open(engine.requests(ids("x"), SamplingParams(), n=3))

    with engine_of(endless, max_open=2) as (engine, _):
        asyncio.run(too_many(engine))
        assert engine.stats().num_running == 0


def test_a_dead_engine_says_so_to_those_who_wait_and_to_those_who_come() -> None:
    core = ScriptedCore(lambda request: [5, FAULT])
    deaths: list[int] = []
    engine = Engine.over(
        ThreadHost(lambda progress: core), text_side, on_death=lambda: deaths.append(1)
    )
    engine.wait_until_ready(60)
    with pytest.raises(MoetError, match="scripted fault"):
        engine.generate("x")
    with pytest.raises(MoetError, match="engine is dead"):
        engine.generate("x")
    engine.close()
    assert deaths == [1]


def test_calls_before_the_model_is_loaded_are_told_to_come_back() -> None:
    from threading import Event

    go = Event()

    def build(progress: object) -> ScriptedCore:
        go.wait(60)
        return ScriptedCore()

    engine = Engine.over(ThreadHost(build), text_side)
    with pytest.raises(OverloadedError, match="still loading") as caught:
        engine.generate("x")
    assert caught.value.unavailable
    assert engine.state == "loading"
    go.set()
    engine.wait_until_ready(60)
    assert engine.generate("x")[0].text == "x"
    engine.close()
