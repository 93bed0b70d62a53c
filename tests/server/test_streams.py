"""Streams over a socket: departures, keep-alive, draining, death, the official client."""

from __future__ import annotations

import asyncio
import random
import time

import httpx
import openai
import pytest

from moet.config import ServerConfig
from moet.errors import EngineDeadError
from moet.server.run import Service
from tests.scripted import FAULT, ScriptedCore, endless
from tests.server.serving import MODEL, events_of, listening, saying, scripted_engine
from tests.texts import EOS, ids

COMPLETIONS = "/v1/completions"
BODY = {"model": MODEL, "prompt": "p", "max_tokens": 100_000, "stream": True}


def wait_until_idle(core: ScriptedCore) -> None:
    """Return when the core has nothing open; the test's own time limit ends the wait."""
    while core.open:
        time.sleep(0.005)


def test_the_official_client_streams_and_collects() -> None:
    core = ScriptedCore(saying("hello 😀"))
    with listening(scripted_engine(core)) as (url, _):
        client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
        whole = client.completions.create(model=MODEL, prompt="p")
        assert whole.choices[0].text == "hello 😀"
        assert whole.usage is not None
        stream = client.completions.create(model=MODEL, prompt="p", stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == "hello 😀"
        assert [model.id for model in client.models.list()] == [MODEL]
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="other", prompt="p")
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model=MODEL, prompt="p", top_p=0)
        assert caught.value.param == "top_p"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_stops_its_request(stream: bool) -> None:
    core = ScriptedCore(endless, step_s=0.001)
    with listening(scripted_engine(core)) as (url, _):
        with httpx.Client(base_url=url, timeout=60) as client:
            if stream:
                with client.stream("POST", COMPLETIONS, json=BODY) as response:
                    next(response.iter_bytes())
            else:
                with pytest.raises(httpx.ReadTimeout):
                    client.post(COMPLETIONS, json={**BODY, "stream": False}, timeout=0.2)
        wait_until_idle(core)
        assert len(core.aborted) == 1


def test_a_client_that_leaves_before_the_first_token_stops_its_request() -> None:
    core = ScriptedCore(lambda request: [*ids("\xff")[:1]] * 100_000, step_s=0.001)
    with listening(scripted_engine(core)) as (url, _):
        with httpx.Client(base_url=url, timeout=60) as client:
            stop = "\N{REPLACEMENT CHARACTER}" * 300  # holds everything back
            with client.stream("POST", COMPLETIONS, json={**BODY, "stop": stop}):
                pass
        wait_until_idle(core)


def test_a_quiet_stream_is_kept_alive_by_comments() -> None:
    core = ScriptedCore(saying("ab"), step_s=0.3)
    with (
        listening(scripted_engine(core), ServerConfig(keep_alive_s=0.05)) as (url, _),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        text = client.post(COMPLETIONS, json=BODY).text
        assert ": keep-alive\n\n" in text
        assert "".join(event["choices"][0]["text"] for event in events_of(text)) == "ab"


async def _storm(url: str, number: int) -> None:
    """Streams that run to their end, leave in the middle, or are never read."""
    rng = random.Random(5)
    limits = httpx.Limits(max_connections=number)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:

        async def one(leave_after: int | None) -> None:
            body = {**BODY, "prompt": "abc", "n": rng.choice([1, 2])}
            async with client.stream("POST", COMPLETIONS, json=body) as response:
                assert response.status_code == 200
                read = 0
                async for _ in response.aiter_bytes():
                    read += 1
                    if leave_after is not None and read > leave_after:
                        return

        choices: list[int | None] = [None, 0, 1, 5, 20]
        await asyncio.gather(*(one(rng.choice(choices)) for _ in range(number)))


def test_fifty_streams_with_departures_leave_nothing_open() -> None:
    core = ScriptedCore(lambda request: [*ids("xyz" * 30), EOS], step_s=0.001)
    with listening(scripted_engine(core)) as (url, service):
        asyncio.run(_storm(url, 50))
        wait_until_idle(core)
        assert service.engine.num_open == 0
        while not service.app.state.traffic.idle.is_set():  # the last ones still say goodbye
            time.sleep(0.005)


def test_a_drain_lets_streams_end_and_refuses_new_ones() -> None:
    core = ScriptedCore(saying("x" * 200), step_s=0.005)
    with listening(scripted_engine(core)) as (url, service):
        with (
            httpx.Client(base_url=url, timeout=60) as client,
            client.stream("POST", COMPLETIONS, json=BODY) as response,
        ):
            lines = response.iter_lines()
            next(lines)
            service.stop()
            while client.get("/ready").json()["status"] != "draining":
                time.sleep(0.01)
            refused = client.post(COMPLETIONS, json=BODY)
            assert refused.status_code == 503
            assert "retry-after" in refused.headers
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert not service.died


def test_a_drain_that_takes_too_long_ends_streams_with_an_error() -> None:
    core = ScriptedCore(endless, step_s=0.001)
    config = ServerConfig(shutdown_timeout_s=0.05)
    with listening(scripted_engine(core), config) as (url, service):
        with (
            httpx.Client(base_url=url, timeout=60) as client,
            client.stream("POST", COMPLETIONS, json=BODY) as response,
        ):
            chunks = response.iter_text()
            text = next(chunks)
            service.stop()
            text += "".join(chunks)
        *_, error = events_of(text)
        assert "shut down" in error["error"]["message"]


def test_a_death_ends_streams_with_one_error_and_the_service_with_its_reason() -> None:
    core = ScriptedCore(lambda request: [*ids("ab"), FAULT])
    ends: list[BaseException] = []

    def note(service: Service) -> None:
        try:
            service.run()
        except EngineDeadError as error:
            ends.append(error)

    with (
        listening(scripted_engine(core), run=note) as (url, _),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        *text, last = events_of(client.post(COMPLETIONS, json=BODY).text)
        assert "".join(chunk["choices"][0]["text"] for chunk in text) == "ab"
        assert "scripted fault" in last["error"]["message"]
        assert client.get("/health").status_code == 503
    assert "scripted fault" in str(ends[0])
