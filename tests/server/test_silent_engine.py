"""An engine that does not answer: the server lives, says so, and keeps nobody waiting."""

from __future__ import annotations

import pytest

from moet.config import ServerConfig
from moet.runtime.engine import Engine
from moet.runtime.host import Host
from moet.runtime.messages import Answer, Ask, AskExperts, Command, ExpertAnswer, Loading, Ready
from moet.server.app import create_app
from tests.scripted import ScriptedCore
from tests.server.serving import MODEL, Caller, serving
from tests.texts import text_side


class StubHost(Host):
    """Ready at once unless it is to load; answers while it `speaks`."""

    def __init__(self, *, loads: bool = False) -> None:
        super().__init__()
        self.core, self.loads = ScriptedCore(), loads
        self.speaks = True
        self.silence_s: float | None = None
        self.sent: list[Command] = []

    @property
    def silent_s(self) -> float | None:
        return self.silence_s

    def _launch(self) -> None:
        if self.loads:
            self._handle(Loading("weights", 0.25))
        else:
            self._handle(Ready(self.core.info(), self.core.stats()))

    def _send(self, command: Command) -> None:
        self.sent.append(command)
        if self.speaks and isinstance(command, Ask):
            self._handle(Answer(command.ticket, self.core.stats()))
        elif self.speaks and isinstance(command, AskExperts):
            self._handle(ExpertAnswer(command.ticket, self.core.expert_stats()))

    def _join(self, timeout_s: float) -> None:
        pass


def caller(host: StubHost) -> Caller:
    engine = Engine.over(host, text_side, model=MODEL)
    return Caller(create_app(engine, ServerConfig()), host.core, engine)


def age_of(metrics: str) -> float:
    [line] = [each for each in metrics.splitlines() if each.startswith("moet:stats_age_seconds{")]
    return float(line.split()[-1])


def test_what_a_silent_engine_said_last_is_told_at_once() -> None:
    host = StubHost()
    api = caller(host)
    assert api.get("/health").status_code == 200
    assert age_of(api.get("/metrics").text) >= 0
    num_sent = len(host.sent)
    host.silence_s = 400.0
    error = api.get("/health").json()["error"]
    assert (error["code"], "400 s" in error["message"]) == ("engine_silent", True)
    live = api.get("/live")
    assert (live.status_code, live.json()["silent_s"]) == (200, 400.0)
    assert live.json()["stats"]["num_running"] == 0
    told = api.get("/metrics")
    assert told.status_code == 200
    assert "moet:expert_" in told.text
    assert api.get("/server_info").json()["stats_age_s"] > 0
    assert len(host.sent) == num_sent  # nobody waits for an answer, since nothing was asked
    api.engine.close()


def test_an_engine_that_does_not_answer_in_time_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("BOOKS_WAIT_S", "LIVE_WAIT_S"):
        monkeypatch.setattr(f"moet.server.status.{name}", 0.001)
    host = StubHost()
    host.speaks = False
    api = caller(host)
    assert api.get("/live").json()["stats"]["num_running"] == 0  # known from the start
    assert api.get("/server_info").status_code == 200
    assert api.get("/metrics").status_code == 503  # nobody has asked for the experts before
    assert api.get("/health").status_code == 200
    api.engine.close()


def test_the_server_lives_while_its_engine_loads_and_after_its_death() -> None:
    host = StubHost(loads=True)
    api = caller(host)
    live = api.get("/live")
    assert (live.status_code, live.json()["state"]) == (200, "loading")
    assert (live.json()["stage"], live.json()["progress"]) == ("weights", 0.25)
    assert live.json()["info"] is live.json()["stats"] is None
    for path in ("/metrics", "/server_info"):
        assert api.get(path).status_code == 503
    assert not host.sent
    api.engine.close()
    assert api.get("/live").json()["state"] == "closed"


def test_cached_prefixes_are_forgotten_on_demand() -> None:
    with serving(config=ServerConfig(api_keys=("k",))) as api:
        assert api.request("POST", "/reset_prefix_cache").status_code == 401
        assert api.core.num_cleared == 0
        key = {"Authorization": "Bearer k"}
        assert api.request("POST", "/reset_prefix_cache", headers=key).status_code == 200
        assert api.core.num_cleared == 1
        assert api.get("/reset_prefix_cache", headers=key).status_code == 405
