"""Ranks as threads of one process, over real connections: what arrives, and what ends them."""

from __future__ import annotations

import gc
import socket
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch

from moet.config import ParallelConfig
from moet.errors import ConfigError, MoetError
from moet.models.sharding import Comm, Shard
from moet.runtime.parallel import group as group_module
from moet.runtime.parallel.device import DeviceComm, through_host
from moet.runtime.parallel.group import INLINE_BYTES, LOOPBACK, Group, Place
from moet.runtime.parallel.monitor import GroupError

T = TypeVar("T")


def together(
    config: ParallelConfig, work: Callable[[Group], T], claims: Callable[[int], dict[str, str]]
) -> list[T | MoetError]:
    """What `work` gives on every rank, or the error that it ends with."""
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]

    def rank(number: int) -> T | MoetError:
        place = Place(number, LOOPBACK, port, hosts_store=number == 0)
        try:
            group = Group.join(place, config, claims(number), listener if number == 0 else None)
        except MoetError as error:
            return error
        try:
            return work(group)
        except MoetError as error:
            return error
        finally:
            group.close()

    with ThreadPoolExecutor(config.num_ranks) as pool:
        return [f.result(60) for f in [pool.submit(rank, n) for n in range(config.num_ranks)]]


def same(rank: int) -> dict[str, str]:
    return {"the pack": "abc"}


def test_every_kind_of_collective_brings_what_was_sent() -> None:
    def bring(shard: Shard, comm: Comm) -> dict[str, object]:
        mine = torch.full((2, 3), float(10 ** (2 * shard.stage + shard.rank)))
        found = {"sum": comm.sum(mine)[0, 0].item(), "gather": comm.gather(mine)[0].tolist()}
        if shard.is_first:
            comm.send(mine.bfloat16())
        else:
            found["received"] = comm.receive(torch.empty(2, 3, dtype=torch.bfloat16))[0, 0].item()
        found["last"] = comm.from_last(mine.clone())[0, 0].item()
        return found

    def work(group: Group) -> dict[str, object]:
        group.begin_step()
        found = bring(group.shard, group.comm)
        # As ranks that share a GPU do it.
        assert bring(group.shard, DeviceComm(*through_host(group), None)) == found
        texts = [b"x" * n for n in (1, INLINE_BYTES, INLINE_BYTES + 1, 3 * INLINE_BYTES)]
        if group.rank == 0:
            for text in texts:
                group.announce(text)
        else:
            assert [group.heard() for _ in texts] == texts
        group.agree(b"0" * 16, "the tokens")
        group.settle()
        return found

    config = ParallelConfig(tensor=2, pipeline=2)
    first, second, third, fourth = together(config, work, same)
    assert first == {"sum": 11.0, "gather": [1.0] * 3 + [10.0] * 3, "last": 100.0}
    assert second == {"sum": 11.0, "gather": [1.0] * 3 + [10.0] * 3, "last": 1000.0}
    assert third == {
        "sum": 1100.0,
        "gather": [100.0] * 3 + [1000.0] * 3,
        "received": 1.0,
        "last": 100.0,
    }
    assert isinstance(fourth, dict)
    assert fourth["received"] == 10.0


def test_four_ranks_add_by_tree() -> None:
    terms = [1.0, 2.0**-24, 2.0**-24, 2.0**-24]  # in fp32 the order shows

    def work(group: Group) -> float:
        return group.comm.sum(torch.tensor([terms[group.rank]])).item()

    expected = torch.tensor(terms[:2]).sum() + torch.tensor(terms[2:]).sum()
    assert together(ParallelConfig(tensor=4), work, same) == [expected.item()] * 4


def test_ranks_that_were_started_differently_are_told_so() -> None:
    def claims(rank: int) -> dict[str, str]:
        return {"the pack": f"pack of {rank}"}

    found = together(ParallelConfig(tensor=2), lambda group: None, claims)
    for error in found:
        assert isinstance(error, ConfigError)
        assert "disagrees on the pack" in str(error)
        assert "(stage 0, tensor rank" in str(error)


def test_a_rank_that_samples_another_token_ends_the_group() -> None:
    def work(group: Group) -> None:
        for step in range(5):
            group.begin_step()
            token = 7 if group.rank == 1 and step == 2 else 0
            group.agree(bytes([token]) * 16, f"the tokens of step {group.step}")
        group.settle()

    for error in together(ParallelConfig(tensor=2), work, same):
        assert isinstance(error, GroupError)
        assert "rank 1 (stage 0, tensor rank 1) disagrees with rank 0" in str(error)
        assert "the tokens of step 3" in str(error)


def test_a_reason_given_by_one_rank_ends_the_others_in_their_collective() -> None:
    def work(group: Group) -> None:
        group.begin_step()
        if group.rank == 1:
            raise GroupError(group.monitor.fail("the disk of rank 1 is gone"))
        group.comm.sum(torch.zeros(1))

    began = time.monotonic()
    for error in together(ParallelConfig(tensor=2), work, same):
        assert "the disk of rank 1 is gone" in str(error)
    assert time.monotonic() - began < 20


def test_a_rank_that_does_not_come_to_a_collective_is_waited_for_no_longer_than_stated() -> None:
    late, links = threading.Event(), list[weakref.ref[object]]()

    def work(group: Group) -> None:
        group.begin_step()
        if group.rank == 1:
            group.monitor.phase = "step 1, reading experts"
            late.wait(30)
            return
        links.append(weakref.ref(group.world))
        try:
            group.gathered(group.world, torch.zeros(1), "sum 3 of stage 0", limit_s=1.5)
        finally:
            late.set()

    error, _ = together(ParallelConfig(tensor=2), work, same)
    assert isinstance(error, GroupError)
    assert "rank 0 (stage 0, tensor rank 0) waited 1.5 s in step 1, sum 3 of stage 0" in str(error)
    assert "rank 1 (stage 0, tensor rank 1): step 1, reading experts" in str(error)
    del error
    gc.collect()
    # To let go of them waits for the other rank, with the interpreter's lock held.
    assert links[0]() is not None


def test_wrong_data_is_found_before_anything_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Group.gathered

    def spoiled(self: Group, *args: object, **kwargs: object) -> list[torch.Tensor]:
        every = real(self, *args, **kwargs)  # type: ignore[arg-type]
        if self.rank == 0:
            every[1][5:8] += 1
        return every

    monkeypatch.setattr(group_module.Group, "gathered", spoiled)
    error, _ = together(ParallelConfig(tensor=2), lambda group: group.settle(), same)
    assert isinstance(error, GroupError)
    assert "probe of collectives failed" in str(error)
    assert "from rank 1 (stage 0, tensor rank 1) to rank 0" in str(error)
    assert "3 are wrong" in str(error)


def test_a_rank_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "JOIN_TIMEOUT_S", 1.5)
    listener = socket.create_server((LOOPBACK, 0))
    place = Place(0, LOOPBACK, listener.getsockname()[1], hosts_store=True)
    with pytest.raises(GroupError, match=r"rank 1 \(stage 0, tensor rank 1\) has not come"):
        Group.join(place, ParallelConfig(tensor=2), same(0), listener)
