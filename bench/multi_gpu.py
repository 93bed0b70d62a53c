"""One command for figures of several GPUs: sums between them, and V4-Flash steps on ranks.

    python -m bench.multi_gpu [--ranks 2] [--layers N] [--steps N] [--out FILE] [--commit X]

Starts one process a GPU. First the sums of a decode step, through NCCL and through peer memory,
compared with the sum by tree, then decode steps at full size with dummy weights: on one rank, then
on all. Each part stands alone: one that fails on every rank is told of and the others go on. The
file is written after every part. GLM-5.2 has no rows until it runs on a GPU.
"""

from __future__ import annotations

import argparse
import gc
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from moet.bench.device_rig import DeviceRig
from moet.bench.results import Row, report, write
from moet.bench.rig import Shape
from moet.config import ModelSettings
from moet.kernels.device_gemm import Device
from moet.kernels.gemm import tree_sum
from moet.models.base import ForwardInput
from moet.models.dummy import DummyOptions
from moet.models.sharding import WHOLE, Shard
from moet.models.synthetic import MODEL_NAME
from moet.runtime.device_runner import Placement
from moet.runtime.dummy import DummyModel, dummy_model, open_device, preset_config
from moet.runtime.parallel.device import DeviceComm, open_comm
from moet.runtime.queues import CudaGraphs, CudaQueue

RESULTS = Path(__file__).parent / "results" / "multi_gpu.json"
CONTEXT = 1024
SKEW, SEED = 0.5, 0
CALLS_PER_GRAPH = 50
ROUNDS = 20
SUM_ROWS = (1, 3, 8, 32, 96)  # of 4,096 fp32 values
DIM = 4096
NUM_DRAFTS = 2
STREAMS = (1, 8, 32)
DRAFTED_MS = (1.9, 4.2)  # floor and target of a whole step of 1 stream with drafts, on two ranks


