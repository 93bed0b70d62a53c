"""One command for what a GLM-5.2 step costs on one GPU, of as many layers as fit, dummy weights.

    python -m bench.step_glm [--layers 22] [--kv nvfp4] [--dense fp8] [--parts exact,decode,...]
                             [--ranks 1] [--commit X] [--out FILE]

Makes the weights on the device; shows that a row's bits are the same in chunks, beside others and
in decode steps; then times decode steps by streams, rows and context, prompts, and every op against
its bytes. Figures of a part of the layers are for no table of the whole model: the time of a layer
is told as well. Each part stands alone: one that fails is told of and the others go on. --ranks:
the share of one of so many ranks, whose sums are its own parts: what a rank computes, without what
it sends.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from bench.glm_ways import WAYS, take_way, tell_timeline
from bench.gpu import check_parts, open_gpu
from bench.lone_rank import lone_rank
from bench.rigs import CONTEXT, placement_on, rig_on
from bench.step_h200 import GIB, op_rows, prompt_rows
from bench.suite import Bench
from bench.timeline import timeline
from moet.bench.device_rig import DeviceRig
from moet.bench.device_step import OpRecorder, profile_kernels
from moet.bench.rig import Shape
from moet.config import ModelSettings
from moet.kernels.device_gemm import Device
from moet.kernels.quant import Activations
from moet.kernels.registry import watching
from moet.models.base import ForwardInput
from moet.models.dummy import DummyOptions
from moet.models.glm_moe_dsa_config import GlmMoeDsaConfig
from moet.models.sharding import WHOLE, Shard
from moet.models.synthetic_glm import MODEL_NAME
from moet.runtime.dummy import DummyModel, dummy_model, preset_config

RESULTS = Path(__file__).parent / "results" / "step_glm.json"
PARTS = ("exact", "variants", "decode", "timeline", "ops", "prompts", "chunk", "long")
PROMPT = 8192
LONG = 262_144
DECODE = ((1, 1), (1, 3), (8, 1), (32, 1))
EXACT_TOKENS = 2600  # more than are selected, so that the last rows choose


class Tracer:
    """Stands before ops at bind time, ahead of a recorder; while it is on, it sums the bits of what
    they return."""

    def __init__(self, recorder: OpRecorder) -> None:
        self.recorder = recorder
        self.is_on = False
        self.sums: list[tuple[str, Tensor]] = []

    def watch(self, name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        """As registry.watching takes it."""
        inner = self.recorder.watch(name, fn)

        def traced(*args: Any, **kwargs: Any) -> Any:
            result = inner(*args, **kwargs)
            if self.is_on:
                parts = result if isinstance(result, tuple) else (result,)
                values = [v.values if isinstance(v, Activations) else v for v in parts]
                self.sums += [(name, bits_of(v)) for v in values if isinstance(v, Tensor)]
            return result

        return traced

    def take(self) -> list[tuple[str, int]]:
        """Ops in order with the sums of their results; forgets them."""
        found = [(name, int(value)) for name, value in self.sums]
        self.sums = []
        return found


def bits_of(x: Tensor) -> Tensor:
    """A sum over x that a changed bit changes."""
    words = x.contiguous().view(torch.int16 if x.element_size() == 2 else torch.int32)
    return words.sum(dtype=torch.int64)


class Steps:
    """Passes over one sequence with state of its own, which begins as the bytes of no entry."""

    def __init__(self, made: DummyModel, device: Device, num_tokens: int) -> None:
        self.model, self.experts = made.model, made.experts
        spec = made.model.kv_cache_spec()
        self.pages = torch.arange(-(-num_tokens // spec.page_size)).unsqueeze(0)
        shape = self.pages.shape[1]
        self.kv = {
            group.name: torch.full(
                (len(group.layers), shape, group.page_bytes),
                0x7F,
                dtype=torch.uint8,
                device=device.torch_device,
            )
            for group in spec.groups
        }

    def run(self, token_ids: Tensor, start: int) -> Tensor:
        """Logits of the last rows of a piece of the sequence."""
        n = len(token_ids)
        inputs = ForwardInput(
            token_ids=token_ids,
            positions=torch.arange(start, start + n),
            cu_seqlens_q=(0, n),
            seq_slots=torch.zeros(1, dtype=torch.int64),
            page_table=self.pages,
            seq_lens=(start + n,),
            logits_indices=torch.arange(max(0, n - 4), n),
        )
        return self.model.forward(inputs, self.kv, self.experts).logits


def exact_rows(bench: Bench, made: DummyModel, device: Device, tracer: Tracer) -> None:
    """The same tokens in pieces of several sizes: rows and pages that differ in any bit."""
    with bench.part("exact"):
        ids = torch.randint(0, made.model.vocab_size, (EXACT_TOKENS,))
        whole: tuple[Tensor, dict[str, Tensor]] | None = None
        traced: list[tuple[str, int]] = []
        for name, sizes in {
            "warm": [EXACT_TOKENS],
            "whole": [EXACT_TOKENS],
            "again": [EXACT_TOKENS],
            "chunks": [2048, EXACT_TOKENS - 2048],
            "small chunks": [300, 2000, EXACT_TOKENS - 2300],
            "rows at the end": [EXACT_TOKENS - 4, 3, 1],
            "single rows": [EXACT_TOKENS - 4, 1, 1, 1, 1],
        }.items():
            steps, start, logits = Steps(made, device, EXACT_TOKENS), 0, []
            tracer.is_on = name in ("whole", "again")
            for size in sizes:
                logits.append(steps.run(ids[start : start + size], start))
                start += size
            last = torch.cat(logits)[-4:]
            note = f"finite {bool(last.isfinite().all())}; fault {int(device.error)}"
            device.error.zero_()
            if name == "warm":
                continue
            if whole is None:
                whole = last, steps.kv
            num_off = int((last != whole[0]).any(1).sum())
            off = [
                f"{group} of layer {layer} page {page}"
                for group, tensor in steps.kv.items()
                for layer, page in (tensor != whole[1][group]).any(2).nonzero().tolist()
            ]
            note += f"; {len(off)} pages differ {off[:5]}"
            sums = tracer.take()
            if name == "again":
                pairs = zip(traced, sums, strict=True)
                differ = [(i, a[0]) for i, (a, b) in enumerate(pairs) if a != b]
                note += f"; {len(differ)} of {len(sums)} results of ops differ {differ[:5]}"
            traced = sums or traced
            bench.add(f"exact, {name}: of the last 4 rows differ", num_off, "rows", note=note)


def variant_rows(
    bench: Bench, made: DummyModel, device: Device, shard: Shard, num_steps: int
) -> None:
    """Ways to run a decode step side by side: what they take, and whose logits are the same."""
    ids = torch.randint(0, made.model.vocab_size, (CONTEXT + 7,))
    first: Tensor | None = None
    for what, way in WAYS.items():
        with bench.part(f"variant: {what}"):
            take_way(made.model, shard.comm, way)
            steps, start, logits = Steps(made, device, len(ids)), CONTEXT, []
            steps.run(ids[:start], 0)
            for size in (1, 3, 1, 2):
                logits.append(steps.run(ids[start : start + size], start))
                start += size
            found = torch.cat(logits)
            first = found if first is None else first
            num_off = int((found != first).any(1).sum())
            note = f"{num_off} of {len(found)} rows differ; fault {int(device.error)}"
            device.error.zero_()
            rig = rig_of(made, device, num_seqs=8, longest=2048)
            for num_seqs, num_rows in ((1, 1), (1, 3), (8, 1)):
                shape = Shape(num_seqs=num_seqs, num_rows=num_rows, context=CONTEXT)
                times = rig.time_steps(shape, num_steps)
                case = f"{num_seqs} streams, {num_rows} rows, {what}"
                bench.add(case, times.step_ms, "ms/step", note=note)
            del rig
    take_way(made.model, shard.comm, {})


def timeline_rows(bench: Bench, rig: DeviceRig, what: str, num_rows: int = 1) -> None:
    shape = Shape(num_seqs=1, num_rows=num_rows, context=CONTEXT)
    case = f"1 streams, {num_rows} rows{what}"
    with bench.part(f"timeline, {case}"):
        rig.time_steps(shape, 3)
        found = timeline(lambda: rig.replay(shape))
        bench.more[f"one layer, {case}"] = tell_timeline(bench.add, found, case)


def rig_of(made: DummyModel, device: Device, *, num_seqs: int, longest: int) -> DeviceRig:
    """State and prompts of some sequences, of which the first may be long."""
    num_rows = max(rows for _, rows in DECODE)
    rig = rig_on(placement_on(device), made, num_seqs=num_seqs, num_rows=num_rows, longest=longest)
    rig.fill()
    return rig


def decode_rows(bench: Bench, rig: DeviceRig, layers: int, num_steps: int) -> None:
    """Steps by streams and rows, at the usual context."""
    for num_seqs, num_rows in DECODE:
        case = f"decode, {num_seqs} streams, {num_rows} rows, context {CONTEXT}"
        with bench.part(case):
            shape = Shape(num_seqs=num_seqs, num_rows=num_rows, context=CONTEXT)
            times = rig.time_steps(shape, num_steps)
            note = f"{1e3 * times.step_ms / layers:.1f} us a layer, all else included; "
            note += f"gap {times.gap_us:.1f} us; launching takes the host {times.host_us:.0f} us"
            bench.add(case, times.step_ms, "ms/step", note=note)


def chunk_rows(
    bench: Bench, rig: DeviceRig, made: DummyModel, device: Device, layers: int, ranks: int
) -> None:
    """A prompt of one chunk: whether it repeats its logits and state, the memory that it needs and
    what its kernels take."""
    ids = torch.randint(0, made.model.vocab_size, (PROMPT,))
    label = f"chunk of {PROMPT}, {ranks} ranks"
    with bench.part(label):
        found = []
        for _ in range(2):
            steps = Steps(made, device, PROMPT)
            found.append([steps.run(ids, 0), *steps.kv.values()])
        num_off = sum(int((a != b).sum()) for a, b in zip(*found, strict=True))
        del steps, found
        note = f"{num_off} values of logits and state differ when repeated; "
        rig.time_prompt(PROMPT, PROMPT)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        taken_ms = 1e3 * median(rig.time_prompt(PROMPT, PROMPT) for _ in range(3))
        peak = torch.cuda.max_memory_allocated() - before
        note += f"{taken_ms:.1f} ms; {taken_ms / layers:.2f} ms a layer; "
        note += f"{peak / GIB:.3f} GiB above the rest, {peak / PROMPT:.0f} B a token"
        bench.add(label, PROMPT / taken_ms * 1e3, "tokens/s", better="higher", note=note)
        kernels = profile_kernels(lambda: rig.time_prompt(PROMPT, PROMPT), 1)
        for kernel in kernels[:20]:
            case = kernel.name.replace("(anonymous namespace)::", "")[:60]
            note = f"{kernel.num_launches:.0f} launches"
            bench.add(f"{label}: {case}", kernel.time_us / 1e3, "ms", note=note)


def long_rows(bench: Bench, rig: DeviceRig, num_steps: int) -> None:
    """A step at a long context against one at the usual context."""
    with bench.part(f"context {LONG}"):
        usual = Shape(num_seqs=1, num_rows=1, context=CONTEXT)
        base_ms = rig.time_steps(usual, num_steps).step_ms
        case = f"decode, 1 streams, 1 rows, context {LONG}"
        shape = Shape(num_seqs=1, num_rows=1, context=LONG)
        taken_ms = rig.time_steps(shape, num_steps).step_ms
        bench.add(case, taken_ms, "ms/step")
        ratio = taken_ms / base_ms
        bench.add(f"{case}, against {CONTEXT}", ratio, "x", floor=1, target=1.4)


def rig_rows(
    bench: Bench,
    made: DummyModel,
    device: Device,
    shard: Shard,
    recorder: OpRecorder,
    args: argparse.Namespace,
) -> None:
    rig = None
    with bench.part("state and prompts of 32 sequences"):
        num_seqs = max(streams for streams, _ in DECODE)
        longest = LONG if "long" in args.parts else 8192
        rig = rig_of(made, device, num_seqs=num_seqs, longest=longest)
    if rig is None:
        return
    if "decode" in args.parts:
        decode_rows(bench, rig, args.layers, args.steps)
    if "timeline" in args.parts:
        timeline_rows(bench, rig, "")
        timeline_rows(bench, rig, "", 3)
    if "ops" in args.parts:
        for num_seqs, num_rows in ((1, 1), (1, 3), (8, 1)):
            shape = Shape(num_seqs=num_seqs, num_rows=num_rows, context=CONTEXT)
            op_rows(bench, rig, recorder, shape, args.steps)
    if "prompts" in args.parts:
        prompt_rows(bench, rig, {8192: None}, 2048)
        prompt_rows(bench, rig, {8192: None}, 8192)
    if "chunk" in args.parts:
        chunk_rows(bench, rig, made, device, args.layers, args.ranks)
    if "long" in args.parts:
        long_rows(bench, rig, args.steps)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", type=lambda text: text.split(","), default=PARTS)
    parser.add_argument("--layers", type=int, default=22, help="take the first ones")
    parser.add_argument("--kv", choices=("fp8", "nvfp4"), default="nvfp4")
    parser.add_argument("--dense", choices=("fp8", "bf16"), default="fp8")
    parser.add_argument("--ranks", type=int, choices=(1, 2, 4), default=1)
    parser.add_argument("--steps", type=int, default=30, help="timed steps of each row")
    parser.add_argument("--commit", default="", help="what to call the sources that are measured")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(given)
    check_parts(parser, args.parts, PARTS)
    return args


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s", stream=sys.stdout)
    args = arguments()
    torch.manual_seed(0)
    device = open_gpu()
    began_s = perf_counter()
    recorder = OpRecorder()
    tracer = Tracer(recorder)
    settings = ModelSettings(arch=device.arch, rounding="deployed", precision="w2")
    config = GlmMoeDsaConfig.from_dict(preset_config(MODEL_NAME, "full", args.layers))
    shard = WHOLE if args.ranks == 1 else lone_rank(device, args.ranks)
    with watching(tracer.watch):
        made = dummy_model(
            config.to_dict(args.dense),
            settings,
            device,
            kv_dtype=args.kv,
            options=DummyOptions(seed=0, skew=0.5),
            shard=shard,
        )
    torch.cuda.synchronize()
    weights_bytes = torch.cuda.memory_allocated()
    bench = Bench(
        args.out,
        " ".join(["python -m bench.step_glm", *sys.argv[1:]]),
        args.commit,
        {
            "model": f"{MODEL_NAME}, {args.layers} layers, w2, {args.dense} dense, {args.kv} KV, "
            "dummy weights of seed 0 and skew 0.5 (moet/models/dummy.py)",
            "ranks": args.ranks,
            "weights_bytes": weights_bytes,
        },
    )
    note = f"{weights_bytes / GIB:.1f} GiB"
    bench.add("making the weights", perf_counter() - began_s, "s", note=note)
    if "exact" in args.parts:
        exact_rows(bench, made, device, tracer)
    if "variants" in args.parts:
        with watching(tracer.watch):
            variant_rows(bench, made, device, shard, args.steps)
    if set(args.parts) - {"exact", "variants"}:
        with watching(tracer.watch):
            rig_rows(bench, made, device, shard, recorder, args)
    bench.add("all of this", perf_counter() - began_s, "s")
    bench.write()
    print(f"faults: {bench.faults}" if bench.faults else "no faults", flush=True)


if __name__ == "__main__":
    main()
