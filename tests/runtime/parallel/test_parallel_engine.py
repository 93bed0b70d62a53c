"""Engines over several processes: the same tokens as one process, and the end of all with one."""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest

from moet import Engine, SamplingParams
from moet.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig, launched
from moet.errors import ConfigError, MoetError
from moet.runtime.parallel import start
from moet.runtime.parallel.group import Place
from moet.runtime.parallel.start import place_of

PROMPTS = ["Hello there, how are you", "The"]
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, logprobs=1)
DRAFTS = SchedulerConfig(max_num_seqs=4, num_spec_tokens=2)
HANG_S = 4  # whole, as callers write it
SOON_S = 40.0  # the machine is busy; what is claimed is HANG_S and a few seconds

Answers = list[tuple[list[int], list[float]]]


def answers(engine: Engine) -> Answers:
    found = []
    for completion in engine.generate(PROMPTS, GREEDY):
        (choice,) = completion.choices
        assert choice.logprobs is not None
        found.append((choice.token_ids, [each.logprobs[0] for each in choice.logprobs]))
    return found


def alone(model: str) -> Answers:
    """What one process answers."""
    with Engine(model, scheduler=DRAFTS) as engine:
        return answers(engine)


@pytest.fixture
def opened() -> Iterator[list[Engine]]:
    """Engines to be closed after a test, which no rank outlives."""
    engines: list[Engine] = []
    yield engines
    for engine in engines:
        engine.close()
    gone(lambda: not followers())


def gone(check: object) -> None:
    until = time.monotonic() + SOON_S
    while not check():  # type: ignore[operator]
        assert time.monotonic() < until, "still there"
        time.sleep(0.1)


def followers() -> list[int]:
    """Process ids of ranks that this process, or one that it has started, started."""
    children = psutil.Process().children(recursive=True)
    return [c.pid for c in children if "moet.runtime.parallel.follower" in " ".join(c.cmdline())]


def wait_dead(engine: Engine) -> str:
    gone(lambda: engine.state == "dead")
    return str(engine.error)


def test_two_tensor_ranks_and_one_that_is_killed(opened: list[Engine]) -> None:
    engine = Engine("demo", scheduler=DRAFTS, tensor_parallel=2, hang_timeout_s=HANG_S)
    opened.append(engine)
    assert answers(engine) == alone("demo")
    (pid,) = followers()
    os.kill(pid, signal.SIGKILL)  # while nothing runs
    message = wait_dead(engine)
    assert "rank 1 (stage 0, tensor rank 1)" in message
    assert "signal SIGKILL" in message
    with pytest.raises(MoetError, match="rank 1"):
        engine.generate("x", GREEDY)


def test_two_stages_and_one_that_is_stopped(opened: list[Engine]) -> None:
    engine = Engine(
        "demo-glm",
        scheduler=DRAFTS,
        pipeline_parallel=2,
        hang_timeout_s=HANG_S,
        own_process=True,
    )
    opened.append(engine)
    assert answers(engine) == alone("demo-glm")
    (pid,) = followers()
    stream = engine.stream("Hello", SamplingParams(max_tokens=10_000, ignore_eos=True))
    next(stream)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(MoetError):
        for _ in stream:
            pass
    message = wait_dead(engine)
    assert "rank 1 (stage 1, tensor rank 0) has given no sign of life for 4 s" in message
    assert re.search(r"rank 0 \(stage 0, tensor rank 0\) is in: step \d+, [a-z]+", message)
    gone(lambda: not psutil.pid_exists(pid))


def test_no_rank_outlives_rank_0(opened: list[Engine]) -> None:
    engine = Engine("demo", tensor_parallel=2, hang_timeout_s=HANG_S, own_process=True)
    opened.append(engine)
    (pid,) = followers()
    core = psutil.Process(pid).ppid()
    os.kill(core, signal.SIGKILL)
    gone(lambda: not psutil.pid_exists(pid))
    assert "ended with exit code -9" in wait_dead(engine)


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(ConfigError, match="-tp 4 cannot divide 4 heads in 2 groups"):
        Engine("demo", tensor_parallel=4)
    with pytest.raises(ConfigError, match="-pp 9"):
        Engine("demo", pipeline_parallel=9)


def test_torchrun_must_start_as_many_as_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "29400"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    outside = launched()
    assert outside is not None
    config = EngineConfig(model="demo", parallel=ParallelConfig(tensor=2))
    with pytest.raises(ConfigError, match="started 3 processes, but -tp 2 -pp 1 makes 2"):
        place_of(outside, config)
    found = place_of(outside, replace(config, parallel=ParallelConfig(pipeline=3)))
    assert (found.rank, found.host, found.port, found.hosts_store) == (1, "127.0.0.1", 29400, False)
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(ConfigError, match="MASTER_PORT is not"):
        launched()


def test_pages_kept_elsewhere_are_refused_in_a_group() -> None:
    with pytest.raises(ConfigError, match="--kv-host-cache"):
        Engine("demo", tensor_parallel=2, cache=CacheConfig(host_cache_bytes=1 << 20))


def test_a_rank_ends_without_taking_its_interpreter_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of its connections let go of tensors late, which may abort an interpreter."""
    monkeypatch.setattr(start, "run_rank", lambda *args: 3)
    monkeypatch.setattr(logging, "shutdown", lambda: None)
    monkeypatch.setattr(os, "_exit", lambda code: codes.append(code))
    codes: list[int] = []
    start.be_rank(EngineConfig(model="demo"), Place(1, "127.0.0.1", 1, hosts_store=False), 1)
    assert codes == [3]


def test_a_rank_heeds_signals_until_all_have_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """From then on requests may be under way, which rank 0 drains."""
    done: list[object] = []
    source = SimpleNamespace(core=lambda *args: done.append("loads"))
    monkeypatch.setattr(start._Source, "open", lambda *args: source)
    monkeypatch.setattr(start, "claims", lambda source: {})
    monkeypatch.setattr(start.Group, "join", lambda *args: None)
    monkeypatch.setattr(start, "_all_loaded", lambda group: done.append("all have"))
    monkeypatch.setattr(start, "follow", lambda *args: done.append("follows"))
    monkeypatch.setattr(signal, "signal", lambda number, how: done.append((number, how)))
    place = Place(1, "127.0.0.1", 1, hosts_store=False)
    assert start.run_rank(EngineConfig(model="demo"), place, 1) == 0
    ignored = [(signal.SIGINT, signal.SIG_IGN), (signal.SIGTERM, signal.SIG_IGN)]
    assert done == ["loads", "all have", *ignored, "follows"]
