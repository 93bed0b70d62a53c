"""The ranks of a group as one of them sees it: collectives, announcements, agreement, failure.

Ranks are numbered stage by stage: rank = stage * tensor + tensor rank. Rank 0 decides what is done;
the others are told. Knows bytes and tensors; knows nothing of batches or models. Needs no global
process group, so that a program that embeds an engine keeps its own.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic, sleep
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    BroadcastOptions,
    PrefixStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
    Work,
)

from moet.config import ParallelConfig
from moet.errors import ConfigError
from moet.kernels.comm import added
from moet.kernels.gemm import tree_sum
from moet.kernels.mixture import Mixture
from moet.models.sharding import Comm, Shard
from moet.runtime.parallel.monitor import GroupError, Monitor

logger = logging.getLogger(__name__)

POLL = timedelta(seconds=0.2)
NEVER = timedelta(days=3650)  # waits end by what the monitor says
JOIN_TIMEOUT_S = 120.0
PROBE_TIMEOUT_S = 30.0
PROBE_WORDS = 1 << 16
INLINE_BYTES = 4096 - 8  # of an announcement that goes along with its length
MAX_UNDECIDED = 2  # results that have not been compared yet
EXCHANGE_BYTES = 256
LOOPBACK = "127.0.0.1"


T = TypeVar("T")
_GLOO: Any = ProcessGroupGloo  # its stub lacks what is used here


class Links(Protocol):
    """Connections between some ranks, as torch's process groups have them."""

    def rank(self) -> int: ...
    def size(self) -> int: ...
    def allgather(self, outs: list[list[Tensor]], x: list[Tensor]) -> Work: ...
    def broadcast(self, x: list[Tensor], options: BroadcastOptions) -> Work: ...


class RankComm(Comm, Protocol):
    """The Comm of a rank in a group."""

    def begin_step(self) -> None: ...

    def wait_at_most(self, seconds: float) -> None:
        """How long a device waits for the other ranks, if it does so by itself."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank finds the others. hosts_store: whether it opens the port itself."""

    rank: int
    host: str
    port: int
    hosts_store: bool
    attempt: str = "0"


