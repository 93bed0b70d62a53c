"""One command for figures of several GPUs: messages between them, and both models' steps on ranks.

    python -m bench.multi_gpu [--ranks 2] [--parts links,small,one,tensor,stages,glm,...]
                              [--layers N] [--glm-layers N] [--steps N] [--no-prompts]
                              [--ways NAME,...] [--timeline] [--out FILE] [--commit X]

Starts one process a GPU; they join as the engine's ranks do, and connect through peer memory, host
memory and NCCL. Parts: what sums and gathers of a decode step take each way, compared with the sum
by tree; V4-Flash with dummy weights on one rank, on tensor ranks ("small": its first layers), in
stages; GLM-5.2 on tensor ranks, with a dense stack of fp8 and of bf16 ("glm-prompt": a prompt alone
and its kernels). --ways: other forms of GLM's steps that are timed behind those that are bound
(`glm_ways.py`). --timeline: what each kernel of a GLM step adds to it. Each part stands alone: one
that fails on every rank is told of and the others go on. The file is written after every part.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from bench.glm_ways import WAYS, take_way, tell_timeline
from bench.gpu import check_parts, open_gpu
from bench.rigs import CONTEXT, placement_on, rig_on
from bench.suite import Bench
from bench.timeline import timeline
from moet.bench.device_rig import DeviceRig
from moet.bench.device_step import profile_kernels
from moet.bench.results import Row
from moet.bench.rig import Shape
from moet.config import KVDtype, ModelSettings, ParallelConfig
from moet.errors import MoetError
from moet.kernels.device_gemm import Device
from moet.kernels.gemm import tree_sum
from moet.models.base import ForwardInput
from moet.models.dummy import DummyOptions
from moet.models.footprint import footprint
from moet.models.sharding import WHOLE, Shard
from moet.models.synthetic import MODEL_NAME as V4
from moet.models.synthetic_glm import MODEL_NAME as GLM
from moet.runtime.device_start import this_gpu
from moet.runtime.dummy import DummyModel, dummy_model, preset_config
from moet.runtime.memory import plan
from moet.runtime.parallel.device import DeviceComm, connect
from moet.runtime.parallel.group import LOOPBACK, Group, Place
from moet.runtime.plan_types import PlanSettings
from moet.runtime.queues import CudaGraphs, CudaQueue

RESULTS = Path(__file__).parent / "results" / "multi_gpu.json"
PARTS = ("links", "tensor", "one", "glm", "glm-bf16", "stages")
SMALL_LAYERS = 6
SKEW, SEED = 0.5, 0
CALLS_PER_GRAPH, ROUNDS = 50, 12
SUM_ROWS = (1, 3, 8, 32, 96, 2048)  # of 4,096 bf16 values
DIM, VOCABULARY = 4096, 129280
NUM_DRAFTS = 2
FAULT_WAIT_S = 20.0
BEAT_S = 60.0  # of a rank that compiles under the interpreter lock, no sign of life may come


@dataclass(frozen=True, kw_only=True)
class Case:
    """Steps to time: streams, rows of each, context of the first; with drafts made behind them."""

    streams: int = 1
    rows: int = 1
    context: int = CONTEXT
    drafts: bool = False
    floor: float | None = None
    target: float | None = None

    @property
    def label(self) -> str:
        what = "whole step with 2 drafts" if self.drafts else f"{self.rows} rows"
        at = "" if self.context == CONTEXT else f", context {self.context}"
        return f"{self.streams} streams, {what}{at}"


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A model and what to time on it. prompt: tokens of one, in chunks of at most 8,192."""

    label: str
    model: str
    cases: Sequence[Case]
    flavour: str | None = None
    layers: int | None = None
    kv_dtype: KVDtype = "fp8"
    drafts: int = NUM_DRAFTS
    prompt: int = 8192
    prompt_target: float | None = None


def v4(layers: int | None, *, two: bool) -> Suite:
    last = Case(rows=3, drafts=True, floor=1.9 if two else None, target=4.2 if two else None)
    cases = (Case(), Case(rows=3), last, Case(streams=8))
    return Suite(label="V4-Flash", model=V4, cases=cases, layers=layers, prompt=0)


