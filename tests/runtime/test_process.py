"""Hosts: a thread and a process behave alike, and neither leaves anything open."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from moet.errors import ConfigError, ContextLengthError, EngineDeadError, RequestError
from moet.runtime.host import Host, Progress, ThreadHost
from moet.runtime.messages import Alive, Ready
from moet.runtime.process import ProcessHost, _beating
from moet.types import FinishReason, Request, SamplingParams, TokenEvent
from tests.scripted import ScriptedCore, builder, endless, faulty

ROOT = Path(__file__).parents[2]
KINDS = [ThreadHost, ProcessHost]


def request(request_id: str, prompt: list[int], **params: object) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        params=SamplingParams(**params),  # type: ignore[arg-type]
        eos_token_ids=(1,),
    )


class Listener:
    """Collects what a host delivers."""

    def __init__(self, host: Host) -> None:
        self.events: queue.Queue[TokenEvent] = queue.Queue()
        self.deaths: queue.Queue[None] = queue.Queue()
        host.start(
            lambda events: [self.events.put(event) for event in events],  # type: ignore[func-returns-value]
            lambda: self.deaths.put(None),
        )

    def next(self) -> TokenEvent:
        return self.events.get(timeout=60)

    def until_end(self) -> Iterator[TokenEvent]:
        while True:
            event = self.next()
            yield event
            if event.finish_reason is not None:
                return


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_runs_and_the_host_closes(kind: type[ThreadHost] | type[ProcessHost]) -> None:
    host = kind(builder())
    heard: list[object] = []
    handle = host._handle
    host._handle = lambda message: (heard.append(message), handle(message))[1]  # type: ignore[method-assign]
    listener = Listener(host)
    info = host.ready.result(60)
    assert info.vocab_size == 1000
    assert host.stage == ("weights", 0.5)
    host.submit(request("a", [7, 8])).result(60)
    events = list(listener.until_end())
    assert [event.token_ids for event in events] == [[7], [8], [1]]
    assert events[-1].finish_reason == FinishReason.STOP
    assert host.stats().result(60).num_running == 0
    host.close()
    assert host.state == "closed"
    with pytest.raises(EngineDeadError, match="shut down"):
        host.submit(request("b", [7]))
    assert (Alive() in heard) == (kind is ProcessHost)


@pytest.mark.parametrize("kind", KINDS)
def test_a_refusal_keeps_its_kind_and_leaves_nothing_open(
    kind: type[ThreadHost] | type[ProcessHost],
) -> None:
    host = kind(builder())
    Listener(host)
    with pytest.raises(RequestError) as caught:
        host.submit(request("a", [7] * 5000)).result(60)
    assert isinstance(caught.value, ContextLengthError)
    assert (caught.value.param, caught.value.code) == ("messages", "context_length_exceeded")
    assert not host._open
    host.close()


@pytest.mark.parametrize("kind", KINDS)
def test_an_aborted_request_is_heard_of_no_more(
    kind: type[ThreadHost] | type[ProcessHost],
) -> None:
    host = kind(builder(endless, step_s=0.001))
    listener = Listener(host)
    host.submit(request("a", [7])).result(60)
    listener.next()
    host.abort("a")
    host.abort("never there")
    host.submit(request("b", [9], max_tokens=3)).result(60)
    rest = []
    while not rest or rest[-1].finish_reason is None:
        rest.append(listener.next())
    assert [event.request_id for event in rest[-3:]] == ["b"] * 3
    assert host.stats().result(60).num_running == 0
    host.close()


@pytest.mark.parametrize("kind", KINDS)
def test_closing_ends_open_requests_with_an_error(
    kind: type[ThreadHost] | type[ProcessHost],
) -> None:
    host = kind(builder(endless, step_s=0.001))
    listener = Listener(host)
    host.submit(request("a", [7])).result(60)
    host.close()
    *_, last = listener.until_end()
    assert last.finish_reason == FinishReason.ERROR


@pytest.mark.parametrize(("kind", "script"), [(ThreadHost, faulty), (ProcessHost, faulty)])
def test_a_fault_of_the_loop_is_a_death(
    kind: type[ThreadHost] | type[ProcessHost], script: object
) -> None:
    host = kind(builder(script))  # type: ignore[arg-type]
    listener = Listener(host)
    host.submit(request("a", [7])).result(60)
    *_, last = listener.until_end()
    assert last.finish_reason == FinishReason.ERROR
    assert "scripted fault" in (last.error or "")
    listener.deaths.get(timeout=60)
    assert host.state == "dead"
    host.close()


def test_the_death_of_the_process_ends_open_requests() -> None:
    host = ProcessHost(builder(endless, step_s=0.001))
    listener = Listener(host)
    host.submit(request("a", [7])).result(60)
    listener.next()
    assert host.pid is not None
    os.kill(host.pid, signal.SIGKILL)
    *_, last = listener.until_end()
    assert last.finish_reason == FinishReason.ERROR
    assert "exit code -9" in (last.error or "")
    listener.deaths.get(timeout=60)
    with pytest.raises(EngineDeadError):
        host.submit(request("b", [7]))
    host.close()


def test_a_killed_process_is_noticed_while_idle() -> None:
    host = ProcessHost(builder())
    listener = Listener(host)
    host.ready.result(60)
    assert host.pid is not None
    os.kill(host.pid, signal.SIGKILL)
    listener.deaths.get(timeout=60)
    assert host.state == "dead"
    host.close()


def test_a_process_that_gives_no_sign_of_life_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr("moet.runtime.process.monotonic", lambda: now_s)
    host, core = ProcessHost(builder()), ScriptedCore()  # not started: it says what is said here
    now_s = 1000.0
    assert host.silent_s is None  # a load may take its time
    host._handle(Ready(core.info(), core.stats()))
    now_s += core.info().step_timeout_s
    assert host.silent_s is None
    now_s += 1.0
    assert host.silent_s == core.info().step_timeout_s + 1.0
    host._handle(Alive())
    assert host.silent_s is None
    host._end("closed", None)
    host.close()
    assert host.silent_s is None


def test_signs_of_life_come_until_the_core_ends() -> None:
    said: queue.SimpleQueue[object] = queue.SimpleQueue()
    with _beating(said.put, every_s=0.001):
        assert [said.get(timeout=60) for _ in range(3)] == [Alive()] * 3
    assert "moet-heartbeat" not in {thread.name for thread in threading.enumerate()}


def refuse_to_build(progress: Progress) -> object:
    raise ConfigError("--max-num-seqs is 0; it must be at least 1")


@pytest.mark.parametrize("kind", KINDS)
def test_a_core_that_cannot_be_built_says_why(kind: type[ThreadHost] | type[ProcessHost]) -> None:
    host = kind(refuse_to_build)  # type: ignore[arg-type]
    Listener(host)
    with pytest.raises(ConfigError, match="--max-num-seqs is 0"):
        host.ready.result(60)
    host.close()
    assert host.state == "dead"


def load_for_ever(progress: Progress) -> object:
    time.sleep(60)
    raise AssertionError


def test_a_core_that_is_closed_while_it_loads_has_not_died() -> None:
    host = ProcessHost(load_for_ever)  # type: ignore[arg-type]
    listener = Listener(host)
    host.close(timeout_s=1e6)  # which it need not wait: nothing is heard while it loads
    with pytest.raises(EngineDeadError, match="shut down"):
        host.ready.result(60)
    assert host.state == "closed"
    assert listener.deaths.empty()


PARENT = """
import time
from tests.scripted import builder, endless
from moet.runtime.process import ProcessHost

if __name__ == "__main__":
    host = ProcessHost(builder(endless, step_s=0.01))
    host.start(lambda events: None)
    host.ready.result(60)
    print(host.pid, flush=True)
    time.sleep(60)
"""


def test_no_orphan_is_left_when_the_parent_dies(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    deadline = time.monotonic() + 20
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the core outlived its parent"
        time.sleep(0.05)
