"""A rank on a GPU among others: small messages through memory that all of a stage write, the rest
through NCCL. All of it can be captured in a graph.

What cannot be reached in one way is tried in the next: the GPUs' own memory, memory of the host,
NCCL alone. Knows tensors and links between ranks; knows nothing of steps.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import monotonic, sleep
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, Store, Work

from moet.config import leave_nccl_to_the_monitor
from moet.errors import ConfigError, KernelError
from moet.kernels.comm import (
    CTAS,
    Exchange,
    HostWindow,
    PeerLinks,
    PeerWindow,
    RankPart,
    Window,
    added,
    register_host,
    window_bytes,
)
from moet.kernels.device_gemm import Device
from moet.kernels.gemm import tree_sum
from moet.kernels.mixture import Mixture
from moet.runtime.parallel.group import NEVER, Group, GroupComm, Links
from moet.runtime.parallel.monitor import GroupError

logger = logging.getLogger(__name__)

Way = Literal["peer", "host"]
READ_ROWS, READ_BYTES = 8, 128 << 10  # of a rank, at most, in a sum that its reader makes
PEER_BYTES = 2 << 20  # of a rank, at most, through a window; NCCL is faster beyond
PROBE_ROUNDS = 8
PROBE_WAIT_S = 5.0
PROBE_VALUES = 1 << 16
NCCL_PROBE_S = 60.0  # its set-up included
LOADING_WAIT_S = 900.0  # of a rank that is still compiling or reading
STEP_WAIT_S = 60.0  # at least; the monitor notices a rank that is gone long before


class DeviceGroup(Links, Protocol):
    """NCCL between some ranks, as torch's process groups have it: work joins torch's stream."""

    def _allgather_base(self, out: Tensor, x: Tensor) -> Work: ...
    def abort(self) -> None: ...


class DeviceLinks(Protocol):
    """What goes between the GPUs of some ranks in full."""

    def rank(self) -> int: ...
    def size(self) -> int: ...
    def all_of(self, x: Tensor) -> list[Tensor]: ...
    def pass_on(self, x: Tensor, root: int) -> None: ...
    def abort(self) -> None: ...


class HostLinks:
    """By way of the host, which waits for the GPU and for the others: for ranks that share a GPU,
    which NCCL refuses. what: whom the links connect."""

    def __init__(self, group: Group, links: Links, what: str) -> None:
        self._group, self._links, self._what = group, links, what

    def rank(self) -> int:
        return self._links.rank()

    def size(self) -> int:
        return self._links.size()

    def all_of(self, x: Tensor) -> list[Tensor]:
        """Every rank's x, in rank order."""
        _require_no_capture(x, self._what)
        every = self._group.gathered(self._links, x.cpu(), f"gathering among {self._what}")
        return [each.to(x.device) for each in every]

    def pass_on(self, x: Tensor, root: int) -> None:
        """Overwrite x with that of a rank."""
        _require_no_capture(x, self._what)
        options = BroadcastOptions()
        options.rootRank = root
        there = x.cpu()
        self._group.wait(self._links.broadcast([there], options), f"passing on among {self._what}")
        x.copy_(there)

    def abort(self) -> None:
        """Waits end by what the monitor says."""


def _require_no_capture(x: Tensor, what: str) -> None:
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ConfigError(
            f"ranks that share a GPU pass {x.numel() * x.element_size()} bytes on among {what} "
            f"through the host, which no graph can do; up to {PEER_BYTES} bytes between tensor "
            "ranks need none: use --enforce-eager or a smaller --max-num-seqs"
        )


class NcclLinks:
    """Through NCCL: work joins torch's stream and can be captured."""

    def __init__(self, nccl: DeviceGroup) -> None:
        self._nccl = nccl

    def rank(self) -> int:
        return self._nccl.rank()

    def size(self) -> int:
        return self._nccl.size()

    def all_of(self, x: Tensor) -> list[Tensor]:
        """Every rank's x, in rank order."""
        out = x.new_empty(self.size(), *x.shape)
        self._nccl._allgather_base(out, x).wait()
        return list(out.unbind(0))

    def pass_on(self, x: Tensor, root: int) -> None:
        """Overwrite x with that of a rank."""
        options = BroadcastOptions()
        options.rootRank = root
        self._nccl.broadcast([x], options).wait()

    def abort(self) -> None:
        """From any thread."""
        self._nccl.abort()