def glm(layers: int | None, *, fp8: bool) -> Suite:
    if not fp8:
        only = (Case(floor=4.6, target=7.2),)
        label = "GLM-5.2 bf16 dense"
        return Suite(label=label, model=GLM, cases=only, flavour="bf16", layers=layers, drafts=0,
                     kv_dtype="nvfp4", prompt=0)  # fmt: skip
    cases = (
        Case(floor=2.8, target=5.0),
        Case(rows=3),
        Case(rows=3, drafts=True, floor=4.8, target=9.0),
        # 41.5 of 256 experts a layer (step_glm's bytes), dense parts and head of a rank: 26.7 GB
        Case(streams=8, floor=5.9, target=10.0),
        Case(context=1 << 18),
    )
    return Suite(label="GLM-5.2 fp8 dense", model=GLM, cases=cases, flavour="fp8", layers=layers,
                 kv_dtype="nvfp4", prompt_target=6000.0)  # fmt: skip


@dataclass(kw_only=True)
class RankBench(Bench):
    """A rank's: what is found is kept by rank 0 alone; the other ranks only take part. Parts may
    fail that fail on every rank."""

    rank: int
    group: Group
    no_prompts: bool
    ways: Sequence[str] = ()
    timeline: bool = False

    def keep(self, row: Row) -> None:
        if self.rank == 0:
            super().keep(row)
            self.write()

    def run(self, name: str, work: Callable[[], None]) -> None:
        """A part that leaves no memory to the next one."""
        with self.part(name):
            work()
        torch.cuda.empty_cache()

    def fail(self, name: str, error: Exception) -> None:
        """As Bench.fail; ends the group unless all ranks have failed."""
        print(f"rank {self.rank}:", flush=True)
        super().fail(name, error)
        try:
            self.group.gathered(self.group.world, torch.zeros(1), f"fault in {name}", FAULT_WAIT_S)
        except MoetError as late:
            print(f"rank {self.rank}: {late}", flush=True)

    def hardware(self) -> str:
        return f"{torch.cuda.device_count()}x {torch.cuda.get_device_name()}"

    def write(self) -> None:
        if self.rank == 0:
            super().write()


def digest_of(values: Tensor) -> bytes:
    data = values.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).digest()


def same_everywhere(group: Group, values: Tensor) -> bool:
    """Whether every rank has the same bits."""
    mine = torch.frombuffer(bytearray(digest_of(values)), dtype=torch.uint8)
    every = group.gathered(group.world, mine, "comparing bits")
    return all(torch.equal(each, mine) for each in every)


