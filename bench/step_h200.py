"""One command for the figures of a V4-Flash step at full size on one GPU, with dummy weights.

    python -m bench.step_h200 [--quick] [--layers N] [--commit X] [--out FILE]

Makes the weights on the device, then times decode steps by streams, rows and context, prompts, the
engine's own loop, a decoding user beside a long prompt, and every op of a step against its bytes.
Each part stands alone: one that fails is told of and the others go on. The file is written after
every part. `--quick` leaves out what takes long; `--layers` takes the first layers only, to try
things: its figures are for no table.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from time import perf_counter

import torch

from bench.gpu import check_parts, open_gpu
from bench.loop import StepLog, open_loop, random_ids
from bench.rigs import CONTEXT, placement_on, rig_on
from bench.suite import Bench
from moet.bench.device_rig import DeviceRig, StepTimes
from moet.bench.device_step import OpRecorder, profile_kernels, read_rate, time_ops
from moet.bench.rig import Shape
from moet.config import ModelSettings
from moet.kernels.device_gemm import Device
from moet.kernels.registry import watching
from moet.models.dummy import DummyOptions
from moet.models.synthetic import MODEL_NAME
from moet.runtime.device_sampler import Kind
from moet.runtime.dummy import DummyModel, dummy_model, preset_config
from moet.runtime.queues import CudaGraphs, CudaQueue, uncaptured

RESULTS = Path(__file__).parent / "results" / "step.json"
GIB = 1 << 30
SKEW, SEED = 0.5, 0
NUM_DRAFTS = 2
# streams, rows of each: floor and target in ms.
DECODE = {(1, 1): (2.1, 3.5), (1, 3): (2.9, 4.7), (8, 1): (4.6, 7.5), (32, 1): (10.8, 18.0)}
LONG = {131072: 1.15, 524288: 1.4}  # context: most that a step may take, against CONTEXT
PROMPTS: dict[int, float | None] = {8192: 20_000}  # tokens: tokens/s wanted
PARTS = (
    "decode",
    "drafts",
    "prompts",
    "engine",
    "ops",
    "long",
    "beside",
    "sampling",
    "longest",
)
QUICK = ("decode", "drafts", "prompts", "ops", "engine")
BESIDE_TOKENS = 100_000
BESIDE_ROWS, BESIDE_SHARE = 4096, 0.37  # of a pass; what it may take of the user's rate
SAME_TOKENS = 400  # of the user, that must be those it has alone


Found = dict[tuple[int, int], StepTimes]


def decode_rows(bench: Bench, rig: DeviceRig, num_steps: int) -> Found:
    """Steps by streams and rows, at the usual context."""
    found: Found = {}
    for (num_seqs, num_rows), (floor, target) in DECODE.items():
        case = f"decode, {num_seqs} streams, {num_rows} rows, context {CONTEXT}"
        with bench.part(case):
            shape = Shape(num_seqs=num_seqs, num_rows=num_rows, context=CONTEXT)
            times = found[num_seqs, num_rows] = rig.time_steps(shape, num_steps)
            note = f"{1e3 * num_seqs / times.period_ms:.0f} steps x streams/s; period "
            note += f"{times.period_ms:.3f} ms; launching takes the host {times.host_us:.0f} us"
            bench.add(case, times.step_ms, "ms/step", floor=floor, target=target, note=note)
            bench.add(f"gap between steps, {case}", times.gap_us, "us", floor=0, target=20)
    return found


def draft_rows(bench: Bench, rig: DeviceRig, streams: Sequence[int], num_steps: int) -> None:
    """Whole steps that verify two drafts and make two."""
    for num_seqs in streams:
        case = f"whole step with 2 drafts, {num_seqs} streams, context {CONTEXT}"
        with bench.part(case):
            shape = Shape(num_seqs=num_seqs, num_rows=1 + NUM_DRAFTS, context=CONTEXT)
            times = rig.time_steps(shape, num_steps, num_to_draft=NUM_DRAFTS)
            floor, target = (3.5, 5.75) if num_seqs == 1 else (None, None)
            note = f"period {times.period_ms:.3f} ms; launching takes {times.host_us:.0f} us"
            bench.add(case, times.step_ms, "ms/step", floor=floor, target=target, note=note)


def sampling_rows(bench: Bench, rig: DeviceRig, found: Found, num_steps: int) -> None:
    """What a step takes more if its sequences are sampled, by what they ask for."""
    for num_seqs in (1, 32):
        for kind in (Kind.PLAIN, Kind.RANKED, Kind.FULL):
            case = f"sampling of kind {kind.name}, {num_seqs} streams"
            with bench.part(case):
                shape = Shape(num_seqs=num_seqs, num_rows=1, context=CONTEXT)
                taken_ms = rig.time_steps(shape, num_steps, kind=kind).step_ms
                more_us = 1e3 * (taken_ms - found[num_seqs, 1].step_ms)
                bench.add(case, more_us, "us/step", note="more than the likeliest token takes")


def long_rows(bench: Bench, rig: DeviceRig, base_ms: float, num_steps: int) -> None:
    """A step at long contexts against one at the usual context."""
    for context, target in LONG.items():
        case = f"decode, 1 streams, 1 rows, context {context}"
        with bench.part(case):
            shape = Shape(num_seqs=1, num_rows=1, context=context)
            times = rig.time_steps(shape, num_steps)
            bench.add(case, times.step_ms, "ms/step")
            ratio = times.step_ms / base_ms
            bench.add(f"{case}, against {CONTEXT}", ratio, "x", floor=1, target=target)


def prompt_rows(bench: Bench, rig: DeviceRig, sizes: dict[int, float | None], chunk: int) -> None:
    """Prompts of one sequence, in chunks."""
    for num_tokens, target in sizes.items():
        case = f"prompt of {num_tokens} tokens, chunks of {chunk}"
        with bench.part(case):
            times_s = [rig.time_prompt(num_tokens, chunk) for _ in range(3 if target else 1)]
            taken_s = median(times_s)
            note = f"{1e3 * taken_s:.1f} ms; first run {1e3 * times_s[0]:.1f} ms"
            rate = num_tokens / taken_s
            bench.add(case, rate, "tokens/s", better="higher", target=target, note=note)


def op_rows(
    bench: Bench, rig: DeviceRig, recorder: OpRecorder, shape: Shape, num_steps: int
) -> None:
    """Every op of a step against its bytes, then the kernels that a step launches."""
    rig.time_steps(shape, min(num_steps, 3))  # captures it, if no other part has
    case = f"{shape.num_seqs} streams, {shape.num_rows} rows"
    queue = rig.queue
    assert isinstance(queue, CudaQueue)
    with bench.part(f"kernels of a step, {case}"):
        kernels = profile_kernels(lambda: rig.replay(shape))
        launches = sum(kernel.num_launches for kernel in kernels)
        target = 700.0 if (shape.num_seqs, shape.num_rows) == (1, 1) else None
        total = sum(kernel.time_us for kernel in kernels)
        note = f"{total / 1e3:.3f} ms in all"
        bench.add(f"kernels of a step, {case}", launches, "launches", target=target, note=note)
        for kernel in kernels[:40]:
            name = kernel.name.replace("(anonymous namespace)::", "")[:70]
            note = f"{kernel.num_launches:.0f} launches"
            bench.add(f"kernel {name}, {case}", kernel.time_us, "us/step", note=note)
    with bench.part(f"ops of a step, {case}"):
        rate = read_rate(queue, CudaGraphs(queue))
        bench.more["read_bytes_per_s"] = rate
        work = rig.step_work(shape)
        work()
        recorder.record(work)
        total_ms = moved = 0.0
        for cost in time_ops(recorder, queue, CudaGraphs(queue)):
            floor_ms = round(1e3 * cost.num_bytes / rate, 4)
            note = f"{cost.num_calls} calls, {cost.num_bytes / 1e6:.1f} MB"
            bench.add(f"op {cost.name}, {case}", cost.time_ms, "ms/step", floor=floor_ms, note=note)
            total_ms, moved = total_ms + cost.time_ms, moved + cost.num_bytes
        floor_ms = round(1e3 * moved / rate, 4)
        bench.add(f"all ops of a step, {case}", total_ms, "ms/step", floor=floor_ms)
    recorder.calls.clear()


def engine_rows(bench: Bench, made: DummyModel, device: Device) -> None:
    """The engine's loop with one stream."""
    for num_drafts in (NUM_DRAFTS, 0):
        case = f"engine loop, 1 stream, {num_drafts} drafts"
        with bench.part(case):
            began_s = perf_counter()
            loop = open_loop(made, device, num_drafts)
            bench.add(f"{case}, start with weights loaded", perf_counter() - began_s, "s")
            loop.submit("alone", random_ids(CONTEXT), 200)
            times = loop.token_times("alone", loop.ended("alone"))[20:]
            between = [1e3 * (b - a) for a, b in pairwise(times)]
            note = f"median {median(between):.3f} ms, longest {max(between):.3f} ms"
            bench.add(f"{case}, time a step", mean(between), "ms", note=note)