class DeviceComm:
    """models.sharding.Comm over GPUs. links: None where there is nobody else.

    sums_on_read: whether sums of few rows are left to the ops behind them that can make them.

    stage: the tensor ranks of this stage; column: those of its number in all stages; before,
    behind: the two ranks at either side of a cut. peers: None if NCCL does everything.
    """

    def __init__(
        self,
        stage: DeviceLinks | None,
        column: DeviceLinks | None,
        before: DeviceLinks | None,
        behind: DeviceLinks | None,
        peers: PeerLinks | None,
    ) -> None:
        self.stage, self.column, self.before, self.behind = stage, column, before, behind
        self.peers = peers
        self.readers: PeerLinks | None = None  # for sums that the op behind them makes
        self.sums_on_read = True

    def sum(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        x, dtype = x.contiguous(), dtype or x.dtype
        if self.stage is None or x.numel() == 0:
            return x.to(dtype)
        if self.peers is not None and self.peers.sums(x):
            return self.peers.sum(x, dtype)
        every = self.stage.all_of(x)
        if len(every) == 2 and dtype == x.dtype:  # torch adds bf16 in fp32 and rounds once
            return every[0] + every[1]
        return tree_sum([each.float() for each in every]).to(dtype)

    def sum_on_read(
        self, x: Tensor | Mixture, dtype: torch.dtype | None = None
    ) -> Tensor | RankPart:
        like = x.shared if isinstance(x, Mixture) else x
        few = like.dim() == 2 and len(like) <= READ_ROWS and dtype in (None, like.dtype)
        readable = self.sums_on_read and few and like.dtype == torch.bfloat16
        if not readable or self.readers is None or not self.readers.sums(like) or not len(like):
            return self.sum(added(x), dtype)
        part = x if isinstance(x, Mixture) else x.contiguous()
        return RankPart(part, self.readers, self.sum)

    def gather(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        if self.stage is None:
            return x
        if x.numel() == 0:
            return x.repeat(1, self.stage.size())
        if self.peers is not None and self.peers.gathers(x):
            return self.peers.gather(x)
        return torch.cat(self.stage.all_of(x), 1)

    def receive(self, like: Tensor) -> Tensor:
        assert self.before is not None
        if like.numel():
            self.before.pass_on(like, 0)
        return like

    def send(self, x: Tensor) -> None:
        assert self.behind is not None
        if x.numel():
            self.behind.pass_on(x.contiguous(), 0)

    def from_last(self, x: Tensor) -> Tensor:
        if self.column is None or x.numel() == 0:
            return x
        x = x.contiguous()
        self.column.pass_on(x, self.column.size() - 1)
        return x

    def begin_step(self) -> None:
        """Collectives of a GPU have no names."""

    def wait_at_most(self, seconds: float) -> None:
        """How long the kernels that take from a window wait for the other ranks."""
        for links in (self.peers, self.readers):
            if links is not None:
                links.wait_at_most(seconds)

    def close(self) -> None:
        """End everything that still waits for another rank. From any thread."""
        self.wait_at_most(0)
        for links in (self.stage, self.column, self.before, self.behind):
            if links is not None:
                links.abort()


def connect(
    group: Group,
    device: Device,
    ways: Sequence[Way] = ("peer", "host"),
    *,
    shared: bool = False,
) -> DeviceComm:
    """Connect the GPUs of a group and make that its comm; all ranks must call alike.

    shared: ranks may have one GPU together. Each kind of connection is tried with known values
    first. Raises GroupError if NCCL brings wrong ones or none.
    """
    leave_nccl_to_the_monitor()
    if shared:
        stage, column, before, behind = through_host(group)
    else:
        stage, column, before, behind = group.connections(_nccl)
    comm = DeviceComm(stage, column, before, behind, None)
    _probe_nccl(group, comm, device.torch_device)
    if stage is not None:
        comm.peers = _peers(group, device, ways)
        if comm.peers is not None:
            comm.readers = comm.peers.beside(READ_BYTES)
    comm.wait_at_most(LOADING_WAIT_S)
    group.use(comm)
    return comm


def _nccl(store: Store, rank: int, size: int) -> DeviceLinks | None:
    if size == 1:
        return None
    try:
        from torch._C._distributed_c10d import ProcessGroupNCCL
    except ImportError as error:
        raise ConfigError(
            "this build of torch has no NCCL, through which several GPUs work together; install "
            "one that has it, or use --device cpu"
        ) from error
    nccl: Any = ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = min(NEVER, options._timeout * 100)  # the monitor says when to give up
    return NcclLinks(nccl(store, rank, size, options))


def through_host(group: Group) -> list[DeviceLinks | None]:
    """The connections that the group has already, in the order of Group.connections."""
    host = group.comm
    assert isinstance(host, GroupComm)
    named = {
        "tensor ranks": host.stage,
        "stages": host.column,
        "this stage and the one before": host.before,
        "this stage and the next": host.behind,
    }
    return [
        None if links is None or links.size() == 1 else HostLinks(group, links, what)
        for what, links in named.items()
    ]


def _probe_nccl(group: Group, comm: DeviceComm, device: torch.device) -> None:
    """Send known values through every connection, in one order that all ranks share."""

    def pattern(number: int) -> Tensor:
        return torch.arange(PROBE_VALUES, dtype=torch.float32, device=device) + number

    faults = []
    if comm.stage is not None:
        found = comm.sum(pattern(comm.stage.rank()))
        size = comm.stage.size()
        expected = tree_sum([pattern(rank) for rank in range(size)])
        _finish(group, "NCCL's probe among tensor ranks")
        faults += [] if torch.equal(found, expected) else ["sums of tensor ranks"]
    stage, last = group.stage, group.config.pipeline - 1
    for cut in range(last):  # cut after cut, as streams travel
        if stage == cut:
            comm.send(pattern(cut))
        elif stage == cut + 1:
            found = comm.receive(pattern(-1))
            _finish(group, f"NCCL's probe from stage {cut}")
            faults += [] if torch.equal(found, pattern(cut)) else [f"what stage {cut} sends"]
    if comm.column is not None:
        found = comm.from_last(pattern(stage))
        _finish(group, "NCCL's probe from the last stage")
        faults += [] if torch.equal(found, pattern(last)) else ["what the last stage sends"]
    _finish(group, "NCCL's probe")
    if faults:
        reason = f"NCCL brings {group.name} wrong values: {' and '.join(faults)}"
        raise GroupError(group.monitor.fail(reason))


def _finish(group: Group, what: str, limit_s: float = NCCL_PROBE_S) -> None:
    """Wait for the GPU, unless the group ends or it takes longer than limit_s."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    group.monitor.phase = what
    until = monotonic() + limit_s
    while not event.query():  # type: ignore[no-untyped-call]
        group.monitor.require_sound()
        if monotonic() > until:
            reason = f"{group.name} waited {limit_s:g} s in {what}"
            raise GroupError(group.monitor.fail(reason))
        sleep(0.001)


def _peers(group: Group, device: Device, ways: Sequence[Way]) -> PeerLinks | None:
    """The first way in which every rank finds what was sent; None if there is no such."""

    def exchange(data: bytes) -> Sequence[bytes]:
        return group.exchange(data, "exchange of windows")

    for way in ways:
        fault, links = "", None
        try:
            window = _window(way, group, exchange)
            group.keep(window)
            links = _links(group, device, window)
            fault = _probe_peers(group, links)
        except KernelError as error:
            fault = str(error)
        faults = [each.decode() for each in exchange(fault.encode()[:200])]
        if not any(faults):
            logger.info("small messages between ranks go through %s memory", way)
            return links
        bad = "; ".join(sorted({each for each in faults if each}))
        logger.warning("small messages between ranks cannot go through %s memory: %s", way, bad)
    logger.warning("all messages between ranks go through NCCL")
    return None


def _window(way: Way, group: Group, exchange: Exchange) -> Window:
    size, rank = group.size, group.tensor_rank
    num_bytes = window_bytes(PEER_BYTES, size) + window_bytes(READ_BYTES, size)
    if way == "peer":
        return PeerWindow(num_bytes, rank, exchange)
    name = f"{group.key}-{group.stage}"
    return HostWindow(num_bytes, rank, size, name, exchange, register_host)


def _links(group: Group, device: Device, window: Window) -> PeerLinks:
    with torch.inference_mode(False):  # to stay writable outside of a forward pass
        turns = torch.zeros(CTAS, dtype=torch.int32, device=device.torch_device)
        limit_ns = torch.zeros(1, dtype=torch.int64, pin_memory=True)
    rank, addresses = group.tensor_rank, window.addresses
    return PeerLinks(device.launcher, addresses, rank, PEER_BYTES, turns, device.error, limit_ns)


def _probe_peers(group: Group, peers: PeerLinks) -> str:
    """What is wrong with sums of known terms; "" if nothing. Ends when a rank does not come."""
    size, device = len(peers.windows), peers.turns.device
    peers.wait_at_most(PROBE_WAIT_S)
    for turn in range(PROBE_ROUNDS):
        numbers = torch.arange(PEER_BYTES // 4, dtype=torch.float32, device=device) + turn
        found = peers.sum(numbers * (1 + peers.rank))
        _finish(group, "the probe of windows")
        if int(peers.error):
            error, _ = int(peers.error), peers.error.zero_()
            return f"error bits {error:#x} in round {turn}: a rank did not come"
        if not torch.equal(found, numbers * (size * (size + 1) // 2)):
            return f"round {turn} brought wrong sums"
    return ""