@dataclass
class Bench:
    """What was found, on rank 0 alone; the other ranks only take part."""

    rank: int
    out: Path
    command: str
    commit: str
    more: dict[str, object]
    rows: list[Row] = field(default_factory=list)
    faults: dict[str, str] = field(default_factory=dict)

    def add(
        self,
        case: str,
        value: float,
        unit: str,
        *,
        better: Literal["lower", "higher"] = "lower",
        floor: float | None = None,
        target: float | None = None,
        note: str = "",
    ) -> None:
        if self.rank == 0:
            row = Row(case=case, value=round(value, 4), unit=unit, better=better, floor=floor,
                      target=target, note=note)  # fmt: skip
            self.rows.append(row)
            print(f"{case:<56} {value:>10.3f} {unit:<8} {note}", flush=True)

    def part(self, name: str, work: Callable[[], None]) -> None:
        """A part that may fail without the others, if it fails on every rank."""
        try:
            work()
        except Exception as error:
            self.faults[name] = f"{type(error).__name__}: {error}"
            print(f"rank {self.rank} FAILED {name}\n{traceback.format_exc(limit=-6)}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        if self.rank == 0:
            hardware = f"{torch.cuda.device_count()}x {torch.cuda.get_device_name()}"
            content = report(self.command, self.rows, hardware=hardware, more=self.more)
            content["commit"] = self.commit or content["commit"]
            content["faults"] = self.faults
            write(self.out, content)


def time_sum(call: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Microseconds of one sum among many in a captured graph; the input is the same each time."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(CALLS_PER_GRAPH):
                call(x)
        times = []
        for _ in range(ROUNDS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            dist.barrier()
            begin.record(stream)
            graph.replay()
            end.record(stream)
            torch.cuda.synchronize()
            times.append(1000 * begin.elapsed_time(end) / CALLS_PER_GRAPH)
    return median(times)


def terms(rank: int, num_rows: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(rank)
    return torch.randn(num_rows, DIM, device="cuda", generator=generator)


def sums(bench: Bench, comm: DeviceComm) -> None:
    """What a sum of some rows costs, either way, and that it is the sum by tree."""
    size, peers = comm.group.size(), comm.peers
    through_nccl = DeviceComm(comm.group, None)
    for num_rows in SUM_ROWS:
        every = [terms(rank, num_rows) for rank in range(size)]
        x, expected = every[comm.group.rank()], tree_sum(every)
        case = f"sum over {size} ranks of {num_rows} x {DIM} fp32"
        taken = time_sum(through_nccl.sum, x)
        same = torch.equal(through_nccl.sum(x), expected)
        bench.add(f"{case}, NCCL", taken, "us", note=f"equal to the sum by tree: {same}")
        if peers is not None and peers.fits(x):
            taken = time_sum(peers, x)
            same = all(torch.equal(peers(x), expected) for _ in range(100))
            note = f"equal to the sum by tree 100 times: {same}; error word {int(peers.error)}"
            bench.add(f"{case}, peer memory", taken, "us", note=note)
    if peers is None:
        bench.add("peer memory", 0, "ranks", note="not used: the probe said no, see the log")


def steps(
    bench: Bench, device: Device, shard: Shard, layers: int | None, num_steps: int, way: str = ""
) -> None:
    """Decode steps of V4-Flash; every rank of the shard's stage takes part. way: of its sums."""
    raw = preset_config(MODEL_NAME, num_layers=layers)
    made = dummy_model(
        raw,
        ModelSettings(arch=device.arch),
        device,
        num_spec_tokens=NUM_DRAFTS,
        options=DummyOptions(seed=SEED, skew=SKEW),
        shard=shard,
    )
    queue = CudaQueue(device.torch_device)
    torch.cuda.synchronize()
    placement = Placement(queue, CudaGraphs(queue), device.error, device.arch)
    rig = DeviceRig(
        made.model,  # type: ignore[arg-type]
        made.experts,
        placement,
        num_seqs=max(STREAMS),
        num_rows=1 + NUM_DRAFTS,
        longest=CONTEXT,
        others=CONTEXT,
        num_drafts=NUM_DRAFTS,
    )
    rig.fill()
    label = f"-tp {shard.size}{way}"
    bench.add(f"memory held, {label}", torch.cuda.memory_allocated() / 2**30, "GiB")
    for num_seqs in STREAMS:
        shape = Shape(num_seqs=num_seqs, num_rows=1, context=CONTEXT)
        found = rig.time_steps(shape, num_steps)
        note = f"period {found.period_ms:.3f} ms; launching takes the host {found.host_us:.0f} us"
        case = f"V4-Flash {label}, {num_seqs} streams, 1 row"
        bench.add(case, found.step_ms, "ms/step", note=note)
    shape = Shape(num_seqs=1, num_rows=1 + NUM_DRAFTS, context=CONTEXT)
    found = rig.time_steps(shape, num_steps, num_to_draft=NUM_DRAFTS)
    floor, target = DRAFTED_MS if shard.size == 2 and layers is None else (None, None)
    case = f"V4-Flash {label}, whole step with 2 drafts, 1 stream"
    bench.add(case, found.step_ms, "ms/step", floor=floor, target=target,
              note=f"period {found.period_ms:.3f} ms")  # fmt: skip
    agreement(bench, rig, made, shard, label)


def agreement(bench: Bench, rig: DeviceRig, made: DummyModel, shard: Shard, label: str) -> None:
    """Whether ranks, and two runs, have the same logits and tokens, bit for bit."""
    num_rows = 48
    inputs = ForwardInput(
        token_ids=torch.arange(100, 100 + num_rows),
        positions=torch.arange(num_rows),
        cu_seqlens_q=(0, num_rows),
        seq_slots=torch.tensor([0]),
        page_table=torch.tensor([[0]]),
        seq_lens=(num_rows,),
        logits_indices=torch.arange(num_rows),
    )
    runs = [made.model.forward(inputs, rig.kv.tensors, made.experts).logits for _ in range(2)]
    same = torch.equal(*runs)
    bench.add(f"two runs agree on all logits, {label}", same, "yes=1", better="higher", target=1)
    if shard.size == 1:
        return
    for what, mine in (("logits", runs[0]), ("tokens", rig.sampler.last_token.clone())):
        every = [torch.empty_like(mine) for _ in range(shard.size)]
        dist.all_gather(every, mine.contiguous())
        same = all(torch.equal(each, every[0]) for each in every)
        bench.add(f"ranks agree on all {what}, {label}", same, "yes=1", better="higher", target=1)


def be_rank(args: argparse.Namespace) -> int:
    """Everything that one rank does."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast may hang GPUs that are shared
    torch.cuda.set_device(args.rank)
    store = dist.TCPStore("127.0.0.1", args.port, args.ranks, args.rank == 0)
    dist.init_process_group(
        "nccl",
        store=store,
        rank=args.rank,
        world_size=args.ranks,
        timeout=timedelta(seconds=60),
        device_id=torch.device("cuda", args.rank),
    )
    device = open_device()
    assert device is not None, "no GPU that kernels were built for"
    more = {"model": MODEL_NAME, "layers": args.layers, "skew": SKEW, "seed": SEED}
    words = [w for w in sys.argv[1:] if not w.startswith(("--rank=", "--port="))]
    command = " ".join(["python -m bench.multi_gpu", *words])
    bench = Bench(args.rank, args.out, command, args.commit, more)
    group = dist.group.WORLD
    assert group is not None
    comm = open_comm(group, device)
    bench.part("sums", lambda: sums(bench, comm))
    if args.rank == 0:
        bench.part("one rank", lambda: steps(bench, device, WHOLE, args.layers, args.steps))
        store.set("one rank is done", "")
    store.wait(["one rank is done"], timedelta(seconds=240))
    for name, way in (("peer memory", comm), ("NCCL", DeviceComm(group, None))):
        if name == "peer memory" and comm.peers is None:
            continue
        shard = Shard(args.rank, args.ranks, comm=way)
        work = partial(steps, bench, device, shard, args.layers, args.steps, f" ({name})")
        bench.part(f"all ranks, sums through {name}", work)
    dist.destroy_process_group()
    return 1 if bench.faults else 0


def main() -> int:
    """Start every other rank, and be rank 0."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--ranks", type=int, default=2)
    made.add_argument("--layers", type=int, default=None)
    made.add_argument("--steps", type=int, default=40)
    made.add_argument("--out", type=Path, default=RESULTS)
    made.add_argument("--commit", default="")
    made.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    made.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    args = made.parse_args()
    if args.rank > 0:
        return be_rank(args)
    with socket.create_server(("127.0.0.1", 0)) as free:
        args.port = free.getsockname()[1]
    words = [sys.executable, "-m", "bench.multi_gpu", *sys.argv[1:]]
    others = [
        subprocess.Popen([*words, f"--rank={rank}", f"--port={args.port}"])
        for rank in range(1, args.ranks)
    ]
    try:
        return be_rank(args)
    finally:
        for other in others:
            try:
                other.wait(20)
            except subprocess.TimeoutExpired:
                other.kill()


if __name__ == "__main__":
    sys.exit(main())