def time_calls(group: Group, call: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Microseconds of one call among many in a captured graph; the input is the same each time."""
    queue = CudaQueue(x.device, group.monitor.require_sound)
    queue.settle()

    def work() -> None:
        for _ in range(CALLS_PER_GRAPH):
            call(x)

    times = []
    with queue.working():
        play = CudaGraphs(queue)(work)
        for _ in range(ROUNDS):
            queue.settle()
            group.meet("timing")
            began = queue.moment()
            play()
            ended = queue.moment()
            ended.wait()
            times.append(1e6 * began.seconds_to(ended) / CALLS_PER_GRAPH)
    return median(times)


def terms(rank: int, num_rows: int, width: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(rank)
    return torch.randn(num_rows, width, device="cuda", generator=generator)


def links(bench: RankBench, group: Group, device: Device) -> None:
    """What messages of a decode step take each way, and whether they bring what they should."""
    size, rank = group.size, group.tensor_rank
    for name, ways in (("peer memory", ("peer",)), ("host memory", ("host",)), ("NCCL", ())):
        comm = connect(group, device, ways)  # type: ignore[arg-type]
        if ways and comm.peers is None:
            bench.add(f"messages through {name}", 0, "ranks", note="the probe said no, see the log")
            continue
        for num_rows in SUM_ROWS:
            every = [terms(r, num_rows, DIM).bfloat16() for r in range(size)]
            expected = tree_sum([each.float() for each in every]).bfloat16()
            if comm.peers is not None and not comm.peers.sums(every[rank]):
                continue
            taken = time_calls(group, comm.sum, every[rank])
            same = all(torch.equal(comm.sum(every[rank]), expected) for _ in range(100))
            case = f"sum over {size} ranks of {num_rows} x {DIM} bf16, {name}"
            note = f"equal to the sum by tree 100 times: {same}; error word {int(device.error)}"
            bench.add(case, taken, "us", note=note)
        for num_rows in (1, 3, 8):
            every = [terms(r, num_rows, VOCABULARY // size) for r in range(size)]
            if comm.peers is not None and not comm.peers.gathers(every[rank]):
                continue
            taken = time_calls(group, comm.gather, every[rank])
            same = torch.equal(comm.gather(every[rank]), torch.cat(every, 1))
            case = f"gather of {num_rows} x {VOCABULARY} fp32 logits, {name}"
            bench.add(case, taken, "us", note=f"every column is right: {same}")


def rig_of(made: DummyModel, device: Device, suite: Suite, watch: Callable[[], None]) -> DeviceRig:
    torch.cuda.synchronize()
    rig = rig_on(
        placement_on(device, CudaQueue(device.torch_device, watch)),
        made,
        num_seqs=max((case.streams for case in suite.cases), default=1),
        num_rows=1 + suite.drafts,
        longest=max(suite.prompt, *(case.context for case in suite.cases)) + suite.drafts,
        num_drafts=suite.drafts,
    )
    rig.fill()
    return rig


def steps(
    bench: RankBench,
    device: Device,
    group: Group | None,
    suite: Suite,
    num_steps: int,
) -> None:
    """A suite on this rank alone (group None) or on all of a group."""
    shard = WHOLE if group is None else group.shard
    watch = (lambda: None) if group is None else group.monitor.require_sound
    kind = f"-tp {shard.size}" if shard.num_stages == 1 else f"-pp {shard.num_stages}"
    raw = preset_config(suite.model, num_layers=suite.layers, flavour=suite.flavour)
    settings = ModelSettings(arch=device.arch)
    made = dummy_model(raw, settings, device, kv_dtype=suite.kv_dtype, num_spec_tokens=suite.drafts,
                       options=DummyOptions(seed=SEED, skew=SKEW), shard=shard)  # fmt: skip
    label = f"{suite.label} {kind}"
    held = torch.cuda.memory_allocated() / 2**30
    bench.add(f"weights of a rank, {label}", held, "GiB")
    if suite.model == GLM and group is not None:
        capacity(bench, raw, device, shard, suite, label)
    rig = rig_of(made, device, suite, watch)
    for case in suite.cases:
        time_case(bench, rig, case, num_steps, label, targets=suite.layers is None)
    if bench.timeline and suite.model == GLM:
        tell_step(bench, rig, label)
    agreement(bench, rig, made, group, label)
    if suite.prompt and not bench.no_prompts:
        time_prompt(bench, rig, suite, label)
    if suite.model != GLM or group is None:
        return
    for name in bench.ways:
        take_way(made.model, group.comm, WAYS[name])
        del rig
        rig = rig_of(made, device, suite, watch)
        for case in suite.cases[:3]:
            time_case(bench, rig, case, num_steps, f"{label}, {name}", targets=False)
        agreement(bench, rig, made, group, f"{label}, {name}")
        if bench.timeline:
            tell_step(bench, rig, f"{label}, {name}")
    take_way(made.model, group.comm, {})


def time_prompt(bench: RankBench, rig: DeviceRig, suite: Suite, label: str) -> None:
    """A prompt of one sequence and, of a suite of prompts alone, the kernels that take it."""
    first_s = rig.time_prompt(suite.prompt, 8192)
    taken_s = median(rig.time_prompt(suite.prompt, 8192) for _ in range(3))
    note = f"{1e3 * taken_s:.1f} ms; the first time {first_s:.3f} s"
    bench.add(f"{label}, prompt of {suite.prompt}", suite.prompt / taken_s, "tok/s",
              better="higher", target=suite.prompt_target, note=note)  # fmt: skip
    if suite.cases:
        return

    def once() -> None:
        rig.time_prompt(suite.prompt, 8192)

    kernels = profile_kernels(once, 1)  # all ranks take part
    for kernel in kernels[:32]:
        name = kernel.name.replace("(anonymous namespace)::", "")[:60]
        note = f"{kernel.num_launches:.0f} launches"
        bench.add(f"{label}, prompt, {name}", kernel.time_us / 1e3, "ms", note=note)


def tell_step(bench: RankBench, rig: DeviceRig, label: str) -> None:
    """The timeline of a step of rank 0; the others take part."""
    shape = Shape(num_seqs=1, num_rows=1, context=CONTEXT)
    rig.time_steps(shape, 3)
    found = timeline(lambda: rig.replay(shape))
    case = f"1 streams, 1 rows, {label}"
    lines = tell_timeline(bench.add, found, case) if bench.rank == 0 else []
    bench.more[f"one layer, {case}"] = lines


def time_case(
    bench: RankBench, rig: DeviceRig, case: Case, num_steps: int, label: str, *, targets: bool
) -> None:
    shape = Shape(num_seqs=case.streams, num_rows=case.rows, context=case.context)
    found = rig.time_steps(shape, num_steps, num_to_draft=NUM_DRAFTS if case.drafts else -1)
    note = f"period {found.period_ms:.3f} ms; launching takes the host {found.host_us:.0f} us"
    floor, target = (case.floor, case.target) if targets else (None, None)
    bench.add(
        f"{label}, {case.label}", found.step_ms, "ms/step", floor=floor, target=target, note=note
    )


def capacity(
    bench: RankBench, raw: dict[str, Any], device: Device, shard: Shard, suite: Suite, label: str
) -> None:
    """How much of what weights and steps leave the planner gives to KV pages."""
    model = footprint(raw, kv_dtype=suite.kv_dtype, num_spec_tokens=suite.drafts)
    free_bytes, weights = torch.cuda.mem_get_info()[0], torch.cuda.memory_allocated()
    card = replace(
        this_gpu(device.torch_device), memory_bytes=free_bytes + weights, num_devices=shard.size
    )
    made = plan(model, card, PlanSettings(max_num_seqs=64))
    steps_bytes = sum(
        made.device_bytes.get(use, 0) for use in ("kv rings", "graphs", "workspace", "reserve")
    )
    held, left = made.kv.num_pages * model.kv.bytes_per_page, free_bytes - steps_bytes
    tokens = made.kv.num_pages * model.kv.page_size
    note = f"{tokens} tokens, {held / 2**30:.1f} of {left / 2**30:.1f} GiB; {held // tokens} B each"
    case = f"{label}, share of the memory left that is KV pages"
    bench.add(case, held / left, "of 1", better="higher", target=0.95, note=note)


def agreement(
    bench: RankBench, rig: DeviceRig, made: DummyModel, group: Group | None, label: str
) -> None:
    """Whether ranks, and two runs, have the same logits and tokens, bit for bit."""
    kv, found = rig.kv.tensors, []
    for first, count in ((0, 48), (48, 3)):
        inputs = ForwardInput(
            token_ids=torch.arange(100, 100 + count),
            positions=torch.arange(first, first + count),
            cu_seqlens_q=(0, count),
            seq_slots=torch.tensor([0]),
            page_table=torch.tensor([[0]]),
            seq_lens=(first + count,),
            logits_indices=torch.arange(count),
        )
        runs = [made.model.forward(inputs, kv, made.experts).logits for _ in range(2)]
        note = f"finite: {bool(runs[0].isfinite().all())}; bits {digest_of(runs[0]).hex()[:8]}"
        case = f"two runs agree on the logits of {count} rows, {label}"
        bench.add(case, torch.equal(*runs), "yes=1", better="higher", target=1, note=note)
        found.append((f"logits of {count} rows", runs[0]))
    if group is None:
        return
    for what, mine in (*found, ("tokens", rig.sampler.last_token)):
        same = same_everywhere(group, mine)
        bench.add(f"ranks agree on all {what}, {label}", same, "yes=1", better="higher", target=1)


def join(args: argparse.Namespace, name: str, config: ParallelConfig, **more: Any) -> Group:
    place = Place(args.rank, LOOPBACK, args.port, hosts_store=False, attempt=name)
    return Group.join(place, config, {"what": "bench"}, **more)


def be_rank(args: argparse.Namespace) -> int:
    """Everything that one rank does."""
    logging.basicConfig(level=logging.INFO if args.rank == 0 else logging.WARNING)
    torch.cuda.set_device(args.rank)
    device = open_gpu()
    more: dict[str, object] = {"layers": args.layers, "skew": SKEW, "seed": SEED}
    words = [w for w in sys.argv[1:] if not w.startswith(("--rank=", "--port="))]
    command = " ".join(["python -m bench.multi_gpu", *words])
    group = join(args, "tensor", ParallelConfig(tensor=args.ranks, hang_timeout_s=BEAT_S))
    bench = RankBench(
        args.out,
        command,
        args.commit,
        more,
        rank=args.rank,
        group=group,
        no_prompts=args.no_prompts,
        ways=args.ways,
        timeline=args.timeline,
    )
    parts = args.parts.split(",")
    suites: dict[str, Suite] = {
        "small": v4(SMALL_LAYERS, two=True),
        "tensor": v4(args.layers, two=True),
        "glm": glm(args.glm_layers, fp8=True),
        "glm-prompt": replace(glm(args.glm_layers, fp8=True), cases=()),
        "glm-bf16": glm(args.glm_layers, fp8=False),
    }
    for name in parts:
        if name == "links":
            bench.run(name, lambda: links(bench, group, device))
        elif name == "one":
            if args.rank == 0:
                suite = v4(args.layers, two=False)
                bench.run(name, partial(steps, bench, device, None, suite, args.steps))
            bench.run("waiting for one rank", lambda: group.meet("one rank's part"))
        elif name == "stages":
            config = ParallelConfig(pipeline=args.ranks, hang_timeout_s=BEAT_S)
            stages = bench.group = join(args, "stages", config)
            connect(stages, device)
            suite = v4(args.layers, two=False)
            bench.run(name, partial(steps, bench, device, stages, suite, args.steps))
        else:
            if not isinstance(group.comm, DeviceComm) or group.comm.peers is None:
                connect(group, device)
            bench.run(name, partial(steps, bench, device, group, suites[name], args.steps))
    bench.run("the end", lambda: group.meet("the end"))
    return 1 if bench.faults else 0


def main() -> int:
    """Hold the store, start every other rank, and be rank 0."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--ranks", type=int, default=2)
    made.add_argument("--parts", default=",".join(PARTS))
    made.add_argument("--layers", type=int, default=None)
    made.add_argument("--glm-layers", type=int, default=None)
    made.add_argument("--steps", type=int, default=30)
    made.add_argument("--no-prompts", action="store_true", help="they take long to compile for")
    made.add_argument("--ways", type=lambda text: text.split(","), default=())
    made.add_argument("--timeline", action="store_true")
    made.add_argument("--out", type=Path, default=RESULTS)
    made.add_argument("--commit", default="")
    made.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    made.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    args = made.parse_args()
    check_parts(made, args.ways, tuple(WAYS))
    if args.rank > 0:
        return be_rank(args)
    listener = socket.create_server((LOOPBACK, 0))
    args.port = listener.getsockname()[1]
    store = TCPStore(
        LOOPBACK, args.port, args.ranks, True, wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )  # fmt: skip
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
                other.wait(10)
            except subprocess.TimeoutExpired:
                other.kill()
        del store


if __name__ == "__main__":
    sys.exit(main())
