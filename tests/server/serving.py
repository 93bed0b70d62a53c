"""Applications over scripted cores, and two ways to call them: in place and over a socket."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
from fastapi import FastAPI

from moet.config import ServerConfig
from moet.runtime.engine import Engine
from moet.runtime.host import ThreadHost
from moet.server.app import create_app
from moet.server.run import MakeEngine, Service
from tests.scripted import Script, ScriptedCore, echo
from tests.texts import EOS, ids, text_side

MODEL = "scripted"


def saying(text: str) -> Script:
    """A script that answers everything with one text and its end."""
    return lambda request: [*ids(text), EOS]


class Caller:
    """Calls an application in place; every call has an event loop of its own."""

    def __init__(self, app: FastAPI, core: ScriptedCore, engine: Engine) -> None:
        self.app, self.core, self.engine = app, core, engine

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        async def call() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=True)
            async with httpx.AsyncClient(transport=transport, base_url="http://moet") as client:
                return await client.request(method, path, **options)

        return asyncio.run(call())

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.request("GET", path, **options)

    def post(self, path: str, body: object, **options: Any) -> httpx.Response:
        return self.request("POST", path, json=body, **options)

    def chunks(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of a streamed answer; checks that it ends with [DONE], once."""
        response = self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return events_of(response.text)


def events_of(text: str) -> list[dict[str, Any]]:
    """The data of server-sent events that end with [DONE]."""
    assert text.endswith("\n\n")
    lines = [line for line in text.split("\n\n") if line and not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    assert lines.count("data: [DONE]") == 1
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@contextmanager
def serving(
    script: Script = echo, config: ServerConfig | None = None, **options: Any
) -> Iterator[Caller]:
    """An application over a scripted core; nothing may be left open at the end."""
    core = ScriptedCore(script, **options)
    engine = Engine.over(ThreadHost(lambda progress: core), text_side, model=MODEL)
    engine.wait_until_ready(60)
    with engine:
        yield Caller(create_app(engine, config or ServerConfig()), core, engine)
        assert engine.stats().num_running == 0


@contextmanager
def listening(
    make_engine: MakeEngine,
    config: ServerConfig | None = None,
    run: Callable[[Service], None] = Service.run,
) -> Iterator[tuple[str, Service]]:
    """A server on a free port, on a thread; stopped at the end if it has not ended by itself."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    service = Service(make_engine, replace(config or ServerConfig(), port=port))
    thread = threading.Thread(target=run, args=(service,), daemon=True)
    thread.start()
    service.engine.wait_until_ready(60)
    url = f"http://127.0.0.1:{port}"
    with httpx.Client(base_url=url) as client:
        while True:
            try:
                client.get("/health")
                break
            except httpx.ConnectError:
                assert thread.is_alive()
                time.sleep(0.01)
    yield url, service
    if thread.is_alive() and not service.died:
        service.stop()
    thread.join(60)
    assert not thread.is_alive()


def scripted_engine(core: ScriptedCore) -> MakeEngine:
    """For `listening`."""
    return lambda on_death: Engine.over(
        ThreadHost(lambda progress: core), text_side, model=MODEL, on_death=on_death
    )