class Group:
    """This process among the ranks. Use `join`; calls come from one thread at a time."""

    def __init__(self, place: Place, config: ParallelConfig, monitor: Monitor, store: Store):
        self.config = config
        self.rank = place.rank
        self.size = config.tensor
        self.stage, self.tensor_rank = divmod(place.rank, config.tensor)
        self.monitor = monitor
        self.key = f"{place.port}-{place.attempt}"  # what no other group of the host has now
        self.step = 0
        self.lost: Callable[[], str | None] = lambda: (
            None
        )  # which rank's process has ended, if known
        self._store = store
        self._num_connected = 0
        self._kept: list[object] = []
        self._device = _gloo_device(place)
        self.world = self._gloo("world", place.rank, config.num_ranks)
        self.verdicts = self._gloo("verdicts", place.rank, config.num_ranks)
        self._undecided: deque[tuple[Work, list[Tensor], str]] = deque()
        self._stage, column, before, behind = self.connections(self._gloo_links)
        self.comm: RankComm = GroupComm(self, self._stage, column, before, behind)
        monitor.at_end(self._outlive)

    @classmethod
    def join(
        cls,
        place: Place,
        config: ParallelConfig,
        claims: Mapping[str, str],
        listener: socket.socket | None = None,
    ) -> Group:
        """Meet the other ranks, compare claims, and check that what is sent arrives.

        claims: what must be the same on every rank, such as a pack's identity. listener: the bound
        socket of the store, if this rank opens it. Raises GroupError naming a rank that does not
        come, has other claims, or gets wrong data.
        """
        num_ranks = config.num_ranks
        name = rank_names(config)
        try:
            store = _store(place, num_ranks, listener)
            store = PrefixStore(f"moet/{place.attempt}", store)
            pulses = _store(place, num_ranks, None, client=True)
            pulses.set_timeout(timedelta(seconds=config.hang_timeout_s))
            pulses = PrefixStore(f"moet/{place.attempt}", pulses)
        except RuntimeError as error:
            message = f"{name(place.rank)} cannot reach the store at {place.host}:{place.port}"
            raise GroupError(f"{message} within {JOIN_TIMEOUT_S:g} s: {error}") from error
        monitor = Monitor(pulses, place.rank, num_ranks, timeout_s=config.hang_timeout_s, name=name)
        store.set(f"claims/{place.rank}", json.dumps(dict(claims)))
        _compare_claims(store, num_ranks, name, claims)
        monitor.start()
        try:
            group = cls(place, config, monitor, store)
            group.probe()
        except RuntimeError as error:
            message = f"{name(place.rank)} cannot connect to the other ranks: {_first_line(error)}"
            raise GroupError(monitor.fail(message)) from error
        logger.info("%s has joined %d ranks", name(place.rank), num_ranks)
        return group

    def connections(
        self, connect: Callable[[Store, int, int], T]
    ) -> tuple[T, T, T | None, T | None]:
        """Links to the tensor ranks of the stage, to those of this number in all stages, and to the
        rank before and the one behind in the pipeline. Every rank must make them alike.

        connect: makes one, given a store of its own, this one's rank there, and how many they are.
        """
        stage, last, column = self.stage, self.config.pipeline - 1, f"column{self.tensor_rank}"
        self._num_connected += 1
        number = self._num_connected

        def link(name: str, rank: int, size: int) -> T:
            return connect(PrefixStore(f"links{number}/{name}", self._store), rank, size)

        return (
            link(f"stage{stage}", self.tensor_rank, self.size),
            link(column, stage, self.config.pipeline),
            link(f"{column}/{stage - 1}", 1, 2) if stage > 0 else None,
            link(f"{column}/{stage}", 0, 2) if stage < last else None,
        )

    def use(self, comm: RankComm) -> None:
        """Take another comm, and end it when the group ends."""
        self.comm = comm
        self.monitor.at_end(comm.close)

    @property
    def shard(self) -> Shard:
        """What this rank holds of a model."""
        return Shard(self.tensor_rank, self.size, self.stage, self.config.pipeline, self.comm)

    @property
    def name(self) -> str:
        return rank_names(self.config)(self.rank)

    def probe(self) -> None:
        """Send a pattern through every kind of collective and compare what arrives."""

        def pattern(rank: int) -> Tensor:
            return torch.arange(PROBE_WORDS, dtype=torch.int32) * 2654435 + rank

        every = self.gathered(self.world, pattern(self.rank), "probe", PROBE_TIMEOUT_S)
        for rank, found in enumerate(every):
            if not torch.equal(found, pattern(rank)):
                wrong = int((found != pattern(rank)).sum())
                sender = rank_names(self.config)(rank)
                reason = (
                    f"the probe of collectives failed: of {PROBE_WORDS} words from {sender} to "
                    f"{self.name} {wrong} are wrong"
                )
                raise GroupError(self.monitor.fail(reason))

    def _outlive(self) -> None:
        """Hold on to the connections of a group that has failed until the process ends: they wait
        for what is under way when they are let go of, and whoever was to answer may never do so."""
        threading.Event().wait()

    def meet(self, what: str) -> None:
        """Wait until every rank is here."""
        self.gathered(self.world, torch.zeros(1), what)

    def begin_step(self) -> None:
        """Count a step; collectives are named by it."""
        self.step += 1
        self.comm.begin_step()

    # Rank 0 tells, the others hear

    def announce(self, data: bytes) -> None:
        """Tell every rank what is next. From rank 0."""
        head = torch.zeros(8 + INLINE_BYTES, dtype=torch.uint8)
        head[:8] = torch.tensor([len(data)], dtype=torch.int64).view(torch.uint8)
        body = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        head[8 : 8 + len(data)] = body[:INLINE_BYTES]
        self._broadcast(head, "announcement")
        if len(data) > INLINE_BYTES:
            self._broadcast(body[INLINE_BYTES:].clone(), "announcement")

    def heard(self) -> bytes:
        """What rank 0 tells next; waits as long as it takes."""
        head = torch.empty(8 + INLINE_BYTES, dtype=torch.uint8)
        self._broadcast(head, "waiting for work")
        length = int(head[:8].view(torch.int64))
        parts = [head[8 : 8 + min(length, INLINE_BYTES)]]
        if length > INLINE_BYTES:
            rest = torch.empty(length - INLINE_BYTES, dtype=torch.uint8)
            self._broadcast(rest, "announcement")
            parts.append(rest)
        return torch.cat(parts).numpy().tobytes()

    def agree(self, digest: bytes, what: str) -> None:
        """Compare 16 bytes with every rank's, two calls later: nobody waits for the others now.

        Raises GroupError naming those that differed.
        """
        mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        outs = [torch.empty_like(mine) for _ in range(self.verdicts.size())]
        work = self.verdicts.allgather([outs], [mine])
        self._undecided.append((work, outs, what))
        while len(self._undecided) > MAX_UNDECIDED:
            self._decide()

    def settle(self) -> None:
        """Wait for every comparison that is under way."""
        while self._undecided:
            self._decide()

    def _decide(self) -> None:
        work, every, what = self._undecided.popleft()
        self.wait(work, f"comparing {what}")
        differ = [r for r, found in enumerate(every) if not torch.equal(found, every[0])]
        if differ:
            names = " and ".join(map(rank_names(self.config), differ))
            reason = (
                f"{names} disagrees with rank 0 on {what}: their memory or kernels are at fault"
            )
            raise GroupError(self.monitor.fail(reason))

    def close(self) -> None:
        """Leave. The others are expected to, too."""
        self.monitor.close()
        self.comm.close()

    # Collectives

    def gathered(
        self, pg: Links, x: Tensor, what: str, limit_s: float | None = None
    ) -> list[Tensor]:
        """Every rank's x, in rank order."""
        outs = [torch.empty_like(x) for _ in range(pg.size())]
        self.wait(pg.allgather([outs], [x]), what, limit_s)
        return outs

    def wait(self, work: Work, what: str, limit_s: float | None = None) -> None:
        """Wait for a collective, unless the group ends or it takes longer than limit_s."""
        self.monitor.phase = f"step {self.step}, {what}"
        started = monotonic()
        while True:
            try:
                work.wait(POLL)
                break
            except RuntimeError as error:
                self.monitor.require_sound()
                if "timed out" not in str(error):
                    self._end(what, error)
                if limit_s is not None and monotonic() - started > limit_s:
                    reason = (
                        f"{self.name} waited {limit_s:g} s in {self.monitor.phase}; the others: "
                        f"{self.monitor.phases()}"
                    )
                    raise GroupError(self.monitor.fail(reason)) from error
        self.monitor.phase = f"step {self.step}, after {what}"

    def _end(self, what: str, error: RuntimeError) -> None:
        """A connection broke: say whose, if that becomes known soon."""
        until = monotonic() + 2.0
        while monotonic() < until:
            lost = self.lost()
            if lost is not None:
                reason = f"{lost}; {self.name} was in: step {self.step}, {what}"
                raise GroupError(self.monitor.mourn(reason)) from error
            self.monitor.require_sound()
            sleep(0.05)
        reason = (
            f"{self.name} lost the connection to another rank in step {self.step}, {what}: "
            f"{_first_line(error)}"
        )
        raise GroupError(self.monitor.fail(reason)) from error

    def _broadcast(self, x: Tensor, what: str) -> None:
        options = BroadcastOptions()
        options.rootRank = 0
        self.wait(self.world.broadcast([x], options), what)

    def keep(self, thing: object) -> None:
        """Hold on to what ranks may still write to, as long as there is a group."""
        self._kept.append(thing)

    def exchange(self, data: bytes, what: str) -> list[bytes]:
        """Up to 255 bytes of every tensor rank of the stage, in rank order."""
        assert len(data) < EXCHANGE_BYTES
        mine = torch.zeros(EXCHANGE_BYTES, dtype=torch.uint8)
        mine[: 1 + len(data)] = torch.tensor([len(data), *data], dtype=torch.uint8)
        every = self.gathered(self._stage, mine, what)
        return [bytes(each[1 : 1 + int(each[0])].tolist()) for each in every]

    def least(self, value: int, what: str) -> int:
        """The least of every rank's values."""
        every = self.gathered(self.world, torch.tensor([value]), what)
        return min(int(each) for each in every)

    def _gloo(self, name: str, rank: int, size: int) -> Links:
        return self._gloo_links(PrefixStore(name, self._store), rank, size)

    def _gloo_links(self, store: Store, rank: int, size: int) -> Links:
        options = _GLOO._Options()
        options._devices = [self._device]
        options._timeout = NEVER
        links: Links = _GLOO(store, rank, size, options)
        return links