def beside_rows(bench: Bench, made: DummyModel, device: Device, num_prompt: int) -> None:
    """A decoding user alone, then beside a prompt of so many tokens, whose layers pass between the
    user's steps. Both have the tokens that they have alone."""
    with bench.part("a decoding user beside a long prompt"):
        loop = open_loop(made, device, 0, num_rows=BESIDE_ROWS, share=BESIDE_SHARE)
        case = f"a prompt of {num_prompt} tokens"
        prompt, user = random_ids(num_prompt), random_ids(CONTEXT)
        began_s = perf_counter()
        alone = loop.tokens("alone", prompt, 4)
        rate = num_prompt / (perf_counter() - began_s)
        bench.add(f"{case} alone", rate, "tokens/s", better="higher")
        user_alone = loop.tokens("user alone", user, SAME_TOKENS)
        steps = StepLog(loop.core)
        loop.submit("user", user, 60_000)
        loop.token_times("user", lambda events: len(events) > 0)
        count = iter(range(170))
        times = loop.token_times("user", lambda events: next(count, None) is None)[20:]
        alone_ms = mean(1e3 * (b - a) for a, b in pairwise(times))
        steps.clear()
        loop.submit("long", prompt, 4)
        began_s = perf_counter()
        times = loop.token_times("user", loop.ended("long"))
        taken_s = perf_counter() - began_s
        between = sorted(1e3 * (b - a) for a, b in pairwise(times))
        share = alone_ms / mean(between)
        note = f"{mean(between):.2f} ms a token against {alone_ms:.2f} ms"
        case = f"user beside {case}"
        bench.add(
            f"{case}, share of the rate alone", share, "x", better="higher", target=0.6, note=note
        )
        p99 = between[int(0.99 * (len(between) - 1))]
        longest = ", ".join(f"{ms:.2f}" for ms in between[-3:])
        note = f"median {median(between):.2f} ms, longest {longest} ms"
        bench.add(f"{case}, p99 between tokens", p99, "ms", target=100, note=note)
        rate = num_prompt / taken_s
        note = steps.told(taken_s)
        bench.add(f"{case}, prompt", rate, "tokens/s", better="higher", target=4000, note=note)
        loop.until(lambda: len(loop.told["user"]) >= SAME_TOKENS)
        same = loop.told["long"] == alone and loop.told["user"][:SAME_TOKENS] == user_alone
        bench.add(f"{case}, tokens as alone", float(same), "", better="higher", target=1)
        loop.core.abort("user")


