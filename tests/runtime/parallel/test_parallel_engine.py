"""Engines over several processes: the same tokens as one process, and the end of all with one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from moet import Engine, SamplingParams
from moet.config import SchedulerConfig
from moet.errors import ConfigError, MoetError
from moet.models.checkpoint import Checkpoint
from moet.models.convert import convert
from moet.models.convert_plan import ConvertOptions
from moet.models.synthetic import write_checkpoint

PROMPTS = ["Hello there, how are you", "The"]
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, logprobs=1)
DRAFTS = SchedulerConfig(max_num_seqs=4, num_spec_tokens=2)
HANG_S = 4.0
SOON_S = 40.0  # the machine is busy; what is claimed is HANG_S and a few seconds

Answers = list[tuple[list[int], list[float]]]


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder / "checkpoint", size="tiny")
    convert(Checkpoint.open(folder / "checkpoint"), folder / "pack", ConvertOptions())
    return folder / "pack"


def answers(engine: Engine) -> Answers:
    found = []
    for completion in engine.generate(PROMPTS, GREEDY):
        (choice,) = completion.choices
        assert choice.logprobs is not None
        found.append((choice.token_ids, [each.logprobs[0] for each in choice.logprobs]))
    return found


@pytest.fixture(scope="module")
def expected(pack: Path) -> Answers:
    with Engine(str(pack), scheduler=DRAFTS) as engine:
        return answers(engine)


@pytest.fixture
def own_children() -> Iterator[None]:
    """No process outlives a test."""
    me = psutil.Process()
    before = {child.pid for child in me.children(recursive=True)}
    yield
    gone(lambda: {c.pid for c in me.children(recursive=True)} <= before)


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


@pytest.mark.usefixtures("own_children")
def test_two_tensor_ranks_and_one_that_is_killed(pack: Path, expected: Answers) -> None:
    engine = Engine(str(pack), scheduler=DRAFTS, tensor_parallel=2, hang_timeout_s=HANG_S)
    assert answers(engine) == expected
    (pid,) = followers()
    os.kill(pid, signal.SIGKILL)  # while nothing runs
    message = wait_dead(engine)
    assert "rank 1 (stage 0, tensor rank 1)" in message
    assert "signal SIGKILL" in message
    with pytest.raises(MoetError, match="rank 1"):
        engine.generate("x", GREEDY)
    engine.close()


@pytest.mark.usefixtures("own_children")
def test_two_stages_and_one_that_is_stopped(pack: Path, expected: Answers) -> None:
    engine = Engine(
        str(pack),
        scheduler=DRAFTS,
        pipeline_parallel=2,
        hang_timeout_s=HANG_S,
        own_process=True,
    )
    assert answers(engine) == expected
    (pid,) = followers()
    stream = engine.stream("Hello", SamplingParams(max_tokens=10_000, ignore_eos=True))
    next(stream)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(MoetError):
        for _ in stream:
            pass
    message = wait_dead(engine)
    assert "rank 1 (stage 1, tensor rank 0) has given no sign of life for 4 s" in message
    assert "stage" in message.partition("is in:")[2]  # the collective that rank 0 waits in
    gone(lambda: not psutil.pid_exists(pid))
    engine.close()


@pytest.mark.usefixtures("own_children")
def test_no_rank_outlives_rank_0(pack: Path) -> None:
    engine = Engine(str(pack), tensor_parallel=2, hang_timeout_s=HANG_S, own_process=True)
    (pid,) = followers()
    core = psutil.Process(pid).ppid()
    os.kill(core, signal.SIGKILL)
    gone(lambda: not psutil.pid_exists(pid))
    assert "ended with exit code -9" in wait_dead(engine)
    engine.close()


def test_what_cannot_be_divided_is_refused(pack: Path) -> None:
    with pytest.raises(ConfigError, match="-tp 4 cannot divide 8 heads in 2 groups"):
        Engine(str(pack), tensor_parallel=4)
    with pytest.raises(ConfigError, match="-pp 9"):
        Engine(str(pack), pipeline_parallel=9)


def test_torchrun_must_start_as_many_as_are_asked_for(pack: Path) -> None:
    place = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    command = [sys.executable, "-m", "moet", "generate", str(pack), "-tp", "2", "-p", "x"]
    ran = subprocess.run(command, env={**os.environ, **place}, capture_output=True, text=True)
    assert ran.returncode == 2
    assert "torchrun started 3 processes, but -tp 2 -pp 1 makes 2" in ran.stderr