class GroupComm:
    """models.sharding.Comm over a group, on the CPU.

    before, behind: the two ranks at either side of a cut, the earlier stage first. What is passed
    on goes as a broadcast between the two, since a wait for a point-to-point message that times out
    breaks its connection.
    """

    def __init__(
        self,
        group: Group,
        stage: Links,
        column: Links,
        before: Links | None,
        behind: Links | None,
    ) -> None:
        self.group, self.stage, self.column = group, stage, column
        self.before, self.behind = before, behind
        self._number = 0

    def sum(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        dtype = dtype or x.dtype
        if self.stage.size() == 1:
            return x.to(dtype)
        every = self.group.gathered(self.stage, x.contiguous(), self._what("sum"))
        return tree_sum([each.float() for each in every]).to(dtype)

    def sum_on_read(self, x: Tensor | Mixture, dtype: torch.dtype | None = None) -> Tensor:
        return self.sum(added(x), dtype)

    def gather(self, x: Tensor) -> Tensor:
        if self.stage.size() == 1:
            return x
        parts = self.group.gathered(self.stage, x.contiguous(), self._what("gather"))
        return torch.cat(parts, 1)

    def receive(self, like: Tensor) -> Tensor:
        assert self.before is not None
        work = self.before.broadcast([like], BroadcastOptions())
        self.group.wait(work, f"receiving from stage {self.group.stage - 1}")
        return like

    def send(self, x: Tensor) -> None:
        assert self.behind is not None
        work = self.behind.broadcast([x.contiguous()], BroadcastOptions())
        self.group.wait(work, f"sending to stage {self.group.stage + 1}")

    def from_last(self, x: Tensor) -> Tensor:
        if self.column.size() == 1:
            return x
        options = BroadcastOptions()
        options.rootRank = self.column.size() - 1
        x = x.contiguous()
        self.group.wait(self.column.broadcast([x], options), "logits of the last stage")
        return x

    def begin_step(self) -> None:
        """Number collectives from 1 again."""
        self._number = 0

    def wait_at_most(self, seconds: float) -> None:
        """Waits end by what the monitor says."""

    def close(self) -> None:
        """Connections end with the process."""

    def _what(self, kind: str) -> str:
        self._number += 1
        return f"{kind} {self._number} of stage {self.group.stage}"


def rank_names(config: ParallelConfig) -> Callable[[int], str]:
    """What a rank is called in messages."""

    def name(rank: int) -> str:
        stage, tensor_rank = divmod(rank, config.tensor)
        return f"rank {rank} (stage {stage}, tensor rank {tensor_rank})"

    return name


def _compare_claims(
    store: Store, num_ranks: int, name: Callable[[int], str], mine: Mapping[str, str]
) -> None:
    for rank in range(num_ranks):
        try:
            theirs = json.loads(store.get(f"claims/{rank}"))
        except RuntimeError as error:
            message = f"{name(rank)} has not come within {JOIN_TIMEOUT_S:g} s"
            raise GroupError(f"{message}: {_first_line(error)}") from error
        for what in sorted(mine.keys() | theirs.keys()):
            a, b = mine.get(what), theirs.get(what)
            if a != b:
                raise ConfigError(
                    f"{name(rank)} disagrees on {what}: it has {b}, this rank has {a}; start all "
                    "ranks with the same command, pack and version"
                )


def _store(
    place: Place, num_ranks: int, listener: socket.socket | None, *, client: bool = False
) -> Store:
    is_master = place.hosts_store and not client
    return TCPStore(
        place.host,
        place.port,
        num_ranks,
        is_master,
        timeout=timedelta(seconds=JOIN_TIMEOUT_S),
        wait_for_workers=False,
        master_listen_fd=listener.detach() if is_master and listener is not None else None,
    )


def _gloo_device(place: Place) -> object:
    """The interface that leads to the store, which all ranks reach; names of hosts say little."""
    family = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((place.host, place.port))  # sends nothing
        return _GLOO.create_device(hostname=probe.getsockname()[0])


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
