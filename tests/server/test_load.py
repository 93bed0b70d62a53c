"""Many clients at once against a real core: whatever they do, no page stays in use."""

from __future__ import annotations

import asyncio
import random
import time

import httpx

from moet.config import ServerConfig
from moet.runtime.engine import Engine
from moet.runtime.host import ThreadHost
from tests.fakes import FakeModel, make_core
from tests.server.serving import MODEL, listening
from tests.texts import byte_tokenizer, text_side

NUM_CLIENTS = 50


async def one_client(client: httpx.AsyncClient, rng: random.Random) -> str:
    """A streamed request that is read to its end, left in the middle, or never looked at."""
    chat = rng.random() < 0.5
    body = {
        "model": MODEL,
        "max_tokens": rng.randint(1, 90),
        "n": rng.choice([1, 1, 2, 3]),
        "stream": True,
        "stop": ["never to be seen", "\x00\x01"],
        "seed": rng.randint(0, 9),
    }
    if chat:
        body["messages"] = [{"role": "user", "content": "word " * rng.randint(1, 30)}]
    else:
        body["prompt"] = ["shared prefix " * rng.randint(1, 8)] * rng.randint(1, 2)
    path = "/v1/chat/completions" if chat else "/v1/completions"
    leave_after = rng.choice([None, None, 0, 1, 3, 10])
    text = ""
    async with client.stream("POST", path, json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            text += line
            if leave_after is not None and text.count("data: ") > leave_after:
                return "left"
    assert text.count("[DONE]") == 1
    assert "error" not in text
    return "read"


async def all_clients(url: str) -> list[str]:
    rng = random.Random(11)
    limits = httpx.Limits(max_connections=NUM_CLIENTS)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        clients = [one_client(client, random.Random(rng.random())) for _ in range(NUM_CLIENTS)]
        return await asyncio.gather(*clients)


def test_fifty_streams_with_aborts_and_departures_end_with_no_page_in_use() -> None:
    core = make_core(
        FakeModel(vocab_size=byte_tokenizer().vocab_size, max_position_embeddings=512),
        num_pages=90,  # fewer than the clients want, so that some must leave
        max_num_seqs=8,
    )
    with listening(
        lambda on_death: Engine.over(
            ThreadHost(lambda progress: core), text_side, model=MODEL, on_death=on_death
        ),
        ServerConfig(),
    ) as (url, service):
        ends = asyncio.run(all_clients(url))
        assert set(ends) == {"read", "left"}
        while (stats := service.engine.stats()).num_running or stats.num_waiting:
            time.sleep(0.01)
        assert stats.num_used_pages == 0
        assert stats.num_used_host_blocks == 0
        assert service.engine.num_open == 0
        assert stats.num_preemptions > 0
    core.check()
