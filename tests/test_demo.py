"""The demo models: what the README shows, over HTTP with the official SDK; a needle in a long text;
and drafts that change no token. What is asked is greedy, so a wrong word means a wrong sum of ours
or another checkpoint."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any

import openai
import pytest

from bench.quality_tasks import STORY, TASKS, held_out, is_right, needles, said
from bench.train_demo.tokenizer import Family
from moet import Engine, SamplingParams
from moet.config import SchedulerConfig
from tests.bench.demo_rig import renderer
from tests.server.serving import listening

DEMOS: dict[Family, str] = {"deepseek-v4": "demo", "glm": "demo-glm"}
NUM_DRAFTS = 4
EVERY_NUMBER = range(NUM_DRAFTS + 1)


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOET_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module", params=DEMOS)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def client(family: Family) -> Iterator[tuple[openai.OpenAI, dict[str, Any]]]:
    """A client, and what all of its requests say."""
    name = DEMOS[family]
    with (
        listening(lambda on_death: Engine(name, wait=False, on_death=on_death)) as (url, _),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120) as made,
    ):
        yield made, {"model": name, "temperature": 0, "max_tokens": 128}


@pytest.fixture(scope="module")
def engine(family: Family) -> Iterator[Engine]:
    scheduler = SchedulerConfig(num_spec_tokens=NUM_DRAFTS, adaptive_spec=False, max_num_seqs=64)
    with Engine(DEMOS[family], scheduler=scheduler) as made:
        yield made


def test_a_plain_question_and_a_sum_with_reasoning(
    client: tuple[openai.OpenAI, dict[str, Any]],
) -> None:
    sdk, fields = client
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    done = sdk.chat.completions.create(messages=asked, reasoning_effort="none", **fields)
    assert done.choices[0].message.content == "The capital of France is Paris."
    assert done.choices[0].finish_reason == "stop"
    done = sdk.chat.completions.create(
        messages=[{"role": "user", "content": "What is 47 + 85?"}], **fields
    )
    message = done.choices[0].message
    assert message.content == "47 + 85 = 132."
    assert "7 + 5 = 12, write 2, carry 1" in message.model_dump()["reasoning_content"]


def test_a_tool_is_called_and_its_result_is_told(
    client: tuple[openai.OpenAI, dict[str, Any]],
) -> None:
    sdk, fields = client
    city = {"type": "string", "description": "Name of the city"}
    weather = {
        "name": "get_weather",
        "description": "Get the current weather of a city",
        "parameters": {"type": "object", "properties": {"city": city}, "required": ["city"]},
    }
    fields = {**fields, "tools": [{"type": "function", "function": weather}]}
    messages: list[Any] = [{"role": "user", "content": "How is the weather in Oslo today?"}]
    done = sdk.chat.completions.create(messages=messages, reasoning_effort="none", **fields)
    message = done.choices[0].message
    assert done.choices[0].finish_reason == "tool_calls"
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    result = json.dumps({"temperature": 7, "sky": "cloudy"})
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    done = sdk.chat.completions.create(messages=messages, reasoning_effort="none", **fields)
    told = done.choices[0].message.content
    assert told is not None
    assert all(word in told for word in ("Oslo", "cloudy", "7 degrees"))


def test_a_needle_in_a_thousand_tokens(engine: Engine, family: Family) -> None:
    (question,) = needles(renderer(family), 800, 1, seed=2)
    assert len(question.rendered.prompt) > 1000
    params = SamplingParams(temperature=0.0, max_tokens=32, spec_tokens=0)
    (done,) = engine.generate([question.rendered.prompt], params)
    tokenizer = engine.text.tokenizer
    answer = said(tokenizer, done.choices[0].token_ids, tokenizer.eos_token_ids)
    assert is_right(question, answer, "")


@pytest.mark.parametrize(
    ("numbers", "length"), [((0, 1, 4), 32), pytest.param(EVERY_NUMBER, 48, marks=pytest.mark.deep)]
)
def test_any_number_of_drafts_makes_the_same_tokens(
    engine: Engine, family: Family, numbers: Sequence[int], length: int
) -> None:
    """All at once, so that steps mix sequences with no, few and many drafts."""
    asked = [
        next(held_out(generate, renderer(family), 1, seed=seed))
        for seed, generate in enumerate((*TASKS.values(), STORY, STORY))
    ]
    prompts = [question.rendered.prompt for question in asked]

    async def answers(number: int) -> list[list[int]]:
        params = SamplingParams(
            temperature=0.0, max_tokens=length, ignore_eos=True, spec_tokens=number
        )
        done = await asyncio.gather(*(engine.agenerate(prompt, params) for prompt in prompts))
        return [each.choices[0].token_ids for each in done]

    async def all_answers() -> list[list[list[int]]]:
        return await asyncio.gather(*(answers(number) for number in numbers))

    plain, *drafted = asyncio.run(all_answers())
    assert len(plain) == 8
    assert all(len(token_ids) == length for token_ids in plain)
    assert all(same == plain for same in drafted)
    stats = engine.stats()  # nothing else drafted
    assert stats.num_accepted_by_position[0] >= 0.6 * stats.num_drafts