# Rows of a step up to which its experts are two launches, and up to which they are four.
FORMS = {"separate": 0, "paired": 8}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a choice of parts, in two minutes")
    parser.add_argument("--parts", type=lambda text: text.split(","), help=", ".join(PARTS))
    parser.add_argument("--layers", type=int, help="take the first ones only")
    parser.add_argument("--steps", type=int, default=40, help="timed steps of each row")
    parser.add_argument("--beside", type=int, default=BESIDE_TOKENS, help="of the long prompt")
    parser.add_argument("--eager", action="store_true", help="capture no graphs, to find faults")
    parser.add_argument("--experts", choices=FORMS, help="how up to 8 rows run")
    parser.add_argument("--commit", default="", help="what to call the sources that are measured")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    args.parts = args.parts or (QUICK if args.quick else PARTS)
    check_parts(parser, args.parts, PARTS)
    return args


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s", stream=sys.stdout)
    args = arguments()
    torch.manual_seed(0)
    device = open_gpu()
    if args.experts:
        device = replace(device, paired_rows=FORMS[args.experts])
    began_s = perf_counter()
    recorder = OpRecorder()
    settings = ModelSettings(arch=device.arch, rounding="deployed", precision="w2")
    raw = preset_config(MODEL_NAME, "full", args.layers)
    with watching(recorder.watch):
        options = DummyOptions(seed=SEED, skew=SKEW)
        made = dummy_model(raw, settings, device, num_spec_tokens=NUM_DRAFTS, options=options)
    torch.cuda.synchronize()
    weights_bytes = torch.cuda.memory_allocated()
    bench = Bench(
        args.out,
        " ".join(["python -m bench.step_h200", *sys.argv[1:]]),
        args.commit,
        {
            "model": f"{MODEL_NAME}, {raw['num_hidden_layers']} layers, w2, fp8 KV, dummy weights "
            f"of seed {SEED} and skew {SKEW} (moet/models/dummy.py)",
            "weights_bytes": weights_bytes,
        },
    )
    note = f"{weights_bytes / GIB:.1f} GiB"
    bench.add("making the weights", perf_counter() - began_s, "s", note=note)
    if set(args.parts) - {"engine", "beside"}:
        rig_rows(bench, made, device, recorder, args)
    gc.collect()
    if "engine" in args.parts:
        engine_rows(bench, made, device)
    if "beside" in args.parts:
        beside_rows(bench, made, device, args.beside)
    bench.add("all of this", perf_counter() - began_s, "s")
    bench.write()
    print(f"faults: {bench.faults}" if bench.faults else "no faults", flush=True)


