"""Cores of a group on stand-in devices: batches are launched ahead on every rank, drawn drafts and
sequences that leave their slot for a while among them, and ranks that differ are found."""

from __future__ import annotations

import os
import socket
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest

from moet.config import ParallelConfig
from moet.runtime.device_runner import Placement
from moet.runtime.parallel.core import LeadingCore, follow
from moet.runtime.parallel.group import LOOPBACK, Group, Place
from moet.runtime.parallel.monitor import GroupError
from moet.runtime.parallel.ranks import Ranks
from moet.runtime.queues import CpuQueue
from moet.types import Request
from tests.fakes import request, run
from tests.runtime.device_fakes import StepFakeModel, Tape, placed_core

PARALLEL = ParallelConfig(tensor=2)
PROMPTS = ([3, 5, 7], [11] * 9, [2, 4, 6, 8, 10])
SETTINGS: dict[str, Any] = {"max_num_seqs": 2, "num_pages": 9, "overlap": True}


def requests() -> list[Request]:
    """More than there are slots and pages for, half of them drawn."""
    return [
        request(f"r{n}", prompt, max_tokens=14, temperature=n % 2, seed=n)
        for n, prompt in enumerate(PROMPTS * 2)
    ]


def model() -> StepFakeModel:
    return StepFakeModel(num_spec_tokens=2, draft_rate=0.7)


def together(
    leading_model: StepFakeModel, following_model: StepFakeModel, asked: list[Request]
) -> dict[str, list[int]]:
    """What two ranks answer; raises what rank 0 raises before it rests."""
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]

    def be_other() -> None:
        group = Group.join(Place(1, LOOPBACK, port, hosts_store=False), PARALLEL, {})
        core = placed_core(following_model, Placement(CpuQueue(), Tape()), **SETTINGS)
        group.meet("loading")
        follow(group, core)

    with ThreadPoolExecutor(1) as pool:
        other: Future[None] = pool.submit(be_other)
        group = Group.join(Place(0, LOOPBACK, port, hosts_store=True), PARALLEL, {}, listener)
        core = placed_core(
            leading_model, Placement(CpuQueue(), Tape()), kind=LeadingCore, **SETTINGS
        )
        assert isinstance(core, LeadingCore)
        core.lead(group, Ranks())
        group.meet("loading")
        try:
            answers = run(core, asked)
        except GroupError:
            with pytest.raises(GroupError):
                other.result(30)
            core.shutdown()
            raise
        assert not group._undecided, "a core rests when all steps are compared"
        core.shutdown()
        other.result(30)
    return answers


def agree() -> None:
    core = placed_core(model(), Placement(CpuQueue(), Tape()), **SETTINGS)
    expected = run(core, requests())
    assert core.stats().num_preemptions > 0
    assert together(model(), model(), requests()) == expected


def differ() -> None:
    """In the only step, behind which none comes that would tell."""
    other = model()
    other.vocab_size //= 8  # of its hashes
    with pytest.raises(GroupError, match=r"rank 1 \(stage 0, tensor rank 1\) disagrees"):
        together(model(), other, [request("last", [3, 5, 7], max_tokens=1)])


def alone(name: str) -> None:
    """Runs a function and ends the process at once, as ranks end."""
    try:
        {"agree": agree, "differ": differ}[name]()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


@pytest.mark.parametrize("name", ["agree", "differ"])
def test_two_ranks_answer_as_one_or_end(name: str) -> None:
    """In a process of its own: connections of a broken group may wait for ever when collected."""
    process = get_context("spawn").Process(target=alone, args=(name,))
    process.start()
    process.join(120)
    if process.exitcode is None:
        process.kill()
        process.join()
    assert process.exitcode == 0