def rig_rows(
    bench: Bench,
    made: DummyModel,
    device: Device,
    recorder: OpRecorder,
    args: argparse.Namespace,
) -> None:
    """The parts that need no engine."""
    parts, steps, placement = args.parts, args.steps, placement_on(device)
    if args.eager:
        placement = replace(placement, capture=uncaptured)
    rig = None
    with bench.part("state and prompts of 32 sequences"):
        rig = rig_on(
            placement,
            made,
            num_seqs=max(streams for streams, _ in DECODE),
            num_rows=max(rows for _, rows in DECODE),
            longest=max(LONG) if {"long", "longest"} & set(parts) else max(PROMPTS),
            num_drafts=NUM_DRAFTS,
        )
        rig.fill()
    if rig is None:
        return
    needs_steps = {"decode", "sampling", "long"} & set(parts)
    found = decode_rows(bench, rig, steps) if needs_steps else {}
    if "drafts" in parts:
        draft_rows(bench, rig, [1] if args.quick else [1, 8, 32], steps)
    if "prompts" in parts:
        prompt_rows(bench, rig, PROMPTS, 8192)
        prompt_rows(bench, rig, dict.fromkeys(PROMPTS), 2048)
    if "ops" in parts:
        for num_seqs, num_rows in [(1, 1)] if args.quick else [(1, 1), (1, 3), (32, 1)]:
            shape = Shape(num_seqs=num_seqs, num_rows=num_rows, context=CONTEXT)
            op_rows(bench, rig, recorder, shape, steps)
    if "long" in parts and (1, 1) in found:
        long_rows(bench, rig, found[1, 1].step_ms, steps)
    if "sampling" in parts:
        sampling_rows(bench, rig, found, 8)
    if "longest" in parts:
        prompt_rows(bench, rig, {450_000: None}, 8192)


if __name__ == "__main__":
    main()
